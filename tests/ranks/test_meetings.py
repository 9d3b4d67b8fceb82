"""Ranks that meet through a store: blocks that end together, and decisions. Ranks are threads."""

from __future__ import annotations

import collections
import threading
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks.meetings.measuring import CountingStore
from ddpopt import _logs, _torch
from ddpopt.errors import PeerError
from ddpopt.ranks import meetings
from ddpopt.ranks.meetings import JointDecision, monitored_block, next_key
from tests.ranks import meeting_machines
from tests.ranks.meeting_machines import Blocks, Decisions
from tests.support.hanging_store import LIMIT_S
from tests.support.machines import run_machine
from tests.support.threads_as_ranks import FakeGroup, on_ranks


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The one store of all groups."""
    made = dist.HashStore()
    monkeypatch.setattr(_torch, "store_of", lambda _: made)
    return made


def _block(group: Any, silence_s: float = LIMIT_S) -> Any:
    return monitored_block(group, "work", "working", silence_s=silence_s)


KEY = "ddpopt/work/1"  # of the first block


def test_no_two_keys_of_a_group_are_equal() -> None:
    """But another group begins to count, also one with its name: it may have another store."""
    group: Any = FakeGroup(0, 1)
    keys = [next_key(group, name) for name in ("a", "a", "b")]
    assert len(set(keys)) == 3
    another: Any = FakeGroup(0, 1)
    assert next_key(another, "a") == keys[0]


@pytest.mark.parametrize("machine", [Blocks, Decisions])
def test_meetings_keep_their_promises_whatever_ranks_and_store_do(machine: Any) -> None:
    """All are told the same, soon, and only those are blamed who did not do what they should."""
    run_machine(machine, num_examples=100, num_steps=25)


@pytest.mark.parametrize("num_calls", range(1, 8))
def test_a_rank_that_stops_while_it_comes_is_not_waited_for_forever(num_calls: int) -> None:
    """Between writing its first report and counting itself in, for one."""
    ranks = Blocks()
    ranks.begin(seed=num_calls, connecting_s=0.0)
    ranks.come_and_stop(0, num_calls)
    ranks.all_come(0.3)
    ranks.all_end(1.0)
    ranks.teardown()


def test_a_rank_that_decides_alone_waits_for_one_time_limit() -> None:
    """The others are announced, and do not come."""
    ranks = Decisions()
    ranks.begin(seed=0, connecting_s=0.0)
    ranks.all_come(1.0)
    alone = ranks.working()[0]
    ranks.end_work(alone, "")
    ranks.pass_time(0.99 * meeting_machines.LIMIT_S)
    assert alone.told is None
    ranks.pass_time(0.2 * meeting_machines.LIMIT_S)
    assert alone.told == "ranks 1, 2 did not come within 10 s"
    ranks.teardown()


def test_one_rank_looks_up_who_is_late_for_all_that_wait() -> None:
    """Here rank 2, which has announced itself and does not decide."""
    ranks = Decisions()
    ranks.begin(seed=0, connecting_s=0.0)
    ranks.all_come(1.0)
    ranks.slow_store(0.1)  # so that the other one's time is over before the answer is there
    for stay in ranks.working()[:2]:
        ranks.end_work(stay, "")
    ranks.teardown()
    assert [stay.told for stay in ranks.stays()[:2]] == ["rank 2 did not come within 10 s"] * 2
    looked_up = [key for key in ranks.world.store.num_checks if "/came/" in key]
    assert len(looked_up) == 3
    assert {ranks.world.store.num_checks[key] for key in looked_up} == {1}


@pytest.mark.parametrize("size", [4, 64])
def test_a_meeting_costs_each_rank_requests_that_do_not_grow_with_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Looks for the answer are made for as long as a rank waits, less often with more ranks."""
    counted, made = (
        dist.HashStore(),
        collections.defaultdict(lambda: CountingStore(lambda: counted)),
    )
    are_announced = threading.Barrier(size)
    monkeypatch.setattr(_torch, "store_of", lambda group: made[group])

    def run(group: Any) -> None:
        with _block(group):
            pass
        decision = JointDecision(group, "looking", "key", LIMIT_S)
        are_announced.wait(LIMIT_S)
        assert decision.decide() is None

    assert on_ranks(size, run) == ["None"] * size
    assert len(made) == size
    for connection in made.values():
        connection.num.pop("look", 0)
        assert sum(connection.num.values()) <= 14, connection.num


@pytest.mark.usefixtures("shared")
def test_one_of_those_that_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names their phase too."""
    monkeypatch.setattr(meetings, "_REPORT_S", 0.05)
    tellers: list[int] = []  # threads
    is_said = threading.Event()

    def note(text: str, *args: object) -> None:
        # Before rank 2 has come, its name is in the line as well.
        if text % args == "work: still waiting for rank 0 (working)":
            tellers.append(threading.get_ident())
            if len(tellers) == 3:
                is_said.set()

    def run(group: Any) -> None:
        with _block(group, silence_s=1.0 if group.rank() else LIMIT_S):
            if group.rank() == 0:
                assert is_said.wait(LIMIT_S)

    monkeypatch.setattr(meetings, "_BEATS", 1000)
    with mock.patch.object(_logs, "warning", note):
        assert on_ranks(3, run) == ["None"] * 3
    assert len(set(tellers)) == 1


def test_a_store_with_values_of_an_earlier_group_is_refused(shared: dist.Store) -> None:
    shared.add(f"{KEY}/entered", 2)
    with pytest.raises(PeerError, match="of an earlier group"), _block(FakeGroup(0, 2)):
        pass
