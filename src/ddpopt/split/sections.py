"""Which calls of a graph run before which gradients are released: the choice of sections.

The two `choose` functions are pure: from what the graph is like (`facts.py`) and what the Reducer
will do (`reducer.py`) to sections. `forward.py` and `backward.py` make graphs of them.

A *boundary* at p separates the calls before p from p and those after it.

[Note: stages and boundaries]
    the backward of linear(relu(linear(x)))       bucket    stage
    0  gb2 = sum(g)                               0         0
    1  gw2 = mm(t(h), g)                          0         0
    2  gh = mm(g, w2)                                       0: it reads w2
                                                            <- boundary: `gh` is kept
    3  gr = relu_backward(gh, h)                            1
    4  gb1 = sum(gr)                              1         1
    5  gw1 = mm(t(x), gr)                         1         1

The calls for which bucket k waits, but no earlier bucket, are *stage* k. A call for which no bucket
waits belongs to the last stage; if a hook could tell whether it has run, or it makes a gradient in
no bucket, to the stage in which it stands. A hook that gets a gradient may update the parameter, as
an optimizer in a hook does, so a bucket also waits for the calls that read its parameters, as call
2 does. Running the stages in order completes each bucket as early as possible without changing any
arithmetic. In the example the stages are in the graph's order; in others calls move.

The boundary after stage k may move later, up to the first gradient of the next stage, to where the
fewest bytes have to be kept for later sections. (Above, behind call 3 two uses of `gr` would cross,
one of which is fused with call 3.) It never moves past a call with effects, which may
communicate: bytes differ between ranks, and on which side of a bucket's allreduce such a call is
made must not differ. Nor does it move past the position from which a gradient that is in no bucket
may be released: a hook on that gradient may communicate too. Everything is linear in the graph's
size.

[Note: collectives]
A model may have collectives of its own. Ranks have to issue these and DDP's allreduces in one
order, or they wait for each other, or add up different tensors. In eager it is the order of
autograd's nodes:

    0  g2 = mm(...)               gradient of w2 -> released, and bucket 0 with it
    1  s = all_reduce(...)        backward of a synchronised norm
    2  g1 = mm(..., s)            gradient of w1 -> released

If another rank had one bucket for both gradients in mind when it compiled, for example because it
compiled before DDP had formed its buckets, it would release both behind call 1. So where a backward
may communicate, the order of collectives and releases is the program's own, and depends on nothing
that may differ between ranks or between two compiles of one code: neither on buckets, nor sizes,
strides, or whether sizes are symbols. For each gradient as many collectives come before its release
as in the graph. Hence a backward is cut in front of each collective before which a gradient is
released, also if there is only one bucket; buckets divide sections further. Autograd's node in a
cut forward runs all of a section's collectives, then releases its gradients: there no section has a
parameter's first use behind a collective.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpopt._indices import (
    BEFORE_ALL_CALLS,
    Argument,
    BucketIndex,
    Call,
    Memory,
    ParameterIndex,
    Place,
    Position,
    SectionIndex,
    Stage,
    memory_of_argument,
    numbered,
)
from ddpopt.errors import NotCutError, Reason
from ddpopt.reducer import Bucket, Parameter, number_buckets
from ddpopt.split.cut import Section, make_sections, parts_of_buckets
from ddpopt.split.facts import BackwardFacts, ForwardFacts, Tie

# Where fine buckets end, as fractions of all bytes: finer at both ends, because the first and the
# last bucket are what cannot be hidden.
_FINE_ENDS = (1 / 64, 1 / 32, *(k / 16 for k in range(1, 16)), 31 / 32, 63 / 64)


def fine_buckets(arrival: Sequence[Parameter]) -> tuple[Bucket, ...]:
    """Small buckets at whose ends a graph is cut while the best buckets are being searched.

    They serve any buckets that come of the search, see [Note: tuning] in planning/tuner.py. There
    are about twenty at most, so that cuts stay cheap. `arrival` has the parameters in the order in
    which their gradients arrive.
    """
    total_bytes = sum(parameter.num_bytes for parameter in arrival)
    ends_bytes = [fraction * total_bytes for fraction in _FINE_ENDS]  # ascending
    # A parameter belongs to the interval between two ends in which its first byte lies, so that an
    # interval may have no member, and then makes no bucket.
    members_of: dict[int, list[Parameter]] = {}
    start_bytes = 0
    for parameter in arrival:
        interval = bisect.bisect_right(ends_bytes, start_bytes)
        members_of.setdefault(interval, []).append(parameter)
        start_bytes += parameter.num_bytes
    no_limit_bytes = 0  # the Reducer forms none of these buckets, so no cap of its limits them
    return number_buckets([(members, no_limit_bytes) for members in members_of.values()])


def _too_few_buckets(bucket_parts: Sequence[Sequence[Parameter]]) -> Reason | None:
    """The reason that no bucket can be released before another: the graph has one, or none.

    None if it has parameters of two buckets or more. `bucket_parts` are the graph's parameters by
    bucket, without buckets of which it has none. A graph that may communicate is cut all the same,
    see [Note: collectives]: what is returned for it is told only if it gets no boundary.
    """
    if not bucket_parts:
        return Reason.NO_PARAMETERS
    return Reason.ONE_BUCKET if len(bucket_parts) == 1 else None


# ---- Forward ---------------------------------------------------------------------------------


def choose_forward_sections(facts: ForwardFacts, buckets: Sequence[Bucket]) -> tuple[Section, ...]:
    """Two or more sections of a forward graph, in forward order.

    Buckets are launched in order, so a bucket is complete once backward has passed the first uses
    of its own parameters and of all earlier buckets'. A boundary goes in front of the first of
    these uses. If none is legal there, it moves towards the graph's start: it still completes every
    bucket that it did. A graph that may communicate gets boundaries behind its collectives as well,
    also if it has one bucket only.

    Raises:
        NotCutError: the graph should stay whole.
    """
    bucket_parts = parts_of_buckets(buckets, facts.first_use)  # the graph's parameters, by bucket
    too_few = _too_few_buckets(bucket_parts)
    communicates = any(facts.communicates)
    if too_few and not communicates:
        raise NotCutError(too_few)
    use_of = {p: facts.first_use[p.index] for part in bucket_parts for p in part}
    # The first uses, in graph order, at which backward completes a bucket or several.
    first_uses = [Position(min(use_of[p] for p in part)) for part in bucket_parts]
    completing_uses = sorted(set(itertools.accumulate(first_uses, min)))
    if len(completing_uses) == 1 and not communicates:
        raise NotCutError(Reason.COMPLETE_TOGETHER)
    # First the graph's start, for calls that have no legal boundary in front of them.
    legal = [Position(0)]
    legal += [p for p, is_legal in numbered(Position, facts.legal_bounds) if is_legal]
    wanted: set[Position] = set()
    # No boundary in front of the first of these uses, to which backward comes last: what it runs
    # after that use completes no bucket.
    for use in completing_uses[1:]:
        wanted.add(_last_bound_in_front_of(use, legal))
    wanted.update(_bounds_behind_collectives(facts, legal))
    # A section of use passes something on, and has a parameter's first use or a collective.
    inner_bounds = _bounds_between_useful_sections(wanted - {Position(0)}, facts)
    bounds = [Position(0), *inner_bounds, Position(facts.num_calls)]
    if communicates:
        # Where a boundary was left out, a section may have a collective in front of a first use.
        # Asked first, so that the reason is the collective also if no boundary is left.
        _refuse_first_uses_behind_collectives(facts, bounds)
    if not inner_bounds:
        raise NotCutError(too_few or Reason.NO_LEGAL_CUT)
    # Backward comes first to the parameter whose first use is last in forward; of parameters that
    # one call uses first, to the one registered last, as `order_arrival` has it.
    arrival = sorted(use_of, key=lambda p: (-use_of[p], -p.index))
    section_of = {p: _section_at(bounds, Position(use_of[p])) for p in arrival}
    return make_sections(bounds, section_of, facts.call_names, facts.has_effects)


def _section_at(bounds: Sequence[Position], position: Position) -> SectionIndex:
    """The section in which the call at a position is; `bounds` begin and end with the graph's."""
    return SectionIndex(bisect.bisect_right(bounds, position) - 1)


def _last_bound_in_front_of(call: int, legal: Sequence[Position]) -> Position:
    """The last legal boundary in front of a call; `legal` begins with 0, the graph's start."""
    return legal[bisect.bisect_right(legal, call) - 1]


def _bounds_behind_collectives(facts: ForwardFacts, legal: Sequence[Position]) -> list[Position]:
    """Boundaries that divide each collective from the next parameter's first use behind it.

        0  y = matmul(x, w0)
        1  s = all_reduce(y)
                                 <- boundary: else backward would run the collective's own backward
        2  z = matmul(s, w1)        before it releases the gradient of w1

    See [Note: collectives]. No boundary is needed between a first use and a collective of the same
    call (a checkpoint, an operator with weights). `legal` has the graph's start, 0, and all legal
    boundaries, in order. A graph without collectives needs none of these boundaries.

    Raises:
        NotCutError: a boundary is needed where none is possible.
    """
    bounds = []
    first_uses = set(facts.first_use.values())
    collective: Call | None = None  # the last one since the last boundary
    for call in map(Call, range(facts.num_calls)):
        if call in first_uses and collective is not None:
            bound = _last_bound_in_front_of(call, legal)
            if bound <= collective:
                names = f"{facts.call_names[collective]} and {facts.call_names[call]}"
                # A rank on which these sizes are numbers has the boundary, and cuts the graph; so
                # this reason, unlike the next, does not hold on all ranks alike.
                if any(facts.legal_bounds_without_sizes[collective + 1 : call + 1]):
                    raise NotCutError(
                        Reason.COLLECTIVES_AND_SIZES,
                        f"a symbolic size forbids a boundary between {names}; use "
                        "split='backward', or torch.compile(..., dynamic=False)",
                    )
                raise NotCutError(Reason.COLLECTIVES, f"none is possible between {names}")
            bounds.append(bound)
            collective = None
        if facts.communicates[call]:
            collective = call
    return bounds


def _refuse_first_uses_behind_collectives(facts: ForwardFacts, bounds: Sequence[Position]) -> None:
    """Raise NotCutError if a section has a parameter's first use behind a collective.

    A call that is both, such as a checkpoint, is not behind itself.
    """
    first_uses = set(facts.first_use.values())
    for start, stop in itertools.pairwise(bounds):
        section = range(start, stop)
        first_collective = next((call for call in section if facts.communicates[call]), stop)
        if any(first_collective < call < stop for call in first_uses):
            name = facts.call_names[first_collective]
            raise NotCutError(Reason.COLLECTIVES, f"one is needed behind {name}")


def _bounds_between_useful_sections(
    bounds: Collection[Position], facts: ForwardFacts
) -> list[Position]:
    """Those of the boundaries, in order, between sections that are of use on their own.

    Such a section passes something on, or split_module would drop it, and it has a parameter's
    first use: the backward of one that has none completes no gradient, so it may as well be one
    with the next section's. A section with collectives but no first use stays apart, since the next
    section's first uses must not stand behind a collective, see [Note: collectives].
    """

    def passes_on(start: int, stop: int) -> bool:
        """Whether a call from `stop` on, or the output, needs what this section makes or writes."""
        return any(last >= stop for last in facts.needed_until[start:stop])

    kept: list[Position] = []
    start = Position(0)
    for bound in sorted(bounds):
        completes = any(start <= use < bound for use in facts.first_use.values())
        is_needed = completes or any(facts.communicates[start:bound])
        if is_needed and passes_on(start, bound):
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

    # The calls as they run, without views and constants.
    order: tuple[Call, ...]
    sections: tuple[Section, ...]
    # For each section: the arguments of the forward whose gradients it releases.
    releases: tuple[tuple[Argument, ...], ...]
    # Calls of sections after the first, and the reachable memory of which they read snapshots; see
    # [Note: order, as a hook sees it] in facts.py.
    snapshot_reads: Mapping[Call, frozenset[Memory]] = field(default_factory=dict)


def choose_backward_sections(
    facts: BackwardFacts,
    buckets: Sequence[Bucket],
    argument_of: Mapping[ParameterIndex, Argument],
    final: Mapping[ParameterIndex, Place],
) -> BackwardSections:
    """Two or more sections of a backward graph, see [Note: stages and boundaries].

    Args:
        facts: what the graph is like.
        buckets: those at which to cut, in launch order.
        argument_of: by which argument of the forward each parameter comes in.
        final: the place at which the gradient of each parameter is final, as `final_places` found
            it. It lacks a parameter that another graph uses too if the backward of that graph runs
            later: the gradient is released here as well, but completes no bucket.

    Raises:
        NotCutError: the graph should stay whole.
    """
    parts = _choose_parts(facts, parts_of_buckets(buckets, final), argument_of)
    released = [part.arguments for part in parts]
    stage = _assign_stages(facts, released)
    _pull_fused_gradients(facts, stage)
    # Behind all that moves calls to other stages: an element goes where its tuple's maker is.
    elements_of = _pull_elements(facts, stage)
    order = _order_calls(facts, stage, elements_of)
    # The end of each stage in that order.
    num_calls = collections.Counter(stage[call] for call in order)
    stages = map(Stage, range(len(parts)))
    ends = [Position(end) for end in itertools.accumulate(num_calls[k] for k in stages)]
    ready_at = _positions_of_other_releases(facts, order, {*itertools.chain(*released)})
    inner_bounds = _choose_bounds(facts, order, ends, {*ready_at.values()})
    if not inner_bounds:
        # One stage has all calls, or no boundary behind another one is possible.
        communicates = any(facts.communicates)
        raise NotCutError(Reason.COLLECTIVES if communicates else Reason.COMPLETE_TOGETHER)
    bounds = [Position(0), *inner_bounds, Position(len(order))]
    # The first section that stops at or after the end of a stage completes the stage's part. The
    # search begins behind the graph's start, at which no section stops.
    section_of: dict[Parameter, SectionIndex] = {}
    released_in: dict[Argument, SectionIndex] = {}
    for part, end in zip(parts, ends, strict=True):
        completed_in = SectionIndex(bisect.bisect_left(bounds, end, lo=1) - 1)
        section_of.update(dict.fromkeys(part.parameters, completed_in))
        released_in.update(dict.fromkeys(part.arguments, completed_in))
    _require_order_of_collectives(facts, order, bounds, released_in)
    # Sections list parameters as their gradients arrive; of equally late ones that of the parameter
    # registered last comes first, as `order_arrival` has it.
    arrival = sorted(section_of, key=lambda p: (final[p.index], -p.index))
    sections = make_sections(
        bounds,
        {p: section_of[p] for p in arrival},
        [facts.call_names[call] for call in order],
        [facts.has_effects[call] for call in order],
    )
    in_first_section = set(order[: bounds[1]])
    return BackwardSections(
        order=tuple(order),
        sections=sections,
        releases=_choose_releases(facts, bounds, released_in, ready_at),
        # The first section runs before any release, so it may read the memory itself.
        snapshot_reads={
            call: memories
            for call, memories in facts.snapshot_reads.items()
            if call not in in_first_section
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Gradients that are released together: those of DDP `parameters`, and perhaps others.

    `arguments` are the forward's arguments to which these gradients belong.
    """

    parameters: Sequence[Parameter]
    arguments: Sequence[Argument]


def _choose_parts(
    facts: BackwardFacts,
    bucket_parts: Sequence[Sequence[Parameter]],
    argument_of: Mapping[ParameterIndex, Argument],
) -> list[_Part]:
    """Which gradients are released together: those of one bucket, divided by collectives.

    See [Note: collectives]. Only in a graph that may communicate do the parts have gradients that
    are in no bucket: a hook on such a gradient may communicate too. `bucket_parts` are the graph's
    parameters by bucket, in launch order.

    Raises:
        NotCutError: there is one part only, of one bucket or of none.
    """
    too_few = _too_few_buckets(bucket_parts)
    collectives = [call for call, communicates in enumerate(facts.communicates) if communicates]
    if not collectives:
        if too_few:
            raise NotCutError(too_few)
        return [
            _Part(parameters=part, arguments=[argument_of[p.index] for p in part])
            for part in bucket_parts
        ]
    # Buckets have numbers of this function's own, among those of which the graph has a part.
    bucket_of: dict[Argument, BucketIndex] = {}
    parameter_of: dict[Argument, Parameter] = {}
    for bucket, part in numbered(BucketIndex, bucket_parts):
        for parameter in part:
            bucket_of[argument_of[parameter.index]] = bucket
            parameter_of[argument_of[parameter.index]] = parameter
    # By how many collectives come before the release, and by bucket (None: in no bucket). Buckets
    # may differ between ranks: divided by these alone, ranks would wait for each other (splits.md,
    # fault 16).
    groups: dict[int, dict[BucketIndex | None, list[Argument]]] = {}
    for argument, place in facts.release_places.items():
        num_before = bisect.bisect_right(collectives, place)  # a place is behind its own call
        by_bucket = groups.setdefault(num_before, {})
        by_bucket.setdefault(bucket_of.get(argument), []).append(argument)
    parts = []
    for _, by_bucket in sorted(groups.items()):
        in_no_bucket = by_bucket.pop(None, [])
        members = [arguments for _, arguments in sorted(by_bucket.items())] or [[]]
        members[-1] += in_no_bucket  # a part of their own would need one more boundary
        for arguments in members:
            parameters = [parameter_of[a] for a in arguments if a in parameter_of]
            parts.append(_Part(parameters=parameters, arguments=arguments))
    if max(groups, default=0) < len(collectives):
        # The stage of this part is what runs behind all releases, collectives among it. Without it
        # these collectives would run before the last part is released.
        parts.append(_Part(parameters=[], arguments=[]))
    if len(parts) == 1:
        assert too_few is not None, "two buckets make two parts"
        raise NotCutError(too_few)
    return parts


def _require_order_of_collectives(
    facts: BackwardFacts,
    order: Sequence[Call],
    bounds: Sequence[Position],
    released_in: Mapping[Argument, SectionIndex],
) -> None:
    """Require as many collectives before each release as in the graph, see [Note: collectives].

    `released_in` has the gradients of all parts, by argument, with the section that releases each.
    A collective may have moved in front of a release: a call that reads a parameter has to run
    before the parameter's gradient is released, even if the call stands behind that place, and so
    have all calls on which it depends.

    Raises:
        NotCutError: a collective would run on the other side of a release.
    """
    arguments = sorted(released_in, key=facts.release_places.__getitem__)
    places = [facts.release_places[argument] for argument in arguments]
    sections = [released_in[argument] for argument in arguments]
    # For each k: the last section that releases one of the first k of these gradients, and the
    # first that releases one of the others.
    none_before, none_behind = SectionIndex(-1), SectionIndex(len(bounds))
    last_before = list(itertools.accumulate(sections, max, initial=none_before))
    first_behind = list(itertools.accumulate(reversed(sections), min, initial=none_behind))[::-1]
    for position, call in numbered(Position, order):
        if facts.communicates[call]:
            section = _section_at(bounds, position)
            # A section releases its gradients behind all of its calls: it may have a collective in
            # front of a release, but none behind one.
            num_before = bisect.bisect_left(places, call)
            if not last_before[num_before] < section <= first_behind[num_before]:
                raise NotCutError(Reason.COLLECTIVES, f"{facts.call_names[call]} would move")


def _assign_stages(facts: BackwardFacts, released: Sequence[Sequence[Argument]]) -> list[Stage]:
    """The stage of each call: the number of the first part that waits for the call.

    `released` has, for each part, the arguments whose gradients are released together, see
    `_choose_parts`. A call for which none waits gets the last stage, unless a hook can tell whether
    it has run, or it makes a gradient that is in no part: then the stage in which it stands.
    """
    last = Stage(len(released) - 1)
    stage = [last] * len(facts.reads)
    # For each part: the place where the last gradient of the parts up to it is released.
    reached_by: list[Place] = []
    reached = BEFORE_ALL_CALLS
    for k, arguments in numbered(Stage, released):
        for argument in arguments:
            reached = max(reached, facts.release_places[argument])
            # The part waits for what makes its gradients, and for what reads or writes the
            # arguments: a hook may update a parameter once its gradient is released.
            users = facts.memory_users.get(memory_of_argument(argument), ())
            for call in (*facts.gradients[argument], *users):
                stage[call] = min(stage[call], k)
        reached_by.append(reached)
    # An observable call that stands before a release must not run after it, see
    # [Note: order, as a hook sees it]: a hook might find a buffer without what the call writes
    # (splits.md, fault 4). Nor must a call that makes a gradient which is in no part: a hook on it,
    # or the backward of an earlier graph, may wait for that gradient.
    # (The place of an epilogue copy, or of a read without a snapshot, is not the call's own.)
    stands_at = dict(facts.observable_calls)
    in_parts = set(itertools.chain.from_iterable(released))
    for argument, calls in facts.gradients.items():
        if argument not in in_parts:
            for call in calls:
                stands_at.setdefault(call, Place(call))
    for call, place in stands_at.items():
        # The first part with a release at or behind this place; behind all releases there is none.
        stage[call] = min(stage[call], Stage(bisect.bisect_left(reached_by, place)))
    _stage_needed_calls(facts, stage)
    return stage


def _stage_needed_calls(facts: BackwardFacts, stage: list[Stage]) -> None:
    """Move calls to earlier stages, so that none runs later than a call that depends on it."""
    # From the last call to the first, so that a call's stage is final before it moves the calls on
    # which it depends. Effects keep their order.
    stage_of_next_effect = max(stage, default=Stage(0))
    for call in map(Call, reversed(range(len(facts.reads)))):
        if call in facts.epilogue_copies:
            # Calls that read or write the same memory before the copy run no later than it
            # (splits.md, fault 3). With effects elsewhere such a copy has no order: it writes this
            # memory and does nothing else.
            for user in facts.memory_users[facts.epilogue_copies[call]]:
                if user < call:
                    stage[user] = min(stage[user], stage[call])
        elif facts.has_effects[call]:
            stage_of_next_effect = stage[call] = min(stage[call], stage_of_next_effect)
        for source in facts.reads[call]:
            stage[source] = min(stage[source], stage[call])


# The ties of calls of which a compiler makes one kernel.
_FUSED = (Tie.FUSED, Tie.UNROUNDED)


def _pull_fused_gradients(facts: BackwardFacts, stage: list[Stage]) -> None:
    """Move gradients that are by-products of an earlier stage's loops into that stage.

    A bias's gradient, for example, sums the values from which the weight's is computed. That is
    free while they are in registers; a later section would have to read them from memory. Calls
    with effects stay where they are, in their order.
    """
    readers: list[list[Call]] = [[] for _ in facts.reads]
    for call, reads in numbered(Call, facts.reads):
        for source in reads:
            readers[source].append(call)
    for gradient in itertools.chain.from_iterable(facts.gradients.values()):
        fused_calls = _fused_calls_of(gradient, facts, readers)
        if any(facts.has_effects[call] for call in fused_calls):
            # At an earlier stage the effect would pass those of the calls between (splits.md,
            # fault 1).
            continue
        outside = [
            (source, tie)
            for call in fused_calls
            for source, tie in facts.reads[call].items()
            if source not in fused_calls
        ]
        # At the latest stage from which they read, all is there that these calls need.
        latest = max((stage[source] for source, _ in outside), default=stage[gradient])
        is_fused = any(stage[source] == latest and tie in _FUSED for source, tie in outside)
        if is_fused and latest < stage[gradient]:
            for call in fused_calls:
                # One may be a gradient of a still earlier stage, where it is released (splits.md,
                # fault 2).
                stage[call] = min(stage[call], latest)


def _fused_calls_of(
    gradient: Call, facts: BackwardFacts, readers: Sequence[Sequence[Call]]
) -> set[Call]:
    """The calls that serve only this gradient and are fused with it, itself included."""
    fused_calls = {gradient}
    pending = [gradient]
    while pending:
        for source, tie in facts.reads[pending.pop()].items():
            # Whatever else reads the source, outside of this set, keeps it where it is.
            if tie in _FUSED and fused_calls.issuperset(readers[source]):
                fused_calls.add(source)
                pending.append(source)
    return fused_calls


def _pull_elements(facts: BackwardFacts, stage: list[Stage]) -> dict[Call, list[Call]]:
    """Move each call that takes a tuple apart to the stage of the call that makes the tuple.

    No boundary can separate the two. Returns the calls that take a tuple apart, by its maker.
    """
    elements_of: dict[Call, list[Call]] = {}
    for call, reads in numbered(Call, facts.reads):
        if len(reads) == 1:
            ((maker, tie),) = reads.items()
            if tie is Tie.TUPLE:
                stage[call] = stage[maker]
                elements_of.setdefault(maker, []).append(call)
    return elements_of


def _order_calls(
    facts: BackwardFacts, stage: Sequence[Stage], elements_of: Mapping[Call, Sequence[Call]]
) -> list[Call]:
    """The calls stage by stage, each tuple being taken apart right after its maker.

    Without views and constants, which each section makes itself. `elements_of` has the calls that
    take a tuple apart, by the call that makes the tuple.
    """
    elements = set(itertools.chain.from_iterable(elements_of.values()))
    others = []
    for call, is_view_or_constant in numbered(Call, facts.is_view_or_constant):
        if not is_view_or_constant and call not in elements:
            others.append(call)
    order: list[Call] = []
    for call in sorted(others, key=lambda call: (stage[call], call)):
        # Behind each call come its elements, in their order: the stack's last is taken first.
        pending = [call]
        while pending:
            order.append(pending.pop())
            pending.extend(reversed(elements_of.get(order[-1], ())))
    return order


def _positions_of_other_releases(
    facts: BackwardFacts, order: Sequence[Call], in_parts: Collection[Argument]
) -> dict[Argument, Position]:
    """For each gradient that is in no part: behind which call of `order` it may be released.

    `in_parts` are the gradients that the parts of buckets have (`_Part`). Behind the call at that
    position the gradient exists, its argument is no longer read, and all calls have run that a hook
    on the gradient could tell of or write the memory of: the observable calls whose places are in
    front of its release. It is 0 for a gradient that waits for no call.
    """
    # Of all but views and constants: these make no gradient, and no hook can tell of them.
    position_of = {call: position for position, call in numbered(Position, order)}
    # For each k: the position by which the first k observable calls, by their places, have run.
    observable = sorted(facts.observable_calls, key=facts.observable_calls.__getitem__)
    places = [facts.observable_calls[call] for call in observable]
    positions = (position_of[call] for call in observable)
    reached = list(itertools.accumulate(positions, max, initial=Position(0)))
    ready_at: dict[Argument, Position] = {}
    for argument, calls in facts.gradients.items():
        if argument not in in_parts:
            num_before = bisect.bisect_right(places, facts.release_places[argument])
            needed = (*calls, *facts.memory_users.get(memory_of_argument(argument), ()))
            positions_needed = [position_of[call] for call in needed]
            ready_at[argument] = max([reached[num_before], *positions_needed])
    return ready_at


class _BoundCost(NamedTuple):
    """What a boundary costs; of two the one with fewer rounded reads is cheaper, whatever bytes."""

    num_rounded_reads: int  # of values that the whole graph would not round
    num_bytes: int  # kept for later sections; twice for what a fusion would never have written


def _choose_bounds(
    facts: BackwardFacts,
    order: Sequence[Call],
    ends: Sequence[Position],
    ready_positions: Collection[Position],
) -> list[Position]:
    """The boundaries: behind each stage but the last, the cheapest one allowed.

    It is the one which has the fewest reads see a rounded value; of these, that which keeps the
    fewest bytes, as `_bound_costs` counts them; of these, the first.

    Bytes may differ among ranks. So for bytes no boundary moves past what a hook may tell: a
    gradient, a call with effects, or one of `ready_positions`, at which a gradient that is in no
    bucket is ready for its release. `ends` are the positions at which stages end; the last one is
    the graph's end.
    """
    costs = _bound_costs(facts, order)  # None where no boundary is possible
    # A section without calls releases a gradient that is there from the start. That is worth no
    # section, unless a collective comes behind the release.
    earliest = 0 if any(facts.communicates) else 1
    gradients = set(itertools.chain.from_iterable(facts.gradients.values()))
    stops = [
        call in gradients or facts.has_effects[call] or position in ready_positions
        for position, call in numbered(Position, order)
    ]
    bounds: set[Position] = set()
    for end, following in itertools.pairwise(sorted(set(ends))):
        if end <= max(bounds, default=-1):
            # The last boundary had to move behind this stage, too, for a value that cannot cross.
            continue
        # `start` is the first possible boundary (behind all calls one always is). From there it may
        # move on, up to the next stage's first call that stops it; if none does, it stays, or it
        # might end up at the next stage's end, where that stage has its own.
        start = next(p for p in range(max(end, earliest), len(costs)) if costs[p] is not None)
        stop = next((p for p in range(start, following) if stops[p]), start)
        legal = (p for p in range(start, stop + 1) if costs[p] is not None)
        bounds.add(Position(min(legal, key=lambda p: (costs[p], p))))
    # One behind all calls separates nothing.
    return sorted(bound for bound in bounds if bound < len(order))


def _bound_costs(facts: BackwardFacts, order: Sequence[Call]) -> list[_BoundCost | None]:
    """What a boundary at each position costs, from 0 (before all calls) to that behind all calls.

        0  a = mm(g, w)
                             <- a boundary at 1 costs the bytes of `a`
        1  c = mul(a, 2)
                             <- at 2 twice those of `c`: the loop of call 2 would be that of call 1
        2  d = sum(c)

    A cost is how many reads would see a value rounded that is not rounded in the whole graph, and
    then the bytes that have to be kept across the boundary. The bytes of a value that a fusion
    would never have written, as of `c`, count twice. It is None where a value would cross that must
    not: a tuple, or one that may be in memory of the program's, see `Tie`. Inputs of the graph cost
    nothing: they are there anyway.
    """
    position_of = {call: position for position, call in numbered(Position, order)}
    num_bounds = len(order) + 1
    # What each boundary has more than the one before it, so that running sums are the costs.
    rounded, num_bytes, forbidden = ([0] * num_bounds for _ in range(3))

    def add(changes: list[int], maker: Call, reader: Position, amount: int) -> None:
        """Add to all boundaries behind a call, up to the one before a call that reads its value."""
        changes[position_of[maker] + 1] += amount
        changes[reader + 1] -= amount

    last_use: dict[Call, Position] = {}
    last_fused: dict[Call, Position] = {}
    for position, call in numbered(Position, order):
        for source, tie in facts.reads[call].items():
            last_use[source] = position
            if tie in _FUSED:  # FUSED or UNROUNDED
                last_fused[source] = position
            if tie is Tie.UNROUNDED:
                add(rounded, source, position, 1)
            if tie in (Tie.TUPLE, Tie.MADE_IN_ARGUMENT):
                add(forbidden, source, position, 1)
    for uses in (last_use, last_fused):  # so bytes count twice up to the last fused use
        for source, position in uses.items():
            add(num_bytes, source, position, facts.num_bytes[source])
    costs: list[_BoundCost | None] = []
    sums = (itertools.accumulate(changes) for changes in (rounded, num_bytes, forbidden))
    for num_rounded, num_kept, num_forbidding in zip(*sums, strict=True):
        costs.append(None if num_forbidding else _BoundCost(num_rounded, num_kept))
    return costs


def _choose_releases(
    facts: BackwardFacts,
    bounds: Sequence[Position],
    released_in: Mapping[Argument, SectionIndex],
    ready_at: Mapping[Argument, Position],
) -> tuple[tuple[Argument, ...], ...]:
    """For each section: the arguments whose gradients it releases, in ascending order.

    Gradients of parts are released in the sections that `released_in` gives, and any other gradient
    in the first section that runs all for which it has to wait: the call at `ready_at`, and those
    before it.
    """
    releases: list[list[Argument]] = [[] for _ in bounds[1:]]
    for argument in facts.gradients:
        section = released_in.get(argument)
        if section is None:
            section = _section_at(bounds, ready_at[argument])
        releases[section].append(argument)
    return tuple(tuple(sorted(arguments)) for arguments in releases)
