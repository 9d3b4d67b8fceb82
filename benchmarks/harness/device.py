"""The memory that steps take on the CPU or on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_MIB = 2**20


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


def peak_mib(device: str) -> float:
    """Return the most memory that was in use since `forget_peak`, 0 where that is not known.

    On a GPU it is what tensors took, on the CPU what was resident of the process.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / _MIB
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return 0.0


def allocated_mib(run: Callable[[], object]) -> float:
    """Return the most memory that tensors on the CPU took beyond what they took before `run`.

    What was there before and is freed on the way does not count: torch's allocator tells the
    profiler only of what it has allocated while that ran.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    num_bytes = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        num_bytes += change.nbytes()
        most = max(most, num_bytes)
    return most / _MIB
