"""Which tests `make test` runs, the quick set: by where a test is, what it uses, and one mark."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

SYSTEM = Path(__file__).parents[1] / "system"
# Fixtures, by what they start.
LARGE = {"four_ranks", "eight_ranks", "make_ranks"}
GROUPS = {"one_rank", "ranks"}
QUICK, REST, NIGHTLY, ALL = "quick", "rest", "nightly", "all"


def set_of(name: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of a set: quick, nightly (what is marked so), or the rest."""
    if name == NIGHTLY:
        return [item for item in items if item.get_closest_marker(NIGHTLY)]
    daily = [item for item in items if not item.get_closest_marker(NIGHTLY)]
    quick = quick_of(daily)
    return [item for item in daily if (item in quick) == (name == QUICK)]


def quick_of(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return those of the quick set, given all tests of their files in order.

    - In `tests/system`, the first test of each file.
    - Elsewhere, of a test that has a process group (`one_rank`, `ranks`), its first row.
    - None that uses more ranks than two, or ranks that are made for it.
    - None that is marked `slow`.
    - All others.
    """
    seen: set[str] = set()
    found = []
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if LARGE & fixtures or item.get_closest_marker("slow"):
            continue
        place = item.nodeid
        if SYSTEM in item.path.parents:
            place = str(item.path)
        elif GROUPS & fixtures:
            place = place.partition("[")[0]
        if place not in seen:
            found.append(item)
        seen.add(place)
    return found
