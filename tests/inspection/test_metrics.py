"""`metrics`: numbers of real steps of two ranks; those that are not known are left out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.inspection import metrics
from ddpopt.steps import clock as clocks
from tests.support.beside import compiled
from tests.support.fake_clock import FakeClock
from tests.support.models import MLP, WIDTH, batches, train
from tests.support.on_ranks import on_ranks

STEP_S = 0.05
TIMES = {
    "ddpopt.forward.ms",
    "ddpopt.backward.ms",
    "ddpopt.communication.ms",
    "ddpopt.communication.exposed_ms",
}


def _train(rank: int, is_compiled: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics before some steps, which begin `STEP_S` apart, and after them."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    run = compiled(ddp) if is_compiled else ddp
    first = ddpopt.metrics(run)
    with FakeClock().replacing_time_of(clocks) as clock:
        for size in (4, 4, 4, 4, 6):
            clock.pass_time(STEP_S)
            train(ddp, batches(rank, [(size, WIDTH)]), run)
            last = ddpopt.metrics(run)
    return first, last


@on_ranks(2)
def test_a_compiled_model_has_times_and_counts_of_its_steps(rank: int) -> None:
    first, last = _train(rank, is_compiled=True)
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


@on_ranks(2)
def test_an_uncompiled_model_has_times_and_no_sections_or_graphs(rank: int) -> None:
    _, last = _train(rank, is_compiled=False)
    assert last.keys() >= TIMES
    assert last["ddpopt.step.ms"] == pytest.approx(STEP_S * 1e3)
    assert last["ddpopt.sections"] == last["ddpopt.graphs"] == 0


@on_ranks(2)
def test_ddps_numbers_of_communication_are_left_out_beside_an_algorithm(rank: int) -> None:
    """DDP logs bytes that it would have sent, and the time that the algorithm's hook took."""
    source: Any = lambda: {"ddpopt.algorithm.steps": 4.0}  # noqa: E731  # an algorithm's handle
    ddp = DistributedDataParallel(MLP())
    metrics.set_algorithm_metrics(ddp, lambda: source)
    train(ddp, batches(rank, [(4, WIDTH)] * 4))
    during = ddpopt.metrics(ddp)
    assert during["ddpopt.algorithm.steps"] == 4
    assert not [name for name in during if "communication" in name]
    assert during.keys() >= {"ddpopt.forward.ms", "ddpopt.backward.ms"}
    source = None
    assert ddpopt.metrics(ddp).keys() >= TIMES


def test_metrics_refuses_what_is_no_ddp_module() -> None:
    with pytest.raises(TypeError, match="Linear"):
        ddpopt.metrics(nn.Linear(2, 2))
