"""What the calls of a graph of aten operations cost on a device.

It reads graphs and runs nothing; `device.py` knows how fast a device is.

[Note: costs of a call]
FLOPs are those of torch's own formulas (`torch.utils.flop_counter`), 0 where there is none. Bytes
moved are the inputs read and the outputs written. Views, elements of tuples and empty tensors
are free. Compilers fuse pointwise operations: a value that one makes and only one other reads is
neither written nor read, and its maker is launched with the reader. This is simpler than what a
compiler does, which also fuses values with several readers, and reductions.

A value's memory belongs to the call that made it. Views and in-place operations pass on the memory
of their first input, so reading them reads that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from ddpopt.errors import PlanError
from ddpopt.planning.device import Device
from ddpopt.split.nodes import call_nodes, leaves, name_of

# They read as much of their first input as they write.
_GATHERS = frozenset({"embedding", "gather", "index", "index_select"})


class CallCost(NamedTuple):
    """See [Note: costs of a call]."""

    flops: int
    moved_bytes: int
    seconds: float


def call_costs(graph: fx.Graph, device: Device) -> dict[str, CallCost]:
    """Return what each aten operation costs, by its node's name, in the order of the graph.

    Raises:
        PlanError: a value has no `meta["val"]`, which make_fx and AOTAutograd set, or has a
            symbolic shape.
    """
    values = _Values(graph)
    # By the operation's name: other overloads, and the same operation elsewhere, cost the same.
    registry = FlopCounterMode(display=False).flop_registry
    formulas = {getattr(target, "__name__", ""): formula for target, formula in registry.items()}
    costs = {}
    for node in call_nodes(graph):
        flops = moved_bytes = 0
        seconds = 0.0
        if not _is_free(node):
            flops, moved_bytes = _count_flops(node, formulas), values.moved_bytes(node)
            dtype = next((tensor.dtype for tensor in _tensors(node)), None)
            seconds = device.seconds(flops, moved_bytes, dtype)
            seconds += 0.0 if values.is_fused(node) else device.launch_s
        costs[node.name] = CallCost(flops, moved_bytes, seconds)
    return costs


class _Values:
    """The values of a graph: whose memory they are in, their sizes in bytes, and their readers."""

    def __init__(self, graph: fx.Graph) -> None:
        self.owner: dict[fx.Node, fx.Node] = {}
        self.size: dict[fx.Node, int] = {}
        self._readers: dict[fx.Node, set[fx.Node]] = {}  # of its memory, without views
        for node in graph.nodes:
            if node.op != "output":
                self.owner[node] = owner = self._find_owner(node)
                size = _num_bytes(node)
                self.size[node] = min(size, self.size.get(owner, size))
            if not _is_free(node):
                for source in node.all_input_nodes:
                    self._readers.setdefault(self.owner[source], set()).add(node)

    def _find_owner(self, node: fx.Node) -> fx.Node:
        if not node.all_input_nodes:
            return node
        first = node.all_input_nodes[0]
        if name_of(node) == "getitem":  # an element of a tuple owns its memory, but not of a view's
            return node if self.owner[first] is first else self.owner[first]
        is_in_place = _base_name(node).endswith("_") and not _base_name(node).endswith("__")
        return self.owner[first] if _is_view(node) or is_in_place else node

    def is_fused(self, node: fx.Node) -> bool:
        """Whether a node's value exists only inside its reader's loop."""
        readers = self._readers.get(node, ())
        return (
            self.owner[node] is node
            and _is_pointwise(node)
            and len(readers) == 1
            and all(map(_is_pointwise, readers))
        )

    def moved_bytes(self, node: fx.Node) -> int:
        """Return the bytes that a call reads and writes."""
        written = 0 if self.is_fused(node) else self.size[node]
        reads = [
            0 if self.is_fused(self.owner[source]) else self.size[source]
            for source in node.all_input_nodes
        ]
        if _base_name(node) in _GATHERS:
            reads[0] = min(reads[0], self.size[node])
        return sum(reads) + written


def _base_name(node: fx.Node) -> str:
    """Return an operation's name without its overload."""
    return name_of(node).partition(".")[0]


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "is_view", False) or _base_name(node) == "_unsafe_view"


def _is_free(node: fx.Node) -> bool:
    is_empty = _base_name(node).startswith(("empty", "new_empty"))
    return _is_view(node) or name_of(node) == "getitem" or is_empty


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    # None has no "val": the result of a call without one, or a gradient that nobody needs.
    is_none = not node.users or name_of(node) == "getitem"
    if "val" not in node.meta and node.op != "get_attr" and not is_none:
        raise PlanError(
            f"node {node.name} ({name_of(node)}) has no meta['val']; trace the graph with make_fx "
            "and tracing_mode='fake'"
        )
    return [leaf for leaf in leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _num_bytes(node: fx.Node) -> int:
    tensors = _tensors(node)
    for tensor in tensors:
        if not all(isinstance(size, int) for size in tensor.shape):
            raise PlanError(
                f"node {node.name} has the symbolic shape {tuple(tensor.shape)}; costs need static "
                "shapes, as make_fx with tracing_mode='fake' gives them"
            )
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


def _count_flops(node: fx.Node, formulas: Mapping[str, Any]) -> int:
    # The CPU's attention has no formula of its own (torch 2.11 to 2.13).
    formula = formulas.get(_base_name(node).replace("_for_cpu", ""))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
