"""The modes of torch that belong to a thread, carried from one thread to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """The modes under which another thread computes the same."""

    has_grad: bool
    is_inference: bool
    has_autocast_cache: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]  # of each type of device; is it on?

    @classmethod
    def current(cls, devices: Sequence[torch.device]) -> Modes:
        """Return those of this thread that matter on these devices and on the CPU."""
        types = sorted({"cpu", *(device.type for device in devices)} - {"meta"})
        return cls(
            has_grad=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            has_autocast_cache=torch.is_autocast_cache_enabled(),
            autocasts=tuple(
                (each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each))
                for each in types
            ),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.has_grad))
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(*autocast, self.has_autocast_cache))
            yield


def stream_of(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream on a device, None if it has no streams."""
    return None if device.index is None else torch.accelerator.current_stream(device)


@contextlib.contextmanager
def on(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    """Make a device, and a stream of it, the current one in this block."""
    if stream is None:
        yield
        return
    with torch.accelerator.device_index(device.index), stream:
        yield
