"""`metrics`: numbers of real steps of two ranks, and what is not known is left out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.inspection import metrics
from tests.support.models import MLP, WIDTH, batches, train
from tests.support.ranks import Ranks

PAUSE_S = 0.05
TIMES = {
    "ddpopt.forward.ms",
    "ddpopt.backward.ms",
    "ddpopt.communication.ms",
    "ddpopt.communication.exposed_ms",
}


def _train(rank: int, kind: str) -> list[dict[str, float]]:
    """Return the metrics before, within and after some steps."""
    torch._dynamo.reset()
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    options = {"inner": "aot_eager"}
    run: Any = ddp
    if kind == "compiled":
        run = torch.compile(ddp, backend="ddpopt", options=options)
    found = [ddpopt.metrics(run)]
    for size in (4, 4, 4, 4, 6):
        time.sleep(PAUSE_S)
        train(ddp, batches(rank, [(size, WIDTH)]), run)
        found.append(ddpopt.metrics(run))
    return found


def test_a_compiled_models_steps_are_told(ranks: Ranks) -> None:
    for first, *_, last in ranks.run(_train, "compiled"):
        assert not TIMES & first.keys()
        assert first["ddpopt.graphs"] == 0
        assert last.keys() >= TIMES
        assert last["ddpopt.step.ms"] >= PAUSE_S * 1e3
        assert last["ddpopt.sections"] > last["ddpopt.graphs"] == 2  # batches of two sizes
        assert last["ddpopt.recompiles"] == 1
        assert last["ddpopt.buckets"] > 1
        assert last["ddpopt.communication.bytes"] == 6 * (WIDTH + 1) * WIDTH * 4
        assert 0 <= last["ddpopt.communication.exposed_ms"] <= last["ddpopt.communication.ms"]
        assert last["ddpopt.communication.exposed_ms"] <= last["ddpopt.backward.ms"]
        bits = last["ddpopt.communication.bytes"] * 8  # of two ranks each moves all of them once
        measured_s = last["ddpopt.communication.ms"] / 1e3
        assert last["ddpopt.communication.bus_gbit_per_s"] == pytest.approx(bits / measured_s / 1e9)
        assert last["ddpopt.sampled_step"] > 2
        assert all(type(value) in (int, float) for value in last.values())


def test_an_uncompiled_model_has_times_too(ranks: Ranks) -> None:
    for found in ranks.run(_train, "uncompiled"):
        assert found[-1].keys() >= TIMES
        assert found[-1]["ddpopt.sections"] == found[-1]["ddpopt.graphs"] == 0


def _train_with_source(rank: int) -> list[dict[str, float]]:
    """Return the metrics while a source is there, and once it has gone."""
    ddp = DistributedDataParallel(MLP())
    metrics.set_source(ddp, lambda: source)
    source: Any = lambda: {"ddpopt.algorithm.steps": 4.0}  # noqa: E731  # an algorithm's handle
    train(ddp, batches(rank, [(4, WIDTH)] * 4))
    found = [ddpopt.metrics(ddp)]
    source = None
    return [*found, ddpopt.metrics(ddp)]


def test_of_an_algorithms_communication_ddp_knows_nothing(ranks: Ranks) -> None:
    """Its log has what it would have sent, in the time that a hook took: that is left out."""
    for during, after in ranks.run(_train_with_source):
        assert during["ddpopt.algorithm.steps"] == 4
        assert not [name for name in during if "communication" in name]
        assert during.keys() >= {"ddpopt.forward.ms", "ddpopt.backward.ms"}
        assert after.keys() >= TIMES


def test_something_else_is_an_error() -> None:
    with pytest.raises(TypeError, match="takes a DistributedDataParallel module"):
        ddpopt.metrics(nn.Linear(2, 2))
