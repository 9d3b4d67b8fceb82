"""One rank of `benchmarks.cost.scaling`: a model whose layers sleep where others compute."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.harness.teams import Task
from benchmarks.harness.worker import join, main
from ddpopt.planning import AllreduceCost

WIDTH, DEPTH = 512, 8  # the weights of a layer have 1 MiB, and are a bucket
FORWARD_S, BACKWARD_S = 0.02, 0.08  # that a layer takes
_CAP_MB = 1.0


class _Speed:
    factor = 1.0  # how many times as long this rank takes


@torch.library.custom_op("ddpopt_scaling::sleep", mutates_args=())
def sleep(x: Tensor, seconds: float) -> Tensor:
    """Take that long, on a rank as fast as most."""
    time.sleep(seconds * _Speed.factor)
    return x.clone()


sleep.register_fake(lambda x, _seconds: torch.empty_like(x))
sleep.register_autograd(lambda _, gradient: (sleep(gradient, BACKWARD_S), None))


class Model(nn.Module):
    """Layers that take no processor time to speak of, so that many ranks do not share any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = sleep(layer(x), FORWARD_S)
        return x


class Measured(NamedTuple):
    """Seconds of each iteration on this rank, and what an allreduce costs in this group."""

    iterations_s: list[float]
    cost: AllreduceCost
    num_buckets: int


class SleepingWorker:
    """Trains; each public method is a request."""

    def __init__(self, task: Task) -> None:
        self._rank, self._num_ranks = task.rank, task.num_ranks
        join(task)
        torch.manual_seed(0)
        self._ddp = DistributedDataParallel(Model(), bucket_cap_mb=_CAP_MB)
        options = {"inner": "aot_eager"}
        self._forward: Any = torch.compile(self._ddp, backend="ddpopt", options=options)

    def measure(self, num_steps: int, slowdown: float) -> Measured:
        """Time steps; the last rank computes `slowdown` times as long."""
        _Speed.factor = slowdown if self._rank == self._num_ranks - 1 else 1.0
        ends_s = []
        for _ in range(num_steps + 1):
            self._forward(torch.randn(1, WIDTH)).sum().backward()
            self._ddp.zero_grad()
            ends_s.append(time.perf_counter())
        iterations_s = [end - start for start, end in itertools.pairwise(ends_s)]
        cost = ddpopt.calibrate(self._ddp.process_group)
        return Measured(iterations_s, cost, len(ddpopt.explain(self._ddp).buckets))


if __name__ == "__main__":
    main(SleepingWorker)
