"""`metrics`: numbers of real steps of two ranks; those that are not known are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.inspection import metrics
from ddpopt.steps import clock as clocks
from tests.support.fake_clock import FakeClock
from tests.support.models import MLP, WIDTH, batches, train
from tests.support.ranks import Ranks

STEP_S = 0.05
TIMES = {
    "ddpopt.forward.ms",
    "ddpopt.backward.ms",
    "ddpopt.communication.ms",
    "ddpopt.communication.exposed_ms",
}


def _train(rank: int, kind: str) -> list[dict[str, float]]:
    """Return the metrics before, within and after some steps, which begin `STEP_S` apart."""
    torch._dynamo.reset()
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    options = {"inner": "aot_eager"}
    run: Any = ddp
    if kind == "compiled":
        run = torch.compile(ddp, backend="ddpopt", options=options)
    values = [ddpopt.metrics(run)]
    with FakeClock().replacing_time_of(clocks) as clock:
        for size in (4, 4, 4, 4, 6):
            clock.pass_time(STEP_S)
            train(ddp, batches(rank, [(size, WIDTH)]), run)
            values.append(ddpopt.metrics(run))
    return values


def test_a_compiled_model_has_times_and_counts_of_its_steps(ranks: Ranks) -> None:
    for first, *_, last in ranks.run(_train, "compiled"):
        assert not TIMES & first.keys()
        assert first["ddpopt.graphs"] == 0
        assert last.keys() >= TIMES
        assert last["ddpopt.step.ms"] == pytest.approx(STEP_S * 1e3)
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
    """The numbers of sections and graphs are 0."""
    for *_, last in ranks.run(_train, "uncompiled"):
        assert last.keys() >= TIMES
        assert last["ddpopt.step.ms"] == pytest.approx(STEP_S * 1e3)
        assert last["ddpopt.sections"] == last["ddpopt.graphs"] == 0


def _train_with_source(rank: int) -> list[dict[str, float]]:
    """Return the metrics while a source is there, and once it has gone."""
    ddp = DistributedDataParallel(MLP())
    metrics.set_source(ddp, lambda: source)
    source: Any = lambda: {"ddpopt.algorithm.steps": 4.0}  # noqa: E731  # an algorithm's handle
    train(ddp, batches(rank, [(4, WIDTH)] * 4))
    during = ddpopt.metrics(ddp)
    source = None
    return [during, ddpopt.metrics(ddp)]


def test_ddps_numbers_of_communication_are_left_out_beside_an_algorithm(ranks: Ranks) -> None:
    """DDP logs bytes that it would have sent, and the time that the algorithm's hook took."""
    for during, after in ranks.run(_train_with_source):
        assert during["ddpopt.algorithm.steps"] == 4
        assert not [name for name in during if "communication" in name]
        assert during.keys() >= {"ddpopt.forward.ms", "ddpopt.backward.ms"}
        assert after.keys() >= TIMES


def test_what_is_no_ddp_module_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a DistributedDataParallel module"):
        ddpopt.metrics(nn.Linear(2, 2))
