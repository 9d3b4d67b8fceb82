"""Run it with: torchrun --standalone --nproc-per-node 2 examples/recipes/regional.py

Regional compilation as in torchtitan, with ddpopt, on CPUs with gloo: each TransformerBlock is
compiled in place before DDP is made, and all of them run one piece of code. An eager twin is
trained beside it, and both must end with the same parameters, but for rounding.
"""

import argparse
import copy
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import ddpopt

NUM_STEPS = 4
VOCABULARY, CONTEXT, WIDTH, HEADS = 256, 32, 64, 4


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        attended = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    def __init__(self, num_layers: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(k): TransformerBlock() for k in range(num_layers)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


# --8<-- [start:recipe]
def train(model: Transformer, options: dict | None) -> DistributedDataParallel:
    if options is not None:
        for block in model.layers.values():
            block.compile(backend="ddpopt", fullgraph=True, options=options)
    # A block has 0.25 MiB. From torch 2.15 on, give it lazy_bucket_allocation=True as well: see
    # docs/recipes.md.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for tokens in make_batches(dist.get_rank()):
        logits = ddp(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return ddp


# --8<-- [end:recipe]


def make_batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    size = (4, CONTEXT + 1)
    return [torch.randint(VOCABULARY, size, generator=generator) for _ in range(NUM_STEPS)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", default="inductor", help="what compiles the sections")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer()
    twin, start = copy.deepcopy(model), parameters_to_vector(model.parameters()).detach().clone()
    ddp = train(model, {"inner": args.inner})
    train(twin, None)
    # AdamW's step is as long for a gradient that is all rounding, so single weights may differ.
    ours, expected = (parameters_to_vector(m.parameters()) for m in (model, twin))
    assert (ours - expected).norm() < 1e-2 * (expected - start).norm(), "the twins have diverged"
    if dist.get_rank() == 0:
        print(ddpopt.explain(ddp))
        print("parameters equal the twin's, but for rounding")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()
