"""Compile C++ kernels of several graphs side by side: Inductor would wait after each graph."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ddpopt._torch import names
from ddpopt._torch.runtime import do_without
from ddpopt.errors import TorchDriftError

Wait = Callable[[], None]
# What this thread is to wait for later, None if it waits at once
_waits: contextvars.ContextVar[list[Wait] | None]
_waits = contextvars.ContextVar("ddpopt_waits", default=None)


@contextlib.contextmanager
def coming_later(inputs: Iterable[Any]) -> Iterator[None]:
    """Allow `collecting` in this block, if that is possible for graphs with such inputs.

    It is possible neither on devices other than the CPU, where Inductor collects results right
    after each graph, nor if Inductor runs each graph once to measure it.
    """
    with contextlib.ExitStack() as stack:
        is_on_cpu = {v.device.type for v in inputs if isinstance(v, torch.Tensor)} <= {"cpu"}
        try:
            if is_on_cpu and not names.PROFILE_BANDWIDTH_OUTPUT.get():
                stack.enter_context(_replaced_wait())
        except TorchDriftError as error:
            do_without(str(error), names.Need.SIDE_BY_SIDE)
        yield


@contextlib.contextmanager
def _replaced_wait() -> Iterator[None]:
    """Replace it for the process; blocks do not overlap, since Dynamo compiles under a lock."""
    async_compile = names.ASYNC_COMPILE.get()
    wait = names.WAIT_FOR_KERNELS.of(async_compile)

    def wait_later(compiler: Any, scope: dict[str, Any]) -> None:
        waits = _waits.get()
        if waits is None:
            wait(compiler, scope)
        else:
            waits.append(lambda: wait(compiler, scope))

    names.WAIT_FOR_KERNELS.set(async_compile, wait_later)
    try:
        yield
    finally:
        names.WAIT_FOR_KERNELS.set(async_compile, wait)


@contextlib.contextmanager
def collecting() -> Iterator[list[Wait]]:
    """Yield what waits for the kernels of a graph that Inductor's threads compile in this block.

    The graph must not be called earlier. There is nothing to wait for outside `coming_later`.
    """
    waits: list[Wait] = []
    token = _waits.set(waits)
    try:
        yield waits
    finally:
        _waits.reset(token)


def finish(waits: Iterable[Wait], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled graph once its kernels are compiled."""
    for wait in waits:
        wait()
    return compiled
