"""Observers of a DDP module's forwards: which are told, in which order, at what cost to others."""

from __future__ import annotations

import gc
import itertools
import weakref
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _events
from ddpopt._events import Observer, StepClock, Turn, ask_at_first, ignore, observe
from ddpopt.split import state


class _Noting(Observer):
    """Notes what it is told in a list that others share."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        self._told.append(f"{self._name} before")

    def after_forward(self, ddp: DistributedDataParallel, is_ours: bool) -> None:
        self._told.append(f"{self._name} after{' ours' if is_ours else ''}")


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
    ddp, told = _ddp(), list[str]()
    with mock.patch.dict(_events._interests, clear=True):
        observe(ddp, Turn.REBUCKET, _Noting("rebucket", told))
        ask_at_first(Turn.VERIFY, lambda _ddp: _Noting("verify", told))
        _run(ddp)
    assert told[:2] == ["verify before", "rebucket before"]


def test_observers_are_told_in_the_order_of_their_turns(one_rank: None) -> None:
    """However they came; of another module they hear nothing."""
    ddp, told = _ddp(), list[str]()
    for turn in (Turn.RECORDER, Turn.AGREEMENT, Turn.TUNER):
        observe(ddp, turn, _Noting(turn.name, told))
    _run(_ddp())
    assert told == []
    _run(ddp)
    names = ["AGREEMENT", "TUNER", "RECORDER"]
    assert told == [f"{name} {when}" for when in ("before", "after") for name in names]


def test_one_observer_a_turn_until_it_is_ignored(one_rank: None) -> None:
    """A second one takes the first one's place."""
    ddp, told = _ddp(), list[str]()
    observe(ddp, Turn.TUNER, _Noting("first", told))
    observe(ddp, Turn.TUNER, _Noting("second", told))
    _run(ddp)
    ignore(ddp, Turn.TUNER)
    _run(ddp)
    assert told == ["second before", "second after"]


def test_an_observer_that_comes_in_a_forward_is_told_of_its_end(one_rank: None) -> None:
    """As the tuner, which a compile in the forward makes; and of our backend around it."""
    told: list[str] = []

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            observe(ddp, Turn.TUNER, _Noting("late", told))
            return super().forward(x)

    ddp = DistributedDataParallel(Late(4, 4))
    torch.compile(ddp, backend="ddpopt", options={"inner": "eager"})(torch.ones(2, 4))
    assert told == ["late after ours"]


def test_a_step_lasts_from_a_forward_that_communicates_to_the_next(one_rank: None) -> None:
    """Evaluation and micro-batches under `no_sync` are a part of it."""
    ddp, clock = _ddp(), StepClock()
    observe(ddp, Turn.METRICS, clock)
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
    observe(ddp, Turn.TUNER, _Noting("", []))
    _run(ddp)
    gone = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert gone() is None
