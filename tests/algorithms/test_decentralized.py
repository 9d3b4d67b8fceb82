"""Decentralized and LowPrecisionDecentralized beside their simulators, golden values, replicas."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ddpopt.algorithms import Decentralized, LowPrecisionDecentralized, attach, decentralized
from ddpopt.algorithms.decentralized import rotating_peer
from ddpopt.errors import AttachError, NonFiniteError, OptionError
from tests.algorithms import step_machine
from tests.algorithms.simulators import PEERS, BesideSimulator
from tests.support.algorithms import ALGORITHMS, Trial, inputs_of
from tests.support.models import MLP
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import Ranks

RING = ALGORITHMS["LowPrecisionDecentralized"]
BY_NODES = {"hierarchical": True, "local_world_size": 2}

# From Bagua: weights that start as the rank's number, without gradients.
CONSENSUS = {
    2: [[0.5, 0.5]],
    4: [[1, 2, 1, 2], [1.5] * 4],
    6: [[1.5, 2.5, 3.5, 1.5, 2.5, 3.5], [2, 3, 2.5, 2.5, 2, 3], [2.5, 2.75, 2.25, 2.75, 2.25, 2.5]],
    8: [None, None, None, [3.5, 4, 3.5, 3, 4, 3.5, 3, 3.5]],
}


@on_ranks()
@pytest.mark.parametrize("num_ranks", CONSENSUS)
def test_shift_one_reaches_the_golden_values(rank: int, num_ranks: int) -> None:
    trial = Trial(
        Decentralized(peer_selection="shift_one", hierarchical=False),
        nn.Linear(1, 1, bias=False),
        make_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
    )
    nn.init.constant_(trial.model.weight, rank)
    for expected in CONSENSUS[num_ranks]:
        trial.step(torch.ones(1, 1))
        found = gather(trial.model.weight.item())
        assert expected is None or found == expected


# ---- beside the simulators -----------------------------------------------------------------------


def _model() -> nn.Module:
    return MLP(2, 16).double()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def _beside(algorithm: Any) -> BesideSimulator:
    return BesideSimulator(algorithm, _model, _sgd, shape=(4, 16))


@on_ranks()
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (4, {"communication_interval": 3}),
        (2, {"peer_selection": "shift_one", "communication_interval": 3}),
        (4, {"peer_selection": "shift_one"}),
        (4, BY_NODES),
        (4, {**BY_NODES, "peer_selection": "shift_one"}),
    ],
)
def test_training_equals_the_simulator(num_ranks: int, options: dict[str, Any]) -> None:
    beside = _beside(Decentralized(**{"hierarchical": False, **options}))
    beside.part()
    for _ in range(7):
        beside.step()
    beside.handle.detach()


@on_ranks()
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, {}), (2, {}), (3, {}), (4, {"communication_interval": 3}), (4, BY_NODES), (6, {})],
)
def test_training_on_a_ring_equals_the_simulator(
    rank: int, num_ranks: int, options: dict[str, Any]
) -> None:
    """A layer is a bucket, with a range of codes. Replicas are bitwise what they are of.

    Leaders alone have them if nodes average first, and then a node has equal weights.
    """
    with mock.patch.object(decentralized, "BUCKET_BYTES", 8 * 17 * 16):
        beside = _beside(LowPrecisionDecentralized(**{"hierarchical": False, **options}))
    beside.simulator.part_sizes = [17 * 16, 17 * 16]
    node_size = options.get("local_world_size", 1)
    for _ in range(7):
        beside.step()
        replicas = _gather_replicas(beside.handle)
        assert [r is None for r in replicas] == [r % node_size > 0 for r in range(num_ranks)]
        _check_replicas(replicas[::node_size])
    beside.handle.detach()


def _gather_replicas(handle: Any) -> list[Any]:
    return gather(handle.replicas and [torch.cat(replica) for replica in handle.replicas])


def _check_replicas(replicas: list[Any]) -> None:
    """What a rank last sent is what both of its neighbours have of it."""
    for k, (sent, _, _) in enumerate(replicas):
        _, at_right, _ = replicas[(k + 1) % len(replicas)]
        _, _, at_left = replicas[k - 1]
        assert torch.equal(sent, at_right)
        assert torch.equal(sent, at_left)


@on_ranks(3)
@pytest.mark.parametrize("name", ["resync", "average"])
def test_replicas_are_right_again_after_resync_and_average(name: str) -> None:
    beside = _beside(RING)
    beside.step()
    beside.part()
    for one in (beside.handle, beside.simulator):
        getattr(one, name)()
    _check_replicas(_gather_replicas(beside.handle))
    for _ in range(3):
        beside.step()
    beside.handle.detach()


@pytest.mark.quick("1-4", "2-4")
@pytest.mark.parametrize("num_scripts", [4, 12])
@pytest.mark.parametrize("interval", [1, 2])
def test_whatever_a_loop_does_a_ring_trains_as_its_simulator(
    ranks: Ranks, interval: int, num_scripts: int
) -> None:
    """A skipped update makes no rank wait, saving ends an open step; see `step_machine`."""
    algorithm = LowPrecisionDecentralized(hierarchical=False, communication_interval=interval)
    step_machine.check(ranks, algorithm, num_scripts)


@on_ranks(2)
def test_an_empty_pause_ends_a_step_whose_update_one_rank_skipped(rank: int) -> None:
    """As `GradScaler` does on one rank alone, where a loop communicates before the next forward."""
    trial = Trial(RING)
    for x in inputs_of(rank, 2):
        trial.backward(x)
        if rank == 0:
            trial.optimizer.step()
        with trial.handle.paused():
            pass
        assert len(set(gather(trial.counts))) == 1


@on_ranks(2)
@pytest.mark.parametrize("is_broadcast", [False, True])
def test_buffers_are_each_ranks_own_or_rank_0s(rank: int, is_broadcast: bool) -> None:
    """As DDP's `broadcast_buffers` says, which sends them as a forward begins."""
    model, seen = nn.Sequential(MLP(1), nn.BatchNorm1d(64)), []
    trial = Trial(model=model, broadcast_buffers=is_broadcast)
    model.register_forward_pre_hook(lambda *_: seen.append(model[1].running_mean.clone()))
    trial.train(inputs_of(rank, 2))
    first, second = gather(seen[-1])
    assert torch.equal(first, second) is is_broadcast


@on_ranks(2)
def test_a_ring_keeps_three_more_copies_of_the_weights(rank: int) -> None:
    trial = Trial(RING)
    trial.train(inputs_of(rank, 2))
    kept = [value for value in tree_leaves(trial.handle.state_dict()) if torch.is_tensor(value)]
    assert sum(value.nbytes for value in kept) == 3 * trial.weights.nbytes


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


@on_ranks(2)
def test_weights_are_averaged_behind_forward_and_replaced_after_backward(rank: int) -> None:
    """Backward has to see the forward's weights."""
    trial = Trial(model=Waiting())
    trial.model.handle = trial.handle
    for _ in range(3):
        before = trial.weights
        trial.backward(torch.full((2, 4), float(rank)))
        assert torch.equal(before, trial.weights)
        trial.optimizer.step()
    trial.handle.detach()
    trial.model.handle = None


# ---- peers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", PEERS)
def test_the_rotation_is_that_of_bagua(num_ranks: int) -> None:
    for exchange, row in enumerate(PEERS[num_ranks]):
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


# ---- what goes wrong on a ring -------------------------------------------------------------------


@on_ranks(2)
def test_states_that_do_not_fit_are_refused_on_all_ranks(rank: int) -> None:
    handle = Trial(RING).handle
    good = handle.state_dict()
    sent, left, right = good["replicas"]
    bad: list[tuple[dict[str, Any], str]] = [
        ({**good, "place": (1 - rank, 2)}, "place"),
        ({**good, "replicas": None}, "replicas"),
        ({**good, "replicas": [sent[:1], left, [v[:1] for v in right]]}, "replicas"),
        ({**good, "replicas": [sent, left, [values.double() for values in right]]}, "replicas"),
        ({name: value for name, value in good.items() if name != "replicas"}, "replicas"),
    ]
    for state, name in bad:
        with pytest.raises(OptionError, match=name):
            handle.load_state_dict(state)
    handle.load_state_dict(good)
    handle.detach(average=False)


class Mixed(nn.Module):
    """A model with parameters of three types, and so buckets of each."""

    def __init__(self) -> None:
        super().__init__()
        self.brief = nn.Parameter(torch.randn(60, dtype=torch.bfloat16))
        self.usual = nn.Parameter(torch.randn(30))
        self.precise = nn.Parameter(torch.randn(50, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.brief, self.usual, self.precise)
        return x.mean() * torch.cat([part.double() for part in parts])


@on_ranks(3)
def test_weights_of_several_types_are_mixed(rank: int) -> None:
    torch.manual_seed(0)
    trial = Trial(RING, Mixed())
    start = trial.weights
    trial.train(torch.full((8,), 1.0 + 0.1 * rank) for _ in range(10))
    _check_replicas(_gather_replicas(trial.handle))
    dtypes = [p.dtype for p in trial.model.parameters()]
    assert [values.dtype for values in trial.handle.replicas.own] == dtypes
    first, *others = gather(trial.weights)
    assert first.norm() < start.norm()
    assert all((other - first).abs().max() < 0.1 for other in others)
    trial.handle.detach(average=False)


@on_ranks(2)
def test_parameters_that_would_be_missed_are_refused_on_all_ranks(rank: int) -> None:
    """One is in no optimizer, and another one was frozen until after attaching, on one rank."""
    ddp = DistributedDataParallel(MLP(2))
    part = torch.optim.SGD(list(ddp.parameters())[1:], lr=0.1)
    with pytest.raises(AttachError, match=r"layers\.0\.weight .* none of the optimizers"):
        attach(ddp, part, RING)
    model = ddp.module
    del ddp  # the first one may not live on beside the second
    first = model.layers[0].weight.requires_grad_(False)
    trial = Trial(RING, model)
    first.requires_grad_(rank == 1)
    with pytest.raises(AttachError, match="rank 1 a parameter is trainable"):
        trial.step()
    trial.handle.detach(average=False)


@on_ranks(4)
@pytest.mark.parametrize(("options", "culprit"), [({}, 1), (BY_NODES, 0)])
def test_nan_on_one_rank_raises_on_all(rank: int, options: dict[str, Any], culprit: int) -> None:
    """It raises on the rank across the ring too, which is sent no NaN; replicas stay."""
    trial = Trial(LowPrecisionDecentralized(**{"hierarchical": False, **options}))
    trial.train(inputs_of(rank, 1))
    before = _gather_replicas(trial.handle)
    with pytest.raises(NonFiniteError, match=f"on rank {culprit},"):
        trial.step(torch.full((2, 64), torch.nan if rank == 1 else 1.0))
    for old, new in zip(before, _gather_replicas(trial.handle), strict=True):
        assert (old is new is None) or all(map(torch.equal, old, new))
    trial.handle.detach(average=False)


def test_pairs_of_an_odd_number_of_ranks_are_refused(one_rank: None) -> None:
    with pytest.raises(OptionError, match="even number, and there are 1 ranks"):
        Trial(Decentralized(peer_selection="shift_one", hierarchical=False))
