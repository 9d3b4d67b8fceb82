"""Choose the sections of a backward graph: which calls run before which gradients are released.

`read_backward` reads AOTAutograd's graph. `plan_backward` is pure: from what the graph is like
(`BackwardFacts`) and what the Reducer will do (`reducer.py`) to an order of the calls and to
sections. `backward_cut.py` cuts the graph.

[Note: calls and repeats]
A backward graph is functional: calls, numbered from 0 in graph order, and an output that lists a
gradient for each argument of the forward. Some calls cost next to nothing: views and constants.
Such a call is a *repeat*: each section that needs it makes its own, so its value never crosses a
cut, and no two values that cross a cut share memory. `reads` looks through repeats.

[Note: order, as a hook sees it]
A hook runs where a gradient is released, and may read and write all that the program can reach:
parameters, buffers, inputs. In eager it finds there what the backward did before, and the backward
has read what it reads before. So whatever stands before a gradient's release in the graph runs
before it here as well: effects, and reads of the memory of arguments. Only pure computation on the
graph's own values may move behind a release. What stands behind a release may run before it: so it
does in the unsplit compile, which runs the whole graph before all releases.

A release stands behind the last call of the autograd node that makes the gradient. A call stands
where it is in the graph, but for one kind: AOTAutograd makes a graph functional, and puts the
writes to its arguments, the *write-backs*, at the end. In the program such a write came no earlier
than the last call that makes its value or that reads the old one, so that is where it stands.

Calls that need no gradient of an output are the forward's: the partitioner has them made again,
rather than save what they return. The program made them before any release, wherever they stand
here. To run all of them first would take the memory that it saves, so if one reads a buffer or an
input in a later section, it reads a copy of that, a *snapshot*, which the first section makes.
(A trained parameter is not written before its own gradient is there, by anybody that we know of.)

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
    memory, or write it. `num_bytes[i]` is the size of what call i returns, `is_ordered[i]` whether
    call i has effects. `write_backs` maps calls with effects to the argument that they write; all
    other calls with effects keep their order.

    `bound_places` has the calls that may not run behind a release before which they stand, and
    where they stand; `release_places` has where each argument's gradient is released.
    `forward_reads` maps calls of the forward to those arguments among the ones they read of which
    they may as well read snapshots: these reads stand before all releases. A call that reads
    parameters besides has a bound place for that. See [Note: order, as a hook sees it].
    """

    call_names: Sequence[str]
    is_repeat: Sequence[bool]
    is_ordered: Sequence[bool]
    reads: Sequence[Mapping[int, Tie]]
    num_bytes: Sequence[int]
    gradients: Mapping[int, tuple[int, ...]]
    argument_reads: Mapping[int, Sequence[int]]
    write_backs: Mapping[int, int]
    bound_places: Mapping[int, int]
    release_places: Mapping[int, int]
    forward_reads: Mapping[int, frozenset[int]]


def refuse_linked_calls(gm: fx.GraphModule) -> None:
    """Raise NotCutError if calls depend on each other by more than the values they read."""
    if uses_streams(gm.graph):
        raise NotCutError(Reason.STREAMS)
    if any(_torch.links_effects(node.target) for node in gm.graph.nodes):
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
    arguments: dict[fx.Node, set[int]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        argument = argument_of(node, saved)
        if argument is not None:
            arguments[node] = {argument}
    reads: list[dict[int, Tie]] = []
    argument_reads: dict[int, list[int]] = {}
    arguments_read: list[set[int]] = []
    for call, node in enumerate(calls):
        origins = node.all_input_nodes
        found = {
            source: _tie(calls[source], node)
            for origin in origins
            for source in sources.get(origin, ())
        }
        read = {argument for origin in origins for argument in arguments.get(origin, ())}
        arguments_read.append(read)
        if node in repeats:
            sources[node], arguments[node] = tuple(found), read
            reads.append({})
        else:
            sources[node] = (call,)
            reads.append(found)
            for argument in read:
                argument_reads.setdefault(argument, []).append(call)
    is_ordered = [not is_pure(node) for node in calls]
    gradients = {a: sources.get(node, ()) for a, node in gradient_nodes(gm).items()}
    write_backs: dict[int, int] = {}
    for call, node in enumerate(calls):
        target = written_back(node, saved)
        if target is not None:
            write_backs[call] = target
    bound_places = _bound_places(reads, is_ordered, argument_reads, write_backs)
    forward_reads = _forward_reads(gm, saved, set(gradients))
    for call, in_snapshots in forward_reads.items():
        if arguments_read[call] == in_snapshots:
            del bound_places[call]
    return BackwardFacts(
        call_names=[node.name for node in calls],
        is_repeat=[node in repeats for node in calls],
        is_ordered=is_ordered,
        reads=reads,
        num_bytes=[num_bytes_of(_torch.aten_value(node)) for node in calls],
        gradients=gradients,
        argument_reads=argument_reads,
        write_backs=write_backs,
        bound_places=bound_places,
        release_places=_release_places(calls, reads, gradients, is_ordered, bound_places),
        forward_reads=forward_reads,
    )


def argument_of(placeholder: fx.Node, saved: Mapping[str, int]) -> int | None:
    """The argument in whose memory a tensor is that a backward graph takes; None for others."""
    if not isinstance(_torch.aten_value(placeholder), torch.Tensor):
        return None  # a size is in nobody's memory
    return saved.get(placeholder.name)


def _has_true_copy(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor has its strides, as one of an expanded tensor has not."""
    return tensor.layout is torch.strided and torch.empty_like(tensor).stride() == tensor.stride()


def _forward_reads(
    gm: fx.GraphModule, saved: Mapping[str, int], trained: AbstractSet[int]
) -> dict[int, frozenset[int]]:
    """Calls of the forward that are made again, and read buffers or inputs that have a snapshot.

    `trained` are the arguments that get gradients. Without a gradient of an output among its inputs
    a graph does not tell which of its calls are the forward's.
    """
    repeats = repeats_of(gm)
    needs_tangent: set[fx.Node] = set()
    read_by: dict[fx.Node, frozenset[int]] = {}  # the arguments in whose memory a value is
    for node in gm.graph.find_nodes(op="placeholder"):
        argument, value = argument_of(node, saved), _torch.aten_value(node)
        if _torch.is_tangent(node):
            needs_tangent.add(node)
        elif argument is not None and argument not in trained and _has_true_copy(value):
            read_by[node] = frozenset([argument])
    found: dict[int, frozenset[int]] = {}
    if not needs_tangent:
        return found
    for call, node in enumerate(call_nodes(gm.graph)):
        if not needs_tangent.isdisjoint(node.all_input_nodes):
            needs_tangent.add(node)
        read = frozenset[int]().union(*(read_by.get(n, ()) for n in node.all_input_nodes))
        if node in repeats:
            read_by[node] = read
        elif read and node not in needs_tangent and is_pure(node):
            found[call] = read
    return found


def written_back(node: fx.Node, saved: Mapping[str, int]) -> int | None:
    """The argument that a call writes and nothing else, as AOTAutograd's last calls do; else None.

    `saved` is as in `read_backward`. A call whose result is used does something else as well.
    """
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return None
    target = node.args[0]
    return argument_of(target, saved) if isinstance(target, fx.Node) else None


def _bound_places(
    reads: Sequence[Mapping[int, Tie]],
    is_ordered: Sequence[bool],
    argument_reads: Mapping[int, Sequence[int]],
    write_backs: Mapping[int, int],
) -> dict[int, int]:
    """Where the calls stand that see or change what the program can reach."""
    places = {call: call for call, is_effect in enumerate(is_ordered) if is_effect}
    for calls in argument_reads.values():
        places.update((call, call) for call in calls)
    for call, argument in write_backs.items():
        # Other writes to the same argument count: they are in this order.
        others = (other for other in argument_reads[argument] if other < call)
        places[call] = max((*reads[call], *(places[other] for other in others)), default=-1)
    return places


def _release_places(
    calls: Sequence[fx.Node],
    reads: Sequence[Mapping[int, Tie]],
    gradients: Mapping[int, tuple[int, ...]],
    is_ordered: Sequence[bool],
    bound_places: Mapping[int, int],
) -> dict[int, int]:
    """Where the gradient of each argument is released: behind the autograd node that makes it.

    The calls of a node stand together and have its number. Calls in traced `autograd.Function`s all
    have the same number, one above those of all nodes, and two Functions may stand together. So of
    the calls behind a gradient with that number only effects that need the gradient count, such as
    a note of how large it is.
    """
    numbers = [_torch.autograd_number(node) for node in calls]
    of_functions = max((number for number in numbers if number is not None), default=None)
    run_ends = list(range(len(calls)))  # the last call behind each one that has its number
    for call in reversed(range(len(calls) - 1)):
        if numbers[call] is not None and numbers[call] == numbers[call + 1]:
            run_ends[call] = run_ends[call + 1]
    effects = [call for call, is_effect in enumerate(is_ordered) if is_effect]
    places: dict[int, int] = {}
    for argument, made_by in gradients.items():
        last = max(made_by, default=-1)
        places[argument] = last
        if not made_by:
            continue
        end = run_ends[last]
        if numbers[last] != of_functions:
            places[argument] = end
            continue
        noted = [call for call in effects if last < bound_places[call] <= end]
        if noted:
            needing = _descendants(reads, last)
            places[argument] = max([last, *(bound_places[c] for c in noted if c in needing)])
    return places


def _descendants(reads: Sequence[Mapping[int, Tie]], origin: int) -> set[int]:
    """The calls that need a call's value."""
    found = {origin}
    for call in range(origin + 1, len(reads)):
        if not found.isdisjoint(reads[call]):
            found.add(call)
    return found


def repeats_of(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the calls that each section makes for itself; see [Note: calls and repeats]."""
    repeats: set[fx.Node] = set()
    for node in call_nodes(gm.graph):
        if not is_pure(node):
            continue
        is_constant = not node.all_input_nodes
        is_view = _torch.is_view(node.target)
        if name_of(node) == "getitem":
            is_view = node.args[0] in repeats
        if is_view or is_constant:
            repeats.add(node)
    return repeats


def _tie(value: fx.Node, reader: fx.Node) -> Tie:
    made = _torch.aten_value(value)
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
    of_first = set(order[: bounds[1]])
    return BackwardCuts(
        order=tuple(order),
        sections=sections,
        releases=releases,
        late_forward_reads={c: a for c, a in facts.forward_reads.items() if c not in of_first},
    )


def _assign_stages(facts: BackwardFacts, released: Sequence[Sequence[int]]) -> list[int]:
    """Return the stage of each call: the first bucket that waits for it."""
    last = len(released) - 1
    stage = [last] * len(facts.reads)
    reached = -1  # where the last gradient of the buckets so far is released, in graph order
    reached_by = []
    for k, arguments in enumerate(released):
        for argument in arguments:
            reached = max(reached, facts.release_places[argument])
            for call in (*facts.gradients[argument], *facts.argument_reads.get(argument, ())):
                stage[call] = min(stage[call], k)
        reached_by.append(reached)
    # Not behind a release that they stand before, see [Note: order, as a hook sees it].
    at_most = dict(facts.bound_places)
    in_bucket = set(itertools.chain.from_iterable(released))
    for argument, calls in facts.gradients.items():
        if argument not in in_bucket:
            at_most.update((call, call) for call in calls if call not in at_most)
    for call, place in at_most.items():
        stage[call] = min(stage[call], bisect.bisect_left(reached_by, place))
    _stage_needed_calls(facts, stage)
    return stage


def _stage_needed_calls(facts: BackwardFacts, stage: list[int]) -> None:
    """Move calls to the stages of those that have to come after them."""
    following = len(stage)  # the stage of the effect after this one
    for call in reversed(range(len(facts.reads))):
        if call in facts.write_backs:
            # What reads the old value comes first. Other effects have nothing to do with it.
            for reader in facts.argument_reads[facts.write_backs[call]]:
                if reader < call:
                    stage[reader] = min(stage[reader], stage[call])
        elif facts.is_ordered[call]:
            following = stage[call] = min(stage[call], following)
        for source in facts.reads[call]:
            stage[source] = min(stage[source], stage[call])


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
    it exists, its argument is no longer read, and all has run that stands before its release.
    """
    place = {call: index for index, call in enumerate(order)}
    # How far in `order` the calls are that stand before each place of the graph.
    bound = sorted(facts.bound_places.items(), key=lambda item: item[1])
    bound_places = [stands_at for _, stands_at in bound]
    reached = list(itertools.accumulate((place[call] for call, _ in bound), max, initial=0))
    result: list[list[int]] = [[] for _ in bounds[1:]]
    for argument, calls in facts.gradients.items():
        reads = facts.argument_reads.get(argument, ())
        num_before = bisect.bisect_right(bound_places, facts.release_places[argument])
        made = max(reached[num_before], *(place[call] for call in (*calls, *reads)), 0)
        result[released_in.get(argument, bisect.bisect_right(bounds, made) - 1)].append(argument)
    return tuple(tuple(sorted(arguments)) for arguments in result)
