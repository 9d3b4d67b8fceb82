"""Decentralized and LowPrecisionDecentralized on real ranks: golden vectors, slow references."""

from __future__ import annotations

import functools
import io
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import Decentralized, LowPrecisionDecentralized, attach, decentralized
from ddpopt.algorithms.bytegrad import EPSILON, compress, decompress
from ddpopt.algorithms.decentralized import rotating_peer
from ddpopt.errors import NonFiniteError
from tests.support.algorithms import flat_weights, lose_rank_1
from tests.support.groups import first_ranks
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import MakeRanks, Ranks, error_of

LR = 0.1

# From Bagua: weights that start as the rank's number, without gradients.
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
    weights = []
    for _ in range(num_steps):
        ddp(torch.ones(())).backward()
        optimizer.step()
        weights.append(ddp.module.weight.item())
    handle.detach(average=False)
    return weights


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
    weights_by_rank = ranks.run(_consensus, num_ranks, len(expected))[:num_ranks]
    for step, values in enumerate(expected):
        if values is not None:
            assert [weights[step] for weights in weights_by_rank] == values


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


def _train(rank: int, num_ranks: int, num_steps: int, options: dict[str, Any]) -> Any:
    setting = _setting(rank, num_ranks, **options)
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    weights = [flat_weights(ddp)]
    for x in batches(rank, [(8, WIDTH)] * num_steps):
        optimizer.zero_grad()
        ddp(x).pow(2).mean().backward()
        optimizer.step()
        weights.append(flat_weights(ddp))
    counts = (handle.num_steps, handle.num_communications)
    handle.detach(average=False)
    return weights, counts


def _run_on_first(rank: int, simulate: Callable[..., Any], *args: Any) -> Any:
    """Simulate in a worker, whose number of threads decides the order in which it adds."""
    return simulate(*args) if rank == 0 else None


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
    weights = [[flat_weights(model)] for model in models]
    interval, exchange = options.get("communication_interval", 1), 0
    for step in range(num_steps):
        before = [[p.detach().clone() for p in model.parameters()] for model in models]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(inputs[rank][step]).pow(2).mean().backward()
            if step % interval == 0:
                _mix(model, before, rank, exchange, options)
            optimizer.step()
            weights[rank].append(flat_weights(model))
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
    index = rank // node
    if options.get("peer_selection") == "shift_one":
        peer = rotating_peer(index, len(nodes), exchange)
        mixed = [(a + b) / 2 for a, b in zip(nodes[index], nodes[peer], strict=True)]
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
    """It does bitwise in pairs, where there is one order of adding."""
    options = {"peer_selection": selection, "communication_interval": interval}
    results = four_ranks.run(_train, num_ranks, 7, options)[:num_ranks]
    expected = four_ranks.run(_run_on_first, _simulate, num_ranks, 7, options)[0]
    is_exact = selection == "shift_one" or num_ranks < 3
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    for (weights, counts), steps in zip(results, expected, strict=True):
        assert counts == (7, len(range(0, 7, interval)))
        for value, reference in zip(weights, steps, strict=True):
            torch.testing.assert_close(value, reference, **tolerance)


@pytest.mark.parametrize("selection", ["all", "shift_one"])
def test_nodes_average_first_when_hierarchical(four_ranks: Ranks, selection: str) -> None:
    """Of two nodes of two ranks, leaders mix the means of each node, and send them to the node."""
    options = {"peer_selection": selection, "hierarchical": True, "local_world_size": 2}
    results = four_ranks.run(_train, 4, 5, options)
    expected = _simulate(4, 5, options)
    for (weights, _), steps in zip(results, expected, strict=True):
        for value, reference in zip(weights, steps, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)


def test_the_mean_of_all_ranks_moves_only_by_their_gradients(four_ranks: Ranks) -> None:
    """However ranks are mixed, their mean moves by the mean of their updates.

    Here they are mixed in pairs, and compared with all mixed with all: mixing is doubly stochastic.
    """
    mixed_in_pairs = four_ranks.run(_train, 4, 1, {"peer_selection": "shift_one"})
    mixed_by_all = _simulate(4, 1, {})
    mean = sum(weights[-1] for weights, _ in mixed_in_pairs) / 4
    expected = sum(weights[-1] for weights in mixed_by_all) / 4
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)


def _train_as_allreduce(rank: int, compiled: bool, split: str) -> Any:
    """Train by averages of weights and by allreduce; gradients do not depend on the weights."""
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
        results.append(flat_weights(ddp))
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
    for averaged, reduced in four_ranks.run(_train_as_allreduce, compiled, split):
        torch.testing.assert_close(averaged, reduced, rtol=1e-5, atol=1e-6)


# ---- weights that are written beside the algorithm ----------------------------------------------


@torch.no_grad()
def _write(ddp: Any, kind: str) -> None:
    """Write weights as people do between a forward and its update."""
    if kind == "a checkpoint":  # by a guard against losses that are not finite
        ddp.load_state_dict(
            {name: torch.full_like(v, 0.01) for name, v in ddp.state_dict().items()}
        )
    for parameter in ddp.parameters():
        if kind == "decay":
            parameter.mul_(0.5)
        elif kind == "data":  # without a new version, of some elements only
            parameter.data[:3] = 0.25
        elif kind == "swapped":  # as an average of weights (EMA) that is swapped in
            parameter.data = parameter.detach() + 1


def _write_in_a_step(rank: int, selection: str, kind: str, is_skipped: bool) -> None:
    """Written weights move by the mean less what was sent; others become the mean itself."""
    setting = _setting(rank, 2, peer_selection=selection)
    assert setting is not None
    ddp, optimizer, handle = setting
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    for step, x in enumerate(batches(rank, [(8, WIDTH)] * 4)):
        sent = flat_weights(ddp)
        mean = sent.clone()
        dist.all_reduce(mean)
        mean /= 2
        optimizer.zero_grad()
        ddp(x).pow(2).mean().backward()
        if step % 2:
            _write(ddp, kind)
        written = flat_weights(ddp)
        gradient = torch.cat([p.grad.flatten() for p in ddp.parameters()])
        moved = torch.where(written == sent, mean, written + (mean - sent))
        if step % 2 and is_skipped:
            handle.settle()
            assert torch.equal(flat_weights(ddp), moved)
        else:
            optimizer.step()
            torch.testing.assert_close(flat_weights(ddp), moved - LR * gradient)
    handle.detach()


@pytest.mark.quick("all-a checkpoint-updated")
@pytest.mark.parametrize("is_skipped", [False, True], ids=["updated", "skipped"])
@pytest.mark.parametrize("kind", ["a checkpoint", "decay", "data", "swapped"])
@pytest.mark.parametrize("selection", ["all", "shift_one"])
def test_what_is_written_between_forward_and_update_stays(
    ranks: Ranks, selection: str, kind: str, is_skipped: bool
) -> None:
    ranks.run(_write_in_a_step, selection, kind, is_skipped)


def _leave_nan(rank: int) -> list[bool]:
    """Rank 1's weights become NaN; all ranks load a checkpoint when they notice."""
    setting = _setting(rank, 2)
    assert setting is not None
    ddp, optimizer, handle = setting
    are_finite = []
    for step, x in enumerate(batches(rank, [(8, WIDTH)] * 4)):
        if step == 1 and rank == 1:
            with torch.no_grad():
                next(ddp.parameters()).fill_(torch.nan)
        optimizer.zero_grad()
        loss = ddp(x).pow(2).mean()
        is_bad = (~loss.detach().isfinite()).float()
        dist.all_reduce(is_bad)
        if is_bad:
            _write(ddp, "a checkpoint")
            continue
        loss.backward()
        optimizer.step()
        are_finite.append(bool(flat_weights(ddp).isfinite().all()))
    handle.detach()
    return are_finite


def test_a_checkpoint_that_replaces_nan_is_not_lost_to_their_mean(ranks: Ranks) -> None:
    """It is lost on neither rank; what one sent was NaN, and so was the mean of both."""
    assert ranks.run(_leave_nan) == [[True] * 3] * 2


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
        before = flat_weights(ddp)
        loss = ddp(torch.full((2, 4), float(rank))).sum()
        unchanged = torch.equal(
            before, flat_weights(ddp)
        )  # backward must see the forward's weights
        loss.backward()
        unchanged &= torch.equal(before, flat_weights(ddp))
        optimizer.step()
    model.handle.detach()
    model.handle = None
    return unchanged


def test_weights_are_averaged_behind_forward_and_replaced_after_backward(
    four_ranks: Ranks,
) -> None:
    assert four_ranks.run(_overlap) == [True] * 4


# ---- peers -------------------------------------------------------------------------------------


TABLE = {
    2: ["10", "10"],
    4: ["2301", "3210", "2301"],
    6: ["345012", "453201", "534120", "345012"],
    8: ["45670123", "56743012", "67452301", "74561230"],
}


@pytest.mark.parametrize("num_ranks", TABLE)
def test_the_rotation_is_that_of_bagua(num_ranks: int) -> None:
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


# ---- LowPrecisionDecentralized -----------------------------------------------------------------


RING_LR = 0.1
LAYER_BYTES = 20_000  # of a bucket that takes one layer of MLP


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RING_LR, momentum=0.5)


def _ring(
    num_ranks: int,
    options: dict[str, Any],
    model: nn.Module | None = None,
    timeout_s: float = 300,
) -> tuple[Any, Any, Any] | None:
    """Return DDP on the first ranks, its optimizer and the handle, with several buckets."""
    group = first_ranks(num_ranks, timeout_s)
    if group is None:
        return None
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model or MLP(3), process_group=group)
    optimizer = _optimizer(ddp)
    algorithm = LowPrecisionDecentralized(**{"hierarchical": False, **options})
    with mock.patch.object(decentralized, "BUCKET_BYTES", LAYER_BYTES):
        return ddp, optimizer, attach(ddp, optimizer, algorithm)


def _step(forward: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = forward(x).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _copies(handle: Any) -> list[list[torch.Tensor]] | None:
    if handle.replicas is None:
        return None
    return [[values.clone() for values in replica] for replica in handle.replicas]


def _train_ring(rank: int, num_ranks: int, num_steps: int, options: dict[str, Any]) -> Any:
    """Return weights and replicas after each step, and counters."""
    setting = _ring(num_ranks, options)
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    steps = []
    for x in batches(rank, [(8, WIDTH)] * num_steps):
        _step(ddp, optimizer, x)
        steps.append((flat_weights(ddp), _copies(handle)))
    counts = (handle.num_steps, handle.num_communications)
    handle.detach(average=False)
    return steps, counts


# ---- the slow reference -----------------------------------------------------------------------


def _simulate_ring(num_ranks: int, num_steps: int, options: dict[str, Any]) -> Any:
    """All ranks in one process, in plain lists; weights after each step, and the codes' widths."""
    torch.manual_seed(0)
    first = MLP(3)
    models = []
    for _ in range(num_ranks):
        model = MLP(3)
        model.load_state_dict(first.state_dict())
        models.append(model)
    optimizers = [_optimizer(model) for model in models]
    inputs = [batches(rank, [(8, WIDTH)] * num_steps) for rank in range(num_ranks)]
    node = options.get("local_world_size", 1)
    num_nodes = num_ranks // node
    replicas = [_layers(first) for _ in range(num_nodes)]
    weights: list[list[torch.Tensor]] = [[] for _ in models]
    widths = []
    for step in range(num_steps):
        for rank, model in enumerate(models):
            _step(model, optimizers[rank], inputs[rank][step])
        if step % options.get("communication_interval", 1) == 0:
            nodes = [models[k : k + node] for k in range(0, num_ranks, node)]
            means = [
                [sum(layers) / node for layers in zip(*map(_layers, members), strict=True)]
                for members in nodes
            ]
            replicas, width = _mix_ring(means, replicas)
            widths.append(width)
            for rank, model in enumerate(models):
                _assign(model, replicas[rank // node])
        for rank, model in enumerate(models):
            weights[rank].append(flat_weights(model))
    return weights, widths


def _layers(model: nn.Module) -> list[torch.Tensor]:
    """One flat tensor a layer, as FlatWeights has it with buckets of that size."""
    return [
        torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]) for layer in model.layers
    ]


@torch.no_grad()
def _assign(model: nn.Module, layers: list[torch.Tensor]) -> None:
    for layer, values in zip(model.layers, layers, strict=True):
        layer.weight.copy_(values[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        layer.bias.copy_(values[WIDTH * WIDTH :])


def _mix_ring(
    means: list[list[torch.Tensor]], replicas: list[list[torch.Tensor]]
) -> tuple[list[list[torch.Tensor]], float]:
    new, width = [], 0.0
    for index, mean in enumerate(means):
        left, right = replicas[index - 1], replicas[(index + 1) % len(replicas)]
        mixed = []
        for x, sent, at_left, at_right in zip(mean, replicas[index], left, right, strict=True):
            z = x + at_left * (1 / 3) + at_right * (1 / 3) - sent * (5 / 3)
            width = max(width, float(z.max() - z.min()))
            mixed.append(sent + decompress(compress(z.view(1, -1))).view(-1))
        new.append(mixed)
    return new, width


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_training_on_a_ring_equals_the_simulator(
    four_ranks: Ranks, num_ranks: int, interval: int
) -> None:
    """It does on steps without an exchange too, where each rank trains by itself.

    They are equal up to a level of a code or so: sums that round otherwise can fall on the other
    side of a tie.
    """
    options = {"communication_interval": interval}
    results = four_ranks.run(_train_ring, num_ranks, 7, options)[:num_ranks]
    expected, widths = four_ranks.run(_run_on_first, _simulate_ring, num_ranks, 7, options)[0]
    for (steps, counts), references in zip(results, expected, strict=True):
        assert counts == (7, len(range(0, 7, interval)))
        for (value, _), reference in zip(steps, references, strict=True):
            torch.testing.assert_close(value, reference, rtol=0, atol=3 * max(widths) / 255)
            assert (value - reference).abs().mean() < 1e-6


def test_nodes_average_first_and_then_make_a_ring(four_ranks: Ranks) -> None:
    """There are two nodes of two ranks; leaders alone have replicas, and a node equal weights."""
    options = {"hierarchical": True, "local_world_size": 2}
    results = four_ranks.run(_train_ring, 4, 5, options)
    expected, widths = four_ranks.run(_run_on_first, _simulate_ring, 4, 5, options)[0]
    for (steps, _), references in zip(results, expected, strict=True):
        for (value, _), reference in zip(steps, references, strict=True):
            torch.testing.assert_close(value, reference, rtol=0, atol=3 * max(widths) / 255)
            assert (value - reference).abs().mean() < 1e-6
    last_weights = [steps[-1][0] for steps, _ in results]
    last_replicas = [steps[-1][1] for steps, _ in results]
    assert [replicas is None for replicas in last_replicas] == [False, True, False, True]
    for leader, other in ((0, 1), (2, 3)):
        assert torch.equal(last_weights[leader], last_weights[other])
    _check_replicas([last_replicas[0], last_replicas[2]])


# ---- replicas ---------------------------------------------------------------------------------


def _check_replicas(copies: list[Any]) -> None:
    """What a rank last sent is what both of its neighbours have of it."""
    for index, (sent, _, _) in enumerate(copies):
        at_right = copies[(index + 1) % len(copies)][1]
        at_left = copies[index - 1][2]
        for bucket, values in enumerate(sent):
            assert torch.equal(values, at_right[bucket])
            assert torch.equal(values, at_left[bucket])
        assert len(sent) == len(at_right) == len(at_left)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_replicas_are_bitwise_what_they_are_of(four_ranks: Ranks, num_ranks: int) -> None:
    results = four_ranks.run(_train_ring, num_ranks, 6, {})[:num_ranks]
    for index in range(6):
        _check_replicas([steps[index][1] for steps, _ in results])
    for steps, _ in results:
        weights, (sent, _, _) = steps[-1]
        assert torch.equal(torch.cat(sent), weights)


@pytest.mark.parametrize("num_ranks", [6, 8])
def test_replicas_are_equal_on_more_ranks(eight_ranks: Ranks, num_ranks: int) -> None:
    results = eight_ranks.run(_train_ring, num_ranks, 3, {})[:num_ranks]
    _check_replicas([steps[-1][1] for steps, _ in results])


def test_the_mean_moves_by_the_gradients_and_what_rounding_adds(four_ranks: Ranks) -> None:
    """The mixing is doubly stochastic: without gradients the mean drifts only by rounding."""
    results = four_ranks.run(_drift)
    before = sum(first for first, _, _ in results) / 4
    after = sum(last for _, last, _ in results) / 4
    allowed = max(lost for _, _, lost in results)
    assert (after - before).abs().max() <= allowed
    assert max((last - after).abs().max() for _, last, _ in results) < 0.2  # of up to 1.5


def _drift(rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    setting = _ring(4, {})
    assert setting is not None
    ddp, _, handle = setting
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 + rank)
    handle.resync()
    for group in handle.training.optimizers[0].param_groups:
        group["lr"] = 0.0
    first, lost = flat_weights(ddp), 0.0
    for x in batches(rank, [(8, WIDTH)] * 12):
        old = [values.clone() for values in handle.replicas.own]
        _step(ddp, handle.training.optimizers[0], x)
        changes = [new - was for new, was in zip(handle.replicas.own, old, strict=True)]
        width = max(float(values.max() - values.min()) for values in changes)
        lost += (1.01 * width + EPSILON) / 510 + 1e-6
    widest = torch.tensor(lost)
    dist.all_reduce(widest, dist.ReduceOp.MAX)
    handle.detach(average=False)
    return first, flat_weights(ddp), float(widest)


def _resync(rank: int, is_mean: bool) -> Any:
    """Return replicas and weights right after it, replicas after further steps, last weights."""
    setting = _ring(3, {})
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    inputs = batches(rank, [(8, WIDTH)] * 4)
    _step(ddp, optimizer, inputs[0])
    if is_mean:
        handle.average()
    else:
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.add_(rank)
        handle.resync()
    fresh, weights = _copies(handle), flat_weights(ddp)
    for x in inputs[1:]:
        _step(ddp, optimizer, x)
    later = _copies(handle)
    handle.detach()
    return fresh, weights, later, flat_weights(ddp)


@pytest.mark.parametrize("is_mean", [False, True])
def test_replicas_are_right_again_after_resync_and_average(
    four_ranks: Ranks, is_mean: bool
) -> None:
    results = four_ranks.run(_resync, is_mean)[:3]
    _check_replicas([fresh for fresh, *_ in results])
    _check_replicas([later for _, _, later, _ in results])
    for fresh, weights, _, last in results:
        assert torch.equal(torch.cat(fresh[0]), weights)
        assert torch.equal(last, results[0][-1])  # detach averaged


def _resume(rank: int) -> Any:
    """Train on, or in a new model from what was saved after two steps."""
    results = []
    saved: dict[str, Any] = {}
    for is_resumed in (False, True):
        setting = _ring(4, {"hierarchical": True, "local_world_size": 2})
        assert setting is not None
        ddp, optimizer, handle = setting
        inputs = batches(rank, [(8, WIDTH)] * 4)
        if is_resumed:
            ddp.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            handle.load_state_dict(saved["handle"])
        for step in range(2 if is_resumed else 0, 4):
            if step == 2 and not is_resumed:
                buffer = io.BytesIO()
                parts = {"model": ddp, "optimizer": optimizer, "handle": handle}
                torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
                buffer.seek(0)
                saved = torch.load(buffer)
            _step(ddp, optimizer, inputs[step])
        results.append((flat_weights(ddp), handle.num_steps, handle.num_communications))
        handle.detach(average=False)
    return results


def test_a_run_goes_on_bitwise_from_a_checkpoint(four_ranks: Ranks) -> None:
    for (weights, *counts), (resumed, *others) in four_ranks.run(_resume):
        assert torch.equal(weights, resumed)
        assert counts == others == [4, 4]


def _save_in_an_open_step(rank: int) -> bool:
    """An update was skipped, so that saving ends the step, which has an exchange."""
    setting = _ring(2, {})
    assert setting is not None
    ddp, _, handle = setting
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.add_(rank)
    ddp(batches(rank, [(8, WIDTH)])[0]).sum().backward()
    saved = handle.state_dict()
    is_equal = all(
        torch.equal(values, copied)
        for replica, copies in zip(_copies(handle) or (), saved["replicas"], strict=True)
        for values, copied in zip(replica, copies, strict=True)
    )
    assert handle.num_communications == saved["num_communications"] == 1
    handle.detach()
    return is_equal


def test_what_is_saved_in_an_open_step_is_of_after_it(ranks: Ranks) -> None:
    assert ranks.run(_save_in_an_open_step) == [True, True]


def _average_without_autograd(rank: int) -> torch.Tensor:
    setting = _ring(2, {})
    assert setting is not None
    ddp, optimizer, handle = setting
    inputs = batches(rank, [(8, WIDTH)] * 2)
    _step(ddp, optimizer, inputs[0])
    with torch.inference_mode():
        handle.average()
    _step(ddp, optimizer, inputs[1])
    handle.detach()
    return flat_weights(ddp)


def test_training_goes_on_after_an_average_in_inference_mode(ranks: Ranks) -> None:
    """What is made in that mode could not be written to in the next step."""
    assert torch.equal(*ranks.run(_average_without_autograd))


def _load_bad(rank: int) -> list[str]:
    setting = _ring(2, {})
    assert setting is not None
    _, _, handle = setting
    good = handle.state_dict()
    sent, left, right = good["replicas"]
    bad: list[dict[str, Any]] = [
        {**good, "place": (1 - rank, 2)},
        {**good, "replicas": None},
        {**good, "replicas": [sent[:1], left, right]},
        {**good, "replicas": [sent, left, [values.double() for values in right]]},
        {name: value for name, value in good.items() if name != "replicas"},
    ]
    errors = [error_of(functools.partial(handle.load_state_dict, state)) for state in bad]
    handle.load_state_dict(good)
    handle.detach(average=False)
    return errors


def test_states_that_do_not_fit_are_refused_on_all_ranks(ranks: Ranks) -> None:
    for errors in ranks.run(_load_bad):
        assert len(errors) == 5
        assert all(error.startswith("OptionError: ") for error in errors)
        assert "call resync instead" in errors[0]
        assert all("replicas" in error for error in errors[1:])


class Mixed(nn.Module):
    """A model with parameters of three types, and so buckets of each."""

    def __init__(self) -> None:
        super().__init__()
        self.brief = nn.Parameter(torch.randn(60, dtype=torch.bfloat16))
        self.usual = nn.Parameter(torch.randn(30))
        self.precise = nn.Parameter(torch.randn(50, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = [part.float().pow(2).sum() for part in (self.brief, self.usual, self.precise)]
        return x.mean() * torch.stack(squares)


def _mixed(rank: int) -> Any:
    setting = _ring(3, {}, Mixed())
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    start = flat_weights(ddp)
    for x in batches(rank, [(8,)] * 10):
        _step(ddp, optimizer, 0.3 + 0.1 * x)
    result = _copies(handle), [p.dtype for p in ddp.parameters()], start, flat_weights(ddp)
    handle.detach(average=False)
    return result


def test_weights_of_several_types_are_mixed(four_ranks: Ranks) -> None:
    results = four_ranks.run(_mixed)[:3]
    _check_replicas([copies for copies, *_ in results])
    for copies, dtypes, start, last in results:
        assert [values.dtype for values in copies[0]] == dtypes
        assert last.norm() < start.norm()
        assert (last - results[0][-1]).abs().max() < 0.1


# ---- what goes wrong --------------------------------------------------------------------------


def _refuse(rank: int) -> list[str]:
    ddp = DistributedDataParallel(MLP(2))
    algorithm = LowPrecisionDecentralized(hierarchical=False)
    part = torch.optim.SGD(list(ddp.parameters())[1:], lr=RING_LR)
    errors = [error_of(lambda: attach(ddp, part, algorithm))]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RING_LR)
    first = next(ddp.parameters()).requires_grad_(False)
    ddp = DistributedDataParallel(ddp.module)  # the first one may not live on beside it
    handle = attach(ddp, optimizer, algorithm)
    if rank == 1:
        first.requires_grad_(True)
    errors.append(error_of(lambda: _step(ddp, optimizer, torch.ones(2, WIDTH))))
    handle.detach(average=False)
    return errors


def test_parameters_that_would_be_missed_are_refused_on_all_ranks(ranks: Ranks) -> None:
    """One is in no optimizer, and another one was frozen until after attaching, on one rank."""
    for errors in ranks.run(_refuse):
        assert all(error.startswith("AttachError: ") for error in errors)
        missing, changed = errors
        assert "layers.0.weight is trainable and in none of the optimizers" in missing
        assert "on rank 1 a parameter is trainable that DDP does not reduce" in changed


def _poison(rank: int, options: dict[str, Any]) -> Any:
    setting = _ring(4, options)
    assert setting is not None
    ddp, optimizer, handle = setting
    _step(ddp, optimizer, torch.ones(2, WIDTH))
    before = _copies(handle)
    message = ""
    x = torch.full((2, WIDTH), float("nan") if rank == 1 else 1.0)
    try:
        _step(ddp, optimizer, x)
    except NonFiniteError as error:
        message = str(error)
    after = _copies(handle)
    handle.detach(average=False)
    return message, after is None if before is None else _are_equal(before, after)


def _are_equal(some: Any, others: Any) -> bool:
    flat = [[values for replica in replicas for values in replica] for replicas in (some, others)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


@pytest.mark.parametrize(
    ("options", "culprit"), [({}, 1), ({"hierarchical": True, "local_world_size": 2}, 0)]
)
def test_nan_on_one_rank_raises_on_all(
    four_ranks: Ranks, options: dict[str, Any], culprit: int
) -> None:
    """It raises on the rank across the ring too, which is sent no NaN; replicas stay."""
    for message, is_unchanged in four_ranks.run(_poison, options):
        assert message.startswith(f"on rank {culprit}, ")
        assert is_unchanged


def _skip(rank: int) -> Any:
    """Train where one rank leaves an update out, as GradScaler does."""
    setting = _ring(3, {})
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    for step, x in enumerate(batches(rank, [(8, WIDTH)] * 4)):
        optimizer.zero_grad()
        ddp(x).pow(2).mean().backward()
        if (rank, step) not in ((1, 1), (2, 3)):
            optimizer.step()
    with handle.paused():
        result = _copies(handle), handle.num_communications
    handle.detach(average=False)
    return result


def test_a_skipped_update_makes_no_rank_wait(four_ranks: Ranks) -> None:
    results = four_ranks.run(_skip)[:3]
    assert [count for _, count in results] == [4, 4, 4]
    _check_replicas([copies for copies, _ in results])


def _update_apart(rank: int) -> int:
    """Rank 0 makes updates that belong to no step: paused, and once more after a step's."""
    setting = _ring(2, {})
    assert setting is not None
    ddp, optimizer, handle = setting
    _step(ddp, optimizer, batches(rank, [(8, WIDTH)])[0])
    if rank == 0:
        optimizer.step()
    with handle.paused():
        if rank == 0:
            optimizer.step()
    count = handle.num_communications
    handle.detach()
    return count


def test_updates_that_belong_to_no_step_communicate_nothing(ranks: Ranks) -> None:
    assert ranks.run(_update_apart) == [1, 1]


def _die(rank: int) -> str:
    setting = _ring(3, {}, timeout_s=20)
    if setting is None:
        return ""
    ddp, optimizer, handle = setting
    return lose_rank_1(rank, handle, lambda: _step(ddp, optimizer, torch.ones(2, WIDTH)))


def test_a_killed_rank_fails_the_others(make_ranks: MakeRanks) -> None:
    errors = make_ranks(3).run_survivors({0, 2}, _die)
    for rank in (0, 2):
        assert re.match(r"exchanging compressed weights in step [23] failed: ", errors[rank])
        assert "another rank has ended" in errors[rank]


# ---- compiled ---------------------------------------------------------------------------------


def _compile(rank: int, split: str) -> Any:
    """Train eagerly and compiled; count the graphs with and without an algorithm."""
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        setting = _ring(2, {})
        assert setting is not None
        ddp, optimizer, handle = setting
        options = {"inner": "aot_eager", "split": split}
        forward = torch.compile(ddp, backend="ddpopt", options=options) if is_compiled else ddp
        torch._dynamo.utils.counters.clear()
        for x in batches(rank, [(8, WIDTH)] * 5):
            _step(forward, optimizer, x)
        results.append((flat_weights(ddp), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        handle.detach(average=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = DistributedDataParallel(MLP(3))
    forward = torch.compile(plain, backend="ddpopt", options=options)
    for x in batches(rank, [(8, WIDTH)] * 5):
        _step(forward, _optimizer(plain), x)
    return *results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_compiled_training_equals_eager_and_adds_no_graphs(ranks: Ranks, split: str) -> None:
    for (eager, _), (compiled, num_graphs), num_plain in ranks.run(_compile, split):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
        assert num_graphs == num_plain > 0
