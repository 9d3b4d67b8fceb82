"""A group's store that answers, does not answer, or fails; and ranks that meet by it.

Those are threads of this process.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
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
def test_what_is_written_is_there() -> None:
    """Also of one that is made again under the same key."""
    own = _store()
    assert own.get_all() == [""]
    own.set_own("here")
    assert own.get("0", "other") == ["here", ""]
    assert [own.set_first("answer", text) for text in ("yes", "no", "")] == ["yes"] * 3
    assert _store().get_all() == ["here"]
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_no_two_have_a_key() -> None:
    """Whatever their name."""
    keys = [next_key(_group(), name) for name in ("a", "a", "b")]
    assert len(set(keys)) == 3


@pytest.mark.usefixtures("one_rank")
def test_the_connection_is_the_stores_own() -> None:
    """So that the group's store ends with its group, and other calls do not wait for it."""
    own = _store()
    assert own._ask(id) != id(_torch.store_of(_group()))
    assert own._ask(id) == own._ask(id)
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_a_store_that_does_not_answer_is_asked_once() -> None:
    """A call after the limit fails at once."""
    with hanging_store() as hanging:
        own = _store(0.05)
        began_s = time.monotonic()
        for _ in range(2):
            with pytest.raises(PeerError, match=r"^testing: .* gone \(no answer within 0\.05 s\)"):
                own.get_all()
            own.limit_s = LIMIT_S
        assert time.monotonic() - began_s < LIMIT_S
        assert hanging.num_calls == 1


@pytest.mark.usefixtures("one_rank")
def test_what_fails_in_a_call_is_named() -> None:
    """With its own words, and as the cause; it is the last call."""
    own = _store()
    with pytest.raises(PeerError, match="no such key") as caught:
        own._ask(lambda store: {}["no such key"])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PeerError, match="no such key"):
        own.get_all()


class _Only:
    """A store of the user's own, with one connection only."""

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
    """As stores that are written in Python."""
    monkeypatch.setattr(_torch, "store_of", lambda _: _Only())
    assert _store().get("y", "x") == ["", "TEST/OWN/X"]


# ---- Ranks that meet ---------------------------------------------------------------------------


class _Group(NamedTuple):
    rank: int
    size: int
    group_name: str = "test"


@pytest.fixture
def threads_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups share one store; monitored blocks have the same names on all ranks."""
    shared, numbers = dist.HashStore(), [itertools.count() for _ in range(4)]
    monkeypatch.setattr(_torch, "store_of", lambda _: shared)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(
        store, "next_key", lambda group, name: f"{name}/{next(numbers[group.rank])}"
    )


def _on_ranks(size: int, run: Callable[[Any], Any]) -> list[str]:
    """Run it on ranks; return what each returned, or its error."""

    def report(rank: int) -> str:
        try:
            return str(run(_Group(rank, size)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(report, range(size)))


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_block_ends_on_no_rank_before_it_has_ended_on_all() -> None:
    """However long one works, whatever the silence that is allowed; no thread is left."""
    is_at_work = threading.Event()

    def run(group: _Group) -> bool:
        with monitored_block(group, "work", "working", silence_s=0.5):  # type: ignore[arg-type]
            if group.rank == 1:
                time.sleep(1.0)
                is_at_work.set()
        return is_at_work.is_set()

    assert _on_ranks(3, run) == ["True"] * 3
    assert not _threads()


@pytest.mark.usefixtures("threads_as_ranks")
def test_an_error_in_a_block_is_one_of_all() -> None:
    """The others name the rank, the phase and its error; the next block is as good as new."""

    def run(group: _Group) -> None:
        thinking = monitored_block(group, "work", "thinking", silence_s=LIMIT_S)  # type: ignore[arg-type]
        with contextlib.suppress(PeerError, KeyError), thinking:
            raise KeyError
        with monitored_block(group, "work", "working", silence_s=LIMIT_S):  # type: ignore[arg-type]
            if group.rank == 1:
                raise KeyError("no such batch")

    first, second, third = _on_ranks(3, run)
    assert first == third
    assert first.startswith("PeerError: work: rank 1 raised in working, KeyError: 'no such batch';")
    assert second == "KeyError: 'no such batch'"


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_rank_that_does_not_come_is_named_with_its_last_report() -> None:
    """After the silence that is allowed."""
    alone: Any = _Group(0, 2)
    with (
        pytest.raises(PeerError, match=r"rank 1 has been silent for 0 s \(its last report: absent"),
        monitored_block(alone, "work", "working", silence_s=0.3),
    ):
        pass


@pytest.mark.usefixtures("threads_as_ranks")
def test_one_of_those_that_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in which phase those are."""
    monkeypatch.setattr(store, "_REPORT_S", 0.3)
    is_said = threading.Event()

    def run(group: _Group) -> None:
        with monitored_block(group, "work", "working", silence_s=LIMIT_S):  # type: ignore[arg-type]
            if group.rank == 0:
                assert is_said.wait(LIMIT_S)

    with mock.patch.object(_logs, "warning", side_effect=lambda *_: is_said.set()) as warning:
        assert _on_ranks(3, run) == ["None"] * 3
    said = {call.args[0] % call.args[1:] for call in warning.call_args_list}
    assert said == {"work: still waiting for rank 0 (working)"}


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_store_that_does_not_answer_ends_a_monitored_block() -> None:
    """After the silence that was allowed."""
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
    """The last one to come says so."""
    decisions = _decisions(3, LIMIT_S)
    assert _on_ranks(3, lambda group: decisions[group.rank].decide()) == ["None"] * 3
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
def test_one_that_cannot_go_on_answers_for_all() -> None:
    """The first of them, and nobody waits."""
    first, second, third = _decisions(3, LIMIT_S)
    with mock.patch.object(store.time, "sleep", side_effect=AssertionError("it waits")):
        answers = [second.decide("it cannot"), first.decide("nor can I"), third.decide()]
    assert answers == [Refusal("on rank 1: it cannot")] * 3


@pytest.mark.usefixtures("threads_as_ranks")
def test_one_that_cannot_go_on_for_now_answers_for_all_and_they_may_ask_again() -> None:
    """With another key."""
    decisions = _decisions(2, LIMIT_S)
    answers = [decisions[1].decide("not yet", is_for_now=True), decisions[0].decide()]
    assert answers == [Refusal("on rank 1: not yet", is_for_now=True)] * 2
    again = _decisions(2, LIMIT_S, key="key again")
    assert _on_ranks(2, lambda group: again[group.rank].decide()) == ["None"] * 2


@pytest.mark.usefixtures("threads_as_ranks")
def test_all_missing_ranks_have_one_time_limit_and_find_its_outcome() -> None:
    """Who comes after it does not wait again."""
    first, *others = _decisions(4, limit_s=0.4)
    with mock.patch.object(store.time, "sleep", side_effect=time.sleep) as sleep:
        answer = Refusal("ranks 1, 2, 3 did not come within 0 s")
        assert first.decide() == answer
        assert sleep.call_count <= 0.4 / store._POLL_S + 1
        sleep.reset_mock()
        assert {each.decide() for each in others} == {answer}
        sleep.assert_not_called()


@pytest.mark.usefixtures("threads_as_ranks")
def test_a_store_that_does_not_answer_ends_a_decision() -> None:
    """With an error, since nobody knows then what the others do."""
    with hanging_store(), pytest.raises(PeerError, match=r"^looking: .* store has gone"):
        _decisions(1, limit_s=0.05)


def test_ranks_are_named_in_few_words() -> None:
    """Eight of them at most."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0]) == "ranks 0, 5"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
