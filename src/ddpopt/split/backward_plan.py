"""Choose the sections of a backward graph: which calls run before which gradients are released.

`read_backward` reads AOTAutograd's graph. `plan_backward` is pure: from what the graph is like
(`BackwardFacts`) and what the Reducer will do (`reducer.py`) to an order of the calls and to
sections. `backward_cut.py` cuts the graph.

[Note: calls and repeats]
A backward graph is functional: calls, numbered from 0 in graph order, and an output that lists a
gradient for each argument of the forward. Some calls cost next to nothing: views and constants.
Such a call is a *repeat*: each section that needs it makes its own, so its value never crosses a
cut, and no two values that cross a cut share memory. `reads` looks through repeats.

[Note: stages and cuts]
The calls for which bucket k waits, but no earlier bucket, are *stage* k; a call for which no bucket
waits belongs to the stage in which it stands, or to the last one. A hook that gets a gradient may
update the parameter, as an optimizer in a hook does, so a bucket also waits for the calls that read
its parameters. Running the stages in order completes each bucket as early as possible without
changing any arithmetic. The cut after stage k may move later, up to the first gradient of the next
stage, to where the fewest bytes have to be kept for later sections. It never moves past a call with
effects, which may communicate: bytes differ between ranks, and on which side of a bucket's
allreduce such a call is made must not. Everything is linear in the graph's size.
"""

from __future__ import annotations

import bisect
import collections
import enum
import itertools
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.errors import NotCutError, Reason
from ddpopt.reducer import Bucket
from ddpopt.split.nodes import (
    call_nodes,
    is_pure,
    name_of,
    num_bytes_of,
    output_values,
    uses_streams,
)
from ddpopt.split.plan import BackwardCuts, make_sections, parts_of_buckets


class Tie(enum.Enum):
    """What a cut between a value and its reader would lose, besides keeping the value."""

    NONE = "nothing: they are separate kernels anyway"
    FUSED = "a fusion: the value would not exist in memory"
    UNROUNDED = "digits: fused, the value is not rounded to what can be stored"
    TUPLE = "everything: the value is a tuple, which only exists to be taken apart"


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
    """Raise NotCutError if calls depend on each other by more than the values they read."""
    if uses_streams(gm.graph):
        raise NotCutError(Reason.STREAMS)
    if any(name_of(node) == "with_effects" for node in gm.graph.nodes):
        raise NotCutError(Reason.EFFECTS)


def gradient_nodes(gm: fx.GraphModule) -> dict[int, fx.Node]:
    """Return each gradient's node by the position of its argument in the forward's graph.

    Raises:
        NotCutError: the graph returns something else as well.
    """
    found: dict[int, fx.Node] = {}
    for node, argument in zip(output_values(gm), _torch.gradient_arguments(gm), strict=True):
        if isinstance(node, fx.Node):
            if argument is None or argument in found:
                raise NotCutError(Reason.OTHER_OUTPUTS, f"{node} is such an output")
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
        return Tie.TUPLE
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


def final_positions(
    facts: BackwardFacts, arguments: Mapping[int, int], elsewhere: Collection[int]
) -> dict[int, int]:
    """Return, by parameter index, the position of the call after which its gradient is final.

    `arguments` gives each parameter's position among the forward's arguments. Parameters
    `elsewhere` are used again by a graph whose backward runs later.
    """
    return {
        index: max(facts.gradients[argument], default=-1)
        for index, argument in arguments.items()
        if argument in facts.gradients and index not in elsewhere
    }


def plan_backward(
    facts: BackwardFacts,
    buckets: Sequence[Bucket],
    arguments: Mapping[int, int],
    final: Mapping[int, int],
) -> BackwardCuts:
    """Return two or more sections of a backward graph.

    `arguments` and `final` are as in `final_positions`.

    Raises:
        NotCutError: it should stay whole.
    """
    own = parts_of_buckets(buckets, final)
    if len(own) < 2:  # a cut releases one bucket before another
        raise NotCutError(Reason.ONE_BUCKET if own else Reason.NO_PARAMETERS)
    released = [[arguments[p.index] for p in parameters] for parameters in own]
    stage = _assign_stages(facts, released)
    _pull_fused_gradients(facts, stage)
    order = _order_calls(facts, stage)
    num_calls = collections.Counter(stage[call] for call in order)
    ends = list(itertools.accumulate(num_calls[k] for k in range(len(own))))
    cuts = _choose_cuts(facts, order, ends)
    if not cuts:
        raise NotCutError(Reason.COMPLETE_TOGETHER)
    bounds = [0, *cuts, len(order)]
    # The first section that stops at or after the end of a stage completes its bucket.
    completed_in = [bisect.bisect_left(bounds, max(end, 1)) - 1 for end in ends]
    section_of = {p: k for k, parameters in zip(completed_in, own, strict=True) for p in parameters}
    arrival = sorted(section_of, key=lambda p: (final[p.index], -p.index))
    sections = make_sections(
        bounds,
        {p: section_of[p] for p in arrival},
        [facts.call_names[call] for call in order],
        [facts.is_ordered[call] for call in order],
    )
    released_in = {arguments[p.index]: section for p, section in section_of.items()}
    releases = _choose_releases(facts, order, bounds, released_in)
    return BackwardCuts(order=tuple(order), sections=sections, releases=releases)


def _assign_stages(facts: BackwardFacts, released: Sequence[Sequence[int]]) -> list[int]:
    """Return the stage of each call: the first bucket that waits for it."""
    last = len(released) - 1
    stage = [last] * len(facts.reads)
    reached = -1  # where in graph order the last gradient of the buckets so far is made
    reached_by = []
    for k, arguments in enumerate(released):
        for argument in arguments:
            reached = max((reached, *facts.gradients[argument]))
            for call in (*facts.gradients[argument], *facts.argument_reads.get(argument, ())):
                stage[call] = min(stage[call], k)
        reached_by.append(reached)
    in_bucket = set(itertools.chain.from_iterable(released))
    for argument, calls in facts.gradients.items():
        for call in calls if argument not in in_bucket else ():
            stage[call] = min(stage[call], bisect.bisect_left(reached_by, call))
    ordered = last
    for call in reversed(range(len(facts.reads))):
        if facts.is_ordered[call]:
            ordered = stage[call] = min(stage[call], ordered)
        for source in facts.reads[call]:
            stage[source] = min(stage[source], stage[call])
    return stage


def _pull_fused_gradients(facts: BackwardFacts, stage: list[int]) -> None:
    """Move gradients that are by-products of an earlier stage's loops into that stage.

    A bias's gradient, for example, sums the values from which the weight's is computed. That is
    free while they are in registers; a later section would have to read them from memory. Calls
    with effects stay where they are, in their order.
    """
    readers: list[list[int]] = [[] for _ in range(len(facts.reads))]
    for call, reads in enumerate(facts.reads):
        for source in reads:
            readers[source].append(call)
    for calls in facts.gradients.values():
        for gradient in calls:
            own = _fused_calls_of(gradient, facts, readers)
            if any(facts.is_ordered[call] for call in own):
                continue
            outside = [
                (stage[source], tie in _FUSED)
                for call in own
                for source, tie in facts.reads[call].items()
                if source not in own
            ]
            reads_from, is_fused = max(outside, default=(stage[gradient], False))
            if is_fused and reads_from < stage[gradient]:
                for call in own:  # of which one may be a gradient of a still earlier stage
                    stage[call] = min(stage[call], reads_from)


_FUSED = (Tie.FUSED, Tie.UNROUNDED)


def _fused_calls_of(
    gradient: int, facts: BackwardFacts, readers: Sequence[Sequence[int]]
) -> set[int]:
    """Return the calls that serve only this gradient and are fused with it, itself included."""
    own = {gradient}
    pending = [gradient]
    while pending:
        for source, tie in facts.reads[pending.pop()].items():
            if tie in _FUSED and own.issuperset(readers[source]):
                own.add(source)
                pending.append(source)
    return own


def _order_calls(facts: BackwardFacts, stage: list[int]) -> list[int]:
    """Return the calls stage by stage, each tuple being taken apart right after its maker."""
    elements: dict[int, list[int]] = {}
    roots = []
    for call, reads in enumerate(facts.reads):
        (maker, tie), *others = reads.items() or [(call, Tie.NONE)]
        if tie is Tie.TUPLE and not others:
            stage[call] = stage[maker]
            elements.setdefault(maker, []).append(call)
        elif not facts.is_repeat[call]:
            roots.append(call)
    order: list[int] = []
    for call in sorted(roots, key=lambda call: (stage[call], call)):
        pending = [call]
        while pending:
            order.append(pending.pop())
            pending.extend(reversed(elements.get(order[-1], ())))
    return order


def _choose_cuts(facts: BackwardFacts, order: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return the places to cut: for each stage but the last, the cheapest one allowed."""
    costs = _cut_costs(facts, order)
    gradients = set(itertools.chain.from_iterable(facts.gradients.values()))
    stops = [call in gradients or facts.is_ordered[call] for call in order]
    cuts: set[int] = set()
    for end, following in itertools.pairwise(sorted(set(ends))):
        if end <= max(cuts, default=-1):
            continue  # a tuple in between: the bucket is complete at an earlier one's cut
        start = next(c for c in range(max(end, 1), len(costs)) if costs[c] is not None)
        stop = next((c for c in range(start, following) if stops[c]), start)
        legal = (c for c in range(start, stop + 1) if costs[c] is not None)
        cuts.add(min(legal, key=lambda c: (costs[c], c)))
    return sorted(cut for cut in cuts if cut < len(order))


def _cut_costs(facts: BackwardFacts, order: Sequence[int]) -> list[tuple[int, int] | None]:
    """Return what a cut before each place of `order` costs, None where it is not possible.

    Values that would be rounded here but not in the whole graph take precedence over bytes. Bytes
    kept alive that a fusion would never have written count twice.
    """
    place = {call: index for index, call in enumerate(order)}
    size = len(order) + 2
    rounded, num_bytes, forbidden = ([0] * size for _ in range(3))

    def add(changes: list[int], first: int, last: int, amount: int) -> None:
        """Add to all cuts after place `first` and up to place `last`."""
        changes[first + 1] += amount
        changes[last + 1] -= amount

    last_use: dict[int, int] = {}
    last_fused: dict[int, int] = {}
    for at, call in enumerate(order):
        for source, tie in facts.reads[call].items():
            last_use[source] = at
            if tie in _FUSED:
                last_fused[source] = at
            if tie is Tie.UNROUNDED:
                add(rounded, place[source], at, 1)
            if tie is Tie.TUPLE:
                add(forbidden, place[source], at, 1)
    for uses in (last_use, last_fused):
        for source, at in uses.items():
            add(num_bytes, place[source], at, facts.num_bytes[source])
    sums = zip(*(itertools.accumulate(c) for c in (rounded, num_bytes, forbidden)), strict=True)
    return [None if no else (num_rounded, kept) for num_rounded, kept, no in sums]


def _choose_releases(
    facts: BackwardFacts,
    order: Sequence[int],
    bounds: Sequence[int],
    released_in: Mapping[int, int],
) -> tuple[tuple[int, ...], ...]:
    """Return the arguments whose gradients each section releases.

    Those of buckets are `released_in` the given sections. Any other gradient is released as soon as
    it exists and its argument is no longer read.
    """
    place = {call: index for index, call in enumerate(order)}
    result: list[list[int]] = [[] for _ in bounds[1:]]
    for argument, calls in facts.gradients.items():
        reads = facts.argument_reads.get(argument, ())
        made = max((place[call] for call in (*calls, *reads)), default=0)
        result[released_in.get(argument, bisect.bisect_right(bounds, made) - 1)].append(argument)
    return tuple(tuple(sorted(arguments)) for arguments in result)
