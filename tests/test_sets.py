"""The tests that are in the quick set, by `support/sets.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sets import SYSTEM, quick_of, set_of

TESTS = SYSTEM.parent


def _item(place: str, test: str, *fixtures: str, **marks: tuple[str, ...]) -> Any:
    """A test, with the arguments of its marks."""
    return SimpleNamespace(
        path=TESTS / place,
        nodeid=f"{place}::{test}",
        fixturenames=fixtures,
        get_closest_marker=lambda name: (
            SimpleNamespace(args=marks[name]) if name in marks else None
        ),
    )


@pytest.mark.parametrize("fixture", ["four_ranks", "eight_ranks", "make_ranks", "ranks_of"])
def test_no_test_of_many_ranks_or_of_ranks_made_for_it_is_quick(fixture: str) -> None:
    """Such a test is not quick in any folder, whatever its marks."""
    assert quick_of([_item("system/test_x.py", "test_large", fixture, quick=())]) == []
    assert quick_of([_item("split/test_x.py", "test_large", "ranks", fixture)]) == []


def test_of_a_marked_test_the_rows_that_are_named_are_quick() -> None:
    """Of one that is not marked, all are; where a row stands does not matter."""
    rows = [_item("test_x.py", f"test_a[{k}]", "ranks", quick=("1", "2")) for k in range(4)]
    others = [_item("test_x.py", f"test_b[{k}]", "ranks") for k in range(2)]
    assert quick_of([*rows, *others]) == [rows[1], rows[2], *others]
    assert quick_of(reversed(rows)) == [rows[2], rows[1]]


def test_a_row_that_is_named_and_is_not_there_is_an_error() -> None:
    """Else a test that is renamed would leave the quick set unnoticed."""
    with pytest.raises(pytest.UsageError, match=r"test_a.*gone"):
        quick_of([_item("test_x.py", "test_a[0]", "ranks", quick=("0", "gone"))])


def test_of_the_system_what_is_marked_is_quick() -> None:
    tests = [_item("system/test_x.py", "test_1"), _item("system/test_x.py", "test_2", quick=())]
    assert quick_of(tests) == [tests[1]]


def test_none_that_is_marked_slow_is_quick() -> None:
    rows = [_item("test_x.py", "test_1", "ranks", slow=()), _item("test_x.py", "test_2", "ranks")]
    assert quick_of(rows) == [rows[1]]


def test_each_test_is_in_one_set() -> None:
    """A test that is marked nightly is in neither of the others."""
    tests = [
        _item("system/test_x.py", "test_1", nightly=(), quick=()),
        _item("system/test_x.py", "test_2", quick=()),
        _item("system/test_x.py", "test_3"),
    ]
    sets = {name: set_of(name, tests) for name in ("quick", "rest", "nightly")}
    assert sets == {"quick": [tests[1]], "rest": [tests[2]], "nightly": [tests[0]]}
