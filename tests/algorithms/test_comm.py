"""What algorithms communicate with: groups that end, what was sent, weights, and a thread."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    QAdam,
    attach,
)
from ddpopt.algorithms.comm import Communicator, FlatWeights, Groups, Worker, _make_group
from ddpopt.errors import AttachError
from tests.support.algorithms import ALGORITHMS, FLAT, Trial, X, inputs_of
from tests.support.beside import compiled
from tests.support.documents import ROOT
from tests.support.models import MLP, WIDTH
from tests.support.on_ranks import gather, on_ranks

CPU = torch.device("cpu")
SHIFT_ONE = Decentralized(hierarchical=False, peer_selection="shift_one")


@on_ranks(4)
@pytest.mark.parametrize(("node_size", "expected"), [(2, 3.0), (4, 1.5)])
def test_nodes_average_leaders_meet_and_nodes_are_told(
    rank: int, node_size: int, expected: float
) -> None:
    """0.5 and 2.5 are the nodes' means, 3 their sum; 1.5 is the mean of one node of all."""
    assert dist.group.WORLD is not None
    groups = Groups(dist.group.WORLD, CPU, node_size)
    value = torch.tensor(float(rank))
    groups.reduce(value, lambda ranks, value: ranks.all_reduce(value).wait())
    assert value == expected
    dist.barrier()
    groups.end()


@on_ranks(2)
def test_ranks_may_be_in_different_numbers_of_groups(rank: int) -> None:
    """Torch names groups by their number, and rank 0 alone has made further ones."""
    num_further = 3 if rank == 0 else 0
    further = [dist.new_group([0], use_local_synchronization=True) for _ in range(num_further)]
    trial = Trial(Decentralized(local_world_size=2))
    trial.step()
    trial.handle.detach()
    for group in further:
        dist.destroy_process_group(group)
    first, second = gather(trial.weights)
    assert torch.equal(first, second)


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mean_is_the_sum_divided_and_fits_where_the_sum_does_not(
    rank: int, dtype: torch.dtype
) -> None:
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, CPU)
    values = (torch.arange(1, 100) * (rank + 1) / 7).to(dtype)
    sum_of_all = values.clone()
    communicator.all_reduce(sum_of_all).wait()
    communicator.mean(values)
    assert torch.equal(values, sum_of_all / 3)
    large = torch.tensor([40000.0, 65504.0, -65504.0]).to(dtype)
    expected = large.clone()
    communicator.mean(large)
    assert torch.equal(large, expected)


LARGE: dict[str, Any] = {
    "all": FLAT,
    "shift_one": SHIFT_ONE,
    "hierarchical": Decentralized(local_world_size=2),
    "LowPrecision": LowPrecisionDecentralized(hierarchical=False),
    "ByteGrad": ByteGrad(hierarchical=False),
    "Async": AsyncModelAverage(sync_interval_ms=1),
}


class Large(nn.Module):
    """Weights of float16 of which two are beyond its range together, with gradients of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 40000.0).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * 0 * x


@on_ranks(2)
@pytest.mark.quick("all")
@pytest.mark.parametrize("name", LARGE)
def test_weights_of_float16_may_be_large(name: str) -> None:
    trial = Trial(LARGE[name], Large())
    trial.train([torch.ones(8).half()] * 3)
    stop_s = time.monotonic() + 60
    while not trial.handle.num_communications and time.monotonic() < stop_s:  # in the background
        time.sleep(0.001)
    trial.handle.average()
    trial.handle.detach()
    assert trial.model.weight.tolist() == [40000.0] * 8


@on_ranks(2)
def test_no_group_is_split_off_the_default_one(rank: int) -> None:
    """NCCL would wait for all ranks of the default group, of which some make no group.

    A device is bound to that group as after `init_process_group(device_id=...)`.
    """
    default = dist.group.WORLD
    assert default is not None
    default.bound_device_id = torch.device("cuda", 0)
    try:
        if rank == 0:
            with mock.patch(
                "torch.distributed.distributed_c10d._get_split_source", side_effect=AssertionError
            ):
                _make_group(Communicator(default, CPU), "apart", [0]).end()
        assert default.bound_device_id == torch.device("cuda", 0)
    finally:
        default.bound_device_id = None


def test_ranks_meet_on_ddps_device(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not on the current device, which may be another rank's."""
    device, asked = torch.device("cuda", 3), []

    def broadcast(objects: list[str], **options: Any) -> None:
        asked.append(options["device"])

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(dist, "barrier", lambda _group, device_ids: asked.append(device_ids))
    world = dist.group.WORLD
    assert world is not None
    groups = Groups(world, device, 1)
    groups.ddp.barrier()
    groups.end()
    assert asked == [device, [3]]


def _num_open() -> tuple[int, int]:
    """Return how many process groups there are, and how many descriptors are open."""
    gc.collect()
    num_groups = len(torch.distributed.distributed_c10d._world.pg_map)
    return num_groups, len(os.listdir("/proc/self/fd"))


@on_ranks(4)
@pytest.mark.parametrize(
    "algorithm",
    [Decentralized(local_world_size=2), ALGORITHMS["ByteGrad"], AsyncModelAverage()],
    ids=lambda algorithm: algorithm.name,
)
def test_groups_end_when_the_algorithm_is_detached(algorithm: Any) -> None:
    """The groups are gone, and their connections closed."""
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = [_num_open()]
    for _ in range(4):
        handle = attach(ddp, optimizer, algorithm)
        for _ in range(2):
            ddp(X).sum().backward()
            optimizer.step()
        handle.detach()
        del handle
        seen.append(_num_open())
    before, _, second, _, fourth = seen
    assert second[0] == fourth[0] == before[0]
    assert fourth[1] <= second[1]


# ---- What was sent -----------------------------------------------------------------------------


DEPTH = 4
PLAIN = DEPTH * WIDTH * WIDTH * 4  # bytes that each of two ranks sends in a step with DDP
STEPS = 4
PREFIX = "ddpopt.algorithm."


def _numbers(model: Any) -> dict[str, float]:
    metrics = ddpopt.metrics(model).items()
    return {name.removeprefix(PREFIX): v for name, v in metrics if name.startswith(PREFIX)}


def _train(rank: int, algorithm: Any) -> tuple[Trial, list[dict[str, float]]]:
    """Return the algorithm's metrics after each step."""
    trial = Trial(algorithm, MLP(DEPTH, bias=False), bucket_cap_mb=0.03)
    numbers = []
    for x in inputs_of(rank, STEPS):
        trial.step(x)
        numbers.append(_numbers(trial.ddp))
    return trial, numbers


# How much of what DDP sends a step sends, and how many steps send nothing.
ROWS = {
    "Decentralized": (Decentralized(hierarchical=False, communication_interval=2), 1, 2),
    "shift_one": (SHIFT_ONE, 1, 0),
    "LowPrecision": (LowPrecisionDecentralized(hierarchical=False), 1 / 4, 0),
    "ByteGrad": (ByteGrad(hierarchical=False), 1 / 4, 0),
    "by nodes": (ByteGrad(local_world_size=2), 0, 0),
}


@on_ranks(2)
@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("row", ROWS)
def test_metrics_count_bytes_sent_and_saved(rank: int, row: str) -> None:
    """Bytes are those of values, or of codes and their ranges; saved is what DDP sends beyond."""
    algorithm, part, num_skipped = ROWS[row]
    trial, steps = _train(rank, algorithm)
    assert [numbers["steps"] for numbers in steps] == [1, 2, 3, 4]
    assert steps[-1]["skipped_steps"] == num_skipped
    assert steps[-1]["stale_steps"] == (num_skipped > 0)
    sent = part * PLAIN * (STEPS - num_skipped)
    assert steps[-1]["sent_bytes"] == pytest.approx(sent, rel=0.02)
    for numbers in steps:
        total = numbers["sent_bytes"] + numbers["saved_bytes"]
        assert total == pytest.approx(numbers["steps"] * PLAIN)
        assert numbers["skipped_updates"] == 0
    trial.backward()
    trial.handle.settle()
    last = _numbers(trial.ddp)
    assert (last["skipped_updates"], last["steps"]) == (1, STEPS + 1)
    trial.handle.detach()
    assert _numbers(trial.ddp) == {}


@on_ranks(2)
def test_a_warm_up_reduces_whole_gradients(rank: int) -> None:
    """QAdam's first steps send what DDP sends, the others codes."""
    trial, steps = _train(rank, QAdam(hierarchical=False))
    parts = [b["sent_bytes"] - a["sent_bytes"] for a, b in itertools.pairwise(steps)]
    assert [part / PLAIN for part in parts] == pytest.approx([1, 1 / 4, 1 / 4], rel=0.02)
    assert steps[-1]["skipped_steps"] == 0
    trial.handle.detach()


@on_ranks(2)
def test_rounds_in_the_background_are_counted_by_steps_of_training(rank: int) -> None:
    """A warm-up step counts as one that communicates; after a round weights are not stale."""
    algorithm = AsyncModelAverage(sync_interval_ms=1, warmup_steps=1)
    trial = Trial(algorithm, MLP(DEPTH, bias=False))
    numbers = []
    for x in inputs_of(rank, 4):
        num_rounds = trial.handle.num_communications
        trial.step(x)
        numbers.append(_numbers(trial.ddp))
        while 1 < trial.handle.num_steps < 4 and trial.handle.num_communications == num_rounds:
            time.sleep(0.001)
    first, *_, last = numbers
    assert first["skipped_steps"] == first["stale_steps"] == 0
    assert first["sent_bytes"] == PLAIN
    assert last["stale_steps"] == 0
    assert last["sent_bytes"] >= PLAIN + last["communications"] * PLAIN
    trial.handle.detach()


def test_every_number_has_a_row_in_the_documents(one_rank: None) -> None:
    """These are the metrics of steps and those of algorithms."""
    trial = Trial(ByteGrad(hierarchical=False), MLP(DEPTH), bucket_cap_mb=0.03)
    trial.run = compiled(trial.ddp, inner="eager")
    ddpopt.metrics(trial.ddp)
    trial.train([X] * 3)
    metrics = ddpopt.metrics(trial.ddp)
    assert metrics.keys() >= {"ddpopt.step.ms", "ddpopt.buckets", *trial.handle.metrics()}
    text = (ROOT / "docs" / "reading-the-logs.md").read_text()
    assert [name for name in metrics if f"`{name}`" not in text] == []
    trial.handle.detach()


def test_a_state_that_is_loaded_is_no_communication(one_rank: None) -> None:
    """The state's steps are not counted either; of the next three, the second communicates."""
    trial = Trial(Decentralized(hierarchical=False, communication_interval=2))
    state = trial.handle.state_dict()
    trial.handle.load_state_dict({**state, "num_steps": 13, "num_communications": 7})
    trial.train([X] * 3)
    numbers = _numbers(trial.ddp)
    assert (numbers["steps"], numbers["skipped_steps"], numbers["stale_steps"]) == (3, 2, 1)
    trial.handle.detach()


# ---- Flat weights ------------------------------------------------------------------------------


def _parameters() -> list[nn.Parameter]:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    kinds = [torch.randn(7, 3), image, torch.randn(()), torch.randn(5).double(), torch.randn(0)]
    return [nn.Parameter(value) for value in kinds]


def test_assigning_a_copy_changes_nothing_and_keeps_storage() -> None:
    parameters = _parameters()
    before = [(p.detach().clone(), p.data_ptr(), p.stride()) for p in parameters]
    weights = FlatWeights(parameters)
    flat = weights.copy()
    assert sorted((v.dtype, v.numel()) for v in flat if v.dtype == torch.float64) == [
        (torch.float64, 5)
    ]
    weights.assign(flat)
    for parameter, (value, address, stride) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value)
        assert (parameter.data_ptr(), parameter.stride()) == (address, stride)


def test_add_adds_elementwise_in_every_layout() -> None:
    parameters = _parameters()
    expected = [p.detach() * 3 for p in parameters]
    weights = FlatWeights(parameters)
    weights.add([2 * values for values in weights.copy()])
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_moving_keeps_what_was_written_and_takes_the_mean_elsewhere(dtype: torch.dtype) -> None:
    """It is bitwise the mean where nothing was written, also where a difference would overflow."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, -60000.0, torch.nan, 5.0], dtype=dtype))
    weights = FlatWeights([parameter])
    sent = weights.copy()
    mean = torch.tensor([7.0, 0.1, torch.inf, 60000.0, torch.nan, 6.0], dtype=dtype)
    weights.move(sent, [mean])
    assert torch.equal(parameter[[0, 1, 2, 3, 5]], mean[[0, 1, 2, 3, 5]])
    with torch.no_grad():
        parameter.copy_(sent[0])
        parameter[1:5] += 1
        parameter[4] = 9
    weights.move(sent, [mean])
    moved = torch.tensor([7, 1.1, 4, 60001 if dtype.itemsize > 2 else 60000, 9, 6], dtype=dtype)
    torch.testing.assert_close(parameter.detach(), moved)


def test_buckets_keep_their_limit_and_never_divide_a_parameter() -> None:
    parameters = [nn.Parameter(torch.randn(n)) for n in (3, 3, 100, 1, 4)]
    sizes = [v.numel() for v in FlatWeights(parameters, bucket_bytes=24).copy()]
    assert sizes == [6, 100, 5]


def test_a_copy_is_not_a_view() -> None:
    parameter = nn.Parameter(torch.ones(3))
    (values,) = FlatWeights([parameter]).copy()
    values.zero_()
    assert parameter.tolist() == [1, 1, 1]


def test_weights_in_a_graph_can_be_assigned_after_backward() -> None:
    parameter = nn.Parameter(torch.ones(3))
    weights = FlatWeights([parameter])
    loss = parameter.square().sum()
    weights.assign([torch.zeros(3)])
    with pytest.raises(RuntimeError, match="inplace"):  # so nothing is computed with wrong values
        loss.backward()


# ---- Worker ------------------------------------------------------------------------------------


class _Owner:
    pass


def _ends(worker: Worker) -> bool:
    assert worker._thread is not None
    for _ in range(10_000):
        if not worker._thread.is_alive():
            return True
        time.sleep(0.01)
    return False


def test_tasks_run_in_order_on_one_other_thread_without_gradients() -> None:
    owner = _Owner()
    worker, never_started = Worker(owner, CPU), Worker(owner, CPU)
    never_started.close()
    seen: list[tuple[int, int, bool]] = []

    def note(k: int) -> int:
        seen.append((k, threading.get_ident(), torch.is_grad_enabled()))
        return k

    futures = [worker.submit(lambda k=k: note(k)) for k in range(20)]
    assert [future.wait() for future in futures] == list(range(20))
    assert [k for k, _, _ in seen] == list(range(20))
    assert {thread for _, thread, _ in seen}.isdisjoint({threading.get_ident()})
    assert not any(grad for _, _, grad in seen)
    worker.close()
    assert _ends(worker)
    for closed in (worker, never_started):
        with pytest.raises(AttachError, match="is over"):  # nobody would run it
            closed.submit(lambda: 1)


def test_an_exception_is_raised_to_the_one_who_waits_and_work_goes_on() -> None:
    owner = _Owner()
    worker = Worker(owner, CPU)

    def fail() -> None:
        raise ValueError("weights are 3")

    failed, done = worker.submit(fail), worker.submit(lambda: 7)
    with pytest.raises(Exception, match="weights are 3"):
        failed.wait()
    assert done.wait() == 7
    worker.close()


def test_the_thread_ends_when_its_owner_is_collected() -> None:
    owner = _Owner()
    worker = owner.worker = Worker(owner, CPU)  # type: ignore[attr-defined]
    worker.submit(lambda kept=owner: kept).wait()  # a task that refers to it
    del owner
    gc.collect()
    assert _ends(worker)
