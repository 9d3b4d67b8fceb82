"""What runs alongside a model: autograd, autocast and torch's profiler."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddpopt._torch import names
from ddpopt.errors import TorchDriftError


def is_compiled_backward(node: Any) -> bool:
    """Whether AOTAutograd made an autograd node, which runs the backward of a compiled graph."""
    return bool(node.name() == names.COMPILED_BACKWARD.text)


def is_in_backward() -> bool:
    """Whether a backward runs in this thread."""
    return running_backward() != -1


def running_backward() -> int:
    """Return autograd's number of the backward that runs in this thread, -1 if none does."""
    task: int = names.TASK_ID.get()()
    return task


def will_accumulate(node: Any) -> bool:
    """Whether the running backward reaches a node that accumulates a gradient.

    `torch.autograd.grad` reaches none: what it differentiates by is asked for, not accumulated.
    """
    will_execute = names.WILL_EXECUTE.get()
    try:
        return bool(will_execute(node))
    except RuntimeError:  # autograd does not tell of a leaf by which somebody differentiates
        return False


class BackwardEnds:
    """Calls a function at the end of each backward in which it was asked to `watch`.

    One that raises has no such end. A backward may run others within it, as reentrant checkpoints
    do, which end before it does: the last call is the end of the outermost one that was watched.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._watched: set[int] = set()

    @property
    def is_pending(self) -> bool:
        """Whether a watched backward has not ended; also after one that raised."""
        return bool(self._watched)

    def watch(self) -> None:
        """Watch the running backward, unless that has been asked before.

        The call comes after DDP's own work. Autograd runs callbacks in the order in which they were
        queued, and DDP queues its last one with the last gradient. So our callback, when it runs,
        only queues another one, which comes after DDP's.
        """
        task = running_backward()
        if task not in self._watched:
            self._watched.add(task)
            queue = queue_callback()
            queue(lambda: queue(lambda: self._end(task)))

    def _end(self, task: int) -> None:
        """A callback of autograd's, at the end of the backward with this number."""
        self._watched.discard(task)
        self._call()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward has ended, DDP's own work in it included."""
    BackwardEnds(call).watch()


def queue_callback() -> Callable[[Callable[[], None]], None]:
    """Return what makes autograd call a function at the end of the running backward."""
    return names.QUEUE_CALLBACK.get()


def run_in_backward(call: Callable[[], None]) -> None:
    """Run a backward, in this thread, that does nothing but call a function."""
    with torch.enable_grad():  # the caller may have switched it off
        # On the CPU, since autograd has threads of its own for other devices.
        root = torch.zeros((), device="cpu", requires_grad=True)
        root.register_hook(lambda _gradient: call())  # type: ignore[no-untyped-call]
        root.backward()  # type: ignore[no-untyped-call]


def is_autocast_on() -> bool:
    """Whether autocast is on in this thread, for the CPU or the accelerator."""
    return bool(_autocasting_devices())


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Switch autocast off in a block, for each device for which it is on."""
    with contextlib.ExitStack() as stack:
        for device in _autocasting_devices():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _autocasting_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [device for device in devices if torch.is_autocast_enabled(device)]


def shows_ranges() -> bool:
    """Whether torch's profiler is on; no if its name has moved: no step should fail for that.

    Each section that runs asks, so the lookup's result is kept.
    """
    try:
        return _profiler_enabled()()
    except TorchDriftError:
        return False


@functools.cache
def _profiler_enabled() -> Callable[[], bool]:
    return names.PROFILER_ENABLED.get()


@contextlib.contextmanager
def profile_ranges(has_cuda: bool) -> Iterator[list[Any]]:
    """Make torch's profiler record named ranges, collectives and kernels, but no operators.

    Yields a list that holds its events when the block has ended, collectives' with their shapes.
    `torch.profiler.profile` cannot leave out operators, which cost a few percent of a step.
    """
    device = "cuda" if has_cuda else None
    profiler: Any = torch.autograd.profiler.profile(use_device=device, record_shapes=True)
    scopes = {names.RECORD_SCOPE.get().USER_SCOPE}
    enable, disable = names.ENABLE_PROFILER.get(), names.DISABLE_PROFILER.get()
    events: list[Any] = []
    # As torch's own profiler does: one id for the trace, made when it is prepared.
    names.PREPARE_PROFILER.get()(profiler.config(create_trace_id=True), profiler.kineto_activities)
    enable(profiler.config(create_trace_id=False), profiler.kineto_activities, scopes)
    try:
        yield events
    finally:
        events += disable().events()
