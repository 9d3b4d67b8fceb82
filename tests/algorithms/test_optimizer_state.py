"""Optimizer states that `attach` makes equal to rank 0's, or refuses on all ranks."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from ddpopt.algorithms import ByteGrad, attach
from ddpopt.algorithms.value_text import text_of
from ddpopt.errors import AttachError
from tests.support.algorithms import X, flat_weights, inputs_of
from tests.support.models import MLP
from tests.support.on_ranks import gather, on_ranks

EXACT = ByteGrad(hierarchical=False)  # all ranks get bitwise equal gradients

Pair = collections.namedtuple("Pair", "first second")


class Plain(nn.Module):
    """Two parameters, for which tests write states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.bias = nn.Parameter(torch.zeros(4))


class Nesting(torch.optim.SGD):
    """An update whose size depends on numbers, flags and nested tensors of its state."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, history=[torch.zeros_like(parameter)], by={"rate": 0.1})
                state["step"] += 1
                state["history"][0].mul_(0.9).add_(parameter.grad)
                factor = state["by"]["rate"] / state["step"]
                parameter.data.sub_(state["history"][0], alpha=factor)


def _state(rank: int) -> dict[str, Any]:
    """One with all kinds of leaves that can be sent, each of which depends on the rank."""
    return {
        "step": rank,
        "rate": 0.1 + rank,
        "is_warm": rank == 0,
        "name": f"of {rank}",
        "none_on_0": rank or None,
        "none_on_1": 1 - rank or None,
        "dtype": [torch.float32, torch.float16][rank],
        "count": torch.tensor(rank),
        "mask": torch.tensor([rank == 0] * 3),
        "phase": torch.tensor([complex(rank, 1)] * 3).conj(),
        "codes": torch.full((3,), float(rank)).to(torch.float8_e4m3fn),
        "other shape": torch.full((rank + 1,), 7.0 + rank),
        "other kind": [torch.ones(2), 3][rank],
        "strided": torch.full((4, 4), float(rank)).t()[::2],
        "expanded": torch.tensor(float(rank)).expand(3),
        "nested": [torch.full((2,), float(rank)), {"x": (rank, torch.tensor(rank))}],
        "pair": Pair(rank, torch.tensor(float(rank))),
        "recent": collections.deque([rank, torch.tensor(rank)], maxlen=4),
        "two": TwoTensor(torch.full((2,), 1.0 + rank), torch.full((2,), 2.0 + rank)),
    } | ({"more on 0": 1} if rank == 0 else {"more on 1": 1})


@on_ranks(2)
def test_all_that_can_be_sent_becomes_rank_0s(rank: int) -> None:
    ddp = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = optimizer.state[ddp.module.weight] = _state(rank)
    optimizer.state["mine"] = {"total": rank}  # type: ignore[index]  # optimizers do so
    count = state["count"]
    with torch.inference_mode():
        state["of inference"] = torch.full((2,), float(rank))
    attach(ddp, optimizer, EXACT).detach()
    found = dict(optimizer.state[ddp.module.weight])
    expected = _state(0) | {"of inference": torch.zeros(2)}
    assert found["count"] is count  # in its place: the optimizer may have a view on it
    two, of_rank_0 = found.pop("two"), expected.pop("two")
    assert torch.equal(two.a, of_rank_0.a)
    assert torch.equal(two.b, of_rank_0.b)
    assert {k: text_of(v) for k, v in found.items()} == {k: text_of(v) for k, v in expected.items()}
    assert optimizer.state["mine"] == {"total": 0}  # type: ignore[index]


@on_ranks(2)
def test_ranks_do_not_drift_apart_whatever_their_states_are_made_of(rank: int) -> None:
    """Their states differ in numbers and in nested tensors, until `attach`."""
    ddp = DistributedDataParallel(MLP(2))
    optimizer = Nesting(ddp.parameters(), lr=0.1)
    (x,) = inputs_of(rank, 1)
    for _ in range(1 + rank):  # DDP reduces, and so both have to do it equally often
        ddp(x).sum().backward()
        optimizer.step()
    if rank == 0:
        ddp(x).sum().backward()
    for state in optimizer.state.values():
        state["by"]["rate"] = 0.1 * (1 + rank)
    attach(ddp, optimizer, EXACT)
    for _ in range(10):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    first, second = gather(flat_weights(ddp))
    assert torch.equal(first, second)


@on_ranks(2)
@pytest.mark.quick("0")
@pytest.mark.parametrize("resumed_rank", [0, 1])
def test_ranks_go_on_from_where_rank_0_is(rank: int, resumed_rank: int) -> None:
    """Only one of them has a state: the other gets it, or it is given up for rank 0's fresh one."""
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    ddp(X).sum().backward()
    optimizer.step()
    if rank != resumed_rank:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    attach(ddp, optimizer, EXACT).detach()
    ddp(X).sum().backward()
    optimizer.step()
    states = [dict(state) for state in optimizer.state.values()]
    assert int(states[0]["step"]) == [2, 1][resumed_rank]
    first, second = gather(text_of(states))
    assert first == second


class _Object:
    def __init__(self, value: float) -> None:
        self.value = value


def _lazy(**values: Any) -> Any:
    return collections.defaultdict(lambda: 0, values)  # which cannot be pickled


# The states of a model's two parameters on a rank, with what the error says, if there is one.
STATES: dict[str, tuple[Callable[[int], list[Any]], str]] = {
    "equal objects": (lambda rank: [{"x": _Object(1.0)}], ""),
    "sparse": (lambda rank: [{"x": torch.eye(2).to_sparse()}], ""),
    "lazy": (lambda rank: [_lazy(step=rank)], ""),
    "none": (lambda rank: [], ""),
    "unequal objects": (
        lambda rank: [{"x": [_Object(1.0 + rank)]}],
        r"rank 1: optimizer 0: state\['x'\]\[0\] of weight .*_Object\(value=2.0\) instead of",
    ),
    "an object alone": (
        lambda rank: [{"x": _Object(1.0)} if rank == 0 else None],
        r"state\['x'\] of weight is missing",
    ),
    "parts that share memory": (
        lambda rank: [{"x": TwoTensor(*(torch.full((1,), 1.0 + rank).expand(3) for _ in "ab"))}],
        "cannot be written",
    ),
    "unequal lazy ones": (lambda rank: [_lazy(**{f"step {rank}": rank})], "pickled"),
    "shares": (
        lambda rank: [{"step": 1}, None] if rank == 0 else [None, {"step": 1}],
        "share of the parameters",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", STATES)
def test_what_cannot_be_sent_is_refused_on_all_ranks_unless_it_is_equal(
    rank: int, name: str
) -> None:
    """The error names the parameter and the leaf."""
    make_states, names = STATES[name]
    ddp = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for parameter, state in zip(ddp.module.parameters(), make_states(rank), strict=False):
        if state is not None:
            optimizer.state[parameter] = state
    if names:
        with pytest.raises(AttachError, match=names):
            attach(ddp, optimizer, EXACT)
    else:
        attach(ddp, optimizer, EXACT).detach()


@on_ranks(2)
def test_of_a_tensor_made_of_several_all_are_sent_or_none(rank: int) -> None:
    """Else a rank would have its own scale with the codes of another."""
    ddp = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    two = TwoTensor(torch.full((2,), float(rank)), torch.ones(2))
    two.b = two.b.to_sparse()  # which cannot be sent
    optimizer.state[ddp.module.weight] = {"x": two}
    attach(ddp, optimizer, EXACT).detach()
    assert two.a.tolist() == [rank, rank]


@on_ranks(2)
def test_a_key_that_cannot_be_sent_is_refused(rank: int) -> None:
    ddp = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.state[lambda: 0] = {"x": 1}
    with pytest.raises(AttachError, match=r"rank 0 cannot be described .*lambda"):
        attach(ddp, optimizer, EXACT)


@on_ranks(2)
def test_an_optimizer_that_shares_its_state_among_ranks_keeps_it(rank: int) -> None:
    """ZeroRedundancyOptimizer's state is in another optimizer, of which each rank has a share."""
    ddp = DistributedDataParallel(MLP(2))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    ddp(X).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    saved = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved)
    optimizer.load_state_dict(saved[0])

    def states() -> list[str]:
        both = (*optimizer.optim.state.values(), *optimizer.state.values())  # None: another rank's
        return [text_of(state and dict(state)) for state in both]

    before = states()
    attach(ddp, optimizer, EXACT).detach()
    assert states() == before
    assert "None" in before
    assert len(set(before)) > 1
