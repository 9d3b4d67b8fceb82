"""`StepTimer`: the order in which it notes a step, and what belongs to none.

tests/planning/test_stopwatch.py has the times of steps, tests/inspection/test_recorder.py backwards
within backwards.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.steps import clock as clocks
from ddpopt.steps.clock import Clock
from ddpopt.steps.timer import StepTimer
from tests.support.fake_clock import FakeClock
from tests.support.models import MLP, WIDTH

X = torch.ones(2, WIDTH)
NUM_TO_SETTLE = 2  # steps, after which DDP has its buckets


def _timed(*, static_graph: bool = False, **more: Any) -> tuple[DistributedDataParallel, StepTimer]:
    """A DDP module of two weights, each in a bucket, and its timer."""
    model = MLP(2, bias=False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, static_graph=static_graph)
    return ddp, StepTimer(ddp, Clock(torch.device("cpu")), **more)


def _forward(ddp: DistributedDataParallel, timer: StepTimer) -> torch.Tensor:
    timer.begin_forward()
    output: torch.Tensor = ddp(X)
    timer.end_forward()
    return output.sum()


def test_a_gradient_is_ready_before_its_bucket_is_launched_and_that_is_noted_after(
    one_rank: None,
) -> None:
    notes: list[str] = []

    def reduce(_, bucket):  # DDP takes no annotations but its own
        notes.append("allreduce")
        reduced = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    ddp, timer = _timed(
        on_ready=lambda index: notes.append(f"ready {index}"),
        on_launched=lambda: notes.append("launched"),
        on_end=lambda: notes.append("end"),
    )
    ddp.register_comm_hook(None, reduce)
    with FakeClock(tick_s=1).replacing_time_of(clocks):
        for _ in range(NUM_TO_SETTLE + 1):
            notes.clear()
            _forward(ddp, timer).backward()
    one_bucket = ["allreduce", "launched"]
    assert notes == ["ready 1", *one_bucket, "ready 0", *one_bucket, "end"]
    step = timer.steps[-1]
    times = [step.began, step.forward_ended, step.ready[1], step.launched[1]]
    times += [step.ready[0], step.launched[0], step.backward_ended]
    assert times == sorted(times)
    assert len(set(times)) == 7
    assert timer.num_backwards == len(timer.steps) == NUM_TO_SETTLE + 1


def test_forwards_before_a_backward_are_of_one_step(one_rank: None) -> None:
    ddp, timer = _timed()
    assert timer.begin_forward()
    first = ddp(X)
    assert not timer.begin_forward()
    (first.sum() + ddp(X).sum()).backward()
    (step,) = timer.steps
    assert step.num_forwards == 2
    assert timer.begin_forward()
    assert [step.num_forwards for step in timer.steps] == [2, 1]


def test_a_forward_with_all_parameters_frozen_is_in_no_step(one_rank: None) -> None:
    ddp, timer = _timed()
    ddp.requires_grad_(False)
    assert not timer.begin_forward()
    timer.end_forward()
    assert timer.steps == []
    ddp.module.layers[0].requires_grad_(True)  # one of two
    assert timer.begin_forward()


def test_a_gradient_in_no_step_is_unreduced_until_a_steps_backward_ends(one_rank: None) -> None:
    """Gradients of the module in DDP, of a second backward, and of `no_sync` are in no step."""
    ddp, timer = _timed()

    def finish_a_step() -> None:
        _forward(ddp, timer).backward()
        assert not timer.has_unreduced

    assert not timer.has_unreduced
    ddp.module(X).sum().backward()
    assert timer.has_unreduced
    finish_a_step()
    ddp.module(X).sum().backward()
    assert timer.has_unreduced
    finish_a_step()
    timer.skip_forward()
    with ddp.no_sync():
        ddp(X).sum().backward()
    assert timer.has_unreduced
    finish_a_step()
    assert timer.num_backwards == len(timer.steps) == 3


def test_a_forward_without_communication_ends_the_step_for_gradients_that_it_lacked_too(
    one_rank: None,
) -> None:
    """A static graph may leave a parameter unused, whose first gradient comes under `no_sync`."""
    ddp, timer = _timed(static_graph=True)
    last = ddp.module.layers[-1].requires_grad_(False)
    _forward(ddp, timer).backward()
    (step,) = timer.steps
    noted = dict(step.ready)
    assert 0 < len(noted) < len(list(ddp.parameters()))
    last.requires_grad_(True)
    timer.skip_forward()
    with ddp.no_sync():
        ddp(X).sum().backward()
    assert step.ready == noted
    assert timer.has_unreduced


def test_of_the_gradients_only_those_that_are_watched_are_noted(one_rank: None) -> None:
    """Once the timer has been stopped, no gradient is noted."""
    indices: list[int] = []
    ddp, timer = _timed(on_ready=indices.append)
    timer.watch_only({0})
    _forward(ddp, timer).backward()
    assert indices == [0]
    assert timer.num_backwards == 1
    timer.stop()
    ddp(X).sum().backward()
    assert indices == [0]


def test_a_timer_does_not_keep_its_module(one_rank: None) -> None:
    """Once the module is gone, no step begins."""
    ddp, timer = _timed()
    _forward(ddp, timer).backward()
    module = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert module() is None
    assert not timer.begin_forward()


def test_a_forward_with_some_parameters_frozen_is_in_a_step_and_one_with_all_in_none(
    one_rank: None,
) -> None:
    ddp, timer = _timed()
    ddp.module.layers[0].requires_grad_(False)
    assert timer.begin_forward()
    ddp.requires_grad_(False)
    assert not timer.begin_forward()
    assert [step.num_forwards for step in timer.steps] == [1]
