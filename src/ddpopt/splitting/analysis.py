"""Read off a forward graph what the planner must know: uses of parameters, and legal cuts.

It changes nothing and decides nothing; `planning` chooses the cuts, `forward.py` makes them.

[Note: positions and cuts]
A graph's calls (all nodes but placeholders, get_attrs and the output) are numbered from 0 in
graph order. A *cut* at p separates the calls before p from p and those after it. Moving a cut
towards the start keeps every bucket complete that was complete, so that is the way to go when a
place cannot be cut.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.buckets import Parameter

_NOT_CALLS = ("placeholder", "get_attr", "output")

# Calls that switch a global state on until their partner switches it off, and whose value does
# not tie the two together. Autocast regions may be cut: split_module closes and reopens them.
_REGION_PARTNERS = {
    "_vmap_increment_nesting": "_vmap_decrement_nesting",
    "_grad_increment_nesting": "_grad_decrement_nesting",
    "_jvp_increment_nesting": "_jvp_decrement_nesting",
    "_saved_tensors_hooks_disable": "_saved_tensors_hooks_enable",
    "_enter_dual_level": "_exit_dual_level",
}
_AUTOCAST = ("_enter_autocast", "_exit_autocast")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """A graph as the planner sees it; see [Note: positions and cuts].

    `first_use` maps the index of each DDP parameter to the position of its first differentiable
    use, `legal_cuts[p]` says whether a cut at p is possible, and `last_use[i]` is the position of
    the last call that uses the value of call i (`num_calls` for the graph's output).
    """

    num_calls: int
    first_use: Mapping[int, int]
    legal_cuts: Sequence[bool]
    last_use: Sequence[int]
    call_names: Sequence[str]


def call_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute something, in order."""
    return [node for node in graph.nodes if node.op not in _NOT_CALLS]


def find_parameters(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    reduced: Mapping[torch.Tensor, Parameter],
) -> tuple[dict[fx.Node, list[int]], dict[int, int]]:
    """Return the DDP parameters behind each node, and for each the argument that brings it in.

    Parameters that the graph writes to are left out of the latter. Dynamo makes parameters inputs
    of its graph; with `inline_inbuilt_nn_modules` off they are attributes of the graph, or belong
    to modules that it calls.
    """
    owners: dict[fx.Node, list[int]] = {}
    slots: dict[int, int] = {}
    written = {
        key
        for node in call_nodes(graph.graph)
        for target in _written_by(node)
        for key in _storage_keys(target)
    }
    for slot, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = example_inputs[slot]
        if isinstance(value, torch.Tensor) and value in reduced:
            index = reduced[value].index
            owners[node] = [index]
            if not written.intersection(_storage_keys(node)):
                slots[index] = slot
    for node in graph.graph.find_nodes(op="get_attr"):
        value = _attribute(graph, str(node.target))
        if isinstance(value, torch.nn.Parameter) and value in reduced:
            owners[node] = [reduced[value].index]
    for node in graph.graph.find_nodes(op="call_module"):
        module = graph.get_submodule(str(node.target))
        owners[node] = [reduced[p].index for p in module.parameters() if p in reduced]
    return owners, slots


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def read_facts(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, Sequence[int]],
    elsewhere: Collection[int] = (),
) -> GraphFacts:
    """Return the facts about a graph; `parameters` gives the DDP parameters behind each node.

    A node may stand for several: a `call_module` for those of its module. Parameters `elsewhere`
    are first used in a graph that runs before this one, so their gradients are not final here.
    """
    calls = call_nodes(gm.graph)
    positions = {node: position for position, node in enumerate(calls)}
    last_use = [_last_use(node, positions, len(calls)) for node in calls]
    blocked = list(
        itertools.chain(
            _uncrossable_spans(gm, calls, last_use),
            _region_spans(calls),
            _mutation_spans(calls, positions),
        )
    )
    return GraphFacts(
        num_calls=len(calls),
        first_use=_first_uses(calls, parameters, elsewhere),
        legal_cuts=_outside(blocked, len(calls)),
        last_use=last_use,
        call_names=[node.name for node in calls],
    )


def _last_use(node: fx.Node, positions: Mapping[fx.Node, int], end: int) -> int:
    return max((positions.get(user, end) for user in node.users), default=positions[node])


def _outside(spans: Iterable[tuple[int, int]], num_calls: int) -> list[bool]:
    """For each p in [0, num_calls], whether it is inside no span (first, last), both included.

    A cut at either end of the graph would separate nothing, so these are False.
    """
    depth_change = [0] * (num_calls + 2)
    for first, last in spans:
        if first <= last:
            depth_change[first] += 1
            depth_change[last + 1] -= 1
    depths = list(itertools.accumulate(depth_change))[: num_calls + 1]
    return [depth == 0 and 0 < p < num_calls for p, depth in enumerate(depths)]


# ---- parameters -------------------------------------------------------------------------------


def _first_uses(
    calls: Sequence[fx.Node],
    parameters: Mapping[fx.Node, Sequence[int]],
    elsewhere: Collection[int],
) -> dict[int, int]:
    first: dict[int, int] = {}
    for position, node in enumerate(calls):
        # all_input_nodes sees nested lists, kwargs and the operands of higher-order ops.
        for source in (node, *node.all_input_nodes):
            for index in parameters.get(source, ()):
                if index not in first and index not in elsewhere and _is_differentiable(node):
                    first[index] = position
    return first


def _is_differentiable(node: fx.Node) -> bool:
    """Whether gradients may flow back through this call; True where that is not known."""
    value = node.meta.get("example_value")
    tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
    return any(tensor.requires_grad for tensor in tensors) if tensors else value is None


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


# ---- what cannot be cut -----------------------------------------------------------------------


def _uncrossable_spans(
    gm: fx.GraphModule, calls: Sequence[fx.Node], last_use: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """Values that no section can take as an input: tuples, generators, contexts, numbers.

    Tensors can cross, and symbolic integers; both only where each symbol in them has a node that
    binds it, because a section gets its symbols as inputs.
    """
    bound = {
        symbol
        for node in gm.graph.nodes
        if isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat)
        for symbol in _torch.free_symbols(node.meta["example_value"])
    }
    for position, node in enumerate(calls):
        if last_use[position] > position and _name_of(node) not in _AUTOCAST:
            value = node.meta.get("example_value")
            can_cross = isinstance(value, torch.Tensor | torch.SymInt)
            if not can_cross or not _torch.free_symbols(value) <= bound:
                yield position + 1, last_use[position]


def _region_spans(calls: Sequence[fx.Node]) -> Iterable[tuple[int, int]]:
    """Stretches under a global state that cannot be closed and reopened at a cut."""
    opened: list[tuple[str, int]] = []
    no_grad_since: int | None = None
    for position, node in enumerate(calls):
        name = _name_of(node)
        if name == "_set_grad_enabled":
            if no_grad_since is not None:
                yield no_grad_since + 1, position
            no_grad_since = None if node.args[0] else position
        elif name in _REGION_PARTNERS:
            opened.append((_REGION_PARTNERS[name], position))
        elif opened and name == opened[-1][0]:
            yield opened.pop()[1] + 1, position
    for _, position in opened:
        yield position + 1, len(calls)
    if no_grad_since is not None:
        yield no_grad_since + 1, len(calls)


def _mutation_spans(
    calls: Sequence[fx.Node], positions: Mapping[fx.Node, int]
) -> Iterable[tuple[int, int]]:
    """From the first call that made a value, or a view of it, to the last that writes to it.

    A cut in between would be right, for AOTAutograd then copies the new contents back, but it
    would pay for that copy, and views on both sides would make it rebuild the sharing.
    """
    first_seen: dict[int, int] = {}
    for position, node in enumerate(calls):
        for target in _written_by(node):
            for key in _storage_keys(target):
                if key in first_seen:
                    yield first_seen[key] + 1, position
        for key in _storage_keys(node):
            first_seen.setdefault(key, position)


def _storage_keys(node: fx.Node) -> list[int]:
    leaves = _leaves(node.meta.get("example_value"))
    keys = (_torch.storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return [key for key in keys if key is not None]


def _written_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that a call writes to in place, as far as its form shows it."""
    out = [n for n in _leaves(node.kwargs.get("out")) if isinstance(n, fx.Node)]
    first = node.args[0] if node.args else None
    if isinstance(first, fx.Node) and _is_in_place(node):
        out.append(first)
    return out


def _is_in_place(node: fx.Node) -> bool:
    if _torch.is_mutable_op(node.target):
        return True
    name = _name_of(node)
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


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []  # builtins without a signature


def _name_of(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", "")
