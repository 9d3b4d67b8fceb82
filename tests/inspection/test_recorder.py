"""`record`: the times that it notes of real steps on two ranks, by the order of events."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import re
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt import _torch
from ddpopt.inspection import recorder
from ddpopt.inspection.page import render_page
from ddpopt.inspection.recording import MedianStep, RecordedSection, RecordedStep, Recording
from ddpopt.planning.timeline import BucketTimes
from ddpopt.steps import clock, sections
from ddpopt.steps.forwards import find_subscriber
from ddpopt.steps.timer import StepTimer
from tests.support.beside import compiled
from tests.support.fresh import run_fresh
from tests.support.models import MLP, WIDTH, batches
from tests.support.on_ranks import gather, on_ranks

SETTLED = 4  # steps, after which DDP tells its buckets
CAP_MB = 0.03  # two layers a bucket


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a model is compiled, and which sections its backward then has, in their order."""

    options: dict[str, Any] | None
    backward: list[int] = field(default_factory=list)


KINDS = {
    "forward": _Kind({"split": "forward"}, [2, 1, 0]),
    "backward": _Kind({"split": "backward"}, [0, 1, 2]),
    "whole": _Kind({"enabled": False}, [0]),
    "no AOTAutograd": _Kind({"inner": "eager"}),
    "uncompiled": _Kind(None),
}


def _model(kind: str, widths: Sequence[int] = ()) -> tuple[DistributedDataParallel, Any]:
    """An MLP of three buckets, or with hidden layers of these widths."""
    module = MLP(bias=False)
    for k, width in enumerate(widths):
        module.layers[2 * k] = nn.Linear(WIDTH, width, bias=False)
        module.layers[2 * k + 1] = nn.Linear(width, WIDTH, bias=False)
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP_MB)
    options = KINDS[kind].options
    return ddp, ddp if options is None else compiled(ddp, **options)


def _steps(rank: int, model: Any, num_steps: int) -> None:
    for x in batches(rank, [(8, WIDTH)] * num_steps):
        model(x).sum().backward()


def _record(rank: int, model: Any) -> tuple[RecordedStep, ...]:
    """Record three steps once buckets are settled."""
    _steps(rank, model, SETTLED)
    with ddpopt.record(model) as recording:
        _steps(rank, model, 3)
    assert recording.notes == ()
    assert len(recording.steps) == 3
    return recording.steps


@on_ranks(2)
@pytest.mark.quick("forward")
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_noted_in_its_order(rank: int, kind: str) -> None:
    """Buckets are ready, launched, and finished before DDP is done; sections lie in the step.

    In split graphs a bucket is launched before the next section begins.
    """
    for step in _record(rank, _model(kind)[1]):
        assert step.forward_start_s < step.forward_stop_s < step.backward_stop_s
        assert [bucket.index for bucket in step.buckets] == [0, 1, 2]
        for bucket in step.buckets:
            assert bucket.num_bytes == 2 * WIDTH * WIDTH * 4
            assert step.forward_stop_s < bucket.ready_s < bucket.launched_s
            assert bucket.launched_s < bucket.finished_s <= step.backward_stop_s
        assert step.exposed_s is not None
        assert 0 < step.exposed_s < step.backward_s
        for section in step.sections:
            start_s = step.forward_start_s if section.kind == "forward" else step.forward_stop_s
            assert start_s < section.start_s < section.stop_s < step.backward_stop_s
        backward = [section for section in step.sections if section.kind == "backward"]
        assert [section.section for section in backward] == KINDS[kind].backward
        for earlier, later in itertools.pairwise(backward):
            assert earlier.stop_s < later.start_s
        if len(backward) == 3:
            num_started = [step.num_started(bucket.launched_s) for bucket in step.buckets]
            assert num_started == [1, 2, 3]


def _hook_that_notes(notes: list[tuple[float, list[float]]]) -> Any:
    def launch(_, bucket):  # DDP takes no annotations but its own
        before_s = time.perf_counter()
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        done: list[float] = []
        notes.append((before_s, done))
        launching_thread = threading.get_ident()

        def finish(future: Any) -> torch.Tensor:
            # Run at once, in this thread, where the allreduce was done before it was attached:
            # then it does not tell when that was.
            if threading.get_ident() != launching_thread:
                done.append(time.perf_counter())
            return future.value()[0]

        return work.get_future().then(finish)

    return launch


@on_ranks(2)
def test_times_agree_with_a_comm_hooks(rank: int) -> None:
    """The launch comes after the hook was called, and the finish after its callback was run.

    None finishes before both ranks have launched it; they share a clock.
    """
    notes: list[tuple[float, list[float]]] = []
    widths = (WIDTH, WIDTH + 8, WIDTH + 16)  # so that sizes tell the allreduces apart
    ddp, model = _model("backward", widths)
    ddp.register_comm_hook(None, _hook_that_notes(notes))
    buckets = [bucket for step in _record(rank, model) for bucket in step.buckets]
    assert len(buckets) == 9
    for bucket, (before_s, done) in zip(buckets, notes[-9:], strict=True):
        assert bucket.ready_s < before_s < bucket.launched_s < bucket.finished_s
        for done_s in done:
            assert bucket.launched_s < done_s <= bucket.finished_s
    times_of_ranks = gather([(bucket.launched_s, bucket.finished_s) for bucket in buckets])
    for times in zip(*times_of_ranks, strict=True):
        assert max(launched_s for launched_s, _ in times) < min(stop_s for _, stop_s in times)


def _in_order_of_launch(order: tuple[int, ...]) -> list[int]:
    """Return the order found for allreduces of 8, 9 and 9 elements that started in `order`."""
    started = [
        recorder.Allreduce(float(place), 5.0, num_elements=(8, 9, 9)[bucket])
        for place, bucket in enumerate(order)
    ]
    launched = recorder.in_order_of_launch(started, (8, 9, 9))
    return [order[started.index(allreduce)] for allreduce in launched]


def test_allreduces_that_start_out_of_order_are_known_by_their_size() -> None:
    """Equal ones are known by their start, as all are where a hook has others in their place."""
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):
        assert _in_order_of_launch(order) == [0, 1, 2]
    assert _in_order_of_launch((2, 1, 0)) == [0, 2, 1]
    others = [recorder.Allreduce(1.0, 2.0, 3), recorder.Allreduce(2.0, 3.0, 4)]
    assert recorder.in_order_of_launch(others, (8, 9)) == others


def test_explain_and_the_page_have_the_recorded_allreduces(one_rank: None) -> None:
    """The page counts their times from the end of forward."""
    ddp, model = _model("backward")
    _steps(0, model, SETTLED)
    with ddpopt.record(model) as recording:
        _steps(0, model, 1)
    (step,) = recording.steps
    explanation = ddpopt.explain(ddp)
    assert "medians of 1 " in str(explanation)
    assert "after 2 of 3" in str(explanation)
    page = render_page(explanation.to_dict())
    match = re.search(r'id="explanation"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert match is not None
    times_on_page = [bucket["measured"] for bucket in json.loads(match[1])["buckets"]]
    assert len(times_on_page) == len(step.buckets) == 3
    for times, bucket in zip(times_on_page, step.buckets, strict=True):
        for name, time_s in times.items():
            assert time_s == pytest.approx(getattr(bucket, name) - step.forward_stop_s)


def _step(at_s: float, finished_s: float | None, num_bytes: int = 8) -> RecordedStep:
    """A step of one section and one bucket; forward ends 1 s after the step's begin."""
    return RecordedStep(
        forward_start_s=at_s,
        forward_stop_s=at_s + 1,
        backward_stop_s=at_s + 9,
        sections=(RecordedSection("0/0", 0, "backward", at_s + 2, at_s + 3),),
        buckets=(BucketTimes(0, num_bytes, at_s + 3, at_s + 4, finished_s),),
    )


def test_medians_are_of_steps_like_the_last_one() -> None:
    """Earlier steps had other buckets; an unknown finish of an allreduce does not count."""
    steps = (_step(0, 1, num_bytes=4), _step(10, 17), _step(20, None), _step(30, 39))
    recording = Recording(rank=0, steps=steps)
    assert "medians of 3 of 4 steps (1 ran other sections or buckets): " in str(recording)
    assert recording.median_step() == MedianStep(
        forward_start_s=-1,
        forward_stop_s=0,
        backward_stop_s=8,
        sections=(RecordedSection("0/0", 0, "backward", 1, 2),),
        buckets=(BucketTimes(0, 8, 2, 3, 7),),
        median_exposed_s=5,
        median_communication_s=4,
    )
    assert Recording(rank=0).median_step() is None


def test_what_steps_wait_is_a_median_of_its_own() -> None:
    """The medians of last gradients and last allreduces are 5 apart here; steps wait 1, 9, 2."""
    steps = []
    for ready_s, finished_s in ((5.0, 6.0), (1.0, 10.0), (9.0, 11.0)):
        bucket = BucketTimes(0, 8, ready_s, ready_s, finished_s)
        step = dataclasses.replace(_step(1, 9), buckets=(bucket,), forward_stop_s=0.0)
        steps.append(step)
    median = Recording(rank=0, steps=tuple(steps)).median_step()
    assert median is not None
    assert (median.buckets[0].ready_s, median.buckets[0].finished_s) == (5, 10)
    assert median.exposed_s == 2


@on_ranks(2)
def test_only_steps_that_communicate_count(rank: int) -> None:
    """A step that does not communicate and an evaluation are left out.

    The last step has two forwards and one backward: three backward sections of each forward.
    """
    ddp, model = _model("backward")
    _steps(rank, model, SETTLED)
    x, y, z = batches(rank, [(8, WIDTH)] * 3)
    with ddpopt.record(model) as recording:
        with ddp.no_sync():
            model(x).sum().backward()
        model(y).sum().backward()
        with torch.no_grad():
            model(z)
        (model(z).sum() + model(x).sum()).backward()
    _, last = recording.steps
    assert [section.kind for section in last.sections].count("backward") == 6


class _Checkpointed(MLP):
    """Each layer but the last has a backward of its own within the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *inner, head = self.layers
        for layer in inner:
            x = checkpoint(layer, x, use_reentrant=True)
        return head(x)


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_backward_ends_after_those_within_it(one_rank: None, is_shared: bool) -> None:
    """The input's gradient comes last; a shared layer is ready with its last use.

    So it is in later steps, in which fewer gradients are watched: of the outer backward's none
    completes a bucket.
    """
    model = _Checkpointed(3, bias=False)
    if is_shared:
        model.layers[1] = model.layers[0]
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB, static_graph=is_shared)
    told_s: list[float] = []  # when hooks of this test were called
    expected: list[tuple[float, ...]] = []

    def step() -> float:
        x = torch.ones(8, WIDTH, requires_grad=True)
        x.register_hook(lambda _: told_s.append(time.perf_counter()))
        ddp(x).sum().backward()
        return time.perf_counter()

    for _ in range(SETTLED):
        step()
    node = _torch.accumulate_node(model.layers[0].weight)
    node.register_prehook(lambda _: told_s.append(time.perf_counter()))
    with ddpopt.record(ddp) as recording:
        for _ in range(3):
            told_s.clear()
            ended_s = step()
            assert len(told_s) == (3 if is_shared else 2)
            *_, first_layer_s, input_s = told_s
            expected.append((first_layer_s, input_s, ended_s))
    assert len(recording.steps) == 3
    for recorded, (first_layer_s, input_s, ended_s) in zip(recording.steps, expected, strict=True):
        first_layer = recorded.buckets[-1]
        assert first_layer_s < first_layer.ready_s < first_layer.launched_s < input_s
        assert input_s < recorded.backward_stop_s < ended_s


def test_a_backward_without_a_forward_of_ddp_is_in_no_step(one_rank: None) -> None:
    """Gradients that arrive once more after a step's backward are not of that step."""
    ddp, _ = _model("uncompiled")
    with ddpopt.record(ddp) as recording:
        ddp(torch.ones(8, WIDTH)).sum().backward()
        ended_s = time.perf_counter()
        ddp.module(torch.ones(8, WIDTH)).sum().backward()
    (step,) = recording.steps
    assert step.forward_stop_s < step.backward_stop_s < ended_s


def test_an_evaluation_before_the_backward_is_no_part_of_the_step(one_rank: None) -> None:
    """Forward ends where the one that communicates does, and its backward is recorded."""
    _, model = _model("backward")
    model(torch.ones(8, WIDTH)).sum().backward()
    with ddpopt.record(model) as recording:
        loss = model(torch.ones(8, WIDTH)).sum()
        ended_s = time.perf_counter()
        with torch.no_grad():
            model(torch.ones(8, WIDTH))
        loss.backward()
    (step,) = recording.steps
    assert step.forward_stop_s < ended_s < step.backward_stop_s
    assert {section.kind for section in step.sections} == {"backward"}


def test_a_recording_does_not_keep_parameters(one_rank: None) -> None:
    """Parameters are freed with the module, without the garbage collector."""
    ddp = _model("uncompiled")[0]
    with ddpopt.record(ddp) as recording:
        ddp(torch.ones(8, WIDTH)).sum().backward()
    weight = weakref.ref(next(ddp.parameters()))
    gc.disable()
    try:
        del ddp
        assert weight() is None
    finally:
        gc.enable()
    assert len(recording.steps) == 1


EAGER = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddpopt
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def step():
    ddp(torch.ones(2, 4)).sum().backward()
for is_watched in (False, True):
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    if is_watched:
        ddpopt.metrics(ddp)
    for _ in range(4):
        step()
    with ddpopt.record(ddp) as recording:
        step()
    has_step = ddpopt.metrics(ddp).get("ddpopt.step.ms", 0) > 0
    print(len(recording.steps), len(recording.steps[0].buckets), has_step)
print("ddpopt.backend" in sys.modules)
del ddp
dist.destroy_process_group()
"""


def test_steps_are_recorded_and_watched_where_nothing_is_compiled() -> None:
    """The process has never looked up the backend, which reports forwards elsewhere.

    `metrics` has times of steps if it was asked before them.
    """
    assert run_fresh(EAGER).splitlines() == ["1 1 False", "1 1 True", "False"]


def test_a_recording_without_steps_says_why(one_rank: None) -> None:
    """No forward that communicates, with its backward, ran in the block."""
    ddp, _ = _model("uncompiled")
    with ddpopt.record(ddp) as recording:
        ddp.module(torch.ones(8, WIDTH)).sum().backward()
    assert recording.steps == ()
    assert "steps: " in str(recording)


@on_ranks(2)
def test_beside_torch_profiler_sections_and_buckets_are_named_ranges(rank: int) -> None:
    """Only the finish of allreduces is left to the profiler, and a note says so."""
    _, model = _model("backward")
    _steps(rank, model, SETTLED)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler, ddpopt.record(model) as made:
        _steps(rank, model, 1)
    names = [event.name for event in profiler.events() if event.name.startswith("ddpopt")]
    numbers = [name.partition(" section ")[2] for name in names if "section" in name]
    assert numbers == [f"{k} backward" for k in range(3)]
    assert [name for name in names if "bucket" in name] == [
        f"ddpopt: bucket {k} ready (32.0 KiB)" for k in range(3)
    ]
    (step,) = made.steps
    assert [bucket.finished_s for bucket in step.buckets] == [None] * 3
    assert any("torch.profiler" in note for note in made.notes)


def test_before_ddp_has_told_its_buckets_a_note_says_when_to_record(one_rank: None) -> None:
    """It is the only one: allreduces are not said to be too many for no buckets."""
    _, model = _model("backward")
    with ddpopt.record(model) as recording:
        model(torch.ones(8, WIDTH)).sum().backward()
    assert recording.steps[0].buckets == ()
    (note,) = recording.notes
    assert "after the first four steps" in note


class _CountingTimer(StepTimer):
    """Counts the calls of its hooks, all timers together."""

    num_calls = 0

    def _arrive(self, index: int, gradients: object) -> None:
        _CountingTimer.num_calls += 1
        super()._arrive(index, gradients)

    def _launch(self, index: int, inputs: object, outputs: object) -> None:
        _CountingTimer.num_calls += 1
        super()._launch(index, inputs, outputs)


def _fail(_gradient: torch.Tensor) -> None:
    raise ArithmeticError


@pytest.mark.quick("in backward")
@pytest.mark.parametrize("place", ["in backward", "in forward", "between steps", "nowhere"])
def test_a_recording_leaves_no_listener_subscriber_or_hook(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """An error may end it in a step or beside one."""
    monkeypatch.setattr(recorder, "StepTimer", _CountingTimer)
    monkeypatch.setattr(_CountingTimer, "num_calls", 0)
    ddp, model = _model("backward")
    x = torch.ones(8, WIDTH)
    model(x).sum().backward()
    is_raised = contextlib.nullcontext() if place == "nowhere" else pytest.raises(ArithmeticError)
    with is_raised, ddpopt.record(model) as recording:
        if place == "in backward":
            ddp.module.layers[3].weight.register_hook(_fail)
        model(x).sum().backward()
        if place == "in forward":
            with mock.patch.object(ddp, "_post_forward", side_effect=ArithmeticError):
                model(x)
        if place == "between steps":
            raise ArithmeticError
    num_calls = _CountingTimer.num_calls
    assert num_calls > 0
    assert sections._listener is None
    assert find_subscriber(ddp, recorder._Recorder) is None
    for parameter in ddp.parameters():
        # DDP may refuse the gradient after a backward that failed.
        with contextlib.suppress(RuntimeError, ArithmeticError):
            parameter.sum().backward()
    assert _CountingTimer.num_calls == num_calls
    assert len(recording.steps) == (place == "nowhere")


def test_a_step_after_the_block_is_not_recorded(one_rank: None) -> None:
    _, model = _model("backward")
    model(torch.ones(8, WIDTH)).sum().backward()
    with ddpopt.record(model) as recording:
        pass
    model(torch.ones(8, WIDTH)).sum().backward()
    assert recording.steps == ()


def test_two_recordings_at_a_time_are_refused(one_rank: None) -> None:
    _, model = _model("uncompiled")
    with (
        ddpopt.record(model),
        pytest.raises(RuntimeError, match="one DDP module at a time"),
        ddpopt.record(model),
    ):
        pass


def test_record_refuses_what_is_no_ddp_module() -> None:
    with pytest.raises(TypeError, match="this is a Linear"), ddpopt.record(nn.Linear(1, 1)):
        pass


class _LateEvent:
    """Is of a GPU that gets to queued work 100 s later, but to the first at once."""

    first: ClassVar[float | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = time.time_ns() / 1e6 + (0.0 if _LateEvent.first is None else 1e5)
        _LateEvent.first = _LateEvent.first or self.at_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _LateEvent) -> float:
        return other.at_ms - self.at_ms


def test_on_a_gpu_times_are_those_at_which_it_got_there(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor is ahead; times of steps, sections and gradients are the GPU's."""
    _, model = _model("backward")
    _steps(0, model, SETTLED)
    finish = mock.Mock()
    with monkeypatch.context() as patched:
        patched.setattr(_LateEvent, "first", None)
        patched.setattr(torch, "Event", _LateEvent)
        patched.setattr(recorder, "device_of", lambda _: torch.device("meta"))
        patched.setattr(clock.Clock, "finish", finish)
        began_s = time.perf_counter()
        with ddpopt.record(model) as recording:
            _steps(0, model, 3)
    assert finish.call_count == 2
    assert len(recording.steps) == 3
    for step in recording.steps:
        assert step.sections
        assert len(step.buckets) > 1
        times_s = [step.forward_start_s, step.forward_stop_s]
        times_s += [t for s in step.sections for t in (s.start_s, s.stop_s)]
        times_s += [t for b in step.buckets for t in (b.ready_s, b.launched_s)]
        assert all(began_s + 100 <= time_s <= step.backward_stop_s for time_s in times_s)
