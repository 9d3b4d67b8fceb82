"""Checks of values: which pass, and the messages for the others."""

from __future__ import annotations

import math

import pytest

from ddpopt._values import POSITIVE, POSITIVE_WHOLE, WHOLE, Limits, check_number
from ddpopt.errors import PlanError


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (0, WHOLE),
        (1, POSITIVE_WHOLE),
        (1e-300, POSITIVE),
        (1, POSITIVE),
        (math.inf, Limits(above=0, below=None)),
        (0.5, Limits(at_least=0, below=1)),
        (10**30, WHOLE),
    ],
)
def test_numbers_within_their_limits_pass(value: float, limits: Limits) -> None:
    check_number("rate", value, limits, PlanError)


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (-1, WHOLE, "rate is -1; it must be a whole number, 0 or more"),
        (2.0, POSITIVE_WHOLE, "rate is 2.0, a float; it must be a whole number, 1 or more"),
        (True, POSITIVE_WHOLE, "rate is True, a bool; it must be a whole number, 1 or more"),
        ("3", POSITIVE, "rate is '3', a str; it must be above 0, and finite"),
        (None, POSITIVE, "rate is None, a NoneType; it must be above 0, and finite"),
        (0, POSITIVE, "rate is 0; it must be above 0, and finite"),
        (math.inf, POSITIVE, "rate is inf; it must be above 0, and finite"),
        (math.nan, POSITIVE, "rate is nan; it must be above 0, and finite"),
        (math.nan, Limits(above=0, below=None), "rate is nan; it must be above 0"),
        (1, Limits(at_least=0, below=1), "rate is 1; it must be 0 or more, and below 1"),
    ],
)
def test_other_values_are_named_with_their_limits(
    value: object, limits: Limits, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        check_number("rate", value, limits, PlanError)
    assert str(caught.value) == message


def test_a_value_of_another_type_may_be_another_error() -> None:
    """In Python, too, a number out of range is a ValueError and a text is a TypeError."""
    with pytest.raises(TypeError, match="'3'"):
        check_number("rate", "3", POSITIVE, PlanError, wrong_type=TypeError)
    with pytest.raises(PlanError, match="-3"):
        check_number("rate", -3, POSITIVE, PlanError, wrong_type=TypeError)
