"""What runs alongside a model: autograd and its profiler, process groups and stores, logs."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ddpopt._torch import names
from ddpopt.errors import TorchDriftError


def is_in_backward() -> bool:
    return running_backward() != -1


def running_backward() -> int:
    """Return autograd's number of the backward that runs in this thread, -1 if none does."""
    task: int = names.TASK_ID.get()()
    return task


def autograd_node() -> Any:
    return names.AUTOGRAD_NODE.get()()


class BackwardEnds:
    """Calls a function at the end of each backward in which it was asked to `watch`.

    A backward may run others within it, as reentrant checkpoints do, which end before it does: the
    last call is the end of the outermost one that was watched.
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
        queued, and DDP queues its end with the last gradient; so this one queues itself once more.
        """
        task = running_backward()
        if task not in self._watched:
            self._watched.add(task)
            queue = queue_callback()
            queue(lambda: queue(lambda: self._end(task)))

    def _end(self, task: int) -> None:
        self._watched.discard(task)
        self._call()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward has ended, DDP's own work in it included."""
    BackwardEnds(call).watch()


def queue_callback() -> Callable[[Callable[[], None]], None]:
    """Return what makes autograd call a function at the end of the running backward."""
    return names.QUEUE_CALLBACK.of(names.EXECUTION_ENGINE.of(torch.autograd.Variable))


def step_without_hooks(
    optimizer: torch.optim.Optimizer, hook: RemovableHandle
) -> Callable[..., object] | None:
    """Return a function that updates an optimizer without its hooks, for this pre-hook of it.

    None if later hooks would find the update done already, or if torch does it in another way.
    """
    step: Any = type(optimizer).step
    hooks = names.STEP_PRE_HOOKS.find(optimizer, {})
    if not names.HOOKED.find(step) or next(reversed(hooks), None) != hook.id:
        return None
    update: Callable[..., object] = step.__wrapped__
    return update


def run_first(optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
    """Let a hook after updates run before the optimizer's other ones."""
    names.STEP_POST_HOOKS.of(optimizer).move_to_end(hook.id, last=False)


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write to a tensor."""
    return names.VERSION.of(tensor)


def is_autocast_on() -> bool:
    return names.IS_AUTOCAST_ON.get()()


def no_autocast() -> contextlib.AbstractContextManager[None]:
    return names.DISABLE_AUTOCAST.get()()


def is_profiling() -> bool:
    return names.PROFILER_ENABLED.get()()


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

    Yields a list that holds its events when the block has ended. `torch.profiler.profile` cannot
    leave out operators, which cost a few percent of a step.
    """
    device = "cuda" if has_cuda else None
    profiler: Any = torch.autograd.profiler.profile(use_device=device, record_shapes=True)
    scopes = {names.RECORD_SCOPE.get().USER_SCOPE}
    enable, disable = names.ENABLE_PROFILER.get(), names.DISABLE_PROFILER.get()
    events: list[Any] = []
    names.PREPARE_PROFILER.get()(profiler.config(create_trace_id=True), profiler.kineto_activities)
    enable(profiler.config(create_trace_id=False), profiler.kineto_activities, scopes)
    try:
        yield events
    finally:
        events += disable().events()


@contextlib.contextmanager
def making_groups_apart(name: str) -> Iterator[None]:
    """Let some ranks make a process group of this name in a block, with no part for the others.

    torch names a group that only its members make by the number of groups that the rank is in.
    That differs between ranks, which then wait for each other until their timeout; and it recurs
    when groups are destroyed: then ranks look for connections that are gone. And if
    `init_process_group` was given a device, NCCL splits a group off the default one, for which all
    of its ranks have to call; without the device it makes a group by itself, when it is first used.
    """
    default = dist.group.WORLD
    device = names.GROUP_DEVICE.of(default)
    with names.GROUP_NAME.replaced_by(lambda *_args, **_kwargs: name):
        if device is not None:
            names.GROUP_DEVICE.set(default, None)
        try:
            yield
        finally:
            if device is not None:
                names.GROUP_DEVICE.set(default, device)


def group_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what communicates tensors of a device on a group, such as `gloo`.

    `dist.get_backend` gives the name by which the group was made: `cpu:gloo`, or `undefined`.
    """
    return str(names.GROUP_BACKEND.of(group)(device).name())


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the time after which a collective on `group` fails, a `datetime.timedelta`."""
    return names.GROUP_TIMEOUT.of(names.GROUP_BACKEND.of(group)(device).options)


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives `group` has launched; RuntimeError if it does not count them."""
    return names.SEQUENCE_NUMBER.of(group)()


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which the ranks of a group found each other."""
    return names.GROUP_STORE.get()(group)


# TORCH_LOGS knows loggers by the modules of torch that own them: a child of this one is shown
# under dynamo, distributed and ddp alike.
LOG_NAME = f"{names.DDP_OPTIMIZER.owner}.ddpopt"


@functools.cache
def do_without(missing: str, need: names.Need) -> None:
    """Warn, once per process, of a missing name without which only one thing is lost."""
    logging.getLogger(LOG_NAME).warning("%s; training is split without %s", missing, need.value)


def graph_logger() -> logging.Logger:
    """Return the logger that `TORCH_LOGS=ddp_graphs` turns on, or a silent one if it has moved."""
    try:
        return names.ARTIFACT_LOGGER.get()(LOG_NAME, "ddp_graphs")
    except TorchDriftError as error:
        do_without(str(error), names.Need.LOGS)
        return logging.getLogger(f"{LOG_NAME}.ddp_graphs")


def trace_structured(name: str, metadata: dict[str, Any], payload: Callable[[], str]) -> None:
    """Write a payload to torch's structured trace, which tlparse reads; do nothing if it is off."""
    try:
        trace = names.TRACE_STRUCTURED.get()
    except TorchDriftError as error:
        do_without(str(error), names.Need.TRACE)
    else:
        trace(name, lambda: metadata, payload_fn=payload)
