"""An error in what only observes a training never ends the training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import ddpopt
from ddpopt.backend import _Noting, _Verifying
from ddpopt.checks.uncompiled import _FirstForward, _WholeForwards
from ddpopt.inspection.recorder import _Recorder
from ddpopt.planning import early, hint, static_graph
from ddpopt.planning.rebucket import _Accumulation, _Permission
from ddpopt.planning.tuner import _Tuner
from ddpopt.steps import observing
from ddpopt.steps.clock import IterationClock
from ddpopt.steps.forwards import Subscriber, subscribe
from ddpopt.steps.numbers import _Numbering
from ddpopt.steps.timer import StepTimer
from tests.support.models import MLP, assert_equal_states, batches, train, twins

# Every hook of ours that observes, with the method in which it is to raise.
HOOKS: list[tuple[Any, str]] = [
    (_FirstForward, "after_forward"),
    (_Noting, "before_forward"),
    (_Noting, "after_forward"),
    (_WholeForwards, "after_forward"),
    (hint._Watch, "before_forward"),
    (early._Watch, "after_forward"),
    (IterationClock, "before_forward"),  # `metrics` has one
    (static_graph._Counter, "before_forward"),
    (static_graph._Counter, "_arrive"),
    (static_graph._Counter, "_end_backward"),
    (_Recorder, "before_forward"),
    (_Recorder, "after_forward"),
    (StepTimer, "_arrive"),
    (StepTimer, "_launch"),
    (StepTimer, "_end_backward"),
    (_Numbering, "before_forward"),
    (_Numbering, "_number"),
    (_Recorder, "_run_section"),
]
# Those whose errors are for the user.
RAISING = {_Verifying, _Tuner, _Permission}


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def test_every_subscriber_is_known_to_observe_or_to_raise() -> None:
    """A new one has to be in one of the lists above."""
    own = {kind for kind in _kinds(Subscriber) if kind.__module__.startswith("ddpopt.")}
    observers = {kind for kind, _ in HOOKS} | {Subscriber, _Accumulation}
    assert {kind for kind in own if kind.may_raise} == RAISING
    assert own - RAISING - observers == set()


@pytest.mark.quick("_FirstForward-after_forward")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("owner", "name"), HOOKS)
def test_an_observer_that_raises_ends_no_training(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is reported once, and gradients are eager's."""
    monkeypatch.setattr(observing, "_reported", set())
    ddp, expected = twins(MLP(), bucket_cap_mb=0.01, static_graph=True)
    if owner in (hint._Watch, early._Watch):  # several ranks have one
        subscribe(ddp, owner())
    inputs = batches(0, [(4, 64)] * 3)
    model = torch.compile(ddp, backend="ddpopt", options={"inner": "eager"})
    failing = mock.Mock(side_effect=RuntimeError("an observer's"))
    with mock.patch.object(owner, name, failing), contextlib.ExitStack() as stack:
        ddpopt.metrics(ddp)
        stack.enter_context(ddpopt.record(ddp))
        actual = train(ddp, inputs, model)
    assert failing.called
    assert [r.levelno for r in caplog.records if "an observer's" in r.message] == [logging.WARNING]
    assert_equal_states(actual, train(expected, inputs))
