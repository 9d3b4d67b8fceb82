"""Ranks that meet through a store: blocks that end together, and decisions. Ranks are threads."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks.meetings.measuring import CountingStore
from ddpopt import _logs, _torch
from ddpopt.errors import PeerError
from ddpopt.ranks import meetings, store
from ddpopt.ranks.meetings import JointDecision, Refusal, monitored_block, next_key
from tests.support.hanging_store import LIMIT_S, hanging_store
from tests.support.threads_as_ranks import FakeGroup, on_ranks


class _Clock:
    """Takes the place of the module `time`, and goes on by `tick_s` with each `sleep` alone.

    It calls `at_tick` then.
    """

    def __init__(self, tick_s: float, at_tick: Callable[[], None] = lambda: None) -> None:
        self.num_ticks = 0
        self.at_tick = at_tick
        self._tick_s = tick_s

    def monotonic(self) -> float:
        return self.num_ticks * self._tick_s

    def sleep(self, _seconds: float) -> None:
        self.num_ticks += 1
        self.at_tick()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The one store of all groups."""
    made = dist.HashStore()
    monkeypatch.setattr(_torch, "store_of", lambda _: made)
    return made


def _block(group: Any, phase: str = "working", silence_s: float = LIMIT_S) -> Any:
    return monitored_block(group, "work", phase, silence_s=silence_s)


KEY = "ddpopt/work/1"  # of the first block


def test_no_two_keys_of_a_group_are_equal() -> None:
    """But another group begins to count, also one with its name: it may have another store."""
    group: Any = FakeGroup(0, 1)
    keys = [next_key(group, name) for name in ("a", "a", "b")]
    assert len(set(keys)) == 3
    another: Any = FakeGroup(0, 1)
    assert next_key(another, "a") == keys[0]


# ---- Blocks ------------------------------------------------------------------------------------


def test_a_block_ends_on_no_rank_before_it_has_ended_on_all(shared: dist.Store) -> None:
    """Here rank 1 works on after the others are done."""
    has_worked = threading.Event()
    all_have_come = threading.Barrier(3)

    def run(group: Any) -> bool:
        with _block(group):
            all_have_come.wait(LIMIT_S)
            if group.rank() == 1:
                until_s = time.monotonic() + LIMIT_S
                while shared.add(f"{KEY}/left", 0) < 2:
                    assert time.monotonic() < until_s
                    time.sleep(meetings._POLL_S)
                time.sleep(2 * meetings._POLL_S)  # in which a block that does not wait would end
                has_worked.set()
        return has_worked.is_set()

    assert on_ranks(3, run) == ["True"] * 3


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


def test_a_rank_that_reports_is_waited_for_longer_than_the_allowed_silence(
    shared: dist.Store,
) -> None:
    """Here rank 1 reports after nine tenths of the silence, and is done after nine reports."""
    clock = _Clock(tick_s=0.9 * LIMIT_S)

    def report() -> None:
        shared.set(f"{KEY}/sign/1", f"working\n{clock.num_ticks}")
        if clock.num_ticks == 1:
            shared.add(f"{KEY}/entered", 1)
        if clock.num_ticks == 10:
            shared.set(f"{KEY}/answer", "go")

    clock.at_tick = report
    with mock.patch.object(meetings, "time", clock), _block(FakeGroup(0, 2)):
        pass
    assert clock.num_ticks == 10


@pytest.mark.parametrize("held_up", ["before the store answers", "after it has answered"])
def test_a_rank_that_is_held_up_while_it_asks_blames_nobody(
    shared: dist.Store, monkeypatch: pytest.MonkeyPatch, held_up: str
) -> None:
    """Rank 1 reports twice in the allowed silence, of which rank 0 is held up twice as long."""
    clock = _Clock(tick_s=LIMIT_S / 10)
    get_all = store.GroupStore.get_all
    num_asked = 0

    def report() -> None:
        if clock.num_ticks % 5 == 0:
            shared.set(f"{KEY}/sign/1", f"working\n{clock.num_ticks}")
            if clock.num_ticks > 100:
                shared.set(f"{KEY}/answer", "go")

    def get_all_slowly(group_store: Any, names: Any) -> list[str]:
        nonlocal num_asked
        num_asked += 1
        early_values = get_all(group_store, names)
        if num_asked % 3 == 0:
            for _ in range(20):
                clock.sleep(0)
        return (
            get_all(group_store, names) if held_up == "before the store answers" else early_values
        )

    clock.at_tick = report
    monkeypatch.setattr(store.GroupStore, "get_all", get_all_slowly)
    shared.set(f"{KEY}/sign/1", "working")
    shared.add(f"{KEY}/entered", 1)
    with mock.patch.object(meetings, "time", clock), _block(FakeGroup(0, 2)):
        pass
    assert clock.num_ticks > 100


@pytest.mark.usefixtures("shared")
def test_an_error_in_a_block_is_one_of_all() -> None:
    """The others name the rank, its phase and its error; a block after a failed one works."""

    def run(group: Any) -> None:
        with contextlib.suppress(PeerError, KeyError), _block(group, "thinking"):
            raise KeyError
        with _block(group):
            if group.rank() == 1:
                raise KeyError("no such batch")

    first, second, third = on_ranks(3, run)
    assert first == third
    assert first.startswith("PeerError: work: rank 1 raised in working, KeyError: 'no such batch';")
    assert second == "KeyError: 'no such batch'"


def _silent_text(last: str) -> str:
    return rf"rank 1 has been silent for {LIMIT_S:.0f} s \(its last report: {last}"


@pytest.mark.usefixtures("shared")
def test_a_rank_that_does_not_come_is_named() -> None:
    """It is waited for until the allowed silence has passed."""
    clock = _Clock(tick_s=0.3 * LIMIT_S)
    with (
        mock.patch.object(meetings, "time", clock),
        pytest.raises(PeerError, match=_silent_text("absent")),
        _block(FakeGroup(0, 2)),
    ):
        pass
    assert clock.num_ticks == 4


@pytest.mark.parametrize("is_watching", [True, False], ids=["it works", "it watches"])
def test_a_rank_that_falls_silent_is_named_with_its_last_report(
    shared: dist.Store, is_watching: bool
) -> None:
    """The first rank that is done watches all others, and these watch it."""
    clock = _Clock(tick_s=0.3 * LIMIT_S)
    shared.set(f"{KEY}/sign/1", "thinking\n7")
    shared.add(f"{KEY}/entered", 1)
    if not is_watching:
        shared.set(f"{KEY}/watching", "1")
    with (
        mock.patch.object(meetings, "time", clock),
        pytest.raises(PeerError, match=_silent_text("thinking")),
        _block(FakeGroup(0, 2)),
    ):
        pass
    assert clock.num_ticks == 4


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


@pytest.mark.usefixtures("shared")
def test_a_store_that_does_not_answer_ends_a_monitored_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has as long for an answer as a rank may be silent, and longer for connecting."""
    monkeypatch.setattr(store, "_CONNECTING_S", 0.0)
    with (
        hanging_store(),
        pytest.raises(PeerError, match=r"work: .* gone \(no answer within 0\.1 s\)"),
        _block(FakeGroup(0, 1), silence_s=0.1),
    ):
        pass


# ---- Decisions ---------------------------------------------------------------------------------


def _decisions(
    size: int, limit_s: float, num_here: int | None = None, key: str = "key"
) -> list[JointDecision]:
    groups: list[Any] = [FakeGroup(rank, size) for rank in range(num_here or size)]
    return [JointDecision(g, "looking", key, limit_s) for g in groups]


def _not_waiting() -> Any:
    return mock.patch.object(meetings.time, "sleep", side_effect=AssertionError("it waits"))


@pytest.mark.usefixtures("shared")
def test_ranks_that_all_come_go_on() -> None:
    """The last one to come writes the answer."""
    decisions = _decisions(3, LIMIT_S)
    assert on_ranks(3, lambda group: decisions[group.rank()].decide()) == ["None"] * 3


@pytest.mark.usefixtures("shared")
def test_a_rank_that_is_not_announced_is_not_waited_for() -> None:
    """All get the same answer."""
    first, second = _decisions(4, LIMIT_S, num_here=2)
    expected = Refusal("ranks 2, 3 did not begin it in the same step")
    with _not_waiting():
        assert [first.decide(), second.decide()] == [expected] * 2


@pytest.mark.usefixtures("shared")
def test_the_first_rank_that_cannot_go_on_answers_for_all() -> None:
    """Nobody waits for the others then."""
    first, second, third = _decisions(3, LIMIT_S)
    with _not_waiting():
        answers = [second.decide("it cannot"), first.decide("nor can I"), third.decide()]
    assert answers == [Refusal("on rank 1: it cannot")] * 3


@pytest.mark.usefixtures("shared")
def test_a_rank_that_cannot_go_on_for_now_answers_for_all_and_they_may_ask_again() -> None:
    """They ask with another key."""
    decisions = _decisions(2, LIMIT_S)
    answers = [decisions[1].decide("not yet", is_for_now=True), decisions[0].decide()]
    assert answers == [Refusal("on rank 1: not yet", is_for_now=True)] * 2
    again = _decisions(2, LIMIT_S, key="key again")
    assert on_ranks(2, lambda group: again[group.rank()].decide()) == ["None"] * 2


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("has_closer", [False, True], ids=["", "whose looker-up has ended"])
def test_all_missing_ranks_have_one_time_limit_and_find_its_outcome(
    shared: dist.Store, has_closer: bool
) -> None:
    """Ranks that come after it do not wait again."""
    first, *others = _decisions(4, LIMIT_S)
    if has_closer:
        shared.set("key/closing", "3")
    num_ticks = 8 if has_closer else 4
    clock = _Clock(tick_s=0.3 * LIMIT_S)
    with mock.patch.object(meetings, "time", clock):
        answer = Refusal(f"ranks 1, 2, 3 did not come within {LIMIT_S:.0f} s")
        assert first.decide() == answer
        assert clock.num_ticks == num_ticks
        assert {late.decide() for late in others} == {answer}
        assert clock.num_ticks == num_ticks


@pytest.mark.usefixtures("shared")
def test_a_store_that_does_not_answer_ends_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, since nobody knows then what the others do."""
    monkeypatch.setattr(store, "_CONNECTING_S", 0.0)
    with hanging_store(), pytest.raises(PeerError, match=r"^looking: .* store has gone"):
        _decisions(1, limit_s=0.05)
