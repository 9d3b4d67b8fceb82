"""A group's store that answers, does not answer, or fails; and ranks that meet by it.

The ranks are threads of this process.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ddpopt import _logs, _torch
from ddpopt.errors import PeerError
from ddpopt.ranks import store
from ddpopt.ranks.store import (
    GroupStore,
    JointDecision,
    Refusal,
    monitored_block,
    name_ranks,
    next_key,
)
from tests.support.hanging_store import LIMIT_S, hanging_store


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _store(limit_s: float = LIMIT_S) -> GroupStore:
    return GroupStore(_group(), "testing", "test/own", limit_s)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ddpopt")]


@pytest.mark.usefixtures("one_rank")
def test_a_value_that_is_written_is_read() -> None:
    """So it is by a store that is made anew under the same key."""
    group_store = _store()
    assert group_store.get_all() == [""]
    group_store.set_own("here")
    assert group_store.get("0", "other") == ["here", ""]
    assert [group_store.set_first("answer", text) for text in ("yes", "no", "")] == ["yes"] * 3
    assert _store().get_all() == ["here"]
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_no_two_keys_of_a_group_are_equal() -> None:
    """But another group begins to count, also one with its name: it may have another store."""
    keys = [next_key(_group(), name) for name in ("a", "a", "b")]
    assert len(set(keys)) == 3
    group: Any = _Group(0, 1)
    assert next_key(group, "a") == keys[0]


@pytest.mark.usefixtures("one_rank")
def test_a_store_has_one_connection_which_is_not_the_groups() -> None:
    """So the group's store ends with its group, and other calls do not wait for it."""
    group_store = _store()
    assert group_store._ask(id) != id(_torch.store_of(_group()))
    assert group_store._ask(id) == group_store._ask(id)
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_a_store_that_does_not_answer_is_asked_once() -> None:
    """A call after the limit fails without another try."""
    with hanging_store() as hanging:
        group_store = _store(0.05)
        for _ in range(2):
            with pytest.raises(PeerError, match=r"^testing: .* gone \(no answer within 0\.05 s\)"):
                group_store.get_all()
            group_store.limit_s = LIMIT_S
        assert hanging.num_calls == 1


@pytest.mark.usefixtures("one_rank")
def test_an_error_in_a_call_is_told_and_ends_all_calls() -> None:
    """The message has its words, and it is the cause."""
    group_store = _store()
    with pytest.raises(PeerError, match="no such key") as caught:
        group_store._ask(lambda store: {}["no such key"])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PeerError, match="no such key"):
        group_store.get_all()


class _Only:
    """Is a store that a user wrote in Python, which has one connection only."""

    def clone(self) -> Any:
        raise RuntimeError('Tried to call pure virtual function "Store::clone"')

    def check(self, keys: list[str]) -> bool:
        return keys == ["test/own/x"]

    def get(self, key: str) -> bytes:
        return key.upper().encode()


@pytest.mark.usefixtures("one_rank")
def test_a_store_without_a_second_connection_is_called_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_torch, "store_of", lambda _: _Only())
    assert _store().get("y", "x") == ["", "TEST/OWN/X"]


# ---- Ranks that meet ---------------------------------------------------------------------------


class _Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


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
def threads_as_ranks(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The one store of all groups; monitored blocks have the same names on all ranks."""
    shared, numbers = dist.HashStore(), [itertools.count() for _ in range(4)]
    monkeypatch.setattr(_torch, "store_of", lambda _: shared)
    monkeypatch.setattr(
        store, "next_key", lambda group, name: f"{name}/{next(numbers[group.rank()])}"
    )
    return shared


def _on_ranks(size: int, run: Callable[[Any], Any]) -> list[str]:
    """Run it on ranks; return what each returned, or its error."""

    def report(rank: int) -> str:
        try:
            return str(run(_Group(rank, size)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(report, range(size)))


def test_a_block_ends_on_no_rank_before_it_has_ended_on_all(threads_as_ranks: dist.Store) -> None:
    """Here rank 1 works on after the others are done. No thread is left."""
    has_worked = threading.Event()
    all_have_come = threading.Barrier(3)

    def run(group: _Group) -> bool:
        with monitored_block(group, "work", "working", silence_s=LIMIT_S):  # type: ignore[arg-type]
            all_have_come.wait(LIMIT_S)
            if group.rank() == 1:
                until_s = time.monotonic() + LIMIT_S
                while {threads_as_ranks.get(f"work/0/{rank}") for rank in (0, 2)} != {b"done"}:
                    assert time.monotonic() < until_s
                    time.sleep(store._POLL_S)
                time.sleep(2 * store._POLL_S)  # in which a block that does not wait would end
                has_worked.set()
        return has_worked.is_set()

    assert _on_ranks(3, run) == ["True"] * 3
    assert not _threads()


def test_a_rank_reports_as_long_as_it_works(
    threads_as_ranks: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each report differs from the one before, and one comes in a part of the allowed silence."""
    monkeypatch.setattr(store, "_BEATS", 100 * LIMIT_S)
    reports: list[bytes] = []
    until_s = time.monotonic() + LIMIT_S
    alone: Any = _Group(0, 1)
    with monitored_block(alone, "work", "working", silence_s=LIMIT_S):
        while len(reports) < 3 and time.monotonic() < until_s:
            report = threads_as_ranks.get("work/0/0")
            if report not in reports:
                reports.append(report)
            time.sleep(1e-3)
    assert len(reports) == 3
    assert all(report.startswith(b"working") for report in reports)


def test_a_rank_that_reports_is_waited_for_longer_than_the_allowed_silence(
    threads_as_ranks: dist.Store,
) -> None:
    """Here rank 1 reports after nine tenths of the silence, and is done after nine reports."""
    clock = _Clock(tick_s=0.9 * LIMIT_S)

    def report() -> None:
        is_done = clock.num_ticks == 10
        threads_as_ranks.set("work/0/1", "done" if is_done else f"working\n{clock.num_ticks}")

    clock.at_tick = report
    alone: Any = _Group(0, 2)
    with (
        mock.patch.object(store, "time", clock),
        monitored_block(alone, "work", "working", silence_s=LIMIT_S),
    ):
        pass
    assert clock.num_ticks == 10


@pytest.mark.parametrize("held_up", ["before the store answers", "after it has answered"])
def test_a_rank_that_is_held_up_while_it_asks_blames_nobody(
    threads_as_ranks: dist.Store, monkeypatch: pytest.MonkeyPatch, held_up: str
) -> None:
    """Rank 1 reports twice in the allowed silence, of which rank 0 is held up twice as long."""
    clock = _Clock(tick_s=LIMIT_S / 10)
    get_all = GroupStore.get_all
    num_asked = 0

    def report() -> None:
        if clock.num_ticks % 5 == 0:
            is_done = clock.num_ticks > 100
            threads_as_ranks.set("work/0/1", "done" if is_done else f"working\n{clock.num_ticks}")

    def get_all_slowly(group_store: GroupStore) -> list[str]:
        nonlocal num_asked
        num_asked += 1
        early_values = get_all(group_store)
        if num_asked % 3 == 0:
            for _ in range(20):
                clock.sleep(0)
        return get_all(group_store) if held_up == "before the store answers" else early_values

    clock.at_tick = report
    monkeypatch.setattr(GroupStore, "get_all", get_all_slowly)
    alone: Any = _Group(0, 2)
    with (
        mock.patch.object(store, "time", clock),
        monitored_block(alone, "work", "working", silence_s=LIMIT_S),
    ):
        pass
    assert clock.num_ticks > 100


@pytest.mark.usefixtures("threads_as_ranks")
def test_an_error_in_a_block_is_one_of_all() -> None:
    """The others name the rank, its phase and its error; a block after a failed one works."""

    def run(group: _Group) -> None:
        thinking = monitored_block(group, "work", "thinking", silence_s=LIMIT_S)  # type: ignore[arg-type]
        with contextlib.suppress(PeerError, KeyError), thinking:
            raise KeyError
        with monitored_block(group, "work", "working", silence_s=LIMIT_S):  # type: ignore[arg-type]
            if group.rank() == 1:
                raise KeyError("no such batch")

    first, second, third = _on_ranks(3, run)
    assert first == third
    assert first.startswith("PeerError: work: rank 1 raised in working, KeyError: 'no such batch';")
    assert second == "KeyError: 'no such batch'"


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_rank_that_does_not_come_is_named_with_its_last_report() -> None:
    """It is waited for until the allowed silence has passed."""
    clock = _Clock(tick_s=0.3 * LIMIT_S)
    alone: Any = _Group(0, 2)
    text = rf"rank 1 has been silent for {LIMIT_S:.0f} s \(its last report: absent"
    with (
        mock.patch.object(store, "time", clock),
        pytest.raises(PeerError, match=text),
        monitored_block(alone, "work", "working", silence_s=LIMIT_S),
    ):
        pass
    assert clock.num_ticks == 4


@pytest.mark.usefixtures("threads_as_ranks")
def test_one_of_those_that_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names their phase too; where two wait, it is the first of them."""
    monkeypatch.setattr(store, "_REPORT_S", 0.05)
    threads_of_ranks: dict[int, int] = {}
    tellers: list[int] = []  # threads
    is_said = threading.Event()

    def note(text: str, *args: object) -> None:
        # Before rank 2 has come, its name is in the line as well.
        if text % args == "work: still waiting for rank 0 (working)":
            tellers.append(threading.get_ident())
            if len(tellers) == 3:
                is_said.set()

    def run(group: _Group) -> None:
        threads_of_ranks[group.rank()] = threading.get_ident()
        with monitored_block(group, "work", "working", silence_s=LIMIT_S):  # type: ignore[arg-type]
            if group.rank() == 0:
                assert is_said.wait(LIMIT_S)

    with mock.patch.object(_logs, "warning", note):
        assert _on_ranks(3, run) == ["None"] * 3
    assert set(tellers) == {threads_of_ranks[1]}


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_store_that_does_not_answer_ends_a_monitored_block() -> None:
    """It has as long for an answer as a rank may be silent."""
    alone: Any = _Group(0, 1)
    with (
        hanging_store(),
        pytest.raises(PeerError, match=r"work: .* gone \(no answer within 0\.1 s\)"),
        monitored_block(alone, "work", "working", silence_s=0.1),
    ):
        pass


def _decisions(
    size: int, limit_s: float, num_here: int | None = None, key: str = "key"
) -> list[JointDecision]:
    groups: list[Any] = [_Group(rank, size) for rank in range(num_here or size)]
    return [JointDecision(g, "looking", key, limit_s) for g in groups]


@pytest.mark.usefixtures("threads_as_ranks")
def test_ranks_that_all_come_go_on() -> None:
    """The last one to come writes the answer."""
    decisions = _decisions(3, LIMIT_S)
    assert _on_ranks(3, lambda group: decisions[group.rank()].decide()) == ["None"] * 3
    assert not _threads()


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_rank_that_is_not_announced_is_not_waited_for() -> None:
    """All get the same answer."""
    first, second = _decisions(4, LIMIT_S, num_here=2)
    with mock.patch.object(store.time, "sleep", side_effect=AssertionError("it waits")):
        assert (
            first.decide()
            == second.decide()
            == Refusal("ranks 2, 3 did not begin it in the same step")
        )


@pytest.mark.usefixtures("threads_as_ranks")
def test_the_first_rank_that_cannot_go_on_answers_for_all() -> None:
    """Nobody waits for the others then."""
    first, second, third = _decisions(3, LIMIT_S)
    with mock.patch.object(store.time, "sleep", side_effect=AssertionError("it waits")):
        answers = [second.decide("it cannot"), first.decide("nor can I"), third.decide()]
    assert answers == [Refusal("on rank 1: it cannot")] * 3


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_rank_that_cannot_go_on_for_now_answers_for_all_and_they_may_ask_again() -> None:
    """They ask with another key."""
    decisions = _decisions(2, LIMIT_S)
    answers = [decisions[1].decide("not yet", is_for_now=True), decisions[0].decide()]
    assert answers == [Refusal("on rank 1: not yet", is_for_now=True)] * 2
    again = _decisions(2, LIMIT_S, key="key again")
    assert _on_ranks(2, lambda group: again[group.rank()].decide()) == ["None"] * 2


@pytest.mark.usefixtures("threads_as_ranks")
def test_all_missing_ranks_have_one_time_limit_and_find_its_outcome() -> None:
    """Ranks that come after it do not wait again."""
    first, *others = _decisions(4, LIMIT_S)
    clock = _Clock(tick_s=0.3 * LIMIT_S)
    with mock.patch.object(store, "time", clock):
        answer = Refusal(f"ranks 1, 2, 3 did not come within {LIMIT_S:.0f} s")
        assert first.decide() == answer
        assert clock.num_ticks == 4
        assert {late.decide() for late in others} == {answer}
        assert clock.num_ticks == 4


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_store_that_does_not_answer_ends_a_decision() -> None:
    """It is an error, since nobody knows then what the others do."""
    with hanging_store(), pytest.raises(PeerError, match=r"^looking: .* store has gone"):
        _decisions(1, limit_s=0.05)


def test_ranks_are_named_in_few_words() -> None:
    """Eight of them are shown at most."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0]) == "ranks 0, 5"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
