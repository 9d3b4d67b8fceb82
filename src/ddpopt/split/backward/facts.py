"""Read off AOTAutograd's backward graph what the planner needs to know to cut it.

It changes nothing and decides nothing; `plan.py` chooses the cuts, `cut.py` makes them.

[Note: calls and repeats]
A backward graph is functional: calls, numbered from 0 in graph order, and an output that lists a
gradient for each argument of the forward. Some calls cost next to nothing: views and constants.
Such a call is a *repeat*: each section that needs it makes its own, so its value never crosses a
cut, and no two values that cross a cut share memory. `reads` looks through repeats.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.errors import CutRefusedError, ForwardInstead
from ddpopt.split.nodes import (
    call_nodes,
    is_pure,
    name_of,
    num_bytes_of,
    output_values,
    uses_streams,
)


class Tie(enum.Enum):
    """What a cut between a value and its reader would lose, besides keeping the value."""

    NONE = "nothing: they are separate kernels anyway"
    FUSED = "a fusion: the value would not exist in memory"
    UNROUNDED = "digits: fused, the value is not rounded to what can be stored"
    ONE = "everything: the value is a tuple, which only exists to be taken apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardFacts:
    """A backward graph as the planner sees it; see [Note: calls and repeats].

    `reads[i]` maps each call whose value call i uses to their tie; it is empty for a repeat.
    `gradients` maps an argument of the forward to the calls that its gradient is computed from
    (none if it is an input passed through); `argument_reads` maps it to the calls that read its
    memory. `num_bytes[i]` is the size of what call i returns, `is_ordered[i]` whether call i has
    effects and must keep its place among such calls.
    """

    call_names: Sequence[str]
    is_repeat: Sequence[bool]
    is_ordered: Sequence[bool]
    reads: Sequence[Mapping[int, Tie]]
    num_bytes: Sequence[int]
    gradients: Mapping[int, tuple[int, ...]]
    argument_reads: Mapping[int, Sequence[int]]


def refuse_linked_calls(gm: fx.GraphModule) -> None:
    """Raise CutRefusedError if calls depend on each other by more than the values they read."""
    if uses_streams(gm.graph):
        raise CutRefusedError(ForwardInstead.STREAMS)
    if any(name_of(node) == "with_effects" for node in gm.graph.nodes):
        raise CutRefusedError(ForwardInstead.EFFECTS)


def gradient_nodes(gm: fx.GraphModule) -> dict[int, fx.Node]:
    """Return each gradient's node by the position of its argument in the forward's graph.

    Raises:
        CutRefusedError: the graph returns something else as well.
    """
    found: dict[int, fx.Node] = {}
    for node, argument in zip(output_values(gm), _torch.gradient_arguments(gm), strict=True):
        if isinstance(node, fx.Node):
            if argument is None or argument in found:
                raise CutRefusedError(ForwardInstead.OTHER_OUTPUTS, f"{node} is such an output")
            found[argument] = node
    return found


def saved_arguments(forward: fx.GraphModule) -> dict[str, int]:
    """Return which values that a forward graph saves live in the memory of which arguments.

    Values are given by name, which is that of the backward graph's input; views are included.
    """
    repeats = repeats_of(forward)
    arguments = _torch.argument_placeholders(forward)
    found = {}
    for node in output_values(forward):
        if isinstance(node, fx.Node) and (memory := memory_of(node, repeats)) in arguments:
            found[node.name] = arguments[memory]
    return found


def memory_of(node: fx.Node, repeats: AbstractSet[fx.Node]) -> fx.Node:
    """Return the node that made the memory in which a node's value lives."""
    while node in repeats and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def read_backward(gm: fx.GraphModule, saved: Mapping[str, int]) -> BackwardFacts:
    """Return the facts about a backward graph; `saved` is what `saved_arguments` returned."""
    calls = call_nodes(gm.graph)
    repeats = repeats_of(gm)
    sources: dict[fx.Node, tuple[int, ...]] = {}  # the calls and the arguments behind a value
    arguments = {
        node: {saved[node.name]}
        for node in gm.graph.find_nodes(op="placeholder")
        if node.name in saved
    }
    reads: list[dict[int, Tie]] = []
    argument_reads: dict[int, list[int]] = {}
    for call, node in enumerate(calls):
        origins = node.all_input_nodes
        found = {
            source: _tie(calls[source], node)
            for origin in origins
            for source in sources.get(origin, ())
        }
        read = {argument for origin in origins for argument in arguments.get(origin, ())}
        if node in repeats:
            sources[node], arguments[node] = tuple(found), read
            reads.append({})
        else:
            sources[node] = (call,)
            reads.append(found)
            for argument in read:
                argument_reads.setdefault(argument, []).append(call)
    return BackwardFacts(
        call_names=[node.name for node in calls],
        is_repeat=[node in repeats for node in calls],
        is_ordered=[not is_pure(node) for node in calls],
        reads=reads,
        num_bytes=[num_bytes_of(node.meta.get("val")) for node in calls],
        gradients={a: sources.get(node, ()) for a, node in gradient_nodes(gm).items()},
        argument_reads=argument_reads,
    )


def repeats_of(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the calls that each section makes for itself; see [Note: calls and repeats]."""
    repeats: set[fx.Node] = set()
    for node in call_nodes(gm.graph):
        if not is_pure(node):
            continue
        is_constant = not node.all_input_nodes
        is_view = getattr(node.target, "is_view", False) or name_of(node) == "_unsafe_view.default"
        if name_of(node) == "getitem":
            is_view = node.args[0] in repeats
        if is_view or is_constant:
            repeats.add(node)
    return repeats


def _tie(value: fx.Node, reader: fx.Node) -> Tie:
    made = value.meta.get("val")
    if not isinstance(made, torch.Tensor | torch.SymInt | torch.SymFloat):
        return Tie.ONE
    is_product = name_of(value).partition(".")[0] in ("mm", "bmm", "addmm", "baddbmm")
    if is_product and name_of(reader).startswith("add."):
        return Tie.UNROUNDED  # the library's product can add to a tensor
    if not (isinstance(made, torch.Tensor) and _is_generated(value) and _is_generated(reader)):
        return Tie.NONE
    # Compilers compute with more bits than a tensor of short floats stores.
    is_short = made.dtype.is_floating_point and made.dtype.itemsize < torch.float32.itemsize
    return Tie.UNROUNDED if is_short else Tie.FUSED


def _is_generated(node: fx.Node) -> bool:
    """Whether a compiler would generate the loop for this call itself, and could fuse it."""
    tags = set(getattr(node.target, "tags", ()))
    return not tags.isdisjoint(_GENERATED_TAGS)


# Not all releases have the tag for reductions.
_GENERATED_TAGS = {
    getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name)
}


# All bits: a gradient that does not depend on outputs, or outputs that all have gradients.
ANY = -1


def find_descent(backward: fx.GraphModule, places: Mapping[Hashable, int]) -> dict[int, int]:
    """Return from which of the forward's outputs the gradient of each argument descends, as bits.

    AOTAutograd fills in zeros for the gradients of outputs that the loss does not use. In eager, a
    parameter behind only such outputs has no gradient, so optimizers leave it alone.

    `places` gives the index of each output of the forward, as AOTAutograd describes it. The result
    is empty if there is nothing to choose: only one output besides the token can have a gradient,
    or one of them is not understood.
    """
    tangents = _torch.tangents(backward)
    if tangents is None or len(tangents) <= 2 or not places.keys() >= set(tangents.values()):
        return {}
    descent = {placeholder: 1 << places[output] for placeholder, output in tangents.items()}
    for node in backward.graph.nodes:
        for source in node.all_input_nodes:
            descent[node] = descent.get(node, 0) | descent.get(source, 0)
    return {
        argument: descent.get(node, 0) or ANY for argument, node in gradient_nodes(backward).items()
    }
