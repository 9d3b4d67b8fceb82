"""Autograd: which backward runs and when it ends, autocast, and the profiler's ranges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddpopt._torch import names


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return bool(names.TASK_ID.get()() != -1)


def autograd_node() -> Any:
    """Return the autograd node that runs in this thread."""
    return names.AUTOGRAD_NODE.get()()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call when the backward that is running has ended, DDP's own work in it included.

    Autograd calls what was queued in that order, and DDP queues its end with the last gradient;
    so this queues itself once more.
    """
    queue = queue_callback()
    queue(lambda: queue(call))


def queue_callback() -> Callable[[Callable[[], None]], None]:
    """Return what has autograd call a function at the end of the backward that is running."""
    engine = names.EXECUTION_ENGINE.of(names.VARIABLE.get())
    queue: Callable[[Callable[[], None]], None] = names.QUEUE_CALLBACK.of(engine)
    return queue


def is_autocast_on() -> bool:
    """Whether autocast is on for any device."""
    return bool(names.IS_AUTOCAST_ON.get()())


def no_autocast() -> contextlib.AbstractContextManager[None]:
    """Return a context in which autocast is off for all devices."""
    context: contextlib.AbstractContextManager[None] = names.DISABLE_AUTOCAST.get()()
    return context


def is_profiling() -> bool:
    """Whether torch's profiler is on."""
    return bool(names.PROFILER_ENABLED.get()())


@contextlib.contextmanager
def profile_ranges(has_cuda: bool) -> Iterator[list[Any]]:
    """Have torch's profiler note named ranges, collectives and kernels, but no operators.

    Yields a list that holds its events when the block has ended. `torch.profiler.profile` cannot
    leave operators out, which cost some percent of a step.
    """
    profiler: Any = torch.autograd.profiler.profile(use_device="cuda" if has_cuda else None)
    scopes = {names.RECORD_SCOPE.get().USER_SCOPE}
    enable, disable = names.ENABLE_PROFILER.get(), names.DISABLE_PROFILER.get()
    events: list[Any] = []
    names.PREPARE_PROFILER.get()(profiler.config(create_trace_id=True), profiler.kineto_activities)
    enable(profiler.config(create_trace_id=False), profiler.kineto_activities, scopes)
    try:
        yield events
    finally:
        events += disable().events()
