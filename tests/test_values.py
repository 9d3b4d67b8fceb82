"""Checks of values: which pass, and the messages for the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from ddpopt._values import (
    POSITIVE,
    POSITIVE_WHOLE,
    WHOLE,
    Limits,
    check_boolean,
    check_choice,
    check_kind,
    check_number,
)
from ddpopt.errors import OptionError, PlanError


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
    ("value", "limits", "named"),
    [
        (-1, WHOLE, "-1; it must be a whole number, 0 or more"),
        (2.0, POSITIVE_WHOLE, "2.0, a float; it must be a whole number, 1 or more"),
        (True, POSITIVE_WHOLE, "True, a bool"),
        ("3", POSITIVE, "'3', a str; it must be above 0, and finite"),
        (None, POSITIVE, "None, a NoneType"),
        (0, POSITIVE, "0; it must be above 0, and finite"),
        (math.inf, POSITIVE, "inf; it must be above 0, and finite"),
        (math.nan, POSITIVE, "nan"),
        (math.nan, Limits(above=0, below=None), "nan; it must be above 0"),
        (1, Limits(at_least=0, below=1), "1; it must be 0 or more, and below 1"),
    ],
)
def test_other_values_are_named_with_their_limits(
    value: object, limits: Limits, named: str
) -> None:
    with pytest.raises(PlanError, match=f"rate is {re.escape(named)}"):
        check_number("rate", value, limits, PlanError)


@pytest.mark.parametrize(
    ("check", "arguments", "error"),
    [
        (check_boolean, (1,), OptionError),
        (check_boolean, ("True", PlanError), PlanError),
        (check_choice, ("c", ["a", "b"]), OptionError),
        (check_choice, (1, ["a", "b"]), OptionError),
        (check_choice, (1, []), OptionError),
        (check_choice, ("plan.txt", ["a", "*.json"]), OptionError),
        (check_kind, (1, str, "give a name", TypeError), TypeError),
        (check_kind, (1, (str, list), "give names", PlanError), PlanError),
    ],
)
def test_values_of_other_kinds_are_named(
    check: Callable[..., None], arguments: tuple[object, ...], error: type[Exception]
) -> None:
    with pytest.raises(error, match=re.escape(f"flag is {arguments[0]!r}")):
        check("flag", *arguments)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (check_boolean, (False,)),
        (check_choice, ("a", ["a", "b"])),
        (check_choice, ("any", [])),
        (check_choice, ("plan.json", ["a", "*.json"])),
        (check_kind, ("1", str, "give a name", TypeError)),
    ],
)
def test_values_of_the_right_kind_pass(
    check: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    check("flag", *arguments)


def test_a_value_of_another_type_may_be_another_error() -> None:
    """In Python, too, a number out of range is a ValueError and a text is a TypeError."""
    with pytest.raises(TypeError, match="'3'"):
        check_number("rate", "3", POSITIVE, PlanError, wrong_type=TypeError)
    with pytest.raises(PlanError, match="-3"):
        check_number("rate", -3, POSITIVE, PlanError, wrong_type=TypeError)
