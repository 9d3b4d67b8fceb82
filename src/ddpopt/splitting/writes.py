"""Find what a graph writes to in place, and what that means for cuts."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from ddpopt import _torch
from ddpopt.splitting.nodes import call_nodes, leaves, name_of, storage_keys


@dataclass(slots=True)
class Memory:
    """The values that share one storage, as (node, position made, last use), and the last write.

    A graph input is made at -1.
    """

    values: list[tuple[fx.Node, int, int]]
    last_write: int = -1


def find_written_memory(graph: fx.Graph) -> list[Memory]:
    """Return the memory that some call writes to in place."""
    calls = call_nodes(graph)
    positions = {node: position for position, node in enumerate(calls)}
    memory: dict[int, Memory] = {}
    for node in (*graph.find_nodes(op="placeholder"), *calls):
        made = positions.get(node, -1)
        for key in storage_keys(node):
            last = max((positions.get(user, len(calls)) for user in node.users), default=made)
            memory.setdefault(key, Memory([])).values.append((node, made, last))
        for target in written_by(node):
            for key in storage_keys(target):
                memory.setdefault(key, Memory([])).last_write = made
    return [m for m in memory.values() if m.last_write >= 0]


def mutation_spans(written: Sequence[Memory]) -> Iterable[tuple[int, int]]:
    """Stretches over which two or more values share memory that is written to later.

    Passed to another section they would have to stay shared. One value alone can be passed; see
    `find_overwritten`.
    """
    for memory in written:
        reached = -1
        for _, made, last in sorted(memory.values, key=lambda value: value[1]):
            yield max(made + 1, 0), min(last, reached, memory.last_write)
            reached = max(reached, last)


def find_overwritten(graph: fx.Graph, cuts: Iterable[int]) -> list[tuple[int, fx.Node]]:
    """Return the values that cross a cut and are written to in place after it, with that cut.

    The section that made such a value may have saved it for its backward; autograd would find it
    changed. Graph inputs are left out: their writes are the caller's to see.
    """
    written = find_written_memory(graph)
    return [
        (cut, node)
        for cut in cuts
        for memory in written
        if memory.last_write >= cut and all(made >= 0 for _, made, _ in memory.values)
        for node, made, last in memory.values
        if made < cut <= last
    ]


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that a call writes to in place, as far as its form shows it."""
    out = [n for n in leaves(node.kwargs.get("out")) if isinstance(n, fx.Node)]
    first = node.args[0] if node.args else None
    if isinstance(first, fx.Node) and _is_in_place(node):
        out.append(first)
    return out


def _is_in_place(node: fx.Node) -> bool:
    if _torch.is_mutable_op(node.target):
        return True
    name = name_of(node)
    if name == "setitem" or name in _IN_PLACE_OPERATORS:
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    return node.op == "call_function" and _inplace_argument(node) is True


_IN_PLACE_OPERATORS = frozenset(
    name for name in vars(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
) - {"index", "inv", "invert", "is_", "is_not", "itemgetter"}


def _inplace_argument(node: fx.Node) -> object:
    """Return the value of a Python function's `inplace` argument, None where it has none."""
    if "inplace" in node.kwargs or not callable(node.target):
        return node.kwargs.get("inplace")
    parameters = _parameter_names(node.target)
    index = parameters.index("inplace") if "inplace" in parameters else len(node.args)
    return node.args[index] if index < len(node.args) else None


def _parameter_names(function: Callable[..., object]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []  # builtins without a signature
