"""Optimizer states that `attach` makes equal to rank 0's, or refuses on all ranks."""

from __future__ import annotations

import collections
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
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks, error_of

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


def _send(rank: int) -> tuple[dict[str, str], dict[str, str], bool]:
    ddp = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.state[ddp.module.weight] = _state(rank)
    optimizer.state["mine"] = {"total": rank}  # type: ignore[index]  # optimizers do so
    count = optimizer.state[ddp.module.weight]["count"]
    with torch.inference_mode():
        optimizer.state[ddp.module.weight]["of inference"] = torch.full((2,), float(rank))
    attach(ddp, optimizer, EXACT).detach()
    state = optimizer.state[ddp.module.weight]
    own = dict(state)
    two = own.pop("two")
    assert torch.equal(two.a, torch.full((2,), 1.0))
    assert torch.equal(two.b, torch.full((2,), 2.0))
    expected = _state(0) | {"of inference": torch.zeros(2)}
    del expected["two"]
    # In the place of the one that was there, on which the optimizer may have a view.
    is_in_place = state["count"] is count
    own["mine"], expected["mine"] = optimizer.state["mine"], {"total": 0}  # type: ignore[index]
    texts = [{name: text_of(value) for name, value in leaves.items()} for leaves in (own, expected)]
    return texts[0], texts[1], is_in_place


def test_all_that_can_be_sent_becomes_rank_0s(ranks: Ranks) -> None:
    for found, expected, is_in_place in ranks.run(_send):
        assert found == expected
        assert is_in_place


def _train_apart(rank: int) -> torch.Tensor:
    """Ranks whose states differ in numbers and in nested tensors train on, after `attach`."""
    ddp = DistributedDataParallel(MLP(2))
    optimizer = Nesting(ddp.parameters(), lr=0.1)
    x = batches(rank, [(4, WIDTH)])[0]
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
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def test_ranks_do_not_drift_apart_whatever_their_states_are_made_of(ranks: Ranks) -> None:
    first, second = ranks.run(_train_apart)
    assert torch.equal(first, second)


def _resume(rank: int, resumed_rank: int) -> tuple[str, int]:
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    ddp(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    if rank != resumed_rank:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    attach(ddp, optimizer, EXACT).detach()
    ddp(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    states = [dict(state) for state in optimizer.state.values()]
    return text_of(states), int(states[0]["step"])


@pytest.mark.quick("0")
@pytest.mark.parametrize("resumed_rank", [0, 1])
def test_ranks_go_on_from_where_rank_0_is(ranks: Ranks, resumed_rank: int) -> None:
    """Only one of them has a state: the other gets it, or it is given up for rank 0's fresh one."""
    expected_step = [2, 1][resumed_rank]
    first, second = ranks.run(_resume, resumed_rank)
    assert first == second
    assert first[1] == expected_step


class _Object:
    def __init__(self, value: float) -> None:
        self.value = value


def _attach_with(states: list[Any]) -> str:
    ddp = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for parameter, state in zip(ddp.module.parameters(), states, strict=False):
        if state is not None:
            optimizer.state[parameter] = state
    return error_of(lambda: attach(ddp, optimizer, EXACT).detach())


def _give_objects(rank: int) -> list[str]:
    lazy: Any = collections.defaultdict(lambda: 0, step=rank)
    other_lazy: Any = collections.defaultdict(lambda: 0, {f"step {rank}": rank})
    sparse = torch.eye(2).to_sparse()
    return [
        _attach_with([{"x": _Object(1.0)}]),
        _attach_with([{"x": sparse}]),
        _attach_with([lazy]),
        _attach_with([{"x": [_Object(1.0 + rank)]}]),
        _attach_with([{"x": _Object(1.0)} if rank == 0 else None]),
        _attach_with([other_lazy]),
        _attach_with([{"step": 1}, None] if rank == 0 else [None, {"step": 1}]),
        _attach_with([]),
    ]


def test_what_cannot_be_sent_is_refused_on_all_ranks_unless_it_is_equal(ranks: Ranks) -> None:
    """The error names the parameter, the leaf and the remedy, and nothing is left behind."""
    for errors in ranks.run(_give_objects):
        assert errors[:3] == ["nothing"] * 3
        assert errors[3].startswith("AttachError: on rank 1: optimizer 0: state['x'][0] of weight")
        assert "_Object(value=2.0) instead of" in errors[3]
        assert "load the same checkpoint on all ranks" in errors[3]
        assert "state['x'] of weight is missing instead of" in errors[4]
        assert "cannot be pickled" in errors[5]
        assert "a share of the parameters" in errors[6]
        assert errors[7] == "nothing"


def _share(rank: int) -> list[bool]:
    """ZeroRedundancyOptimizer's state is in another optimizer, of which each rank has a share."""
    ddp = DistributedDataParallel(MLP(2))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    ddp(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    saved = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved)
    optimizer.load_state_dict(saved[0])
    before = {p: text_of(dict(state)) for p, state in optimizer.optim.state.items()}
    attach(ddp, optimizer, EXACT).detach()
    after = {p: text_of(dict(state)) for p, state in optimizer.optim.state.items()}
    return [bool(before), before == after]


def test_an_optimizer_that_shares_its_state_among_ranks_keeps_it(ranks: Ranks) -> None:
    assert ranks.run(_share) == [[True, True]] * 2
