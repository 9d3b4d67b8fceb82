"""Run it with: torchrun --standalone --nproc-per-node 2 examples/recipes/nano_gpt.py

A loop in the style of nanoGPT, compiled with ddpopt, on CPUs with gloo: micro steps that accumulate
gradients, autocast, a scaler, and clipping. An eager twin is trained beside it, and both must end
with the same parameters, but for rounding.
"""

import argparse
import copy
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

import ddpopt

NUM_STEPS, NUM_MICRO_STEPS = 4, 2
VOCABULARY, CONTEXT, WIDTH, HEADS = 256, 32, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        attended = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, num_blocks: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --8<-- [start:recipe]
def train(model: nn.Module, options: dict | None, dtype: torch.dtype = torch.bfloat16) -> DDP:
    if options is not None:
        model = torch.compile(model, backend="ddpopt", options=options)
    # Give it lazy_bucket_allocation=True as well from torch 2.15 on: see docs/recipes.md.
    ddp = DDP(model, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    raw_model = ddp.module  # if compiled, names in its state_dict begin with `_orig_mod.`
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    batches = make_batches(dist.get_rank())
    for _ in range(NUM_STEPS):
        for micro_step in range(NUM_MICRO_STEPS):
            ddp.require_backward_grad_sync = micro_step == NUM_MICRO_STEPS - 1
            with torch.autocast("cpu", dtype=dtype):
                _, loss = ddp(*next(batches))
            scaler.scale(loss / NUM_MICRO_STEPS).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return ddp


# --8<-- [end:recipe]


def make_batches(rank: int):
    generator = torch.Generator().manual_seed(rank)
    while True:
        tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", default="inductor", help="what compiles the sections")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT()
    twin, start = copy.deepcopy(model), parameters_to_vector(model.parameters()).detach().clone()
    ddp = train(model, {"inner": args.inner})
    train(twin, None)
    # AdamW's step is as long for a gradient that is all rounding, so single weights may differ.
    ours, expected = (parameters_to_vector(m.parameters()) for m in (model, twin))
    assert (ours - expected).norm() < 0.1 * (expected - start).norm(), "the twins have diverged"
    if dist.get_rank() == 0:
        print(ddpopt.explain(ddp))
        print("parameters equal the twin's, but for rounding")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()
