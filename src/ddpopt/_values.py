"""Checks of values that users give. Each error names the value, the limit and what to give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpopt._text import quote
from ddpopt.errors import OptionError


def check_boolean(name: str, value: object, error: type[Exception] = OptionError) -> None:
    """Raise `error` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise error(f"{name} is {quote(value)}, a {type(value).__name__}; give True or False")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise OptionError unless `value` is one of `choices`; without choices, unless it is a str.

    A choice such as `*.json` allows any path that ends this way.
    """
    if choices and not any(isinstance(value, str) and _is_choice(value, c) for c in choices):
        raise OptionError(f"{name} is {quote(value)}; valid values are {list(choices)}")
    if not isinstance(value, str):
        raise OptionError(f"{name} is {quote(value)}, a {type(value).__name__}; give a str")


def _is_choice(value: str, choice: str) -> bool:
    return value.endswith(choice[1:]) if choice.startswith("*") else value == choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that a value may be; `str` gives what follows "it must be" in a message.

    NaN is within no limits, and infinity only within `below=None`. Numbers are those of Python
    itself, as JSON has them; a bool is none.
    """

    at_least: float | None = None
    above: float | None = None
    below: float | None = math.inf
    is_whole: bool = False

    def __contains__(self, number: float) -> bool:
        return (
            not (isinstance(number, float) and math.isnan(number))
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        limits = ["a whole number"] if self.is_whole else []
        if self.at_least is not None:
            limits.append(f"{self.at_least:g} or more")
        if self.above is not None:
            limits.append(f"above {self.above:g}")
        if self.below == math.inf:
            if not self.is_whole:  # no whole number is infinite
                limits.append("and finite")
        elif self.below is not None:
            limits.append(f"and below {self.below:g}")
        return ", ".join(limits)


WHOLE = Limits(at_least=0, is_whole=True)
POSITIVE_WHOLE = Limits(at_least=1, is_whole=True)
POSITIVE = Limits(above=0)
BEYOND = 1e18
"""Numbers in plans are smaller, so that what is computed from them stays finite."""
RANKS = Limits(at_least=1, below=BEYOND, is_whole=True)


def check_kind(
    name: str, value: object, kind: type | tuple[type, ...], remedy: str, error: type[Exception]
) -> None:
    """Raise `error` unless `value` is of a kind; the message ends with `remedy`, what to give."""
    if not isinstance(value, kind):
        raise error(f"{name} is {quote(value)}, a {type(value).__name__}; {remedy}")


def check_number(
    name: str,
    value: object,
    limits: Limits,
    error: type[Exception],
    *,
    wrong_type: type[Exception] | None = None,
) -> None:
    """Raise `error` unless `value` is a number within `limits`.

    If it is no number, or not a whole one where it has to be, `wrong_type` is raised, by default
    `error` as well.
    """
    number_type = int if limits.is_whole else (int, float)
    if not isinstance(value, number_type) or isinstance(value, bool):
        kind = type(value).__name__
        raise (wrong_type or error)(f"{name} is {quote(value)}, a {kind}; it must be {limits}")
    if value not in limits:
        raise error(f"{name} is {quote(value)}; it must be {limits}")
