"""A graph of aten operations as a networkx DAG with costs, and what planning asks of it.

It reads graphs and runs nothing; `device.py` knows how fast a device is.

[Note: costs of a call]
FLOPs are those of torch's own formulas (`torch.utils.flop_counter`), 0 where there is none. Bytes
moved are the inputs read and the outputs written. Views, elements of tuples and empty tensors
are free. Compilers fuse pointwise operations: a value that one makes and only one other reads is
neither written nor read, and its maker is launched with the reader. This is simpler than what a
compiler does, which also fuses values with several readers, and reductions.

[Note: memory]
A value's memory belongs to the call that made it, or, of a tuple, to the call that takes the
element out. Views and operations in place hand on the memory of their first input. So each byte
has one owner, and it lives until the last use of any value in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from ddpopt.bucketing.device import Device
from ddpopt.errors import PlanError
from ddpopt.split.nodes import call_nodes, leaves, name_of

# They read as much of their first input as they write.
_GATHERS = frozenset({"embedding", "gather", "index", "index_select"})


class Arrival(NamedTuple):
    """A gradient is final after the call at `position`, `ready_s` after the graph began.

    `position` is -1 where the gradient is an input handed through.
    """

    name: str
    position: int
    ready_s: float


class CriticalPath(NamedTuple):
    """The chain of calls that takes longest: what no number of devices could shorten."""

    nodes: tuple[str, ...]
    seconds: float


def build_dag(graph: fx.Graph, device: Device) -> nx.DiGraph:
    """Return the calls of a graph by name, in graph order, with their costs on a device.

    Nodes have these attributes (see [Note: costs of a call] and [Note: memory]):
    `position` among the calls; `op`, the operation's name; `flops`; `moved_bytes`; `seconds`;
    `output_bytes`, the size of the memory that is its own; `memory`, the name of the node that owns
    the memory of its value. Edges go from a value to its reader; `num_bytes` is the value's size.

    Args:
        graph: Of calls of aten operations with fake or meta tensors in `meta["val"]`, as `make_fx`
            and AOTAutograd make it; shapes must be static.
        device: Its rates.

    Raises:
        PlanError: a value has no `meta["val"]`, or a symbolic shape.
    """
    values = _Values(graph)
    formulas = _flop_formulas()
    dag = nx.DiGraph()
    for position, node in enumerate(call_nodes(graph)):
        is_fused, is_own = values.is_fused(node), values.owner[node] is node
        flops, moved_bytes, seconds = 0, 0, 0.0
        if not _is_free(node):
            flops, moved_bytes = _count_flops(node, formulas), values.moved_bytes(node)
            seconds = device.seconds(flops, moved_bytes, _dtype_of(node))
            seconds += 0.0 if is_fused else device.launch_s
        dag.add_node(
            node.name,
            position=position,
            op=name_of(node),
            flops=flops,
            moved_bytes=moved_bytes,
            seconds=seconds,
            output_bytes=values.size[node] if is_own and not _is_tuple(node) else 0,
            memory=values.owner[node].name,
        )
        for source in node.all_input_nodes:
            if source.name in dag:
                taken = node if _is_tuple(source) else source
                dag.add_edge(source.name, node.name, num_bytes=values.size[taken])
    return dag


def end_times(dag: nx.DiGraph) -> list[float]:
    """Return when each call ends, in seconds, if they run one after another in graph order."""
    return list(itertools.accumulate(seconds for _, seconds in dag.nodes(data="seconds")))


def arrival_order(dag: nx.DiGraph, gradients: Mapping[str, str]) -> list[Arrival]:
    """Return when each gradient is final, first ones first, if calls run in graph order.

    `gradients` tells by the gradient's name which node makes it. Those that one node makes keep
    the order in which they are given.
    """
    ends_s = end_times(dag)
    arrivals = []
    for name, node in gradients.items():
        position = dag.nodes[node]["position"] if node in dag else -1
        arrivals.append(Arrival(name, position, ends_s[position] if position >= 0 else 0.0))
    return sorted(arrivals, key=lambda arrival: arrival.position)


def critical_path(dag: nx.DiGraph) -> CriticalPath:
    """Return the path through the graph whose calls take longest together."""
    until: dict[str, float] = {}
    before: dict[str, str | None] = {}
    for node, seconds in dag.nodes(data="seconds"):
        latest = max(dag.predecessors(node), key=until.__getitem__, default=None)
        before[node] = latest
        until[node] = seconds + (until[latest] if latest is not None else 0.0)
    last = max(until, key=until.__getitem__, default=None)
    path = []
    node = last
    while node is not None:
        path.append(node)
        node = before[node]
    return CriticalPath(tuple(reversed(path)), until[last] if last is not None else 0.0)


def live_bytes(dag: nx.DiGraph) -> list[int]:
    """Return the bytes that are kept across the cut in front of each call.

    They are in values that a call before the cut makes and one behind it uses; inputs of the graph
    are not among them, nor is a value that is only returned. See [Note: memory].
    """
    last_use: dict[str, int] = {}
    for node, position in dag.nodes(data="position"):
        for value in (node, *dag.predecessors(node)):
            last_use[dag.nodes[value]["memory"]] = position
    changes = [0] * (len(dag) + 1)
    for memory, last in last_use.items():
        if memory in dag:
            changes[_made_at(dag, memory) + 1] += dag.nodes[memory]["output_bytes"]
            changes[last + 1] -= dag.nodes[memory]["output_bytes"]
    return list(itertools.accumulate(changes))[: len(dag)]


def _made_at(dag: nx.DiGraph, node: str) -> int:
    """Return the position of the call that makes a node's memory: of an element, its tuple's."""
    is_element = dag.nodes[node]["op"] == "getitem"
    maker = next(iter(dag.predecessors(node)), node) if is_element else node
    position: int = dag.nodes[maker]["position"]
    return position


class _Values:
    """The values of a graph: whose memory they are in, their sizes in bytes, who reads them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.owner: dict[fx.Node, fx.Node] = {}
        self.size: dict[fx.Node, int] = {}
        self._readers: dict[fx.Node, set[fx.Node]] = {}  # of memory, other than views
        for node in graph.nodes:
            if node.op != "output":
                self.owner[node] = owner = self._find_owner(node)
                num_bytes = _num_bytes(node)
                self.size[node] = (
                    min(num_bytes, self.size[owner]) if owner in self.size else num_bytes
                )
            if not _is_free(node):
                for source in node.all_input_nodes:
                    self._readers.setdefault(self.owner[source], set()).add(node)

    def _find_owner(self, node: fx.Node) -> fx.Node:
        inputs = node.all_input_nodes
        if not inputs:
            return node
        if name_of(node) == "getitem":
            return node if self.owner[inputs[0]] is inputs[0] else self.owner[inputs[0]]
        return self.owner[inputs[0]] if _is_view(node) or _is_in_place(node) else node

    def is_fused(self, node: fx.Node) -> bool:
        """Whether a node's value only exists inside of its reader's loop."""
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


def _is_in_place(node: fx.Node) -> bool:
    name = _base_name(node)
    return name.endswith("_") and not name.endswith("__")


def _is_free(node: fx.Node) -> bool:
    is_empty = _base_name(node).startswith(("empty", "new_empty"))
    return _is_view(node) or name_of(node) == "getitem" or is_empty


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    # None has no "val": what a call without a result returns, or a gradient that nobody needs.
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


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    return next((tensor.dtype for tensor in _tensors(node)), None)


def _flop_formulas() -> dict[str, Any]:
    """Return torch's FLOP formulas by the operation's name."""
    registry = FlopCounterMode(display=False).flop_registry
    return {getattr(target, "__name__", ""): formula for target, formula in registry.items()}


def _count_flops(node: fx.Node, formulas: Mapping[str, Any]) -> int:
    # The CPU's attention has no formula of its own (torch 2.11 to 2.13).
    formula = formulas.get(_base_name(node).replace("_for_cpu", ""))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
