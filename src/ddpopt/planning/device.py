"""What a device can do per second, given or measured, and how long an operation takes on it."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from ddpopt.errors import PlanError

_MEASURE_S = 0.1  # for each of the measurements
_TINY_CALLS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The rates of a device: FLOPs of large matrix products, bytes of large copies, small calls.

    `flops_per_s` is by dtype; a missing dtype is assumed to be as slow as the slowest. `launch_s`
    is the additional cost of each call.

    Raises:
        PlanError: a rate is not positive and finite, or there is no rate of FLOPs.
    """

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.flops_per_s:
            raise PlanError("Device.flops_per_s is empty; give a rate for torch.float32 at least")
        rates = {f"flops_per_s[{dtype}]": rate for dtype, rate in self.flops_per_s.items()}
        for name, rate in {**rates, "bytes_per_s": self.bytes_per_s}.items():
            if not 0 < rate < math.inf:
                raise PlanError(f"Device.{name} is {rate!r}; it must be above 0 and finite")
        if not 0 <= self.launch_s < math.inf:
            raise PlanError(f"Device.launch_s is {self.launch_s!r}; it must be 0 or more, finite")

    def seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype | None = None) -> float:
        """Return how long a call takes without its launch: the longer of arithmetic and memory.

        This is the roofline model (Williams, Waterman and Patterson, 2009).
        """
        rates = self.flops_per_s
        rate = min(rates.values()) if dtype is None or dtype not in rates else rates[dtype]
        return max(flops / rate, moved_bytes / self.bytes_per_s)


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
        bytes_per_s=2 * source.numel() * source.element_size() / copy_s,
        launch_s=_median_seconds(call_often, device) / _TINY_CALLS,
    )


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    run()  # the first one allocates, and loads kernels
    times: list[float] = []
    while len(times) < 3 or sum(times) < _MEASURE_S:
        start_s = now(device)
        run()
        times.append(now(device) - start_s)
    return statistics.median(times)


def now(device: torch.device) -> float:
    """Return the time in seconds once a device has done all of its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def now_on_stream(device: torch.device) -> float:
    """As `now`, but for the current stream: others, such as those that communicate, may be busy."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    return time.perf_counter()
