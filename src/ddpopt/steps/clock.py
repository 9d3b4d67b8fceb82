"""The one clock, and how long steps take by it.

A GPU gets to its queued work later than the CPU that queues it. So each time on a GPU is that of an
event in its queue, and is known only when the GPU has got there.
"""

from __future__ import annotations

import time

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._torch import Forward
from ddpopt.steps.forwards import Subscriber, will_communicate


def read_host() -> float:
    """The time in seconds by the clock that all times of steps and exchanges are of."""
    return time.perf_counter()


class _Queued(float):
    """When the CPU put an event into a device's queue, with the event."""

    __slots__ = ("event",)
    event: torch.Event


class Clock:
    """Gives times in seconds, on a GPU those of events in its queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_on_cpu = device.type == "cpu"

    def now(self) -> float:
        """The time; on a GPU the CPU's, with an event in the queue for `seconds` to measure by."""
        if self.is_on_cpu:
            return read_host()
        moment = _Queued(read_host())
        moment.event = torch.Event(self._device, enable_timing=True)
        moment.event.record()
        return moment

    def seconds(self, start: float, stop: float) -> float:
        """How long the device took from one time that `now` returned to another."""
        if isinstance(start, _Queued) and isinstance(stop, _Queued):
            stop.event.synchronize()
            return float(start.event.elapsed_time(stop.event)) / 1e3
        return stop - start

    def finish(self) -> float:
        """Wait until the device has done all of its queued work; return the CPU's time."""
        if not self.is_on_cpu:
            torch.accelerator.synchronize(self._device)
        return read_host()

    def finish_stream(self) -> float:
        """As `finish`, for the current stream: others, which may communicate, can be busy."""
        if not self.is_on_cpu:
            torch.accelerator.current_stream(self._device).synchronize()
        return read_host()


def device_of(ddp: DistributedDataParallel) -> torch.device:
    """The device of the first parameter that is reduced."""
    return next(iter(_torch.reducer_parameters(ddp))).device


class IterationClock(Subscriber):
    """Times iterations, from one forward that communicates to the next, without a device's queue.

    Evaluations and micro-batches under `no_sync` are part of one.
    """

    def __init__(self) -> None:
        self.last_s: float | None = None  # how long the last iteration took
        self._began_s: float | None = None

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        if not will_communicate(ddp):
            return
        now_s = read_host()
        if self._began_s is not None:
            self.last_s = now_s - self._began_s
        self._began_s = now_s
