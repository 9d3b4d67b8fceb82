"""Observers of a DDP module's forwards, and sections as ranges in a profile of the user's."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ddpopt import _events
from ddpopt._events import Observer, Priority, StepClock, ask_at_first, ignore, observe
from ddpopt._torch import names, runtime
from ddpopt.split import state
from tests.support.models import MLP, WIDTH

CAP_MB = 0.03  # two layers a bucket
FORWARD = [f"section {k} forward" for k in range(3)]
BACKWARD = [f"section {k} backward" for k in range(3)]


class _Noting(Observer):
    """Notes its notifications in a list that others share."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name = name
        self._notes = notes

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        self._notes.append(f"{self._name} before")

    def after_forward(self, ddp: DistributedDataParallel, is_ours: bool) -> None:
        self._notes.append(f"{self._name} after{' ours' if is_ours else ''}")


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 4))


def _run(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def test_a_module_that_never_uses_us_has_no_observer_and_no_state(one_rank: None) -> None:
    """After its first forward, in which it was looked at once."""
    ddp = _ddp()
    _run(ddp)
    _run(ddp)
    assert _events._observers[ddp] == ()
    assert ddp not in state._states


def test_a_module_observed_before_the_backend_was_loaded_is_asked_then(one_rank: None) -> None:
    """As after `rebucket` of a module that runs uncompiled at first."""
    ddp, notes = _ddp(), list[str]()
    with mock.patch.dict(_events._interests, clear=True):
        observe(ddp, Priority.REBUCKET, _Noting("rebucket", notes))
        ask_at_first(Priority.RECORDER, lambda _ddp: _Noting("record", notes))
        _run(ddp)
    assert notes[:2] == ["rebucket before", "record before"]


def test_observers_are_notified_in_the_order_of_priority(one_rank: None) -> None:
    """However they came; of another module they are not notified."""
    ddp, notes = _ddp(), list[str]()
    for priority in (Priority.RECORDER, Priority.REBUCKET, Priority.TUNER):
        observe(ddp, priority, _Noting(priority.name, notes))
    _run(_ddp())
    assert notes == []
    _run(ddp)
    names = ["REBUCKET", "TUNER", "RECORDER"]
    assert notes == [f"{name} {when}" for when in ("before", "after") for name in names]


def test_one_observer_a_priority_until_it_is_ignored(one_rank: None) -> None:
    """A second one takes the first one's place."""
    ddp, notes = _ddp(), list[str]()
    observe(ddp, Priority.TUNER, _Noting("first", notes))
    observe(ddp, Priority.TUNER, _Noting("second", notes))
    _run(ddp)
    ignore(ddp, Priority.TUNER)
    _run(ddp)
    assert notes == ["second before", "second after"]


def test_an_observer_that_comes_in_a_forward_is_notified_of_its_end(one_rank: None) -> None:
    """As the tuner, which a compile in the forward makes; and of our backend around it."""
    notes: list[str] = []

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            observe(ddp, Priority.TUNER, _Noting("late", notes))
            return super().forward(x)

    ddp = DistributedDataParallel(Late(4, 4))
    torch.compile(ddp, backend="ddpopt", options={"inner": "eager"})(torch.ones(2, 4))
    assert notes == ["late after ours"]


def test_a_step_lasts_from_a_forward_that_communicates_to_the_next(one_rank: None) -> None:
    """Evaluation and micro-batches under `no_sync` are a part of it."""
    ddp, clock = _ddp(), StepClock()
    observe(ddp, Priority.METRICS, clock)
    seconds = itertools.count(10, 5)
    with mock.patch.object(_events, "time", mock.Mock(perf_counter=lambda: next(seconds))):
        _run(ddp)
        assert clock.step_s is None
        with ddp.no_sync():
            _run(ddp)
        with torch.no_grad():
            ddp(torch.ones(2, 4))
        _run(ddp)
    assert clock.step_s == 5


def test_the_ddp_module_around_a_module_is_found_once_it_has_run(one_rank: None) -> None:
    """The newest of several."""
    module = nn.Linear(4, 4)
    for _ in range(2):
        ddp = DistributedDataParallel(module)
        _run(_ddp())
        assert _events.find_ddp(module) is not ddp
        _run(ddp)
        assert _events.find_ddp(module) is ddp


def test_what_is_noted_of_a_module_keeps_it_from_nothing(one_rank: None) -> None:
    """It is freed with its observers."""
    ddp = _ddp()
    observe(ddp, Priority.TUNER, _Noting("", []))
    _run(ddp)
    gone = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert gone() is None


# ---- Sections as ranges ------------------------------------------------------------------------


def _step(**options: Any) -> Any:
    torch._dynamo.reset()
    ddp = DistributedDataParallel(MLP(bias=False), bucket_cap_mb=CAP_MB)
    model = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager", **options})
    return lambda: model(torch.ones(8, WIDTH)).sum().backward()


def _ranges(profiler: profile, path: Path) -> list[str]:
    """Return what the file that `export_chrome_trace` writes calls sections, in their order."""
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    own = [event for event in events if str(event.get("name", "")).startswith("ddpopt: ")]
    assert {event["cat"] for event in own} <= {"user_annotation"}
    own.sort(key=lambda event: event["ts"])
    return [event["name"].split(" ", 2)[2] for event in own]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"split": "forward"}, [*FORWARD, *reversed(BACKWARD)]),
        ({"split": "backward"}, BACKWARD),
        ({"enabled": False}, ["section 0 forward", "section 0 backward"]),
    ],
)
def test_a_profile_has_each_section_that_ran_once(
    one_rank: None, tmp_path: Path, options: dict[str, Any], expected: list[str]
) -> None:
    """In the order in which they ran; steps before and after it leave nothing there."""
    step = _step(**options)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    step()
    ranges = _ranges(profiler, tmp_path / "trace.json")
    assert [name for name in ranges if name in expected] == expected
    assert len([name for name in ranges if name.endswith("backward")]) == sum(
        name.endswith("backward") for name in expected
    )


def test_without_a_profiler_nobody_is_notified_of_sections() -> None:
    assert _events.listening() is None
    with profile(activities=[ProfilerActivity.CPU]):
        assert _events.listening() is not None
    assert _events.listening() is None


def test_where_torch_has_moved_its_flag_sections_run_without_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step is not the place to fail for that."""
    runtime._profiler_enabled.cache_clear()
    moved = names.PrivateName("torch._C._autograd", "_moved", names.Need.RECORD)
    monkeypatch.setattr(names, "PROFILER_ENABLED", moved)
    with profile(activities=[ProfilerActivity.CPU]):
        assert _events.listening() is None
