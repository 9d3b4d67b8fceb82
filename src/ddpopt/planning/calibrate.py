"""Measure what an allreduce costs on a process group, and how much it slows down computation."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddpopt.errors import PlanError
from ddpopt.planning.costs import AllreduceCost, fit_cost
from ddpopt.planning.device import now, now_on_stream

_MIB = 1024 * 1024
_LARGEST_S = 0.1  # about how long the largest allreduce may take
_LARGEST_BYTES = (_MIB, 32 * _MIB)  # at least and at most
_LEAST_STARTUP_S = {"cpu": 1e-4, "other": 1e-5}  # of a launch; a fit may give less
_NUM_SIZES = 5
_NUM_ROUNDS = 3
_NUM_LAUNCHES = 16  # of small allreduces, one after another
_SMALL_BYTES = 1024
_SIDE = 256  # of the matrices that are multiplied at the same time


def calibrate(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> AllreduceCost:
    """Measure the cost of an allreduce on `group`, the default group if None.

    A collective call: every rank of the group must make it, while nothing else communicates, and
    all get the same result, computed from the slowest rank's times. It takes one to two seconds,
    up to four on slow networks. `device` is that of the gradients, by default the GPU if the
    group has a backend for it alone, such as nccl.

    Raises:
        PlanError: the group has one rank, so that nothing is communicated.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks < 2:
        raise PlanError("a process group of one rank communicates nothing; there is no cost")
    bench = _Bench(group, _device_of(group) if device is None else torch.device(device))
    bench.seconds(1024)  # connects, and fills caches
    probe_s = statistics.median(bench.seconds(_MIB) for _ in range(_NUM_ROUNDS))
    largest = int(_LARGEST_S / max(probe_s, 1e-9) * _MIB)
    largest = min(max(largest, _LARGEST_BYTES[0]), _LARGEST_BYTES[1])
    # All are as large as buckets: tiny ones mostly measure how the system schedules threads.
    sizes = [largest // 2**k for k in range(_NUM_SIZES)]
    times = [statistics.median(bench.seconds(n) for _ in range(_NUM_ROUNDS)) for n in sizes]
    lost, taken_s = zip(*(bench.beside(largest) for _ in range(_NUM_ROUNDS)), strict=True)
    launch_s = statistics.median(bench.launch() for _ in range(_NUM_ROUNDS))
    fitted = fit_cost(sizes, times)
    return dataclasses.replace(
        fitted,
        startup_s=max(
            fitted.startup_s, _LEAST_STARTUP_S["cpu" if bench.device.type == "cpu" else "other"]
        ),
        interference=statistics.median(lost),
        contention=max(1.0, statistics.median(taken_s) / times[0]),
        launch_s=max(0.0, launch_s),
    )


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the GPU if the group has another backend for it than for the CPU."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    accelerator = torch.accelerator.current_accelerator(True)
    if accelerator and backends.get(accelerator.type, backends.get("cpu")) != backends.get("cpu"):
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


class _Bench:
    """Allreduces on a group; its results are equal on all ranks."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.device = device
        self._matrix = torch.ones(_SIDE, _SIDE, device=device)
        self._product = torch.empty_like(self._matrix)

    def seconds(self, num_bytes: int) -> float:
        """Return how long the slowest rank's allreduce takes."""
        values = torch.ones(num_bytes // 4, device=self.device)
        start_s = self._meet()
        dist.all_reduce(values, group=self._group)
        return self._slowest(now(self.device) - start_s)

    def beside(self, num_bytes: int) -> tuple[float, float]:
        """Compute while an allreduce runs.

        Return the fraction of its speed that computation loses, and how long the allreduce takes.
        """
        values = torch.ones(num_bytes // 4, device=self.device)
        self._meet()
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        beside, beside_s = self._multiply(lambda: not work.is_completed())
        work.wait()
        stop_s = self._meet() + beside_s
        alone, alone_s = self._multiply(lambda: time.perf_counter() < stop_s)
        lost = 1 - (beside / beside_s) / (alone / alone_s)
        return min(max(self._slowest(lost), 0.0), 0.95), self._slowest(beside_s)

    def launch(self) -> float:
        """Return how much longer computation takes for each small allreduce beside it."""
        values = [torch.ones(_SMALL_BYTES // 4, device=self.device) for _ in range(_NUM_LAUNCHES)]
        _, busy_s = self._beside_all(values, count=0)
        _, one_s = self._beside_all([], count=1)
        count = math.ceil(2 * self._slowest(busy_s) / self._slowest(one_s))  # outlasts them
        beside_s, _ = self._beside_all(values, count)
        alone_s, _ = self._beside_all([], count)
        return self._slowest(beside_s - alone_s) / _NUM_LAUNCHES

    def _beside_all(self, values: Sequence[torch.Tensor], count: int) -> tuple[float, float]:
        """Launch an allreduce of each value and multiply; return when each of the two was done."""
        start_s = self._meet()
        works = [dist.all_reduce(each, group=self._group, async_op=True) for each in values]
        left = iter(range(count))
        self._multiply(lambda: next(left, None) is not None)
        multiplied_s = time.perf_counter() - start_s
        for work in works:
            assert work is not None
            work.wait()
        return multiplied_s, now(self.device) - start_s

    def _multiply(self, is_on: Callable[[], bool]) -> tuple[int, float]:
        """Multiply while `is_on`, at least once; return how often, and how long it took."""
        start_s = stop_s = time.perf_counter()
        count = 0
        while is_on() or not count:
            torch.mm(self._matrix, self._matrix, out=self._product)
            stop_s = now_on_stream(self.device)  # not when the allreduce beside it is over
            count += 1
        return count, stop_s - start_s

    def _meet(self) -> float:
        now(self.device)
        dist.barrier(group=self._group)
        return time.perf_counter()

    def _slowest(self, value: float) -> float:
        slowest = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return float(slowest.item())
