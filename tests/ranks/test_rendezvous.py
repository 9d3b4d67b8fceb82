"""Meetings and appointments of several ranks, in one process: ranks are threads of it."""

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
from ddpopt.ranks import rendezvous
from ddpopt.ranks.rendezvous import Appointment, meeting, name_ranks
from tests.support.hanging import LIMIT_S, hanging_store


class _Group(NamedTuple):
    rank: int
    size: int
    group_name: str = "test"


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups share one store; meetings have the same names on all ranks."""
    store, numbers = dist.HashStore(), [itertools.count() for _ in range(4)]
    monkeypatch.setattr(_torch, "store_of", lambda _: store)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(
        rendezvous, "next_key", lambda group, name: f"{name}/{next(numbers[group.rank])}"
    )


def _on_ranks(size: int, run: Callable[[Any], Any]) -> list[str]:
    """Run it on ranks; return what each returned, or its error."""

    def tell(rank: int) -> str:
        try:
            return str(run(_Group(rank, size)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(tell, range(size)))


def _threads() -> int:
    return sum(thread.name.startswith("ddpopt") for thread in threading.enumerate())


def test_a_meeting_ends_on_no_rank_before_it_has_ended_on_all() -> None:
    """However long one works, whatever the silence that is allowed; no thread is left."""
    is_at_work = threading.Event()

    def run(group: _Group) -> bool:
        with meeting(group, "work", "working", silence_s=0.5):  # type: ignore[arg-type]
            if group.rank == 1:
                time.sleep(1.0)
                is_at_work.set()
        return is_at_work.is_set()

    assert _on_ranks(3, run) == ["True"] * 3
    assert _threads() == 0


def test_an_error_in_a_meeting_is_one_of_all() -> None:
    """The others name the rank, the phase and its error; the next meeting is as good as new."""

    def run(group: _Group) -> None:
        thinking = meeting(group, "work", "thinking", silence_s=LIMIT_S)  # type: ignore[arg-type]
        with contextlib.suppress(PeerError, KeyError), thinking:
            raise KeyError
        with meeting(group, "work", "working", silence_s=LIMIT_S):  # type: ignore[arg-type]
            if group.rank == 1:
                raise KeyError("no such batch")

    first, second, third = _on_ranks(3, run)
    assert first == third
    assert first.startswith("PeerError: work: rank 1 raised in working, KeyError: 'no such batch';")
    assert second == "KeyError: 'no such batch'"


def test_a_rank_that_does_not_come_is_named_with_its_last_word() -> None:
    """After the silence that is allowed."""
    alone: Any = _Group(0, 2)
    with (
        pytest.raises(PeerError, match=r"rank 1 has told nothing for 0 s \(its last word: absent"),
        meeting(alone, "work", "working", silence_s=0.3),
    ):
        pass


def test_one_of_those_that_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in which phase those are."""
    monkeypatch.setattr(rendezvous, "_REPORT_S", 0.3)
    is_said = threading.Event()

    def run(group: _Group) -> None:
        with meeting(group, "work", "working", silence_s=LIMIT_S):  # type: ignore[arg-type]
            if group.rank == 0:
                assert is_said.wait(LIMIT_S)

    with mock.patch.object(_logs, "warning", side_effect=lambda *_: is_said.set()) as warning:
        assert _on_ranks(3, run) == ["None"] * 3
    said = {call.args[0] % call.args[1:] for call in warning.call_args_list}
    assert said == {"work: still waiting for rank 0 (working)"}


def test_a_store_that_does_not_answer_ends_a_meeting() -> None:
    """After the silence that was allowed."""
    alone: Any = _Group(0, 1)
    with (
        hanging_store(),
        pytest.raises(PeerError, match=r"work: .* gone \(no answer within 0\.1 s\)"),
        meeting(alone, "work", "working", silence_s=0.1),
    ):
        pass


def _appoint(size: int, limit_s: float, num_here: int | None = None) -> list[Appointment]:
    groups: list[Any] = [_Group(rank, size) for rank in range(num_here or size)]
    return [Appointment(g, "looking", "key", limit_s, absence="did not look") for g in groups]


def test_ranks_that_all_come_go_on() -> None:
    """The last one to come says so."""
    appointments = _appoint(3, LIMIT_S)
    assert _on_ranks(3, lambda group: appointments[group.rank].keep(None)) == ["None"] * 3
    assert _threads() == 0


def test_a_rank_that_is_not_announced_is_not_waited_for() -> None:
    """All hear the same."""
    first, second = _appoint(4, LIMIT_S, num_here=2)
    with mock.patch.object(rendezvous.time, "sleep", side_effect=AssertionError("it waits")):
        assert first.keep(None) == second.keep(None) == "ranks 2, 3 did not look"


def test_one_that_cannot_go_on_answers_for_all() -> None:
    """The first of them, and nobody waits."""
    first, second, third = _appoint(3, LIMIT_S)
    with mock.patch.object(rendezvous.time, "sleep", side_effect=AssertionError("it waits")):
        told = [second.keep("it cannot"), first.keep("nor can I"), third.keep(None)]
    assert told == ["on rank 1: it cannot"] * 3


def test_all_missing_ranks_have_one_time_limit_and_find_its_outcome() -> None:
    """Who comes after it does not wait again."""
    first, *others = _appoint(4, limit_s=0.4)
    with mock.patch.object(rendezvous.time, "sleep", side_effect=time.sleep) as sleep:
        assert first.keep(None) == "ranks 1, 2, 3 did not come within 0 s"
        assert sleep.call_count <= 0.4 / rendezvous._POLL_S + 1
        sleep.reset_mock()
        assert {each.keep(None) for each in others} == {"ranks 1, 2, 3 did not come within 0 s"}
        sleep.assert_not_called()


def test_a_store_that_does_not_answer_ends_an_appointment() -> None:
    """With an error, since nobody knows then what the others do."""
    with hanging_store(), pytest.raises(PeerError, match=r"^looking: .* store has gone"):
        _appoint(1, limit_s=0.05)


def test_ranks_are_named_in_few_words() -> None:
    """Eight of them at most."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0]) == "ranks 0, 5"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
