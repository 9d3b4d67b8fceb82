"""Which tests `make test` runs, the quick set: by where a test is, what it uses, and its marks."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

SYSTEM = Path(__file__).parents[1] / "system"
# Fixtures, by what they start.
LARGE = {"four_ranks", "eight_ranks", "make_ranks", "ranks_of"}
QUICK, REST, NIGHTLY, ALL = "quick", "rest", "nightly", "all"


def set_of(name: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of a set: quick, nightly (what is marked so), or the rest."""
    if name == NIGHTLY:
        return [item for item in items if item.get_closest_marker(NIGHTLY)]
    daily = [item for item in items if not item.get_closest_marker(NIGHTLY)]
    quick = quick_of(daily)
    return [item for item in daily if (item in quick) == (name == QUICK)]


def place_of(item: pytest.Item) -> tuple[bool, int]:
    """A key to sort tests by: files that take long begin early, so that processes end together.

    These are files of `tests/system`; of others, large files take longer than small ones.
    """
    return SYSTEM not in item.path.parents, -_size_of(item.path)


@functools.cache
def _size_of(path: Path) -> int:
    return path.stat().st_size


def quick_of(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return those of the quick set.

    - In `tests/system`, what is marked `quick`.
    - Of a test that is marked `quick("a", "b")`, the rows with these names.
    - None that uses more ranks than two, or ranks that are made for it.
    - None that is marked `slow`.
    - All others.

    Raises:
        pytest.UsageError: a mark names a row that a test, of which rows are given, has not.
    """
    rows: dict[str, dict[str, pytest.Item]] = collections.defaultdict(dict)
    for item in items:
        test, _, row = item.nodeid.partition("[")
        rows[test][row.removesuffix("]")] = item
    found = []
    for test, item_by_row in rows.items():
        marks = [
            mark for item in item_by_row.values() if (mark := item.get_closest_marker("quick"))
        ]
        named = marks[0].args if marks else ()
        if missing := [row for row in named if row not in item_by_row]:
            raise pytest.UsageError(f"{test} is marked as quick for {missing}, which it has not")
        for row, item in item_by_row.items():
            is_large = LARGE & set(getattr(item, "fixturenames", ()))
            is_left_out = is_large or item.get_closest_marker("slow")
            is_chosen = row in named if named else bool(marks) or SYSTEM not in item.path.parents
            if is_chosen and not is_left_out:
                found.append(item)
    return found
