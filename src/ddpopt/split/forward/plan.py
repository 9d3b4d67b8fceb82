"""Choose the sections of a forward graph: cut where DDP's buckets are complete.

Pure: from what a graph is like (`GraphFacts`) and what the Reducer will do (`reducer.py`) to
sections. `facts.py` reads the graph, `cut.py` cuts it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence

from ddpopt.errors import Fallback
from ddpopt.reducer import Bucket, Parameter
from ddpopt.split.forward.facts import GraphFacts
from ddpopt.split.plan import Section


def order_arrival(
    parameters: Sequence[Parameter],
    place: Mapping[int, float],
    later: Sequence[Parameter] = (),
    earlier: Sequence[Parameter] = (),
    is_last: bool = False,
) -> tuple[Parameter, ...]:
    """Return all parameters of a Reducer in the order in which their gradients become final.

    `place` says how late in backward the gradient of each of the graph's own parameters is final.
    Parameters of graphs that run later in forward come before the graph's own, those of `earlier`
    graphs after, each in the given order. Parameters that no known graph uses are assumed to belong
    to graphs not seen yet, and come first; if no graph can follow (`is_last`) they are unused, and
    the Reducer of a static graph puts them last. Of equal ones the parameter registered last comes
    first, as in eager modules.
    """
    place_later = {parameter.index: place for place, parameter in enumerate(later)}
    place_earlier = {parameter.index: place for place, parameter in enumerate(earlier)}

    def key(parameter: Parameter) -> tuple[int, float, int]:
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
    of all earlier buckets, because buckets are launched in order. The cut goes before that
    position, or still earlier if that place cannot be cut.
    """
    own = [[p for p in bucket.parameters if p.index in facts.first_use] for bucket in buckets]
    uses = {p: facts.first_use[p.index] for parameters in own for p in parameters}
    firsts = [min(uses[p] for p in parameters) for parameters in own if parameters]
    complete_at = list(itertools.accumulate(firsts, min))
    if not complete_at:
        return Fallback.NO_PARAMETERS
    if len(complete_at) == 1:
        return Fallback.ONE_BUCKET
    positions = sorted(set(complete_at))
    if len(positions) == 1:
        return Fallback.COMPLETE_TOGETHER
    legal = [0, *(p for p, is_legal in enumerate(facts.legal_cuts) if is_legal)]
    wanted = {legal[bisect.bisect_right(legal, position) - 1] for position in positions[1:]}
    cuts = _drop_empty_sections(wanted - {0}, facts)
    if not cuts:
        return Fallback.NO_LEGAL_CUT
    bounds = [0, *cuts, facts.num_calls]
    names: list[list[str]] = [[] for _ in bounds[1:]]
    for p in sorted(uses, key=lambda p: (-uses[p], -p.index)):
        names[bisect.bisect_right(bounds, uses[p]) - 1].append(p.name)
    return tuple(
        Section(
            index=index,
            start=start,
            stop=stop,
            first_node=facts.call_names[start],
            parameters=tuple(names[index]),
            num_fixed=sum(facts.is_fixed[start:stop]),
        )
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def _drop_empty_sections(cuts: Collection[int], facts: GraphFacts) -> list[int]:
    """Drop cuts before which a section would pass nothing on, or complete no parameter.

    split_module drops a section without outputs, and one without gradients releases nothing.
    """

    def hands_on(start: int, stop: int) -> bool:
        return any(last >= stop for last in facts.last_effect[start:stop])

    kept: list[int] = []
    start = 0
    for cut in sorted(cuts):
        completes = any(start <= use < cut for use in facts.first_use.values())
        if completes and hands_on(start, cut):
            kept.append(cut)
            start = cut
    while kept and not hands_on(kept[-1], facts.num_calls):
        kept.pop()
    return kept
