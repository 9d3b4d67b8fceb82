"""Sections as named ranges in torch's profiler, and where autograd runs a section's backward.

The names are the same inside `ddpopt.record` and outside. Nothing here checks whether a profiler is
on: `_events.py` does, once for each section that runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

_COMPILED_BACKWARD = "CompiledFunctionBackward"  # the autograd node that AOTAutograd makes
_DEPTH = 4  # of views that may lie between an output and that node
_WATCHED = "ddpopt: watched"  # in the node's own dictionary, which ends with the step

Context = contextlib.AbstractContextManager[None]


class Ranges:
    """Shows sections to torch's profiler: the `_events.Listener` while nobody records."""

    @contextlib.contextmanager
    def section(self, label: tuple[str, int], kind: str) -> Any:
        with record_function(range_name(label, kind)):
            yield

    def watch(self, label: tuple[str, int], outputs: Any) -> None:
        """Show the backward of these outputs, where AOTAutograd's node runs it."""
        watch_backward(outputs, lambda: self.section(label, "backward"))


def range_name(label: tuple[str, int], kind: str) -> str:
    """Return what a section is called in a profile, as in `ddpopt: 4/0 section 2 backward`."""
    graph, section = label
    return f"ddpopt: {graph} section {section} {kind}"


def watch_backward(outputs: Any, running: Callable[[], Context]) -> None:
    """Make the backward of a compiled section's outputs run in the context that `running` makes.

    Does nothing if no AOTAutograd node made them, or if its backward is watched already.
    """
    node = _find_node(outputs)
    if node is None:
        return
    node.metadata[_WATCHED] = True
    stack = contextlib.ExitStack()
    node.register_prehook(lambda _: stack.enter_context(running()))
    node.register_hook(lambda *_: stack.close())


def _find_node(outputs: Any) -> Any:
    """Return the node of a compiled graph that made these outputs; None without a new one."""
    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    level: list[Any] = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor)]
    for _ in range(_DEPTH):
        nodes = [node for node in level if node is not None]
        compiled = [node for node in nodes if node.name() == _COMPILED_BACKWARD]
        for node in compiled:
            if _WATCHED not in node.metadata:
                return node
        others = (node for node in nodes if node not in compiled)
        level = [following for node in others for following, _ in node.next_functions]
    return None
