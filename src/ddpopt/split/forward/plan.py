"""Choose the sections of a forward graph: cut where DDP's buckets are complete.

Pure: from what a graph is like (`GraphFacts`) and what the Reducer will do (`reducer.py`) to
sections. `facts.py` reads the graph, `cut.py` cuts it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from ddpopt.errors import Fallback
from ddpopt.reducer import Bucket, Parameter
from ddpopt.split.forward.facts import GraphFacts
from ddpopt.split.plan import Section


def order_arrival(
    parameters: Sequence[Parameter],
    place: Mapping[int, int],
    later: Sequence[Parameter] = (),
    earlier: Sequence[Parameter] = (),
    is_last: bool = False,
) -> tuple[Parameter, ...]:
    """Return all parameters of a Reducer in the order in which their gradients become final.

    `place` tells for each of the graph's own parameters how late in backward its gradient is
    final. Parameters of graphs that run later in forward come before the graph's own, those of
    `earlier` graphs after, each in the order given. What no known graph uses is taken to belong to
    graphs not seen yet, and comes first; if no graph can follow (`is_last`) it is not used, and
    the Reducer of a static graph puts it last. Ties go to the parameter registered last, which is
    what eager modules do.
    """
    place_later = {parameter.index: place for place, parameter in enumerate(later)}
    place_earlier = {parameter.index: place for place, parameter in enumerate(earlier)}

    def key(parameter: Parameter) -> tuple[int, int, int]:
        index = parameter.index
        if index in place_earlier:
            return (3, place_earlier[index], 0)
        if index in place:
            return (2, place[index], -index)
        if index in place_later:
            return (1, place_later[index], 0)
        return (4, index, 0) if is_last else (0, 0, -index)

    return tuple(sorted(parameters, key=key))


def plan_sections(facts: GraphFacts, buckets: Sequence[Bucket]) -> tuple[Section, ...] | Fallback:
    """Return two or more sections of a graph in forward order, or why it should stay whole.

    A bucket is complete once backward has passed the first uses of its parameters and of those
    of all buckets before it, because buckets are launched in order. The cut goes in front of that
    position, or further to the front where that place cannot be cut.
    """
    complete_at = _completion_positions(facts, buckets)
    positions = sorted(set(complete_at.values()))
    if not complete_at:
        return Fallback.NO_PARAMETERS
    if len(complete_at) == 1:
        return Fallback.ONE_BUCKET
    if len(positions) == 1:
        return Fallback.COMPLETE_TOGETHER
    wanted = {_legal_cut(facts, position) for position in positions[1:]}
    cuts = _drop_empty_sections(wanted - {0}, facts)
    if not cuts:
        return Fallback.NO_LEGAL_CUT
    bounds = [0, *cuts, facts.num_calls]
    return tuple(
        _section(index, start, stop, facts, complete_at, buckets)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def _completion_positions(facts: GraphFacts, buckets: Sequence[Bucket]) -> dict[int, int]:
    """Map each bucket that has parameters in this graph to the position that completes it."""
    positions: dict[int, int] = {}
    reached = facts.num_calls
    for bucket in buckets:
        uses = [facts.first_use[p.index] for p in bucket.parameters if p.index in facts.first_use]
        if uses:
            reached = min(reached, *uses)
            positions[bucket.index] = reached
    return positions


def _legal_cut(facts: GraphFacts, position: int) -> int:
    """Return the last legal cut at or before a position, 0 if there is none."""
    while position > 0 and not facts.legal_cuts[position]:
        position -= 1
    return position


def _drop_empty_sections(cuts: Collection[int], facts: GraphFacts) -> list[int]:
    """Drop cuts before which a section would hand nothing on, or complete no parameter.

    split_module loses a section without outputs, and one without gradients releases nothing.
    """
    kept: list[int] = []
    start = 0
    for cut in sorted(cuts):
        completes = any(start <= use < cut for use in facts.first_use.values())
        if completes and _hands_on(facts, start, cut):
            kept.append(cut)
            start = cut
    while kept and not _hands_on(facts, kept[-1], facts.num_calls):
        kept.pop()
    return kept


def _hands_on(facts: GraphFacts, start: int, stop: int) -> bool:
    """Whether a value made in [start, stop) is used at `stop` or later."""
    return any(facts.last_effect[position] >= stop for position in range(start, stop))


def _section(
    index: int,
    start: int,
    stop: int,
    facts: GraphFacts,
    complete_at: Mapping[int, int],
    buckets: Sequence[Bucket],
) -> Section:
    parameters = [
        (facts.first_use[parameter.index], parameter)
        for bucket in buckets
        for parameter in bucket.parameters
        if start <= facts.first_use.get(parameter.index, -1) < stop
    ]
    parameters.sort(key=lambda item: (-item[0], -item[1].index))
    return Section(
        index=index,
        start=start,
        stop=stop,
        first_node=facts.call_names[start] if facts.call_names else "",
        parameters=tuple(parameter.name for _, parameter in parameters),
        completes=tuple(k for k, position in complete_at.items() if start <= position < stop),
    )
