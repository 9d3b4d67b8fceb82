"""A group's store that answers, does not answer, fails, or is slow to connect."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks.meetings.measuring import FakeGroup
from ddpopt import _torch
from ddpopt.errors import PeerError
from ddpopt.ranks import store
from ddpopt.ranks.store import GroupStore, name_ranks
from tests.support.simulated_ranks import World

LIMIT_S = 300.0


def _store(group: Any, limit_s: float = LIMIT_S) -> GroupStore:
    return GroupStore(group, "testing", "test/own", limit_s)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    """A group of one, whose store is one of torch's in this process."""
    shared = dist.HashStore()
    monkeypatch.setattr(_torch, "store_of", lambda _: shared)
    return FakeGroup(0, 1)


def test_a_value_that_is_written_is_read_by_any_meeting_with_its_key(group: FakeGroup) -> None:
    group_store = _store(group)
    assert group_store.find("sign") == ""
    group_store.set("sign", "here")
    assert [group_store.find("sign"), group_store.has("other")] == ["here", False]
    assert [group_store.set_first("answer", text) for text in ("yes", "no", "")] == ["yes"] * 3
    numbers = [group_store.count("in"), group_store.count("in"), group_store.read_count("in")]
    assert numbers == [1, 2, 2]
    assert _store(group).get_all(["answer", "sign"]) == ["yes", "here"]


def test_all_meetings_of_a_group_have_one_connection_and_one_thread(group: FakeGroup) -> None:
    """The connection is not the group's own; connection and thread end with the group."""
    own = mock.Mock(**{"clone.side_effect": dist.HashStore})
    with mock.patch.object(_torch, "store_of", return_value=own):
        stores = [_store(group) for _ in range(3)]
        assert len({each._ask(id) for each in stores}) == 1
        assert len({each._ask(lambda _: threading.get_ident()) for each in stores}) == 1
    assert own.clone.call_count == 1
    (made,) = [c for g, c in store._connections.items() if g is group]
    thread = made.thread
    del made
    gone = FakeGroup(0, 1)
    _store(gone).find("x")
    (other,) = [c.thread for g, c in store._connections.items() if g is gone]
    del gone
    gc.collect()
    other.join(LIMIT_S)
    assert not other.is_alive()
    assert thread.is_alive()


def test_a_store_that_does_not_answer_is_asked_once() -> None:
    """A later call fails at once, after whatever limit; the next meeting connects anew."""
    world = World(1)

    def ask(group: Any) -> str:
        group_store = _store(group, 0.05)
        group_store.find("x")
        world.store.hangs = True
        for _ in range(2):
            with pytest.raises(PeerError, match=r"^testing: .*0\.05 s"):
                group_store.find("x")
            group_store.limit_s = LIMIT_S
        assert world.now_s < 0.1
        world.store.hangs = False
        return _store(group).find("x")

    with world.simulated():
        assert world.run(ask) == [""]
    assert world.store.num_connections == 2


@pytest.mark.parametrize("seed", range(8))
def test_a_process_that_was_stopped_while_it_asked_blames_no_store(seed: int) -> None:
    """The process was stopped for however long; any of its threads may go on first."""
    world, found = World(1, seed), list[str]()
    (process,) = world.processes
    with world.simulated():
        world.start(process, lambda: found.append(_store(world.group_of(0)).find("x")))
        world.pass_time(world.store.latency_s / 100)
        process.is_stopped = True
        world.pass_time(10 * LIMIT_S)
        process.is_stopped = False
        world.pass_time(1)
    assert found == [""]


def test_connecting_has_a_limit_of_its_own() -> None:
    """A call may take less time than connecting took, and not more than its own limit."""
    world = World(1)
    world.store.connecting_s = 20.0

    def ask(group: Any) -> str:
        return _store(group, 0.01).find("x")

    with world.simulated():
        assert world.run(ask) == [""]
        world.store.hangs = True
        (error,) = world.run(ask)
        assert "0.01 s" in str(error)
        (error,) = world.run(ask)  # which connects anew
        assert f"{store._CONNECTING_S:g} s" in str(error)


def test_a_rank_that_took_long_to_connect_allows_others_longer_in_the_first_meeting_alone() -> None:
    world = World(100)
    world.store.connecting_s = 0.2

    def allow(group: Any) -> list[float]:
        first = _store(group)
        before_s = first.allowance_s
        first.find("x")
        return [before_s, first.allowance_s, _store(group).allowance_s]

    with world.simulated():
        assert world.run(allow, ranks=[0]) == [[0.0, pytest.approx(100 * 0.2), 0.0]]


def test_an_error_in_a_call_is_told_and_ends_all_calls(group: FakeGroup) -> None:
    """The call's error is named in the one that is raised, and is its cause."""
    group_store = _store(group)
    with pytest.raises(PeerError, match="no such key") as caught:
        group_store._ask(lambda store: {}["no such key"])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PeerError, match="no such key"):
        group_store.find("x")


def test_signs_of_life_differ_and_are_written_until_the_block_ends() -> None:
    world = World(1)

    def live(group: Any) -> list[str]:
        group_store, seen = _store(group), []
        with group_store.writing("sign", map(str, itertools.count()), 1.0):
            for _ in range(3):
                world.sleep(1.1)
                seen.append(group_store.find("sign"))
        world.sleep(LIMIT_S)
        return [*seen, group_store.find("sign")]

    with world.simulated():
        assert world.run(live) == [["0", "1", "2", "2"]]


def test_of_two_signs_of_life_each_is_written_when_it_is_due() -> None:
    world = World(1)

    def live(group: Any) -> str:
        group_store = _store(group)
        slow, quick = (map(str, itertools.count()) for _ in range(2))
        with (
            group_store.writing("slow", slow, 50.0),
            group_store.writing("quick", quick, 1.0),
        ):
            world.sleep(10.5)
            return group_store.find("quick")

    with world.simulated():
        (sign,) = world.run(live)
    assert int(sign) >= 8


class _Only(dist.Store):
    """A store that a user wrote in Python, which has one connection only."""

    def check(self, keys: list[str]) -> bool:
        return keys == ["test/own/x"]

    def get(self, key: str) -> bytes:
        return key.upper().encode()


def test_a_store_without_a_second_connection_is_called_itself(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "store_of", lambda _: _Only())
    group_store = _store(group)
    assert [group_store.find("y"), group_store.find("x")] == ["", "TEST/OWN/X"]
    behind_a_prefix = dist.PrefixStore("a", _Only())
    assert store._connect_anew(behind_a_prefix) is behind_a_prefix


def test_of_many_ranks_eight_are_named() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0]) == "ranks 0, 5"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
