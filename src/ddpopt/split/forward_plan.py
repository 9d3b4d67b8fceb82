"""Choose the sections of a forward graph: cut where DDP's buckets are complete.

`read_facts` reads the graph: uses of parameters, and legal cuts. `plan_sections` is pure: from what
the graph is like (`GraphFacts`) and what the Reducer will do (`reducer.py`) to sections.
`forward_cut.py` cuts the graph.

[Note: positions and cuts]
A graph's calls (all nodes but placeholders, get_attrs and the output) are numbered from 0 in
graph order. A *cut* at p separates the calls before p from p and those after it. Moving a cut
towards the start keeps complete every bucket that was, so that is where a cut moves if its place
cannot be cut.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.errors import NotCutError, Reason
from ddpopt.reducer import Bucket, Parameter
from ddpopt.split.nodes import (
    attribute_of,
    call_nodes,
    find_written_memory,
    has_ragged_sizes,
    is_composite,
    is_differentiable,
    is_pure,
    mutation_spans,
    name_of,
    uses_streams,
    written_by,
)
from ddpopt.split.plan import Section, make_sections, parts_of_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """A graph as the planner sees it; see [Note: positions and cuts].

    `first_use` maps the index of each DDP parameter to the position of its first differentiable
    use, `legal_cuts[p]` says whether a cut at p is possible, and `last_effect[i]` is the position
    of the last call that uses what call i returns or writes to (`num_calls` for the output).
    `is_fixed[i]` says that call i is not known to be pure.
    """

    num_calls: int
    first_use: Mapping[int, int]
    legal_cuts: Sequence[bool]
    last_effect: Sequence[int]
    call_names: Sequence[str]
    is_fixed: Sequence[bool]


def parameters_of(
    graph: fx.GraphModule, example_inputs: Sequence[Any], reduced: Mapping[torch.Tensor, Parameter]
) -> dict[fx.Node, list[int]]:
    """Return the DDP parameters behind each node.

    Dynamo makes parameters inputs of its graph; with `inline_inbuilt_nn_modules` off they are
    attributes of the graph, or belong to modules that it calls.
    """
    arguments = {node: slot for slot, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    owners: dict[fx.Node, list[int]] = {}
    for node in graph.graph.nodes:
        values = []
        if node in arguments:
            values = [example_inputs[arguments[node]]]
        elif node.op == "get_attr":
            values = [attribute_of(graph, node)]
        elif node.op == "call_module":
            values = [*graph.get_submodule(str(node.target)).parameters()]
        found = [reduced[v].index for v in values if isinstance(v, torch.Tensor) and v in reduced]
        if found:
            owners[node] = found
    return owners


def frame_module(names: Mapping[fx.Node, str]) -> tuple[str, ...]:
    """Return the path of the module whose forward this graph was traced from, () for the root.

    `names` gives the parameter behind each node, by its path from the root. A frame that was given
    several modules counts as the root's.
    """
    owners = set()
    for node, name in names.items():
        if node.op == "placeholder":
            path = name.split(".")[:-1]
            owners.add(tuple(path[: len(path) - _torch.depth_below_frame(node)]))
    return owners.pop() if len(owners) == 1 else ()


def has_twin(root: torch.nn.Module, path: tuple[str, ...]) -> bool:
    """Whether a module may share its graph with another one.

    Dynamo makes parameters inputs, so one compiled frame serves all modules of a class, such as
    the blocks of a transformer whose outer loop is not compiled.
    """
    if not path:
        return False
    module = root.get_submodule(".".join(path))
    shapes = [parameter.shape for parameter in module.parameters()]
    return any(
        other is not module
        and type(other) is type(module)
        and [parameter.shape for parameter in other.parameters()] == shapes
        for other in root.modules()
    )


def read_facts(
    gm: fx.GraphModule, parameters: Mapping[fx.Node, Sequence[int]], elsewhere: Collection[int] = ()
) -> GraphFacts:
    """Return the facts about a graph; `parameters` gives the DDP parameters behind each node.

    There may be several: a `call_module` has all those of its module. Parameters `elsewhere` are
    first used in a graph that runs before this one, so their gradients are not final here.
    """
    calls = call_nodes(gm.graph)
    positions = {node: position for position, node in enumerate(calls)}

    def last_use_of(*values: fx.Node) -> int:
        users = [positions.get(user, len(calls)) for value in values for user in value.users]
        return max(users, default=positions[values[0]])

    last_use = [last_use_of(node) for node in calls]
    first_use: dict[int, int] = {}
    for position, node in enumerate(calls):
        # all_input_nodes sees nested lists, kwargs and the operands of higher-order ops.
        for source in (node, *node.all_input_nodes):
            for index in parameters.get(source, ()):
                if index not in first_use and index not in elsewhere and is_differentiable(node):
                    first_use[index] = position
    blocked = itertools.chain(
        _uncrossable_spans(gm, calls, last_use),
        _region_spans(calls),
        mutation_spans(find_written_memory(gm.graph)),
    )
    return GraphFacts(
        num_calls=len(calls),
        first_use=first_use,
        legal_cuts=_outside(blocked, len(calls)),
        last_effect=[last_use_of(node, *written_by(node)) for node in calls],
        call_names=[node.name for node in calls],
        is_fixed=[not is_pure(node) for node in calls],
    )


def _outside(spans: Iterable[tuple[int, int]], num_calls: int) -> list[bool]:
    """Return for each p in [0, num_calls] whether it is in no span (first, last), ends included.

    A cut at either end of the graph would separate nothing, so both are False.
    """
    depth_change = [0] * (num_calls + 2)
    for first, last in spans:
        if first <= last:
            depth_change[first] += 1
            depth_change[last + 1] -= 1
    depths = list(itertools.accumulate(depth_change))[: num_calls + 1]
    return [depth == 0 and 0 < p < num_calls for p, depth in enumerate(depths)]


def _uncrossable_spans(
    gm: fx.GraphModule, calls: Sequence[fx.Node], last_use: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """Yield spans of values that no section can take: tuples, generators, contexts, numbers.

    Tensors and symbolic integers can cross, but only if each symbol in them has a node that binds
    it, because a section gets its symbols as inputs. Tensor subclasses cannot: AOTAutograd would
    have to guess the class of their gradients. Nor can anything beside one with symbols, which are
    those of the tensors that it consists of, as in nested tensors.
    """
    if uses_streams(gm.graph) or has_ragged_sizes(gm.graph):
        yield 0, len(calls)
    bound = {
        symbol
        for node in gm.graph.nodes
        if isinstance(_torch.dynamo_value(node), torch.SymInt | torch.SymFloat)
        for symbol in _torch.free_symbols(_torch.dynamo_value(node))
    }
    for position, node in enumerate(calls):
        # Autocast regions may be cut: split_module closes and reopens them.
        if last_use[position] > position and not _torch.enters_autocast(name_of(node)):
            value = _torch.dynamo_value(node)
            can_cross = isinstance(value, torch.Tensor | torch.SymInt) and not is_composite(value)
            if not can_cross or not _torch.free_symbols(value) <= bound:
                yield position + 1, last_use[position]


def _region_spans(calls: Sequence[fx.Node]) -> Iterable[tuple[int, int]]:
    """Yield spans under a global state that cannot be closed and reopened at a cut."""
    # What links the two calls of a region is the state, no value.
    partners = _torch.region_partners()
    opened: list[tuple[str, int]] = []
    no_grad_since: int | None = None
    for position, node in enumerate(calls):
        name = name_of(node)
        if _torch.sets_grad_mode(name):
            if no_grad_since is not None:
                yield no_grad_since + 1, position
            no_grad_since = None if node.args[0] else position
        elif name in partners:
            opened.append((partners[name], position))
        elif opened and name == opened[-1][0]:
            yield opened.pop()[1] + 1, position
    for _, position in opened:
        yield position + 1, len(calls)
    if no_grad_since is not None:
        yield no_grad_since + 1, len(calls)


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


def plan_sections(facts: GraphFacts, buckets: Sequence[Bucket]) -> tuple[Section, ...]:
    """Return two or more sections of a graph in forward order.

    A bucket is complete once backward has passed the first uses of its parameters and of those
    of all earlier buckets, because buckets are launched in order. The cut goes before that
    position, or still earlier if that place cannot be cut.

    Raises:
        NotCutError: the graph should stay whole.
    """
    own = parts_of_buckets(buckets, facts.first_use)
    if len(own) < 2:  # a cut releases one bucket before another
        raise NotCutError(Reason.ONE_BUCKET if own else Reason.NO_PARAMETERS)
    uses = {p: facts.first_use[p.index] for parameters in own for p in parameters}
    firsts = [min(uses[p] for p in parameters) for parameters in own]
    positions = sorted(set(itertools.accumulate(firsts, min)))
    if len(positions) == 1:
        raise NotCutError(Reason.COMPLETE_TOGETHER)
    legal = [0, *(p for p, is_legal in enumerate(facts.legal_cuts) if is_legal)]
    wanted = {legal[bisect.bisect_right(legal, position) - 1] for position in positions[1:]}
    cuts = _drop_empty_sections(wanted - {0}, facts)
    if not cuts:
        raise NotCutError(Reason.NO_LEGAL_CUT)
    bounds = [0, *cuts, facts.num_calls]
    arrival = sorted(uses, key=lambda p: (-uses[p], -p.index))
    section_of = {p: bisect.bisect_right(bounds, uses[p]) - 1 for p in arrival}
    return make_sections(bounds, section_of, facts.call_names, facts.is_fixed)


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
