"""Make what fails simpler, by what it is made of.

Each try costs a compile. Hypothesis shrinks the choices that a case was drawn from, and needs
hundreds of tries to leave a block out; this takes one for each thing that can be left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def simplify(case: T, simpler_cases: Callable[[T], Iterator[T]], fails: Callable[[T], bool]) -> T:
    """Return a case that fails, and no longer fails if anything is left out."""
    simpler = next(filter(fails, simpler_cases(case)), None)
    while simpler is not None:
        case = simpler
        simpler = next(filter(fails, simpler_cases(case)), None)
    return case


def with_defaults(part: T, except_for: Collection[str]) -> Iterator[T]:
    """Give copies of a dataclass in which one field has its default."""
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING or field.name in except_for:
            continue
        if getattr(part, field.name) != field.default:
            yield dataclasses.replace(part, **{field.name: field.default})  # type: ignore[type-var]


def with_each(items: tuple[Any, ...], simpler: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Give copies of a tuple in which one item is simpler."""
    for index, item in enumerate(items):
        for other in simpler(item):
            yield (*items[:index], other, *items[index + 1 :])


def without_each(items: tuple[Any, ...], least: int = 1) -> Iterator[tuple[Any, ...]]:
    """Give copies of a tuple without one item, if `least` are left."""
    for index in range(len(items) if len(items) > least else 0):
        yield (*items[:index], *items[index + 1 :])
