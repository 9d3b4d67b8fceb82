"""What algorithms tell `ddpopt.metrics`: bytes that follow from sizes, steps that were skipped."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    GradientAllReduce,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    ShardedUpdate,
    attach,
)
from ddpopt.algorithms.comm import Tally
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks
from tests.system.documents import ROOT

DEPTH = 4
PLAIN = DEPTH * WIDTH * WIDTH * 4  # bytes that each of two ranks sends in a step with DDP
STEPS = 4
PREFIX = "ddpopt.algorithm."


def _numbers(model: Any) -> dict[str, float]:
    found = ddpopt.metrics(model).items()
    return {name.removeprefix(PREFIX): v for name, v in found if name.startswith(PREFIX)}


def _train(rank: int, algorithm: Any) -> list[dict[str, float]]:
    """Return the algorithm's metrics after each step, the last with no update, and detached."""
    ddp = DistributedDataParallel(MLP(DEPTH, bias=False), bucket_cap_mb=0.03)
    kind = QAdamOptimizer if isinstance(algorithm, QAdam) else torch.optim.SGD
    given = {"warmup_steps": 2} if isinstance(algorithm, QAdam) else {}
    optimizer = kind(ddp.parameters(), lr=0.01, **given)
    handle = attach(ddp, optimizer, algorithm)
    found = []
    for step, x in enumerate(batches(rank, [(4, WIDTH)] * (STEPS + 1))):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        if step < STEPS:
            optimizer.step()
            found.append(_numbers(ddp))
    handle.settle()
    found.append(_numbers(ddp))
    handle.detach()
    return [*found, _numbers(ddp)]


# How much of what DDP sends a step sends, and how many steps send nothing.
ROWS = {
    "GradientAllReduce": (GradientAllReduce(), 1, 0),
    "Decentralized": (Decentralized(hierarchical=False, communication_interval=2), 1, 2),
    "shift_one": (Decentralized(hierarchical=False, peer_selection="shift_one"), 1, 0),
    "LowPrecision": (LowPrecisionDecentralized(hierarchical=False), 1 / 4, 0),
    "ByteGrad": (ByteGrad(hierarchical=False), 1 / 4, 0),
    "by nodes": (ByteGrad(local_world_size=2), 0, 0),
    "ShardedUpdate": (ShardedUpdate(), 7 / 8, 0),  # the last step's parameters are sent after it
}


@pytest.mark.parametrize("row", ROWS)
def test_what_was_sent_is_told(ranks: Ranks, row: str) -> None:
    """By values or codes and their ranges; plain DDP is what it is compared with."""
    algorithm, part, num_skipped = ROWS[row]
    for *steps, last, detached in ranks.run(_train, algorithm):
        assert [found["steps"] for found in steps] == [1, 2, 3, 4]
        assert steps[-1]["skipped_steps"] == num_skipped
        assert steps[-1]["stale_steps"] == (num_skipped > 0)
        sent = part * PLAIN * (STEPS - num_skipped)
        assert steps[-1]["sent_bytes"] == pytest.approx(sent, rel=0.02)
        for found in steps:
            total = found["sent_bytes"] + found["saved_bytes"]
            assert total == pytest.approx(found["steps"] * PLAIN)
        assert [found["skipped_updates"] for found in steps] == [0] * STEPS
        assert last["skipped_updates"] == 1
        assert last["steps"] == STEPS + 1
        assert detached == {}


def test_a_warm_up_reduces_whole_gradients(ranks: Ranks) -> None:
    """QAdam's first steps send what DDP sends, the others codes."""
    for *steps, _, _ in ranks.run(_train, QAdam(hierarchical=False)):
        parts = [b["sent_bytes"] - a["sent_bytes"] for a, b in itertools.pairwise(steps)]
        assert [part / PLAIN for part in parts] == pytest.approx([1, 1 / 4, 1 / 4], rel=0.02)
        assert steps[-1]["skipped_steps"] == 0


def _train_beside_rounds(rank: int) -> list[dict[str, float]]:
    ddp = DistributedDataParallel(MLP(DEPTH, bias=False), broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = attach(ddp, optimizer, AsyncModelAverage(sync_interval_ms=1, warmup_steps=1))
    found = []
    for x in batches(rank, [(4, WIDTH)] * 3):
        num_rounds = handle.num_communications
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        found.append(_numbers(ddp))
        while handle.num_steps > 1 and handle.num_communications == num_rounds:
            time.sleep(0.001)
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    found.append(_numbers(ddp))
    handle.detach()
    return found


def test_rounds_in_the_background_are_counted_by_steps_of_training(ranks: Ranks) -> None:
    """A warm-up step counts as one that communicates; after a round weights are not stale."""
    for first, *_, last in ranks.run(_train_beside_rounds):
        assert first["skipped_steps"] == first["stale_steps"] == 0
        assert first["sent_bytes"] == PLAIN
        assert last["stale_steps"] == 0
        assert last["sent_bytes"] >= PLAIN + last["communications"] * PLAIN


def test_every_number_has_a_row_in_the_documents(one_rank: None) -> None:
    """Those of steps and those of algorithms."""
    ddp = DistributedDataParallel(MLP(DEPTH), bucket_cap_mb=0.03)
    model = torch.compile(ddp, backend="ddpopt", options={"inner": "eager"})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = attach(ddp, optimizer, GradientAllReduce())
    ddpopt.metrics(ddp)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    found = ddpopt.metrics(ddp)
    assert found.keys() >= {"ddpopt.step.ms", "ddpopt.buckets", *handle.metrics()}
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in found if f"`{name}`" not in text] == []
    handle.detach()


def test_a_state_that_is_loaded_is_no_communication() -> None:
    tally = Tally()
    tally.known_communications = 7
    tally.end_step(7)
    tally.end_step(8)
    tally.end_step(8)
    assert (tally.num_steps, tally.num_skipped_steps, tally.stale_steps) == (3, 2, 1)
