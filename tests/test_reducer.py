"""The model of the Reducer against the Reducer itself."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.reducer import Bucket, Parameter, ReducerRules, find_misplaced, predict_buckets
from ddpopt.split import state
from ddpopt.split.arrival import order_arrival
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
    """In arrival order and in registration order, with dtypes, sparse gradients and any caps."""
    tensors, sparse, caps, is_rebuilt = case
    parameters = [_parameter(i, t, s) for i, (t, s) in enumerate(zip(tensors, sparse, strict=True))]
    arrival = list(reversed(parameters)) if is_rebuilt else parameters
    predicted = predict_buckets(
        arrival, ReducerRules(caps_bytes=tuple(caps), is_rebuilt=is_rebuilt)
    )
    indices = [p.index for p in arrival] if is_rebuilt else []
    real, _ = dist._compute_bucket_assignment_by_size(
        [tensors[p.index] for p in arrival], caps, sparse, indices
    )
    if not is_rebuilt:
        real.reverse()  # as DistributedDataParallel does
    assert [[p.index for p in bucket.parameters] for bucket in predicted] == real


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.03}, {"bucket_cap_mb": 25}, {"bucket_cap_mb_list": [0.02, 0.1]}],
    ids=str,
)
def test_parameters_and_rules_are_those_of_a_live_reducer(one_rank: None, options: dict) -> None:
    """What is read off DDP gives the buckets that DDP reports after its rebuild."""
    ddp = DistributedDataParallel(MLP(depth=20), **options)
    train(ddp, batches(0, [(2, 64)] * 3))
    parameters = list(_torch.reducer_parameters(ddp).values())
    place = {p.index: -(p.index // 2) for p in parameters}
    buckets = predict_buckets(order_arrival(parameters, place), state.rules_of(ddp))
    reported = ddp._get_ddp_logging_data()
    sizes = [int(size) for size in reported["rebuilt_bucket_sizes"].split(",")]
    assert [bucket.num_bytes for bucket in buckets] == sizes


def test_reducer_parameters_leave_out_what_ddp_leaves_out(one_rank: None) -> None:
    """Frozen and ignored parameters are not reduced, a shared one counts once, sparse is marked."""
    model = nn.ModuleDict(
        {
            "first": nn.Linear(4, 4),
            "tied": nn.Linear(4, 4),
            "frozen": nn.Linear(4, 4),
            "ignored": nn.Linear(4, 4),
            "table": nn.Embedding(4, 4, sparse=True),
        }
    )
    model["tied"].weight = model["first"].weight
    model["frozen"].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["ignored.weight", "ignored.bias"]
    )
    found = _torch.reducer_parameters(DistributedDataParallel(model)).values()
    names = ["first.weight", "first.bias", "tied.bias", "table.weight"]
    assert [p.name for p in found] == names
    assert [p.is_sparse for p in found] == [False, False, False, True]
    assert [p.index for p in found] == [0, 1, 2, 3]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_reducer_parameters_stay_when_others_are_frozen(one_rank: None, is_sparse: bool) -> None:
    """Those that required gradients when DDP was made, with a sparse one after the first step."""
    model = nn.Sequential(nn.Embedding(4, 4, sparse=is_sparse), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    ddp(torch.arange(4)).sum().backward()
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    names = [p.name for p in _torch.reducer_parameters(ddp).values()]
    assert names == ["0.weight", "2.weight", "2.bias"]


@given(st.permutations(range(8)), st.permutations(range(8)), st.data())
def test_a_misplaced_parameter_is_in_a_bucket_of_another_number(
    planned: list[int], actual: list[int], data: st.DataObject
) -> None:
    """One is found exactly where own parameters are reduced with others, or out of turn."""
    parameters = [Parameter(index=i, name=f"p{i}", num_bytes=4, group="f32") for i in range(8)]
    own = [p for p in parameters if data.draw(st.booleans())]

    def parts(order: list[int]) -> list[list[int]]:
        cuts = sorted(data.draw(st.sets(st.integers(1, 7))))
        return [order[a:b] for a, b in itertools.pairwise([0, *cuts, 8])]

    ours, theirs = parts(planned), parts(actual)
    buckets = [
        Bucket(index=k, parameters=tuple(parameters[i] for i in part), cap_bytes=4)
        for k, part in enumerate(ours)
    ]
    found = find_misplaced(own, buckets, theirs)
    indices = {p.index for p in own}
    turns = [
        [turn for part in all_ if (turn := indices.intersection(part))] for all_ in (ours, theirs)
    ]
    assert (found is None) == (turns[0] == turns[1])
    if found is not None:
        assert found.parameter in own
        assert found.planned != found.actual
        assert found.parameter.index in ours[found.planned]
        assert found.parameter.index in theirs[found.actual]
