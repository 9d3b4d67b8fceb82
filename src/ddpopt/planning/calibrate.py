"""Measure what the cost model needs of a machine: its network, and the rates of its devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from ddpopt._values import check_kind
from ddpopt.errors import PlanError
from ddpopt.planning.costs import AllreduceCost, Device, fit_cost
from ddpopt.ranks.agree import communicating
from ddpopt.steps.clock import Clock, read_host

_MIB = 1024 * 1024
_LARGEST_S = 0.1  # about how long the largest allreduce may take
_LARGEST_AT_LEAST_BYTES, _LARGEST_AT_MOST_BYTES = _MIB, 32 * _MIB
_LEAST_STARTUP_S, _LEAST_STARTUP_CPU_S = 1e-5, 1e-4  # of an allreduce
_NUM_SIZES = 5
_NUM_ROUNDS = 3
_NUM_LAUNCHES = 16  # of small allreduces, one after another
_SMALL_BYTES = 1024
_SIDE = 256  # of the matrices that are multiplied at the same time
_MEASURE_S = 0.1  # for each of a device's rates
_TINY_CALLS = 200


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
        PeerError: another rank has ended, or did not make the call within the group's timeout.
    """
    if group is not None:
        remedy = "give a process group, or None for the default one"
        check_kind("group", group, dist.ProcessGroup, remedy, TypeError)
    num_ranks = dist.get_world_size(group)
    if num_ranks < 2:
        raise PlanError("a process group of one rank communicates nothing; give one of two or more")
    bench = _Bench(group, _device_of(group) if device is None else torch.device(device))
    with communicating("calibrate"):
        return _measure(bench)


def _measure(bench: _Bench) -> AllreduceCost:
    """Time allreduces of the sizes of buckets, alone and beside computation, and fit a cost.

    `bench` gives all ranks the slowest rank's times, so that all come to the same sizes and cost.
    """
    bench.time_allreduce(_SMALL_BYTES)  # connects, and fills caches
    probe_s = statistics.median(bench.time_allreduce(_MIB) for _ in range(_NUM_ROUNDS))
    affordable_bytes = int(_LARGEST_S / max(probe_s, 1e-9) * _MIB)
    largest_bytes = min(max(affordable_bytes, _LARGEST_AT_LEAST_BYTES), _LARGEST_AT_MOST_BYTES)
    # All are as large as buckets: tiny ones mostly measure how the system schedules threads.
    sizes = [largest_bytes // 2**k for k in range(_NUM_SIZES)]
    times = [statistics.median(bench.time_allreduce(n) for _ in range(_NUM_ROUNDS)) for n in sizes]
    overlaps = [bench.time_overlap(largest_bytes) for _ in range(_NUM_ROUNDS)]
    lost, beside_s = zip(*overlaps, strict=True)
    largest_alone_s = times[0]
    launch_s = statistics.median(bench.time_launch() for _ in range(_NUM_ROUNDS))
    fitted = fit_cost(sizes, times)
    # The line through times of large allreduces may well begin at 0, but no allreduce is free.
    least_s = _LEAST_STARTUP_CPU_S if bench.device.type == "cpu" else _LEAST_STARTUP_S
    return dataclasses.replace(
        fitted,
        startup_s=max(fitted.startup_s, least_s),
        interference=statistics.median(lost),
        contention=max(1.0, statistics.median(beside_s) / largest_alone_s),
        launch_s=max(0.0, launch_s),
    )


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The GPU if the group has another backend for it than for the CPU, such as nccl.

    A group with one backend for both, such as gloo, does not tell where gradients are.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator and backends.get(accelerator.type, backends.get("cpu")) != backends.get("cpu"):
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


class _Bench:
    """Times allreduces on a group, alone and beside products of matrices on the same device.

    All ranks call the same methods, which return the largest of the ranks' values, equal on all.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.device = device
        self._clock = Clock(device)
        self._matrix = torch.ones(_SIDE, _SIDE, dtype=torch.float32, device=device)
        self._product = torch.empty_like(self._matrix)

    def _make_values(self, num_bytes: int) -> torch.Tensor:
        """A tensor of that size to reduce, of float32 whatever the default dtype is."""
        return torch.ones(num_bytes // 4, dtype=torch.float32, device=self.device)

    def time_allreduce(self, num_bytes: int) -> float:
        """Return how long the slowest rank's allreduce takes."""
        values = self._make_values(num_bytes)
        start_s = self._start_together()
        dist.all_reduce(values, group=self._group)
        return self._worst(self._clock.finish() - start_s)

    def time_overlap(self, num_bytes: int) -> tuple[float, float]:
        """Compute while an allreduce runs, and once more for as long without one.

        Return the fraction of its speed that computation loses to the allreduce, and how long this
        takes beside computation.
        """
        values = self._make_values(num_bytes)
        self._start_together()
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        num_beside, beside_s = self._multiply_while(lambda: not work.is_completed())
        work.wait()
        stop_s = self._start_together() + beside_s
        num_alone, alone_s = self._multiply_while(lambda: read_host() < stop_s)
        lost = 1 - (num_beside / beside_s) / (num_alone / alone_s)
        # `AllreduceCost.interference` is below 1: computation never stands still.
        return min(max(self._worst(lost), 0.0), 0.95), self._worst(beside_s)

    def time_launch(self) -> float:
        """Return how much longer the same products take for each small allreduce beside them."""
        values = [self._make_values(_SMALL_BYTES) for _ in range(_NUM_LAUNCHES)]
        _, reduced_s = self._launch_all(values, num_products=1)
        _, product_s = self._launch_all([], num_products=1)
        # So many products take twice as long as all of the allreduces, and thus outlast them.
        num_products = math.ceil(2 * self._worst(reduced_s) / self._worst(product_s))
        beside_s, _ = self._launch_all(values, num_products)
        alone_s, _ = self._launch_all([], num_products)
        return self._worst(beside_s - alone_s) / _NUM_LAUNCHES

    def _launch_all(self, values: Sequence[torch.Tensor], num_products: int) -> tuple[float, float]:
        """Launch an allreduce of each value, and multiply meanwhile, on this rank's own clock.

        Return how long it takes until the products have ended, and until the allreduces have too.
        """
        start_s = self._start_together()
        works = [dist.all_reduce(each, group=self._group, async_op=True) for each in values]
        left = iter(range(num_products))
        self._multiply_while(lambda: next(left, None) is not None)
        multiplied_s = read_host() - start_s
        for work in works:
            assert work is not None
            work.wait()
        return multiplied_s, self._clock.finish() - start_s

    def _multiply_while(self, is_wanted: Callable[[], bool]) -> tuple[int, float]:
        """Multiply at least once; return how often, and how long it took."""
        start_s = stop_s = read_host()
        count = 0
        while is_wanted() or not count:
            torch.mm(self._matrix, self._matrix, out=self._product)
            stop_s = self._clock.finish_stream()  # not when the allreduce beside it is over
            count += 1
        return count, stop_s - start_s

    def _start_together(self) -> float:
        """Wait for the device and for all ranks; return the time."""
        self._clock.finish()
        dist.barrier(group=self._group)
        return read_host()

    def _worst(self, value: float) -> float:
        """The largest of all ranks' values."""
        worst = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
        return float(worst.item())


def measure_device(
    device: torch.device | str = "cpu", dtypes: Iterable[torch.dtype] = (torch.float32,)
) -> Device:
    """Measure the rates of a device, with as many threads as torch uses now.

    It takes about 0.1 s for each dtype and 0.2 s for the rest. Each rate is that of the median run.

    Raises:
        PlanError: `dtypes` is empty.
    """
    device = torch.device(device)
    is_cpu = device.type == "cpu"
    side = 512 if is_cpu else 4096
    rates = {}
    for dtype in dtypes:
        factor = torch.full((side, side), 0.5, dtype=dtype, device=device)
        product = torch.empty_like(factor)
        multiply = functools.partial(torch.mm, factor, factor, out=product)
        rates[dtype] = 2 * side**3 / _median_seconds(multiply, device)
    source = torch.zeros(2**24 if is_cpu else 2**26, device=device)  # beyond any cache
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source), device)
    tiny = torch.zeros(1, device=device)

    def call_often() -> None:
        for _ in range(_TINY_CALLS):
            tiny.add_(1)

    return Device(
        flops_per_s=rates,
        bytes_per_s=2 * source.numel() * source.element_size() / copy_s,  # read, and written
        launch_s=_median_seconds(call_often, device) / _TINY_CALLS,
    )


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """How long a function's work takes on a device: the median of several runs, the first aside."""
    run()  # the first one allocates, and loads kernels
    clock = Clock(device)
    times: list[float] = []
    while len(times) < 3 or sum(times) < _MEASURE_S:
        start_s = clock.finish()
        run()
        times.append(clock.finish() - start_s)
    return statistics.median(times)
