"""Steps on the CPU or on a GPU: moments of a step, and memory.

Work on a GPU is queued, so a moment there is an event in its queue, and is read when all is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch

Moment = Any  # seconds, or an event


class Clock:
    def __init__(self, device: str) -> None:
        self._is_cpu = device == "cpu"
        self._device = torch.device(device)

    def moment(self) -> Moment:
        if self._is_cpu:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Moment, stop: Moment) -> float:
        """Return the time between two moments, when the second one is over."""
        if self._is_cpu:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def finish(self) -> None:
        if not self._is_cpu:
            torch.accelerator.synchronize(self._device)


def forget_peak(device: str) -> None:
    """Watch the memory in use from now on, after giving back what compilation left behind."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(AttributeError):  # not all C libraries have it
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: str) -> float:
    """Return the most memory that was in use since `forget_peak`, 0 where that is not known.

    On a GPU it is what tensors took, on the CPU what was resident of the process.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return 0.0
