"""Which calls of a graph run before which gradients are released: the choice of sections.

The two `choose` functions are pure: from what the graph is like (`facts.py`) and what the Reducer
will do (`reducer.py`) to sections. `forward.py` and `backward.py` make graphs of them.

A *boundary* at p separates the calls before p from p and those after it.

[Note: stages and boundaries]
The calls of a backward graph for which bucket k waits, but no earlier bucket, are *stage* k; a call
for which no bucket waits belongs to the stage in which it stands, or to the last one. A hook that
gets a gradient may update the parameter, as an optimizer in a hook does, so a bucket also waits for
the calls that read its parameters. Running the stages in order completes each bucket as early as
possible without changing any arithmetic.

The boundary after stage k may move later, up to the first gradient of the next stage, to where the
fewest bytes have to be kept for later sections. It never moves past a call with effects, which may
communicate: bytes differ between ranks, and on which side of a bucket's allreduce such a call is
made must not. Nor past the place from which a gradient that is in no bucket may be released, for
whose hook the same holds. Everything is linear in the graph's size.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ddpopt.errors import NotCutError, Reason
from ddpopt.reducer import Bucket, Parameter, number_buckets
from ddpopt.split.cut import Section, make_sections, parts_of_buckets
from ddpopt.split.facts import BackwardFacts, ForwardFacts, Tie

# Where fine buckets end, as fractions of all bytes: finer at both ends, because the first and the
# last bucket are what cannot be hidden.
_FINE_ENDS = (1 / 64, 1 / 32, *(k / 16 for k in range(1, 16)), 31 / 32, 63 / 64)


def fine_buckets(arrival: Sequence[Parameter]) -> tuple[Bucket, ...]:
    """Small buckets at whose ends a graph is cut while the best buckets are being searched.

    There are about twenty at most, so that cuts stay cheap.
    """
    total_bytes = sum(parameter.num_bytes for parameter in arrival)
    ends_bytes = [fraction * total_bytes for fraction in _FINE_ENDS]
    # The members of each fine bucket, by how many ends lie before their first byte.
    members_by_part: dict[int, list[Parameter]] = {}
    start_bytes = 0
    for parameter in arrival:
        part = bisect.bisect_right(ends_bytes, start_bytes)
        members_by_part.setdefault(part, []).append(parameter)
        start_bytes += parameter.num_bytes
    return number_buckets([(members, 0) for members in members_by_part.values()])


def _require_two_parts(bucket_parts: Sequence[Sequence[Parameter]]) -> None:
    """Raise NotCutError unless a graph has parts of two buckets.

    A cut only helps if it releases one bucket before another.
    """
    if not bucket_parts:
        raise NotCutError(Reason.NO_PARAMETERS)
    if len(bucket_parts) == 1:
        raise NotCutError(Reason.ONE_BUCKET)


# ---- Forward ---------------------------------------------------------------------------------


def choose_forward_sections(facts: ForwardFacts, buckets: Sequence[Bucket]) -> tuple[Section, ...]:
    """Two or more sections of a forward graph, in forward order.

    A bucket is complete once backward has passed the first uses of its parameters and of those
    of all earlier buckets, because buckets are launched in order. The boundary goes before that
    position. Moving it towards the start keeps complete every bucket that was, so that is where it
    moves if there is no legal one at that position.

    Raises:
        NotCutError: the graph should stay whole.
    """
    bucket_parts = parts_of_buckets(buckets, facts.first_use)
    _require_two_parts(bucket_parts)
    use_of = {p: facts.first_use[p.index] for part in bucket_parts for p in part}
    # How far towards the graph's start backward has to come, bucket by bucket.
    firsts = [min(use_of[p] for p in part) for part in bucket_parts]
    positions = sorted(set(itertools.accumulate(firsts, min)))
    if len(positions) == 1:
        raise NotCutError(Reason.COMPLETE_TOGETHER)
    legal = [0, *(p for p, is_legal in enumerate(facts.legal_bounds) if is_legal)]
    wanted = set()
    for position in positions[1:]:
        wanted.add(legal[bisect.bisect_right(legal, position) - 1])
    inner_bounds = _drop_empty_sections(wanted - {0}, facts)
    if not inner_bounds:
        raise NotCutError(Reason.NO_LEGAL_CUT)
    bounds = [0, *inner_bounds, facts.num_calls]
    arrival = sorted(use_of, key=lambda p: (-use_of[p], -p.index))
    section_of = {p: bisect.bisect_right(bounds, use_of[p]) - 1 for p in arrival}
    return make_sections(bounds, section_of, facts.call_names, facts.is_fixed)


def _drop_empty_sections(bounds: Collection[int], facts: ForwardFacts) -> list[int]:
    """Drop boundaries before which a section would pass nothing on, or use no parameter first.

    split_module drops a section without outputs. The backward of a section in which no parameter is
    used first would complete no gradient.
    """

    def passes_on(start: int, stop: int) -> bool:
        return any(last >= stop for last in facts.last_effect[start:stop])

    kept: list[int] = []
    start = 0
    for bound in sorted(bounds):
        completes = any(start <= use < bound for use in facts.first_use.values())
        if completes and passes_on(start, bound):
            kept.append(bound)
            start = bound
    # The last section has to pass something on too, to the output.
    while kept and not passes_on(kept[-1], facts.num_calls):
        kept.pop()
    return kept


# ---- Backward --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSections:
    """The sections of a backward graph, and the order in which its calls run."""

    # The calls by number, without repeats; sections count in this order.
    order: tuple[int, ...]
    sections: tuple[Section, ...]
    # The arguments of the forward whose gradients section k releases.
    releases: tuple[tuple[int, ...], ...]
    # Calls of sections after the first, and the reachable memory of which they read snapshots; see
    # [Note: order, as a hook sees it] in facts.py.
    late_forward_reads: Mapping[int, frozenset[int]] = field(default_factory=dict)


def choose_backward_sections(
    facts: BackwardFacts,
    buckets: Sequence[Bucket],
    argument_of: Mapping[int, int],
    final: Mapping[int, int],
) -> BackwardSections:
    """Two or more sections of a backward graph, see [Note: stages and boundaries].

    Args:
        facts: what the graph is like.
        buckets: those at which to cut, in launch order.
        argument_of: each parameter's position among the forward's arguments, by index.
        final: what `final_positions` returned for them.

    Raises:
        NotCutError: the graph should stay whole.
    """
    bucket_parts = parts_of_buckets(buckets, final)
    _require_two_parts(bucket_parts)
    released = [[argument_of[p.index] for p in part] for part in bucket_parts]
    stage = _assign_stages(facts, released)
    _pull_fused_gradients(facts, stage)
    order = _order_calls(facts, stage)
    # The end of each stage in that order.
    num_calls = collections.Counter(stage[call] for call in order)
    ends = list(itertools.accumulate(num_calls[k] for k in range(len(bucket_parts))))
    ready_places = _ready_places(facts, order, in_buckets={*itertools.chain(*released)})
    inner_bounds = _choose_bounds(facts, order, ends, {*ready_places.values()})
    if not inner_bounds:
        raise NotCutError(Reason.COMPLETE_TOGETHER)
    bounds = [0, *inner_bounds, len(order)]
    # The first section that stops at or after the end of a stage completes its bucket.
    section_of: dict[Parameter, int] = {}
    for part, end in zip(bucket_parts, ends, strict=True):
        completed_in = bisect.bisect_left(bounds, max(end, 1)) - 1
        section_of.update(dict.fromkeys(part, completed_in))
    arrival = sorted(section_of, key=lambda p: (final[p.index], -p.index))
    sections = make_sections(
        bounds,
        {p: section_of[p] for p in arrival},
        [facts.call_names[call] for call in order],
        [facts.is_ordered[call] for call in order],
    )
    released_in = {argument_of[p.index]: section for p, section in section_of.items()}
    in_first_section = set(order[: bounds[1]])
    return BackwardSections(
        order=tuple(order),
        sections=sections,
        releases=_choose_releases(facts, bounds, released_in, ready_places),
        late_forward_reads={
            call: arguments
            for call, arguments in facts.forward_reads.items()
            if call not in in_first_section
        },
    )


def _assign_stages(facts: BackwardFacts, released: Sequence[Sequence[int]]) -> list[int]:
    """The stage of each call: the first bucket that waits for it.

    `released` are the arguments whose gradients each bucket has.
    """
    last = len(released) - 1
    stage = [last] * len(facts.reads)
    # For each bucket: the place where the last gradient of the buckets up to it is released.
    reached_by = []
    reached = -1
    for k, arguments in enumerate(released):
        for argument in arguments:
            reached = max(reached, facts.release_places[argument])
            for call in (*facts.gradients[argument], *facts.memory_reads.get(argument, ())):
                stage[call] = min(stage[call], k)
        reached_by.append(reached)
    # Calls that stand before a release must not run after it, see [Note: order, as a hook sees it];
    # nor must gradients that are in no bucket, since somebody may wait for them.
    stands_at = dict(facts.pinned_places)
    in_bucket = set(itertools.chain.from_iterable(released))
    for argument, calls in facts.gradients.items():
        if argument not in in_bucket:
            for call in calls:
                stands_at.setdefault(call, call)
    for call, place in stands_at.items():
        stage[call] = min(stage[call], bisect.bisect_left(reached_by, place))
    _stage_needed_calls(facts, stage)
    return stage


def _stage_needed_calls(facts: BackwardFacts, stage: list[int]) -> None:
    """Move calls to earlier stages, so that none runs later than a call that depends on it."""
    following = len(stage)  # the stage of the effect after this one, since effects keep their order
    for call in reversed(range(len(facts.reads))):
        if call in facts.write_backs:
            # Calls that read the old value come first. Other effects do not matter here.
            for reader in facts.memory_reads[facts.write_backs[call]]:
                if reader < call:
                    stage[reader] = min(stage[reader], stage[call])
        elif facts.is_ordered[call]:
            following = stage[call] = min(stage[call], following)
        for source in facts.reads[call]:
            stage[source] = min(stage[source], stage[call])


_FUSED = (Tie.FUSED, Tie.UNROUNDED)


def _pull_fused_gradients(facts: BackwardFacts, stage: list[int]) -> None:
    """Move gradients that are by-products of an earlier stage's loops into that stage.

    A bias's gradient, for example, sums the values from which the weight's is computed. That is
    free while they are in registers; a later section would have to read them from memory. Calls
    with effects stay where they are, in their order.
    """
    readers: list[list[int]] = [[] for _ in facts.reads]
    for call, reads in enumerate(facts.reads):
        for source in reads:
            readers[source].append(call)
    for gradient in itertools.chain.from_iterable(facts.gradients.values()):
        fused_calls = _fused_calls_of(gradient, facts, readers)
        if any(facts.is_ordered[call] for call in fused_calls):
            continue
        # The latest stage from which these calls read, and whether they would be fused with it.
        outside = [
            (stage[source], tie in _FUSED)
            for call in fused_calls
            for source, tie in facts.reads[call].items()
            if source not in fused_calls
        ]
        reads_from, is_fused = max(outside, default=(stage[gradient], False))
        if is_fused and reads_from < stage[gradient]:
            for call in fused_calls:  # of which one may be a gradient of a still earlier stage
                stage[call] = min(stage[call], reads_from)


def _fused_calls_of(
    gradient: int, facts: BackwardFacts, readers: Sequence[Sequence[int]]
) -> set[int]:
    """The calls that serve only this gradient and are fused with it, itself included."""
    fused_calls = {gradient}
    pending = [gradient]
    while pending:
        for source, tie in facts.reads[pending.pop()].items():
            if tie in _FUSED and fused_calls.issuperset(readers[source]):
                fused_calls.add(source)
                pending.append(source)
    return fused_calls


def _order_calls(facts: BackwardFacts, stage: list[int]) -> list[int]:
    """The calls stage by stage, each tuple being taken apart right after its maker.

    A call that takes a tuple apart gets the stage of the tuple's maker.
    """
    elements: dict[int, list[int]] = {}
    roots = []
    for call, reads in enumerate(facts.reads):
        if len(reads) == 1:
            ((maker, tie),) = reads.items()
            if tie is Tie.TUPLE:
                stage[call] = stage[maker]
                elements.setdefault(maker, []).append(call)
                continue
        if not facts.is_repeat[call]:
            roots.append(call)
    order: list[int] = []
    for call in sorted(roots, key=lambda call: (stage[call], call)):
        pending = [call]
        while pending:
            order.append(pending.pop())
            pending.extend(reversed(elements.get(order[-1], ())))
    return order


def _ready_places(
    facts: BackwardFacts, order: Sequence[int], in_buckets: Collection[int]
) -> dict[int, int]:
    """For the gradients that are in no bucket: from which place in `order` on each may be released.

    Behind that it exists, its argument is no longer read, and all has run that stands before its
    release.
    """
    place_of = {call: place for place, call in enumerate(order)}
    # How far in `order` the calls are that stand before each place of the graph.
    bound_calls = sorted(facts.pinned_places, key=facts.pinned_places.__getitem__)
    stands_at = [facts.pinned_places[call] for call in bound_calls]
    reached = list(itertools.accumulate((place_of[c] for c in bound_calls), max, initial=0))
    places = {}
    for argument, calls in facts.gradients.items():
        if argument not in in_buckets:
            num_before = bisect.bisect_right(stands_at, facts.release_places[argument])
            needed = (*calls, *facts.memory_reads.get(argument, ()))
            places[argument] = max(reached[num_before], *(place_of[call] for call in needed), 0)
    return places


def _choose_bounds(
    facts: BackwardFacts,
    order: Sequence[int],
    ends: Sequence[int],
    ready_places: Collection[int],
) -> list[int]:
    """The boundaries in `order`: behind each stage but the last, the cheapest one allowed.

    Bytes may differ among ranks. So for bytes no boundary moves past what a hook may tell: a
    gradient, a place from which one may be released, a call with effects.
    """
    costs = _bound_costs(facts, order)
    gradients = set(itertools.chain.from_iterable(facts.gradients.values()))
    stops = [
        call in gradients or facts.is_ordered[call] or place in ready_places
        for place, call in enumerate(order)
    ]
    bounds: set[int] = set()
    for end, following in itertools.pairwise(sorted(set(ends))):
        if end <= max(bounds, default=-1):
            continue  # a tuple in between: the bucket is complete at an earlier stage's boundary
        start = next(p for p in range(max(end, 1), len(costs)) if costs[p] is not None)
        stop = next((p for p in range(start, following) if stops[p]), start)
        legal = (p for p in range(start, stop + 1) if costs[p] is not None)
        bounds.add(min(legal, key=lambda p: (costs[p], p)))
    return sorted(bound for bound in bounds if bound < len(order))


def _bound_costs(facts: BackwardFacts, order: Sequence[int]) -> list[tuple[int, int] | None]:
    """What a boundary before each place of `order` costs, None where it is not possible.

    Values that would be rounded here but not in the whole graph take precedence over bytes. Bytes
    kept alive that a fusion would never have written count twice.
    """
    place_of = {call: place for place, call in enumerate(order)}
    size = len(order) + 2
    rounded, num_bytes, forbidden = ([0] * size for _ in range(3))

    def add(changes: list[int], first: int, last: int, amount: int) -> None:
        """Add to all boundaries behind place `first` and up to place `last`."""
        changes[first + 1] += amount
        changes[last + 1] -= amount

    last_use: dict[int, int] = {}
    last_fused: dict[int, int] = {}
    for place, call in enumerate(order):
        for source, tie in facts.reads[call].items():
            last_use[source] = place
            if tie in _FUSED:
                last_fused[source] = place
            if tie is Tie.UNROUNDED:
                add(rounded, place_of[source], place, 1)
            if tie in (Tie.TUPLE, Tie.MADE_IN_ARGUMENT):
                add(forbidden, place_of[source], place, 1)
    for uses in (last_use, last_fused):
        for source, place in uses.items():
            add(num_bytes, place_of[source], place, facts.num_bytes[source])
    costs: list[tuple[int, int] | None] = []
    sums = (itertools.accumulate(changes) for changes in (rounded, num_bytes, forbidden))
    for num_rounded, num_kept, num_forbidding in zip(*sums, strict=True):
        costs.append(None if num_forbidding else (num_rounded, num_kept))
    return costs


def _choose_releases(
    facts: BackwardFacts,
    bounds: Sequence[int],
    released_in: Mapping[int, int],
    ready_places: Mapping[int, int],
) -> tuple[tuple[int, ...], ...]:
    """The arguments whose gradients each section releases.

    Those of buckets are `released_in` the given sections, any other one in the first that can.
    """
    releases: list[list[int]] = [[] for _ in bounds[1:]]
    for argument in facts.gradients:
        section = released_in.get(argument)
        if section is None:
            section = bisect.bisect_right(bounds, ready_places[argument]) - 1
        releases[section].append(argument)
    return tuple(tuple(sorted(arguments)) for arguments in releases)
