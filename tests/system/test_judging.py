"""What comes of a training beside eager DDP has the right word: equal, wrong, refused, stuck."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpopt.errors import Reason
from tests.system.training.comparing import relative_error, within
from tests.system.training.outcomes import (
    AS_UNSPLIT,
    BREAKS,
    DIFFERS,
    EQUAL,
    EQUAL_TO_UNSPLIT,
    FAILURES,
    NOT_SPLIT,
    OUTCOMES,
    RAISES,
    REFUSED,
    REFUSED_UNSPLIT,
    ROUNDED,
)
from tests.system.training.running import Attempt, Notes, attempt, judge

pytestmark = pytest.mark.quick

BROKEN, NEAR, NEARER = "a traceback", 1 + 2e-5, 1 + 1e-5
UNSUPPORTED = "torch._dynamo.exc.Unsupported: a call"
LOST = SimpleNamespace(fallback=Reason.SPLIT_FAILED, backward_fallback=None, sections=())


def _attempt(value: Any, *cuts: Any) -> Attempt:
    """A training that ended with a value, or with an error."""
    if isinstance(value, str):
        return Attempt(error=value)
    notes = Notes(values={"weight": torch.tensor([value])}, texts={"output": "a tensor"})
    return Attempt(notes=notes, cuts=cuts)


@pytest.mark.parametrize(
    ("outcome", "ours", "eager", "unsplit"),
    [
        (EQUAL, 1.0, 1.0, BROKEN),
        (EQUAL_TO_UNSPLIT, NEAR, 1.0, NEAR),
        (ROUNDED, NEAR, 1.0, NEARER),
        (AS_UNSPLIT, 2.0, 1.0, 2.0),
        (DIFFERS, 2.0, 1.0, 1.0),
        (DIFFERS, float("nan"), 1.0, 1.0),
        (RAISES, BROKEN, 1.0, 1.0),
        (REFUSED, 1.0, BROKEN, 1.0),
        (REFUSED_UNSPLIT, BROKEN, 1.0, BROKEN),
        (BREAKS, BROKEN, 1.0, UNSUPPORTED),
    ],
)
def test_a_training_is_judged_by_eager_ddp_and_then_by_the_unsplit_compile(
    one_rank: None, outcome: str, ours: Any, eager: Any, unsplit: Any
) -> None:
    trainings = [_attempt(value) for value in (ours, eager, unsplit)]
    finding = judge(*trainings[:2], lambda: trainings[2], measure=within(1e-4))
    assert finding.outcome == outcome
    assert finding.is_failure == (outcome in (DIFFERS, RAISES))


def test_equal_values_are_no_excuse_for_a_graph_that_an_error_left_whole(one_rank: None) -> None:
    finding = judge(_attempt(1.0, LOST), _attempt(1.0), lambda: _attempt(1.0), measure=within(0))
    assert finding.outcome == NOT_SPLIT
    assert Reason.SPLIT_FAILED.name in finding.detail


@pytest.mark.parametrize("is_one_step", [False, True])
def test_in_one_step_each_value_may_be_as_one_of_the_two(one_rank: None, is_one_step: bool) -> None:
    """In several, a value that only the unsplit compile has so comes of what it did before."""

    def of(**values: float) -> Attempt:
        return Attempt(notes=Notes(values={k: torch.tensor(v) for k, v in values.items()}))

    ours, eager, unsplit = of(a=1.0, b=2.0), of(a=1.0, b=1.0), of(a=2.0, b=2.0)
    finding = judge(ours, eager, lambda: unsplit, measure=within(0), is_one_step=is_one_step)
    assert finding.outcome == (AS_UNSPLIT if is_one_step else DIFFERS)


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("name", ["weight", "output"])
def test_what_one_of_two_has_alone_differs(one_rank: None, name: str, is_ours: bool) -> None:
    whole, lacking = _attempt(1.0), _attempt(1.0)
    for notes in (lacking.notes.values, lacking.notes.texts):
        notes.pop(name, None)
    ours, eager = (whole, lacking) if is_ours else (lacking, whole)
    finding = judge(ours, eager, lambda: eager, measure=within(1))
    assert finding.outcome == DIFFERS
    assert name in finding.detail


def test_an_error_of_a_training_is_kept(one_rank: None) -> None:
    def fail(_group: object) -> Any:
        raise ArithmeticError("one\ntwo")

    found = attempt(fail)
    assert found.raised == "ArithmeticError: one two"
    assert "in fail" in found.error


def test_the_worst_is_last() -> None:
    assert OUTCOMES[-len(FAILURES) :] == FAILURES
    assert len(set(OUTCOMES)) == len(OUTCOMES)


def test_errors_are_relative_to_the_largest_element() -> None:
    """Tensors of another dtype, or with another element that is not finite, differ infinitely."""
    ones = torch.ones(2)
    assert relative_error(ones, ones.clone()) == 0.0
    assert relative_error(ones, 2 * ones) == 0.5
    assert relative_error(ones, ones.double()) == float("inf")
    assert relative_error(ones, ones * float("nan")) == float("inf")
    assert relative_error(ones * float("nan"), ones * float("nan")) == 0.0
    assert relative_error(ones * (1 + 1j), ones * (1 + 2j)) == 0.5
