"""What is recorded and explained of sharded updates: sums in backward, gathers in forward."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import time
from typing import Any

import pytest
import torch

import ddpopt
from ddpopt.algorithms import ShardedUpdate, attach
from ddpopt.inspection.exchanges import Follower
from ddpopt.inspection.page import render_page
from ddpopt.inspection.recording import RecordedExchange
from ddpopt.planning import AllreduceCost, timer
from tests.inspection.test_recorder import SETTLED, _model
from tests.inspection.test_traces import _check
from tests.planning.test_rebucket import _plan_for
from tests.support.models import WIDTH, batches
from tests.support.ranks import Ranks

CPU = torch.device("cpu")


class _Work:
    """A work of a process group that ends when the test says so, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done = threading.Event()
        self._error = error

    def wait(self) -> None:
        assert self.done.wait(60)
        if self._error is not None:
            raise self._error


def test_an_exchange_ends_when_its_works_do_whoever_waits_for_it() -> None:
    """Nobody has asked for it by then; who does later has it at once."""
    follower = Follower(timer.Clock(CPU))
    exchange, work = RecordedExchange(0, 100, launched_s=time.perf_counter()), _Work()
    (waiter,) = follower.follow(exchange, [work])
    assert exchange.finished_s == 0
    work.done.set()
    follower.close()
    assert exchange.finished_s > exchange.launched_s
    assert exchange.wanted_s == 0
    waiter.wait()
    assert exchange.finished_s < exchange.wanted_s < exchange.had_s


def test_what_goes_wrong_is_raised_to_who_waits() -> None:
    follower = Follower(timer.Clock(CPU))
    work = _Work(RuntimeError("Connection closed by peer"))
    (waiter,) = follower.follow(RecordedExchange(0, 100, launched_s=0.5), [work])
    work.done.set()
    with pytest.raises(RuntimeError, match="Connection closed"):
        waiter.wait()
    follower.close()


def _record(rank: int, kind: str) -> Any:
    ddp, model = _model(kind)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = attach(ddp, optimizer, ShardedUpdate(overlap_forward=True))
    plan = dataclasses.replace(
        _plan_for(ddp.module, (2, 2, 2)),
        cost=AllreduceCost(startup_s=1e-3, s_per_byte=1e-7),
        communication="sharded",
    )

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    inputs = batches(rank, [(8, WIDTH)] * (SETTLED + 4))
    for x in inputs[:SETTLED]:
        step(x)
    before = str(ddpopt.explain(ddp))
    with ddpopt.record(ddp) as recording:
        for x in inputs[SETTLED:]:
            step(x)
    explained = ddpopt.explain(ddp, plan)
    step(inputs[0])  # what was still followed is received
    handle.detach()
    return recording, before, str(explained), explained.to_dict(), str(ddpopt.explain(ddp))


@pytest.mark.parametrize("kind", ["backward", "uncompiled"])
def test_sums_and_gathers_are_recorded_shown_and_traced(ranks: Ranks, kind: str) -> None:
    """The last bucket first, behind the forward of the next step, and each before it is read."""
    for recording, before, text, content, after in ranks.run(_record, kind):
        assert recording.notes == ()
        first, *steps = recording.steps
        assert not first.gathers  # they began before it was recorded
        assert len(steps) == 3
        for earlier, step in itertools.pairwise(recording.steps):
            assert all(bucket.finished_s for bucket in step.buckets)
            assert [gather.index for gather in step.gathers] == [2, 1, 0]
            summed_s = max(bucket.finished_s for bucket in earlier.buckets)
            for gather in step.gathers:
                assert summed_s < gather.launched_s < gather.finished_s <= gather.had_s
                assert gather.wanted_s <= gather.had_s < step.backward_stop_s
                assert gather.num_bytes == 2 * WIDTH * WIDTH * 4
            assert 0 <= step.waited_s <= step.gathered_s + step.forward_s
        trace = recording.trace()
        _check(trace)
        names = [event["name"] for event in trace["traceEvents"]]
        for name in ("sum bucket 0", "gather bucket 2", "wait for bucket 0"):
            assert name in names
        assert not any(name.startswith("allreduce") for name in names)
        if kind == "uncompiled":  # of which explain knows nothing
            continue
        assert "updates are sharded" in before
        assert re.search(r"measured: gathers take [\d.]+ ms, of which \d+% hides", text)
        assert re.search(r"predicted: gathers take [\d.]+ ms, of which \d+% hides", text)
        assert content["communication"] == "sharded"
        for bucket in content["buckets"]:
            for name in ("measured_gather", "predicted_gather"):
                assert bucket[name]["launched_s"] < bucket[name]["finished_s"]
                assert bucket[name]["launched_s"] < 0
        assert "predicted_gather" in render_page(content)
        assert "updates are sharded" not in after
