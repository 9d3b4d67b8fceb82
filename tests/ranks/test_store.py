"""A group's store that answers, does not answer, fails, or is slow to connect."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.errors import PeerError
from ddpopt.ranks import store
from ddpopt.ranks.store import GroupStore, name_ranks
from tests.support.hanging_store import LIMIT_S, hanging_store
from tests.support.simulated_ranks import World
from tests.support.threads_as_ranks import FakeGroup


def _store(group: Any, limit_s: float = LIMIT_S) -> GroupStore:
    return GroupStore(group, "testing", "test/own", limit_s)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    """A group of one, whose store is in this process."""
    shared = dist.HashStore()
    monkeypatch.setattr(_torch, "store_of", lambda _: shared)
    return FakeGroup(0, 1)


def test_a_value_that_is_written_is_read(group: FakeGroup) -> None:
    """So it is by a meeting that has the same key."""
    group_store = _store(group)
    assert group_store.find("sign") == ""
    group_store.set("sign", "here")
    assert [group_store.find("sign"), group_store.has("other")] == ["here", False]
    assert [group_store.set_first("answer", text) for text in ("yes", "no", "")] == ["yes"] * 3
    assert [group_store.count("in"), group_store.count("in"), group_store.read_count("in")] == [
        1,
        2,
        2,
    ]
    assert _store(group).get_all(["answer", "sign"]) == ["yes", "here"]


def test_all_meetings_of_a_group_have_one_connection_and_one_thread(group: FakeGroup) -> None:
    """The connection is not the group's own; both end with the group."""
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


def test_a_store_that_does_not_answer_is_asked_once(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call after the limit fails without another try; the next meeting connects anew."""
    monkeypatch.setattr(store, "_CONNECTING_S", 0.0)
    with hanging_store() as hanging:
        group_store = _store(group, 0.05)
        for _ in range(2):
            with pytest.raises(PeerError, match=r"^testing: .* gone \(no answer within 0\.05 s\)"):
                group_store.find("x")
            group_store.limit_s = LIMIT_S
        assert hanging.num_calls == 1
    assert _store(group).find("x") == ""


@pytest.mark.parametrize("seed", range(8))
def test_a_process_that_was_stopped_while_it_asked_blames_no_store(seed: int) -> None:
    """For however long, and whichever of its threads goes on first."""
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


def test_connecting_has_a_limit_of_its_own(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who has taken long for it allows others longer, in the group's first meeting alone."""

    class _Slow:
        def clone(self) -> dist.Store:
            time.sleep(0.2)
            return dist.HashStore()

    monkeypatch.setattr(_torch, "store_of", lambda _: _Slow())
    first = GroupStore(FakeGroup(0, 100), "testing", "first", 0.01)  # type: ignore[arg-type]
    assert first.allowance_s == 0.0
    assert first.find("x") == ""
    assert 20.0 <= first.allowance_s <= LIMIT_S
    assert _store(first._group).allowance_s == 0.0


def test_an_error_in_a_call_is_told_and_ends_all_calls(group: FakeGroup) -> None:
    """The message has its words, and it is the cause."""
    group_store = _store(group)
    with pytest.raises(PeerError, match="no such key") as caught:
        group_store._ask(lambda store: {}["no such key"])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PeerError, match="no such key"):
        group_store.find("x")


def test_signs_of_life_are_written_until_the_block_ends(group: FakeGroup) -> None:
    """Each differs from the one before."""
    group_store, seen = _store(group), []
    until_s = time.monotonic() + LIMIT_S
    with group_store.writing("sign", map(str, itertools.count()), 1e-3):
        while len(seen) < 3 and time.monotonic() < until_s:
            if (sign := group_store.find("sign")) and sign not in seen:
                seen.append(sign)
    assert len(seen) == 3
    last = group_store.find("sign")
    time.sleep(0.05)
    assert group_store.find("sign") == last


class _Only(dist.Store):
    """Is a store that a user wrote in Python, which has one connection only."""

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


def test_ranks_are_named_in_few_words() -> None:
    """Eight of them are shown at most."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0]) == "ranks 0, 5"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
