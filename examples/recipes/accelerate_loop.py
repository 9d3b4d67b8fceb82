"""Run it with: torchrun --standalone --nproc-per-node 2 examples/recipes/accelerate_loop.py

A training loop with Hugging Face Accelerate (`pip install accelerate`), compiled with ddpopt, on
CPUs with gloo. A twin in eager mode is trained beside it, and both must end with the same
parameters.
"""

import argparse
import copy

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
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
def train(accelerator: Accelerator, module: nn.Module, options: dict) -> DistributedDataParallel:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ddp, optimizer = accelerator.prepare(module, optimizer)
    model = torch.compile(ddp, backend="ddpopt", options=options)
    for batch in make_batches(accelerator.process_index):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return ddp


# --8<-- [end:recipe]


def make_batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 64, generator=generator) for _ in range(NUM_STEPS)]


def compare(accelerator: Accelerator, inner: str) -> None:
    torch.manual_seed(0)
    module = Net()
    twin = copy.deepcopy(module)
    ddp = train(accelerator, module, {"inner": inner})
    with torch.compiler.set_stance("force_eager"):
        train(accelerator, twin, {})
    for ours, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    accelerator.print(ddpopt.explain(ddp))
    accelerator.print("parameters equal the twin's")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", default="inductor", help="what compiles the sections")
    args = parser.parse_args()
    of_ddp = DistributedDataParallelKwargs(bucket_cap_mb=0.03, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[of_ddp])
    compare(accelerator, args.inner)
    accelerator.free_memory()  # DDP has to go before the process group: see docs/faq.md
    accelerator.end_training()


if __name__ == "__main__":
    main()
