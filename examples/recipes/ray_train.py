"""Run it with: python examples/recipes/ray_train.py

A training loop of Ray Train (`pip install "ray[train]"`), compiled with ddpopt, on two workers with
CPUs and gloo. A twin in eager mode is trained beside it, and both must end with the same
parameters.
"""

import argparse
import copy
import tempfile

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
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
def train(module: nn.Module, options: dict) -> DistributedDataParallel:
    of_ddp = {"bucket_cap_mb": 0.03, "gradient_as_bucket_view": True}
    ddp = prepare_model(module, parallel_strategy_kwargs=of_ddp)
    model = torch.compile(ddp, backend="ddpopt", options=options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in make_batches(ray.train.get_context().get_world_rank()):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp


# --8<-- [end:recipe]


def make_batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 64, generator=generator) for _ in range(NUM_STEPS)]


def compare(config: dict) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    module = Net()
    twin = copy.deepcopy(module)
    ddp = train(module, {"inner": config["inner"]})
    with torch.compiler.set_stance("force_eager"):
        train(twin, {})
    for ours, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    if ray.train.get_context().get_world_rank() == 0:
        print(ddpopt.explain(ddp))
        print("parameters equal the twin's")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", default="inductor", help="what compiles the sections")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            compare,
            train_loop_config={"inner": args.inner},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        trainer.fit()


if __name__ == "__main__":
    main()
