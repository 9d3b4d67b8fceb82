"""When compiled sections run, for `ddpopt.record` and for a profile of the user's.

`ddpopt.record` listens inside its block; nothing else does. Where nothing listens, a section costs
two looks: whether there is a listener, and whether torch's profiler is on, which gets a range.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from ddpopt import _torch
from ddpopt.steps.observing import observing

_DEPTH = 4  # of nodes with several inputs that may lie between an output and its compiled graph's
_WATCHED = "ddpopt: watched"  # in the node's own dictionary, which ends with the step

Context = contextlib.AbstractContextManager[None]


class Label(NamedTuple):
    """A section; a graph that is compiled whole is its section 0."""

    graph: str
    section: int


# Makes the context in which a section runs; the text is "forward" or "backward".
Listener = Callable[[Label, str], Context]

# Of the `record` block that is open, with which it ends.
_listener: Listener | None = None


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Have sections run in contexts of `listener`'s in this block.

    Raises:
        RuntimeError: there is a listener already.
    """
    global _listener  # noqa: PLW0603  # a section can afford one look at a global
    if _listener is not None:
        raise RuntimeError(
            "a ddpopt.record block is open already; record one DDP module at a time, and leave "
            "the block before the next"
        )
    _listener = listener
    try:
        yield
    finally:
        _listener = None


def find_listener() -> Listener | None:
    """The listener, or what shows sections to torch's profiler; None if nobody wants to know."""
    if _listener is not None:
        return _listener
    return show_range if _torch.shows_ranges() else None


@contextlib.contextmanager
def show_range(label: Label, kind: str) -> Iterator[None]:
    """Show torch's profiler a section, as in `ddpopt: 4/0 section 2 backward`."""
    with record_function(f"ddpopt: {label.graph} section {label.section} {kind}"):
        yield


def report_runs(compiled: Callable[..., Any], label: Label) -> Callable[..., Any]:
    """Run a compiled graph's forward, and the backward of its outputs, in the listener's contexts.

    A backward is told to the listener of its forward, also where it comes after the `record` block.
    """

    def run(*args: Any) -> Any:
        listener = find_listener()
        if listener is None:
            return compiled(*args)
        leave = _enter(lambda: listener(label, "forward"))
        try:
            outputs = compiled(*args)
        finally:
            leave()
        _watch_backward(outputs, lambda: listener(label, "backward"))
        return outputs

    return run


def _enter(make_context: Callable[[], Context]) -> Callable[[], None]:
    """Enter a context; return a function that leaves it. Errors of the context only warn."""
    stack = contextlib.ExitStack()
    observing(lambda: stack.enter_context(make_context()))()
    return observing(stack.close)


def _watch_backward(outputs: Any, make_context: Callable[[], Context]) -> None:
    """Make the backward of a compiled section's outputs run in a context.

    Does nothing if no AOTAutograd node made them, or if its backward is watched already.
    """
    node = _find_node(outputs)
    if node is None:
        return
    node.metadata[_WATCHED] = True
    entered: list[Callable[[], None]] = []

    def leave(*_: object) -> None:
        while entered:  # also the context of a backward that raised in this node before
            entered.pop()()

    node.register_prehook(lambda _: entered.append(_enter(make_context)))
    node.register_hook(leave)


def _find_node(outputs: Any) -> Any:
    """The AOTAutograd node that made these outputs; None if there is none that is not watched yet.

    The node is the outputs' own `grad_fn`, or lies behind views of what the compiled graph
    returned. A view has one input, so any number of nodes with one input is passed. Behind more
    than a few nodes with several inputs another graph begins.
    """
    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    level: list[Any] = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor)]
    for _ in range(_DEPTH):
        following: list[Any] = []
        for each in level:
            node = each
            while node is not None and not _torch.is_compiled_backward(node):
                sources = [source for source, _ in node.next_functions]
                node = sources[0] if len(sources) == 1 else None
                following += sources if len(sources) > 1 else []
            if node is not None and _WATCHED not in node.metadata:
                return node
        level = following
    return None
