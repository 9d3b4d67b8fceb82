"""The tests that are in the quick set, by `support/sets.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sets import SYSTEM, quick_of, set_of

TESTS = SYSTEM.parent


def _item(place: str, test: str, *fixtures: str, marks: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        path=TESTS / place,
        nodeid=f"{place}::{test}",
        fixturenames=fixtures,
        get_closest_marker=lambda name: name if name in marks else None,
    )


@pytest.mark.parametrize("fixture", ["four_ranks", "eight_ranks", "make_ranks"])
def test_no_test_of_many_ranks_or_of_ranks_made_for_it_is_quick(fixture: str) -> None:
    """It is not in any folder; the next test of its file takes its place."""
    small = _item("system/test_x.py", "test_small")
    assert quick_of([_item("system/test_x.py", "test_large", fixture), small]) == [small]
    assert quick_of([_item("split/test_x.py", "test_large", "ranks", fixture)]) == []


@pytest.mark.parametrize("fixture", ["one_rank", "ranks"])
def test_of_rows_with_a_process_group_the_first_is_quick(fixture: str) -> None:
    """Each of several tests has its first row there."""
    rows = [_item("test_x.py", f"{name}[{k}]", fixture) for name in ("a", "b") for k in range(3)]
    assert quick_of(rows) == [rows[0], rows[3]]


def test_of_a_file_of_the_system_the_first_test_is_quick() -> None:
    tests = [_item(f"system/test_{name}.py", f"test_{k}") for name in "xy" for k in range(2)]
    assert quick_of(tests) == [tests[0], tests[2]]


def test_none_that_is_marked_slow_is_quick() -> None:
    """The next row takes its place."""
    rows = [_item("test_x.py", f"test_one[{k}]", "ranks", marks=("slow",) * k) for k in (1, 0)]
    assert quick_of(rows) == [rows[1]]


def test_each_test_is_in_one_set() -> None:
    """A test that is marked nightly is in neither of the others."""
    tests = [
        _item("system/test_x.py", f"test_{k}", marks=("nightly",) * (k == 0)) for k in range(3)
    ]
    sets = {name: set_of(name, tests) for name in ("quick", "rest", "nightly")}
    assert sets == {"quick": [tests[1]], "rest": [tests[2]], "nightly": [tests[0]]}


def test_all_rows_without_a_process_group_are_quick() -> None:
    tests = [_item("test_x.py", f"test_one[{k}]", "tmp_path") for k in range(3)]
    tests.append(_item("test_x.py", "test_two"))
    assert quick_of(tests) == tests
