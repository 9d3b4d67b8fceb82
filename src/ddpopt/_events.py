"""Where forwards and sections tell that they run, to whoever records a step.

Nobody listens but inside of `ddpopt.record`; then telling costs one look at `current`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch.nn.parallel import DistributedDataParallel


class Label(NamedTuple):
    """A section as it is told of; a graph that is compiled whole is its section 0."""

    graph: str
    section: int


class Listener(Protocol):
    """Who is told."""

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Run before the forward of a DDP module."""

    def after_forward(self, ddp: DistributedDataParallel) -> None:
        """Run after it."""

    def section(self, label: Label, kind: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a section's `kind`, "forward" or "backward", runs."""

    def watch(self, label: Label, outputs: Any) -> None:
        """Find the autograd node that made a section's outputs, which will run its backward."""


current: Listener | None = None


def telling(compiled: Callable[..., Any], label: Label) -> Callable[..., Any]:
    """Return `compiled`, telling of its forward and its outputs."""

    def run(*args: Any) -> Any:
        listener = current
        if listener is None:
            return compiled(*args)
        with listener.section(label, "forward"):
            outputs = compiled(*args)
        listener.watch(label, outputs)
        return outputs

    return run


@contextlib.contextmanager
def listen(listener: Listener) -> Any:
    """Tell `listener` in this block.

    Raises:
        RuntimeError: somebody listens already.
    """
    global current  # noqa: PLW0603  # one look at a global is what a section can afford
    if current is not None:
        raise RuntimeError(
            "a ddpopt.record block is open already; record one DDP module at a time, and leave "
            "the block before the next"
        )
    current = listener
    try:
        yield
    finally:
        current = None
