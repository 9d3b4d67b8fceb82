"""Which buckets graphs are cut for, whose the Reducer has, and whether it has told them."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import TorchDriftError
from ddpopt.split import state
from ddpopt.split.phases import Answer, CutGoal, Goal, Origin, ReducerBuckets
from tests.support.models import MLP

FINE: Any = [[0], [1]]
ONE: Any = [[0, 1]]
ANY = (Goal.IN_FORCE, Goal.SEARCHED, Goal.EXPECTED)


def _begin(known: state.DDPState, goal: Goal) -> None:
    if goal is Goal.SEARCHED:
        known.begin_search(is_provisional=False)
    elif goal is Goal.EXPECTED:
        known.expect_buckets(FINE)


@pytest.mark.parametrize("origin", [Origin.PLANNED, Origin.RETURNED], ids=lambda each: each.name)
@pytest.mark.parametrize("goal", ANY, ids=lambda each: each.name)
def test_a_module_may_be_given_buckets_whatever_its_graphs_are_cut_for(
    one_rank: None, goal: Goal, origin: Origin
) -> None:
    """Only the end of a search or a plan's application changes the goal."""
    ddp = DistributedDataParallel(MLP(1))
    known = state.get(ddp)
    _begin(known, goal)
    known.give_buckets(ONE, origin)
    assert (known.goal, known.buckets) == (goal, ONE)
    expected = (frozenset({0, 1}),)
    if goal is Goal.EXPECTED:
        expected = (frozenset({0}), frozenset({1}))
    assert known.cut_for == (state.ANY_BUCKETS if goal is Goal.SEARCHED else expected)
    known.end_search()
    assert (known.goal, known.expected_buckets) == (Goal.IN_FORCE, None)
    assert known.has_planned_buckets == (origin is Origin.PLANNED)


@pytest.mark.parametrize("goal", ANY, ids=lambda each: each.name)
def test_code_of_another_module_serves_a_goal_that_it_was_cut_for(
    one_rank: None, goal: Goal
) -> None:
    """Code that was cut finely serves any, and all code does once the goal is reached."""
    ddp = DistributedDataParallel(MLP(1))
    known = state.get(ddp)
    _begin(known, goal)
    for cut_for in (state.ANY_BUCKETS, known.cut_for):
        known.recut_unless(cut_for)
        assert not known.is_provisional
        assert not known.is_recut
    known.recut_unless((frozenset({0, 1}),))
    assert known.is_provisional == known.is_recut == (goal is not Goal.IN_FORCE)
    known.end_search()
    assert not known.is_provisional
    assert known.is_recut == (goal is not Goal.IN_FORCE)


@pytest.mark.parametrize("goal", ANY, ids=lambda each: each.name)
def test_a_copy_compiles_for_a_goal_by_the_rules_of_its_original(
    one_rank: None, goal: Goal
) -> None:
    """A copy's guards compare its rules, and it runs the original's code."""
    ddps = DistributedDataParallel(MLP(1)), DistributedDataParallel(MLP(1))
    original, copied = map(state.get, ddps)
    original.begin_search(is_provisional=True)
    copied.mark_as_copy_of(original)
    if goal is not Goal.SEARCHED:  # which says itself whether it is provisional
        _begin(copied, goal)
    assert copied.rules == original.rules


def test_only_a_plan_that_is_expected_has_buckets() -> None:
    """No other goal can be given any, nor a plan be expected without."""
    for goal, buckets in ((Goal.SEARCHED, FINE), (Goal.IN_FORCE, FINE), (Goal.EXPECTED, None)):
        with pytest.raises(AssertionError):
            CutGoal(goal=goal, expected=buckets)


@pytest.mark.parametrize(
    ("told", "answer"),
    [(None, Answer.AWAITED), (FINE, Answer.TOLD), (TorchDriftError(""), Answer.NONE)],
    ids=["not yet", "other buckets", "an error"],
)
def test_what_was_given_is_known_unless_the_reducer_tells_something_else(
    monkeypatch: pytest.MonkeyPatch, told: Any, answer: Answer
) -> None:
    """So it is where this release of torch tells nothing, and asking raises."""

    def final_buckets(_: DistributedDataParallel) -> Any:
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr(_torch, "final_buckets", final_buckets)
    ddp: Any = None
    planned, formed = ReducerBuckets(Origin.PLANNED, ONE), ReducerBuckets()
    for buckets in (planned, formed):
        with contextlib.suppress(TorchDriftError):
            assert buckets.ask(ddp) == 1
        assert buckets.answer is answer
        assert buckets.told == (FINE if answer is Answer.TOLD else None)
    assert planned.find(ddp) == (FINE if answer is Answer.TOLD else ONE)


def test_buckets_that_ddp_keeps_are_asked_for_anew_unless_this_release_cannot_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where asking has raised, nobody asks again, so that no compile raises for it."""
    monkeypatch.setattr(_torch, "will_rebuild_buckets", lambda _: False)
    ddp: Any = None
    formed = ReducerBuckets()
    for buckets in (FINE, ONE):
        monkeypatch.setattr(_torch, "final_buckets", lambda _, buckets=buckets: buckets)
        assert (formed.find(ddp), formed.answer) == (buckets, Answer.AWAITED)
    monkeypatch.setattr(_torch, "final_buckets", mock.Mock(side_effect=TorchDriftError("")))
    with pytest.raises(TorchDriftError):
        formed.ask(ddp)
    assert formed.find(ddp) is None
