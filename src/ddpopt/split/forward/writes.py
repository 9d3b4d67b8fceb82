"""Find what a graph writes to in place, and what that means for cuts."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ddpopt import _torch
from ddpopt.split.nodes import attribute_of, call_nodes, leaves, name_of, storage_keys


@dataclass(slots=True)
class Memory:
    """The values that share one storage, as (node, position made, last use), and who writes to it.

    A graph input is made at -1. `writes` are the positions of calls, in order.
    """

    values: list[tuple[fx.Node, int, int]] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


_MAY_COPY = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as", "sum_to_size"})


def find_written_memory(graph: fx.Graph) -> list[Memory]:
    """Return the memory that some call writes to in place.

    What a reshape returns counts as its input's memory even if it was copied: that depends on
    sizes, which differ between ranks, and cuts must not.
    """
    calls = call_nodes(graph)
    positions = {node: position for position, node in enumerate(calls)}
    memory: dict[int, Memory] = {}
    origin: dict[int, int] = {}

    def keys_of(node: fx.Node) -> list[int]:
        return [origin.get(key, key) for key in storage_keys(node)]

    for node in (*graph.find_nodes(op="placeholder"), *calls):
        made = positions.get(node, -1)
        if name_of(node) in _MAY_COPY and node.all_input_nodes:
            sources = keys_of(node.all_input_nodes[0])
            origin.update((key, source) for key in storage_keys(node) for source in sources)
        for key in keys_of(node):
            last = max((positions.get(user, len(calls)) for user in node.users), default=made)
            memory.setdefault(key, Memory()).values.append((node, made, last))
        for target in written_by(node):
            for key in keys_of(target):
                memory.setdefault(key, Memory()).writes.append(made)
    return [m for m in memory.values() if m.writes]


def mutation_spans(written: Sequence[Memory]) -> Iterable[tuple[int, int]]:
    """Yield spans over which two or more values share memory that is written to later.

    Passed to another section they would have to stay shared. A single value can be passed; see
    `find_overwritten`.
    """
    for memory in written:
        reached = -1
        for _, made, last in sorted(memory.values, key=lambda value: value[1]):
            yield max(made + 1, 0), min(last, reached, memory.writes[-1])
            reached = max(reached, last)


def find_overwritten(graph: fx.Graph, bounds: Sequence[int]) -> list[tuple[int, fx.Node]]:
    """Return the values that a section takes from an earlier one and writes to, with its start.

    `bounds` are the starts of sections, and the end. The section that made such a value may have
    saved it for its backward, and AOTAutograd cannot save what a write to an input overwrites.
    Graph inputs are left out: the caller is meant to see writes to them.
    """
    return [
        (start, node)
        for memory in find_written_memory(graph)
        if all(made >= 0 for _, made, _ in memory.values)
        for start, stop in itertools.pairwise(bounds)
        if any(start <= write < stop for write in memory.writes)
        for node, made, last in memory.values
        if made < start <= last
    ]


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that a call writes to in place, as far as its form and schema show."""
    values = leaves(node.kwargs.get("out"))
    if _is_in_place(node):
        values += leaves(node.args[0] if node.args else node.kwargs.get("input"))
    if _torch.is_higher_order(node.target):
        values += node.all_input_nodes if _writes_within(node) else []
    else:
        for place, name in _written_arguments(node):
            values += leaves(_argument(node, place, name))
    return list(dict.fromkeys(value for value in values if isinstance(value, fx.Node)))


def _written_arguments(node: fx.Node) -> list[tuple[int | None, str]]:
    # torch's functions and methods have the names and the arguments of their operators.
    is_named = node.op == "call_method" or inspect.isbuiltin(node.target)
    written = list(_torch.written_arguments(node.target, name_of(node) if is_named else ""))
    if node.op == "call_function" and inspect.isfunction(node.target):
        # Functions in torch.nn.functional have no schema.
        names = _parameter_names(node.target)
        written += [(names.index(name), name) for name in _torch.RUNNING_AVERAGES if name in names]
        if "max_norm" in names and _argument(node, names.index("max_norm"), "max_norm") is not None:
            written.append((names.index("weight"), "weight"))  # an embedding shortens its rows
    return written


def _argument(node: fx.Node, place: int | None, name: str) -> Any:
    if place is not None and place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, node.kwargs.get("input") if name == "self" else None)


def _writes_within(node: fx.Node) -> bool:
    """Whether a higher-order operator's kernel, or a graph that it calls, writes to an input."""
    if name_of(node) == "triton_kernel_wrapper_mutation":
        return True
    gm = node.graph.owning_module
    modules = [attribute_of(gm, n) for n in node.all_input_nodes if n.op == "get_attr"]
    return any(
        made < 0
        for module in modules
        if isinstance(module, fx.GraphModule)
        for memory in find_written_memory(module.graph)
        for _, made, _ in memory.values
    )


_IN_PLACE_OPERATORS = frozenset(
    name for name in vars(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
) - {"index", "inv", "invert", "is_", "is_not", "itemgetter"} | {"setitem"}


def _is_in_place(node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(attribute_of(node.graph.owning_module, node), "inplace", False))
    name = name_of(node)
    if name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return True
    if node.op != "call_function":
        return False
    names = _parameter_names(node.target)
    place = names.index("inplace") if "inplace" in names else None
    return _argument(node, place, "inplace") is True


@functools.lru_cache(maxsize=256)  # a graph calls few functions, many times
def _parameter_names(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()  # builtins without a signature
