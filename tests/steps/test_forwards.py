"""Subscribers to a DDP module's forwards: who they are, in which order, and until when."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt.backend
from ddpopt._torch import Forward
from ddpopt.split import state
from ddpopt.steps import clock as clocks
from ddpopt.steps import forwards
from ddpopt.steps.clock import IterationClock
from ddpopt.steps.forwards import Subscriber, Turn, ask_at_first, subscribe, unsubscribe
from tests.support.fake_clock import FakeClock


class _Noting(Subscriber):
    """Notes what it is told of in a list that others share."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name = name
        self._notes = notes

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        self._notes.append(f"{self._name} before")

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        is_ours = forward.backend is ddpopt.backend.backend
        self._notes.append(f"{self._name} after{' ours' if is_ours else ''}")


class _NotingToo(_Noting):
    """Is another class: of each a module has one subscriber."""


class _NotingLast(_Noting):
    """Is a third class."""


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 4))


def _run(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def test_a_module_that_never_uses_us_has_no_subscriber_and_no_state(one_rank: None) -> None:
    """In its first forward it is looked at, and never again."""
    ddp = _ddp()
    _run(ddp)
    _run(ddp)
    assert forwards._subscriptions.find(ddp) == ()
    assert ddp not in state._states


def test_interests_are_asked_also_of_a_module_that_has_subscribers(one_rank: None) -> None:
    """`rebucket` of a module that runs uncompiled subscribes before anybody is asked."""
    ddp, notes = _ddp(), list[str]()
    with mock.patch.object(forwards, "_interests", []):
        subscribe(ddp, _Noting("rebucket", notes), Turn.CHANGES)
        ask_at_first(lambda _ddp: _NotingToo("record", notes))
        _run(ddp)
    assert notes[:2] == ["rebucket before", "record before"]


def test_an_interest_that_is_told_of_twice_is_asked_once(one_rank: None) -> None:
    ddp, asked = _ddp(), list[DistributedDataParallel]()

    def interest(module: DistributedDataParallel) -> None:
        asked.append(module)

    with mock.patch.object(forwards, "_interests", []):
        ask_at_first(interest)
        ask_at_first(interest)
        _run(ddp)
    assert [module for module in asked if module is ddp] == [ddp]  # others may live yet


def test_of_each_class_one_subscriber_is_told_of_all_modules(one_rank: None) -> None:
    notes = list[str]()
    with mock.patch.object(forwards, "_subscribers_to_all", []):
        for kind, name in ((_Noting, "first"), (_NotingToo, "other"), (_Noting, "second")):
            forwards.subscribe_to_all(kind(name, notes))
        _run(_ddp())
    assert [note for note in notes if "before" in note] == ["first before", "other before"]


def test_subscribers_are_told_in_their_turns(one_rank: None) -> None:
    """The order in which they came does not count; of another module they are not told."""
    ddp, notes = _ddp(), list[str]()
    subscribe(ddp, _Noting("remembers", notes), Turn.REMEMBERS)
    subscribe(ddp, _NotingToo("watches", notes))
    subscribe(ddp, _NotingLast("changes", notes), Turn.CHANGES)
    _run(_ddp())
    assert notes == []
    _run(ddp)
    names = ["changes", "watches", "remembers"]
    assert notes == [f"{name} {when}" for when in ("before", "after") for name in names]


def test_a_second_subscriber_of_a_class_replaces_the_first_until_it_leaves(one_rank: None) -> None:
    ddp, notes = _ddp(), list[str]()
    subscribe(ddp, _Noting("first", notes))
    subscribe(ddp, _Noting("second", notes))
    _run(ddp)
    unsubscribe(ddp, _Noting)
    _run(ddp)
    assert notes == ["second before", "second after"]


def test_who_subscribes_in_a_forward_is_told_of_its_end(one_rank: None) -> None:
    """A compile in the forward makes the tuner; it is told of our backend around the forward."""
    notes: list[str] = []

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            subscribe(ddp, _Noting("late", notes), Turn.CHANGES)
            return super().forward(x)

    ddp = DistributedDataParallel(Late(4, 4))
    torch.compile(ddp, backend="ddpopt", options={"inner": "eager"})(torch.ones(2, 4))
    assert notes == ["late after ours"]


def test_a_step_lasts_from_a_forward_that_communicates_to_the_next(one_rank: None) -> None:
    """Evaluation and micro-batches under `no_sync` are a part of it."""
    ddp, clock = _ddp(), IterationClock()
    subscribe(ddp, clock)
    with FakeClock(tick_s=5).replacing_time_of(clocks):
        _run(ddp)
        assert clock.last_s is None
        with ddp.no_sync():
            _run(ddp)
        with torch.no_grad():
            ddp(torch.ones(2, 4))
        _run(ddp)
    assert clock.last_s == 5


def test_the_ddp_module_around_a_module_is_found_once_it_has_run(one_rank: None) -> None:
    """Of several it is the newest."""
    module = nn.Linear(4, 4)
    for _ in range(2):
        ddp = DistributedDataParallel(module)
        _run(_ddp())
        assert forwards.find_ddp(module) is not ddp
        _run(ddp)
        assert forwards.find_ddp(module) is ddp


def test_a_module_with_subscribers_is_freed(one_rank: None) -> None:
    ddp = _ddp()
    subscribe(ddp, _Noting("", []))
    _run(ddp)
    gone = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert gone() is None
