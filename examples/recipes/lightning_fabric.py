"""Run it with: torchrun --standalone --nproc-per-node 2 examples/recipes/lightning_fabric.py

A training loop with Lightning Fabric (`pip install lightning`), compiled with ddpopt, on CPUs with
gloo. An eager twin is trained beside it, and both must end with the same parameters.
"""

import argparse
import copy
import gc
import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt

NUM_STEPS = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


# --8<-- [start:recipe]
def train(fabric: Fabric, module: nn.Module, options: dict) -> nn.Module:
    compiled = torch.compile(module, backend="ddpopt", options=options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(compiled, optimizer)
    for step, batch in enumerate(make_batches(fabric.global_rank)):
        is_accumulating = step % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(model(batch).square().mean())
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return model


def ddp_of(model: nn.Module) -> DistributedDataParallel:
    """Fabric wraps what it sets up; ddpopt.explain takes the DDP module inside."""
    return next(part for part in model.modules() if isinstance(part, DistributedDataParallel))


# --8<-- [end:recipe]


def make_batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 64, generator=generator) for _ in range(NUM_STEPS)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", default="inductor", help="what compiles the sections")
    args = parser.parse_args()
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    # And lazy_bucket_allocation=True from torch 2.15 on: see docs/recipes.md.
    strategy = DDPStrategy(bucket_cap_mb=0.03, gradient_as_bucket_view=True)
    fabric = Fabric(accelerator="cpu", devices=num_ranks, strategy=strategy)
    fabric.launch()

    fabric.seed_everything(0)
    module = Net()
    twin = copy.deepcopy(module)
    model = train(fabric, module, {"inner": args.inner})
    with torch.compiler.set_stance("force_eager"):
        train(fabric, twin, {})
    for ours, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    fabric.print(ddpopt.explain(ddp_of(model)))
    fabric.print("parameters equal the twin's")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP has to go before its group, which Lightning destroys: see docs/faq.md
