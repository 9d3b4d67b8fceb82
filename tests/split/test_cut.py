"""The record of how a graph was cut: what ranks compare of it."""

from __future__ import annotations

import pytest

from ddpopt.split.cut import digest_of_order

COLLECTIVES = {3: "all_reduce", 6: "all_gather"}
RELEASES = {"a": 1, "b": 2, "c": 4, "d": 8}


@pytest.mark.parametrize(
    ("collectives", "releases", "is_equal"),
    [
        (COLLECTIVES, {"b": 2, "a": 1, "c": 4, "d": 8}, True),  # in another order between two
        (COLLECTIVES, {"a": 2, "b": 1, "c": 5, "d": 7}, True),
        ({4: "all_reduce", 5: "all_gather"}, {"a": 1, "b": 2, "c": 4, "d": 8}, True),
        (COLLECTIVES, {"a": 1, "b": 2, "c": 2, "d": 8}, False),  # before a collective, not behind
        (COLLECTIVES, {"a": 1, "b": 2, "c": 6, "d": 8}, False),
        ({3: "all_gather", 6: "all_reduce"}, RELEASES, False),
        ({3: "all_reduce"}, RELEASES, False),
    ],
)
def test_ranks_are_alike_if_the_same_gradients_leave_between_the_same_collectives(
    collectives: dict[int, str], releases: dict[str, int], is_equal: bool
) -> None:
    expected = digest_of_order(COLLECTIVES, RELEASES)
    assert (digest_of_order(collectives, releases) == expected) is is_equal
