"""Checks of the values that algorithms are made with; each names value, limit and remedy."""

from __future__ import annotations

from collections.abc import Sequence

from ddpopt.errors import OptionError


def check_boolean(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; give True or False")


def check_count(name: str, value: object, least: int) -> None:
    """Raise TypeError unless `value` is an int, OptionError if it is below `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; give an int")
    if value < least:
        raise OptionError(f"{name} is {value}; the least is {least}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise OptionError unless `value` is one of `choices`."""
    if value not in choices:
        raise OptionError(f"{name} is {value!r}; valid values are {list(choices)}")
