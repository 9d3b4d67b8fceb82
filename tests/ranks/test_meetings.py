"""Ranks that meet through a store, on a clock of their own: blocks that end together, decisions."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import pytest

from benchmarks.meetings.measuring import FakeGroup
from ddpopt.errors import PeerError
from ddpopt.ranks import meetings
from ddpopt.ranks.meetings import JointDecision, monitored_block, next_key
from ddpopt.ranks.store import GroupStore
from tests.ranks import meeting_machines
from tests.ranks.meeting_machines import Blocks, Decisions
from tests.support.logs import logged
from tests.support.machines import run_machine
from tests.support.simulated_ranks import World

SILENCE_S = 10.0


def _block(group: Any) -> Any:
    return monitored_block(group, "work", "working", silence_s=SILENCE_S)


def test_no_two_keys_of_a_group_are_equal() -> None:
    """Another group begins to count, also one of the same name: it may have another store."""
    group: Any = FakeGroup(0, 1)
    keys = [next_key(group, name) for name in ("a", "a", "b")]
    assert len(set(keys)) == 3
    another: Any = FakeGroup(0, 1)
    assert next_key(another, "a") == keys[0]


@pytest.mark.parametrize("machine", [Blocks, Decisions])
def test_meetings_keep_their_promises_whatever_ranks_and_store_do(machine: Any) -> None:
    """All ranks are told the same, soon; only those are blamed who did not do what they should."""
    run_machine(machine, num_examples=100, num_steps=25)


@pytest.mark.parametrize("num_calls", range(1, 8))
def test_a_rank_that_stops_while_it_comes_is_not_waited_for_forever(num_calls: int) -> None:
    """The rank may have written its first report, and not have counted itself in."""
    ranks = Blocks()
    ranks.begin(seed=num_calls, connecting_s=0.0)
    ranks.come_and_stop(0, num_calls)
    ranks.all_come(0.3)
    ranks.all_end(1.0)
    ranks.teardown()


def test_ranks_that_connect_one_after_another_are_not_taken_for_absent() -> None:
    """In a group's first meeting, where the last one connects long behind the time limit."""
    world = World(3)
    world.store.connecting_s = 8.0

    def work(group: Any) -> None:
        with monitored_block(group, "work", "thinking", silence_s=5.0):
            pass

    with world.simulated():
        assert world.run(work) == [None] * 3


def test_a_rank_that_decides_alone_waits_for_one_time_limit() -> None:
    """Ranks 1 and 2 are announced, and do not come."""
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
    """Rank 2 is late: it has announced itself and does not decide."""
    ranks = Decisions()
    ranks.begin(seed=0, connecting_s=0.0)
    ranks.all_come(1.0)
    ranks.slow_store(0.1)  # so that the other one's time is over before the answer is there
    for stay in ranks.working()[:2]:
        ranks.end_work(stay, "")
    ranks.teardown()
    assert [stay.told for stay in ranks.stays()[:2]] == ["rank 2 did not come within 10 s"] * 2
    checks = [call.key for call in ranks.world.store.requests if call.name == "check"]
    looked_up = [key for key in checks if "/came/" in key]
    assert len(looked_up) == len(set(looked_up)) == 3


@pytest.mark.parametrize("size", [4, 64])
def test_a_meeting_costs_each_rank_requests_that_do_not_grow_with_ranks(size: int) -> None:
    """Looks for the answer are made for as long as a rank waits, less often with more ranks."""
    world = World(size)

    def meet(group: Any) -> str:
        with _block(group):
            pass
        decision = JointDecision(group, "looking", "key", SILENCE_S)
        world.sleep(SILENCE_S)  # all are announced
        return str(decision.decide())

    with world.simulated():
        assert world.run(meet) == ["None"] * size
    num_requests = collections.Counter(
        request.rank
        for request in world.store.requests
        if (request.name, request.key.rpartition("/")[2]) != ("check", "answer")
    )
    assert len(num_requests) == size
    assert max(num_requests.values()) <= 14


def test_one_of_those_that_wait_says_for_whom_and_what_that_rank_does() -> None:
    world = World(3)

    def work(group: Any) -> None:
        with _block(group):
            if group.rank() == 0:
                world.sleep(3.5 * meetings._REPORT_S)

    with (
        world.simulated(),
        mock.patch.object(meetings, "_REPORT_S", 5.0),
        logged("warning") as lines,
    ):
        assert world.run(work) == [None] * 3
    assert lines == ["work: still waiting for rank 0 (working)"] * 3


def test_a_store_with_values_of_an_earlier_group_is_refused() -> None:
    world = World(2)

    def enter(group: Any) -> None:
        for _ in range(2):
            GroupStore(group, "work", "ddpopt/work/1", SILENCE_S).count("entered")
        with _block(group):
            pass

    with world.simulated():
        (error,) = world.run(enter, ranks=[0])
    assert isinstance(error, PeerError)
    assert "of an earlier group" in str(error)
