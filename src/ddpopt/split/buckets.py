"""Which buckets a graph is cut for, and where they come from.

a compile in the first step     the Reducer will form buckets by its rules      -> PREDICTED
from the third step on          the Reducer has formed them                     -> OWN
with `buckets="auto"`           better ones are searched for                    -> SEARCHED
with `buckets="plan.json"`      the Reducer will be given those of the plan     -> EXPECTED
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ddpopt._indices import ParameterIndex
from ddpopt.reducer import Bucket, Parameter, in_launch_order, known_buckets, predict_buckets
from ddpopt.split.arrival import order_arrival
from ddpopt.split.graph import DynamoGraph
from ddpopt.split.phases import Goal
from ddpopt.split.sections import fine_buckets


class Source(enum.Enum):
    """Where the buckets come from at which a graph is cut."""

    PREDICTED = "the Reducer will form them by its rules"
    OWN = "the Reducer has them"
    EXPECTED = "the Reducer will be given them, by a plan that is about to be applied"
    SEARCHED = "small ones, to serve any: better buckets are being searched for"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBuckets:
    """The buckets of one graph."""

    source: Source
    # The buckets at whose ends the graph is cut, in launch order.
    to_cut_at: tuple[Bucket, ...]
    # The buckets that the Reducer has in this step, or is predicted to form: the `Cut` lists them.
    in_force: tuple[Bucket, ...]
    # The graph's own parameters, in the order in which their gradients are released.
    arrival: tuple[Parameter, ...]


def which_buckets(graph: DynamoGraph, lateness: Mapping[ParameterIndex, float]) -> GraphBuckets:
    """The buckets for which to cut a graph.

    `lateness` says how late in backward the gradient of each of the graph's own parameters is
    final: the place in the traced backward, or, as long as none is traced, minus the first use in
    forward. Only the order of these numbers counts.
    """
    rules, is_shared = graph.ddp_state.rules, graph.empty_cut.is_shared
    # Indices of parameters by bucket: of a plan that is about to be applied, and the Reducer's.
    # None without such a plan, and while the Reducer has yet to form buckets.
    expected, actual = graph.ddp_state.expected_buckets, graph.ddp_state.buckets
    arrival = _predict_arrival(graph, lateness)
    arrival_here = tuple(parameter for parameter in arrival if parameter.index in lateness)

    source = Source.PREDICTED
    if is_shared:
        # Other modules may run this graph, between other graphs than this module does, so only the
        # graph's own parameters count.
        in_force = predict_buckets(arrival_here, rules)
    elif actual is None:
        in_force = predict_buckets(arrival, rules)
    else:
        source = Source.OWN
        in_force = known_buckets(graph.reduced, actual, rules)
        # No bucket will be formed from the order of arrival any more, so the buckets set the order.
        arrival_here = in_launch_order(arrival_here, in_force)

    to_cut_at = in_force
    if expected is not None and not is_shared:
        source = Source.EXPECTED
        to_cut_at = known_buckets(graph.reduced, expected, rules)
    elif graph.ddp_state.goal is not Goal.IN_FORCE:
        # A search; or a plan, and modules share the graph: nobody knows which module's part of the
        # plan the graph has to serve, so it is cut finely, for any. No Reducer has what is
        # predicted from a shared graph alone (`in_force`), so there the order of arrival counts.
        source = Source.SEARCHED
        in_order = [parameter for bucket in in_force for parameter in bucket.parameters]
        to_cut_at = fine_buckets(arrival_here if is_shared else in_order)
    return GraphBuckets(source=source, to_cut_at=to_cut_at, in_force=in_force, arrival=arrival_here)


def _predict_arrival(
    graph: DynamoGraph, lateness: Mapping[ParameterIndex, float]
) -> tuple[Parameter, ...]:
    """All of the Reducer's parameters, in the order in which their gradients will arrive.

    `lateness` is as for `which_buckets`.
    """
    rules, expected = graph.ddp_state.rules, graph.ddp_state.expected_buckets
    lateness = dict(lateness)
    # DDP holds back the gradients of `delay_all_reduce_named_params` until that of one other
    # parameter arrives, so the runner has that one arrive last.
    for index in rules.arrives_last:
        if index in lateness:
            lateness[index] = math.inf
    arrival = order_arrival(
        graph.reduced,
        lateness,
        graph.arrives_before,
        graph.arrives_after,
        others=graph.others,  # the rule for parameters that no known graph uses
        of_root=graph.of_root,  # those that the root module has itself
    )
    if expected is not None and not graph.empty_cut.is_shared:
        # The graph is cut at the plan's buckets, so its sections release gradients in their order.
        arrival = in_launch_order(arrival, known_buckets(graph.reduced, expected, rules))
    return arrival
