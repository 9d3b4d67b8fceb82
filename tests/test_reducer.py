"""The model of the Reducer in `reducer.py` against the Reducer itself."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.reducer import (
    Bucket,
    Order,
    Parameter,
    ReducerRules,
    compare_order,
    find_misplaced,
    known_buckets,
    predict_buckets,
)
from ddpopt.split import state
from ddpopt.split.arrival import order_arrival
from tests.support.buckets import rebuilt_buckets
from tests.support.models import MLP, batches, train

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _parameter(index: int, tensor: torch.Tensor, is_sparse: bool = False) -> Parameter:
    return Parameter(
        index=index,
        name=f"p{index}",
        num_bytes=tensor.numel() * tensor.element_size(),
        group=f"{tensor.dtype}",
        is_sparse=is_sparse,
    )


@st.composite
def _gradients(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[bool], list[int], bool]:
    tensors = draw(
        st.lists(
            st.builds(
                lambda numel, dtype: torch.empty(numel, dtype=dtype),
                st.integers(1, 300),
                st.sampled_from(DTYPES[: draw(st.integers(1, 2))]),
            ),
            min_size=1,
            max_size=40,
        )
    )
    sparse = draw(st.lists(st.sampled_from([False, False, False, True]), min_size=len(tensors)))
    caps = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
    return tensors, sparse[: len(tensors)], caps, draw(st.booleans())


@given(_gradients())
def test_buckets_equal_those_of_the_reducers_own_function(
    case: tuple[list[torch.Tensor], list[bool], list[int], bool],
) -> None:
    """Orders are those of arrival and of registration, with dtypes, sparse gradients and caps."""
    tensors, sparse, caps, follows_arrival = case
    parameters = [_parameter(i, t, s) for i, (t, s) in enumerate(zip(tensors, sparse, strict=True))]
    arrival = list(reversed(parameters)) if follows_arrival else parameters
    rules = ReducerRules(caps_bytes=tuple(caps), follows_arrival=follows_arrival)
    predicted = predict_buckets(arrival, rules)
    indices = [p.index for p in arrival] if follows_arrival else []
    # With sparse gradients, which `assigned_by_torch` has no argument for.
    real, _ = dist._compute_bucket_assignment_by_size(
        [tensors[p.index] for p in arrival], caps, sparse, indices
    )
    if not follows_arrival:
        real.reverse()  # as DistributedDataParallel does
    assert [[p.index for p in bucket.parameters] for bucket in predicted] == real
    if follows_arrival:
        # Each group, such as a dtype, goes through the limits by itself.
        assert known_buckets(parameters, real, rules) == predicted


@pytest.mark.quick("{}")
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.03}, {"bucket_cap_mb": 25}, {"bucket_cap_mb_list": [0.02, 0.1]}],
    ids=str,
)
def test_parameters_and_rules_are_those_of_a_live_reducer(one_rank: None, options: dict) -> None:
    """Both give the buckets that DDP reports after its rebuild, with equal members and order."""
    ddp = DistributedDataParallel(MLP(depth=20), **options)
    train(ddp, batches(0, [(2, 64)] * 3))
    parameters = list(_torch.reducer_parameters(ddp).values())
    place = {p.index: -(p.index // 2) for p in parameters}
    buckets = predict_buckets(order_arrival(parameters, place), state.rules_of(ddp))
    assert [[p.index for p in bucket.parameters] for bucket in buckets] == rebuilt_buckets(ddp)
    sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert [bucket.num_bytes for bucket in buckets] == [int(size) for size in sizes.split(",")]


@given(st.permutations(range(8)), st.permutations(range(8)), st.data())
def test_a_parameter_is_misplaced_where_it_is_reduced_with_others_or_out_of_turn(
    planned_order: list[int], actual_order: list[int], data: st.DataObject
) -> None:
    """A parameter is named only if buckets group or order the graph's parameters differently.

    The graph has a part of all parameters; how the others are grouped makes no difference.
    """
    parameters = [Parameter(index=i, name=f"p{i}", num_bytes=4, group="f32") for i in range(8)]
    of_graph = [p for p in parameters if data.draw(st.booleans())]
    indices = {p.index for p in of_graph}

    def cut_into_buckets(order: list[int]) -> list[list[int]]:
        cuts = sorted(data.draw(st.sets(st.integers(1, 7))))
        return [order[a:b] for a, b in itertools.pairwise([0, *cuts, 8])]

    def parts_of_graph(buckets: list[list[int]]) -> list[set[int]]:
        return [part for bucket in buckets if (part := indices.intersection(bucket))]

    planned, actual = cut_into_buckets(planned_order), cut_into_buckets(actual_order)
    buckets = [
        Bucket(index=k, parameters=tuple(parameters[i] for i in members), cap_bytes=4)
        for k, members in enumerate(planned)
    ]
    misplaced = find_misplaced(of_graph, buckets, actual)
    assert (misplaced is None) == (parts_of_graph(planned) == parts_of_graph(actual))
    if misplaced is not None:
        assert misplaced.parameter in of_graph
        assert misplaced.planned != misplaced.actual
        assert misplaced.parameter.index in planned[misplaced.planned]
        assert misplaced.parameter.index in actual[misplaced.actual]


@pytest.mark.parametrize(
    ("actual", "order"),
    [
        ([[2], [1, 0]], Order.EQUAL),
        ([[2, 1, 9], [0, 3]], Order.EQUAL),
        ([[3, 2], [1, 0]], Order.EQUAL),
        ([[1, 2, 0]], Order.OTHERS_MOVED),
        ([[2, 0], [1]], Order.OTHERS_MOVED),
        ([[0, 2, 1]], Order.DIFFERENT),
    ],
    ids=str,
)
def test_orders_are_compared_in_each_group_with_and_without_those_that_may_have_moved(
    actual: list[list[int]], order: Order
) -> None:
    """Planned are 2, 1 and 0, of which 1 may move, and 3 of another group; of 9 nothing is said."""
    members = [
        Parameter(index=i, name=f"p{i}", num_bytes=4, group="f16" if i == 3 else "f32")
        for i in (2, 1, 0, 3)
    ]
    planned = [Bucket(index=0, parameters=tuple(members), cap_bytes=4)]
    with_other_group = actual if any(3 in bucket for bucket in actual) else [*actual, [3]]
    assert compare_order(planned, with_other_group, {1}) is order
