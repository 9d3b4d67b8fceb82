"""Decentralized SGD on real ranks: golden vectors, a simulator as the slow reference, peers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import Decentralized, attach
from ddpopt.algorithms.decentralized import ring_neighbours, rotating_peer
from tests.support.groups import first_ranks
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks

LR = 0.1

# Of BAGUA: weights that start as the rank's number, without gradients.
CONSENSUS = {
    2: [[0.5, 0.5]],
    4: [[1, 2, 1, 2], [1.5] * 4],
    6: [[1.5, 2.5, 3.5, 1.5, 2.5, 3.5], [2, 3, 2.5, 2.5, 2, 3], [2.5, 2.75, 2.25, 2.75, 2.25, 2.5]],
    8: [None, None, None, [3.5, 4, 3.5, 3, 4, 3.5, 3, 3.5]],
}


class Scalar(nn.Module):
    """One weight; the gradient of its output is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _consensus(rank: int, num_ranks: int, num_steps: int) -> list[float] | None:
    group = first_ranks(num_ranks)
    if group is None:
        return None
    ddp = DistributedDataParallel(Scalar(), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    algorithm = Decentralized(peer_selection="shift_one", hierarchical=False)
    handle = attach(ddp, optimizer, algorithm)
    with torch.no_grad():
        ddp.module.weight.fill_(rank)
    seen = []
    for _ in range(num_steps):
        ddp(torch.ones(())).backward()
        optimizer.step()
        seen.append(ddp.module.weight.item())
    handle.detach(average=False)
    return seen


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shift_one_reaches_the_golden_values(four_ranks: Ranks, num_ranks: int) -> None:
    _check_consensus(four_ranks, num_ranks)


@pytest.mark.parametrize("num_ranks", [6, 8])
def test_shift_one_reaches_the_golden_values_on_more_ranks(
    eight_ranks: Ranks, num_ranks: int
) -> None:
    _check_consensus(eight_ranks, num_ranks)


def _check_consensus(ranks: Ranks, num_ranks: int) -> None:
    expected = CONSENSUS[num_ranks]
    found = ranks.run(_consensus, num_ranks, len(expected))[:num_ranks]
    for step, values in enumerate(expected):
        if values is not None:
            assert [steps[step] for steps in found] == values


def _setting(rank: int, num_ranks: int, **options: Any) -> tuple[Any, Any, Any] | None:
    """Return DDP on the first ranks, its optimizer and the handle, with other weights by rank."""
    group = first_ranks(num_ranks)
    if group is None:
        return None
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.5)
    handle = attach(ddp, optimizer, Decentralized(**{"hierarchical": False, **options}))
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.add_(rank / 10)
    return ddp, optimizer, handle


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def _train(rank: int, num_ranks: int, num_steps: int, options: dict[str, Any]) -> Any:
    setting = _setting(rank, num_ranks, **options)
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    weights = [_flat(ddp)]
    for x in batches(rank, [(8, WIDTH)] * num_steps):
        optimizer.zero_grad()
        ddp(x).pow(2).mean().backward()
        optimizer.step()
        weights.append(_flat(ddp))
    counts = (handle.num_steps, handle.num_communications)
    handle.detach(average=False)
    return weights, counts


def _simulate_on_first(rank: int, *args: Any) -> list[list[torch.Tensor]] | None:
    """In a worker, whose number of threads decides the order in which it adds."""
    return None if rank else _simulate(*args)


def _simulate(num_ranks: int, num_steps: int, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """All ranks in one process, in plain lists: the slow reference."""
    models, optimizers = [], []
    for rank in range(num_ranks):
        torch.manual_seed(0)
        model = MLP(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank / 10)
        models.append(model)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5))
    inputs = [batches(rank, [(8, WIDTH)] * num_steps) for rank in range(num_ranks)]
    weights = [[_flat(model)] for model in models]
    interval, exchange = options.get("communication_interval", 1), 0
    for step in range(num_steps):
        before = [[p.detach().clone() for p in model.parameters()] for model in models]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(inputs[rank][step]).pow(2).mean().backward()
            if step % interval == 0:
                _mix(model, before, rank, exchange, options)
            optimizer.step()
            weights[rank].append(_flat(model))
        exchange += step % interval == 0
    return weights


@torch.no_grad()
def _mix(
    model: nn.Module,
    before: list[list[torch.Tensor]],
    rank: int,
    exchange: int,
    options: dict[str, Any],
) -> None:
    num_ranks = len(before)
    node = options.get("local_world_size", 1)
    nodes = [
        [sum(ws) / node for ws in zip(*before[k : k + node], strict=True)]
        for k in range(0, num_ranks, node)
    ]
    place = rank // node
    if options.get("peer_selection") == "shift_one":
        peer = rotating_peer(place, len(nodes), exchange)
        mixed = [(a + b) / 2 for a, b in zip(nodes[place], nodes[peer], strict=True)]
    else:
        mixed = [sum(ws) / len(nodes) for ws in zip(*nodes, strict=True)]
    for parameter, value in zip(model.parameters(), mixed, strict=True):
        parameter.copy_(value)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    ("num_ranks", "selection"),
    [(1, "all"), (2, "all"), (3, "all"), (4, "all"), (2, "shift_one"), (4, "shift_one")],
)
def test_training_equals_the_simulator(
    four_ranks: Ranks, num_ranks: int, selection: str, interval: int
) -> None:
    """Bitwise in pairs, where there is one order of adding."""
    options = {"peer_selection": selection, "communication_interval": interval}
    found = four_ranks.run(_train, num_ranks, 7, options)[:num_ranks]
    expected = four_ranks.run(_simulate_on_first, num_ranks, 7, options)[0]
    is_exact = selection == "shift_one" or num_ranks < 3
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    for (weights, counts), steps in zip(found, expected, strict=True):
        assert counts == (7, len(range(0, 7, interval)))
        for value, reference in zip(weights, steps, strict=True):
            torch.testing.assert_close(value, reference, **tolerance)


@pytest.mark.parametrize("selection", ["all", "shift_one"])
def test_nodes_average_first_when_hierarchical(four_ranks: Ranks, selection: str) -> None:
    """Two nodes of two ranks: the mean of each pair, mixed by the leaders, told to the node."""
    options = {"peer_selection": selection, "hierarchical": True, "local_world_size": 2}
    found = four_ranks.run(_train, 4, 5, options)
    expected = _simulate(4, 5, options)
    for (weights, _), steps in zip(found, expected, strict=True):
        for value, reference in zip(weights, steps, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)


def test_the_mean_of_all_ranks_moves_only_by_their_gradients(four_ranks: Ranks) -> None:
    """The mixing is doubly stochastic; momentum and gradients are those of a mean model's."""
    mixed = four_ranks.run(_train, 4, 1, {"peer_selection": "shift_one"})
    alone = _simulate(4, 1, {"communication_interval": 2**30})  # step 0 mixes; undo by the mean
    mean = sum(weights[-1] for weights, _ in mixed) / 4
    expected = sum(weights[-1] for weights in alone) / 4
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)


def _train_as_allreduce(rank: int, compiled: bool, split: str) -> Any:
    """A loss that is linear in the weights has the same gradients wherever they are."""
    results = []
    for is_decentralized in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Scalars(), bucket_cap_mb=1e-4)
        options = {"inner": "aot_eager", "split": split}
        forward = torch.compile(ddp, backend="ddpopt", options=options) if compiled else ddp
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        handle = None
        if is_decentralized:
            handle = attach(forward, optimizer, Decentralized(hierarchical=False))
        for x in batches(rank, [(50,)] * 6):
            optimizer.zero_grad()
            forward(x).backward()
            optimizer.step()
        if handle is not None:
            handle.detach()
        results.append(_flat(ddp))
    return results


class Scalars(nn.Module):
    """Fifty weights in five parameters, and a loss that is linear in them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(10) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part * x[10 * k : 10 * k + 10]).sum() for k, part in enumerate(self.parts))


@pytest.mark.parametrize(
    ("compiled", "split"), [(False, ""), (True, "forward"), (True, "backward")]
)
def test_a_linear_loss_is_trained_as_by_allreduce(
    four_ranks: Ranks, compiled: bool, split: str
) -> None:
    for decentralized, reduced in four_ranks.run(_train_as_allreduce, compiled, split):
        torch.testing.assert_close(decentralized, reduced, rtol=1e-5, atol=1e-6)


class Waiting(nn.Module):
    """A model whose forward does not end before the weights of its step have been averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.handle: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stop_s = time.monotonic() + 300
        while not self.handle._averaged.done():
            assert time.monotonic() < stop_s, "weights are not averaged while forward runs"
            time.sleep(0.001)
        return self.layer(x)


def _overlap(rank: int) -> bool:
    model = Waiting()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    model.handle = attach(ddp, optimizer, Decentralized(hierarchical=False))
    for _ in range(3):
        before = _flat(ddp)
        loss = ddp(torch.full((2, 4), float(rank))).sum()
        unchanged = torch.equal(before, _flat(ddp))  # backward must see the forward's weights
        loss.backward()
        unchanged &= torch.equal(before, _flat(ddp))
        optimizer.step()
    model.handle.detach()
    model.handle = None
    return unchanged


def test_weights_are_averaged_behind_forward_and_replaced_after_backward(
    four_ranks: Ranks,
) -> None:
    assert four_ranks.run(_overlap) == [True] * 4


# ---- Peers -------------------------------------------------------------------------------------


TABLE = {
    2: ["10", "10"],
    4: ["2301", "3210", "2301"],
    6: ["345012", "453201", "534120", "345012"],
    8: ["45670123", "56743012", "67452301", "74561230"],
}


@pytest.mark.parametrize("num_ranks", TABLE)
def test_the_rotation_is_bagua_s(num_ranks: int) -> None:
    for exchange, row in enumerate(TABLE[num_ranks]):
        peers = [rotating_peer(rank, num_ranks, exchange) for rank in range(num_ranks)]
        assert peers == [int(digit) for digit in row]


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 10, 64])
def test_a_rank_is_its_peers_peer_and_meets_the_whole_other_half(num_ranks: int) -> None:
    half = num_ranks // 2
    for rank in range(num_ranks):
        met = [rotating_peer(rank, num_ranks, exchange) for exchange in range(half)]
        others = range(half, num_ranks) if rank < half else range(half)
        assert sorted(met) == list(others)
        for exchange, peer in enumerate(met):
            assert rotating_peer(peer, num_ranks, exchange) == rank


def test_a_ring_closes() -> None:
    assert [ring_neighbours(rank, 4) for rank in range(4)] == [(3, 1), (0, 2), (1, 3), (2, 0)]
    assert [ring_neighbours(rank, 2) for rank in range(2)] == [(1, 1), (0, 0)]
    assert ring_neighbours(0, 1) == (0, 0)
