"""Meetings of all ranks of a group through its store: no collective, so no timeout of one runs.

[Note: meetings]
    a block of two ranks, silence_s = 30        rank 0               rank 1              the store
     0 s                                        begins               begins              in: 2
     5 s                                        done, and watches    works               out: 1
    60 s                                        sees rank 1's sign   gives a sign        out: 1
    90 s                                        answers "all done"   done                out: 2
    or rank 1 gives no sign for 30 s:           answers "rank 1 is lost", which both raise

In a *monitored block* each rank writes which phase it is in, and at intervals that it is alive; the
block ends when all are done, however long one of them works, or with an error if one fails or falls
silent. A *joint decision* has one deadline. Either has one answer, the same on all ranks: the one
that is written first. It is written by the last rank to come, by one that fails or cannot go on, or
by one that has waited too long for another; a rank that then comes reads that answer.

[Note: what a meeting costs]
It has to end on a thousand ranks as on two, so no rank asks for something of each of the others.
Ranks count themselves in and out; the one that makes a counter full writes the answer, and all
others look for that one key, every 50 ms, or every 0.75 n ms on n ranks if that is longer. In a
block the first rank that is done *watches*: once all ranks are in the block, it reads the signs of
life of all by one request in each interval between two signs. The others read only that rank's.
Ranks that are late are looked up one by one, by one rank, for a message.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from ddpopt import _logs
from ddpopt.errors import PeerError
from ddpopt.ranks.store import LONGEST_TEXT, GroupStore, name_ranks

_POLL_S = 0.05
_POLL_S_PER_RANK = 0.75e-3
_REPORT_S = 30.0
_BEATS = 10  # signs of life in the time after which a rank counts as lost

# Names of values and counters.
_ANSWER, _ENTERED, _LEFT, _WATCHING = "answer", "entered", "left", "watching"
_ANNOUNCED, _CAME, _CLOSING = "announced", "came", "closing"

_GO = "go"  # the answer with which ranks go on; all others say why they do not
_DONE, _ABSENT = "done", "absent"  # phases
_NOT_NOW = "not now\n"  # what a decision's answer begins with if ranks may ask again

# How often each name was asked for, by process group: not by the group's name, which the next group
# of a process that lives on has again, with ranks that begin to count.
_num_made: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def next_key(group: dist.ProcessGroup, name: str) -> str:
    """A new key, which is equal on ranks that asked equally often for `name`."""
    num_made = _num_made.setdefault(group, collections.Counter())
    num_made[name] += 1
    return f"ddpopt/{name}/{num_made[name]}"


def _poll_s(store: GroupStore) -> float:
    """How long a rank waits between two looks for the answer; see [Note: what a meeting costs]."""
    return max(_POLL_S, _POLL_S_PER_RANK * store.size)


# ---- Blocks --------------------------------------------------------------------------------------


@contextlib.contextmanager
def monitored_block(
    group: dist.ProcessGroup, name: str, phase: str, *, silence_s: float
) -> Iterator[None]:
    """Make a block that all ranks run end on no rank before it has ended on all.

    `name` is the call of a user's that errors name, and `phase` what ranks do in the block. Every
    rank of the group must run the same number of blocks of each name.

    Raises:
        PeerError: another rank raised in the block or has been silent for `silence_s` seconds, or
            the store does not answer for as long.
    """
    store = GroupStore(group, name, next_key(group, name), silence_s)
    own_sign = _sign_of(store.rank)
    store.set(own_sign, phase)  # before this rank is counted: who sees all counted reads all signs
    if store.count(_ENTERED) > store.size:
        raise PeerError(
            f"{name}: more ranks are in it than the group has ({store.size}): its store has values "
            "of an earlier group; make the process group with a store of its own"
        )
    # Each sign of life is another text, by which the others see that it is new.
    signs = (f"{phase}\n{number}" for number in itertools.count())
    with contextlib.ExitStack() as living:
        living.enter_context(store.writing(own_sign, signs, silence_s / _BEATS))
        try:
            yield
        except BaseException as error:
            # KeyboardInterrupt too: the others are told, and it goes on.
            reason = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
            with contextlib.suppress(PeerError):  # the block's own error is what matters
                store.set_first(
                    _ANSWER,
                    f"rank {store.rank} raised in {phase}, {reason}; this is that rank's error: "
                    "look at its log",
                )
            raise
        # It gets `living`, by which a rank ends its signs where it is done and watches nobody.
        answer = _leave(store, own_sign, living)
    if answer != _GO:
        raise PeerError(f"{name}: {answer}")


def _sign_of(rank: int) -> str:
    """The name of a rank's sign of life: its phase, and in a second line what changes."""
    return f"sign/{rank}"


def _leave(store: GroupStore, own_sign: str, living: contextlib.ExitStack) -> str:
    """Count this rank out of a block, and wait for the block's answer.

    `living` writes this rank's signs of life until it is closed.
    """
    if store.count(_LEFT) == store.size:
        return store.set_first(_ANSWER, _GO)
    watching = int(store.set_first(_WATCHING, str(store.rank)))
    if watching == store.rank:
        # This rank goes on writing signs, by which the others see that somebody watches.
        return _wait(store, _Watch(store))
    living.close()  # first, since one more sign would overwrite `_DONE`
    store.set(own_sign, _DONE)
    return _wait(store, _WatchOfOne(store, watching))


def _wait(store: GroupStore, watch: _Watch | _WatchOfOne) -> str:
    """Wait for a block's answer; if `watch` finds a problem first, that is the answer."""
    next_look_s = time.monotonic()
    while True:
        answer = store.find(_ANSWER)
        if not answer and time.monotonic() >= next_look_s:
            next_look_s = time.monotonic() + store.limit_s / _BEATS
            if problem := watch.look():
                answer = store.set_first(_ANSWER, problem)
        if answer:
            return answer
        time.sleep(_poll_s(store))


class _Signs:
    """Signs of life of some ranks, and since when each has not changed.

    The store answers at some time between a question and its answer, where this process may be held
    up. So a rank has been silent for at least as long as from an answer to a later question.
    """

    def __init__(self, store: GroupStore, ranks: list[int]) -> None:
        self._store = store
        self._names = {rank: _sign_of(rank) for rank in ranks}
        self._seen: dict[int, tuple[str, float]] = {}
        self.phases: dict[int, str] = {}

    def find_silent(self) -> str:
        """Read the signs; say which rank has been silent for too long, "" for none."""
        asked_s = time.monotonic()
        values = self._store.get_all(self._names.values())
        answered_s = time.monotonic()
        for rank, value in zip(self._names, values, strict=True):
            phase = value.partition("\n")[0]
            self.phases[rank] = phase
            before, since_s = self._seen.get(rank, ("", 0.0))
            if value != before:
                self._seen[rank] = value, answered_s
            elif phase != _DONE and asked_s - since_s > self._store.limit_s:
                return _silence(self._store, rank, phase)
        return ""


def _silence(store: GroupStore, rank: int, phase: str) -> str:
    return (
        f"rank {rank} has been silent for {store.limit_s:.0f} s (its last report: {phase}); it has "
        "ended, hangs, or did not make this call; look at its log and start all ranks again, or "
        "give a higher silence_s"
    )


class _WatchOfOne:
    """What a rank that waits looks at: whether the watching one lives."""

    def __init__(self, store: GroupStore, watching: int) -> None:
        self._signs = _Signs(store, [watching])

    def look(self) -> str:
        """What is wrong, "" for nothing."""
        return self._signs.find_silent()


class _Watch:
    """What the watching rank looks at: whether all ranks come, and then whether all live."""

    def __init__(self, store: GroupStore) -> None:
        self._store = store
        self._others = [rank for rank in range(store.size) if rank != store.rank]
        self._signs = _Signs(store, self._others)
        self._are_in = False
        # When a rank that has not come yet counts as lost.
        self._until_s = time.monotonic() + store.limit_s + store.allowance_s
        self._report_s = time.monotonic() + _REPORT_S

    def look(self) -> str:
        """What is wrong, "" for nothing; now and then a warning says which ranks are missing."""
        store = self._store
        asked_s = time.monotonic()
        # Signs are read only when all are there: a store waits for values that are missing.
        self._are_in = self._are_in or store.read_count(_ENTERED) == store.size
        if self._are_in:
            if problem := self._signs.find_silent():
                return problem
        elif asked_s > self._until_s:
            absent = [rank for rank in self._others if not store.find(_sign_of(rank))]
            if absent:
                return _silence(store, absent[0], _ABSENT)
            # All have written a sign. Who has not counted itself since may have ended in between,
            # and falls silent.
            self._are_in = True
        if asked_s > self._report_s:
            self._report_s = asked_s + _REPORT_S
            _logs.warning("%s: still waiting for %s", store.title, self._describe_missing())
        return ""

    def _describe_missing(self) -> str:
        """The ranks that are not done, and what each of them does; for a warning."""
        phases = self._signs.phases
        if not self._are_in:
            phases = {
                rank: self._store.find(_sign_of(rank)).partition("\n")[0] for rank in self._others
            }
        missing = {rank: phase or _ABSENT for rank, phase in phases.items() if phase != _DONE}
        if not missing:
            return "nobody any more"
        by_phase: dict[str, list[int]] = {}
        for rank, phase in missing.items():
            by_phase.setdefault(phase, []).append(rank)
        return ", ".join(f"{name_ranks(ranks)} ({phase})" for phase, ranks in by_phase.items())


# ---- Decisions -----------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """Why ranks do not go on; `is_for_now` says that the reason may be gone at the next chance."""

    reason: str
    is_for_now: bool


class JointDecision:
    """All ranks go on together, or none does; nobody waits longer than twice `limit_s`.

    Creating it announces this rank, before the last collective that precedes the decision; so
    nobody waits for a rank that is not announced. No other decision may have its `key`.

    Raises:
        PeerError: the store has gone or does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, title: str, key: str, limit_s: float) -> None:
        self._store = GroupStore(group, title, key, limit_s)
        # Counted first: so a rank that is not counted has no key either, and is found missing.
        self._store.count(_ANNOUNCED)
        self._store.set(f"{_ANNOUNCED}/{self._store.rank}", "")

    def decide(self, problem: str = "", *, is_for_now: bool = False) -> Refusal | None:
        """Return why ranks do not go on, None if they do; the same on all ranks.

        `problem` is why this rank cannot go on, "" if it can. One that `is_for_now` may be gone at
        a later meeting.

        Raises:
            PeerError: the store has gone or does not answer, so that nobody knows.
        """
        if problem:
            text = f"{_NOT_NOW if is_for_now else ''}on rank {self._store.rank}: {problem}"
            answer = self._store.set_first(_ANSWER, text)
        else:
            answer = self._find_answer()
        if answer == _GO:
            return None
        return Refusal(answer.removeprefix(_NOT_NOW), answer.startswith(_NOT_NOW))

    def _find_answer(self) -> str:
        """The answer, as soon as this rank has one or the store has."""
        store = self._store
        # All announce themselves before a collective that precedes this call. So whoever has not
        # was not in that collective, and is not waited for.
        if store.read_count(_ANNOUNCED) < store.size:
            if answer := store.find(_ANSWER):
                return answer
            absent = self._find_missing(_ANNOUNCED)
            # The absent rank may have announced itself since, one step late.
            who = name_ranks(absent) if absent else "another rank"
            return store.set_first(_ANSWER, f"{who} did not begin it in the same step")
        store.set(f"{_CAME}/{store.rank}", "")  # before it is counted, or it could seem late
        if store.count(_CAME) == store.size:
            return store.set_first(_ANSWER, _GO)
        if answer := self._wait():
            return answer
        own = str(store.rank)
        # `limit_s` is over. The first rank here looks up who is late; the others wait once more,
        # for its answer.
        if store.set_first(_CLOSING, own) != own and (answer := self._wait()):
            return answer
        late = self._find_missing(_CAME)
        # If nobody is missing, the last rank has come meanwhile.
        reason = f"{name_ranks(late)} did not come within {store.limit_s:.0f} s" if late else _GO
        return store.set_first(_ANSWER, reason)

    def _wait(self) -> str:
        """The answer, "" if none comes in time."""
        until_s = time.monotonic() + self._store.limit_s
        while not (answer := self._store.find(_ANSWER)) and time.monotonic() <= until_s:
            time.sleep(_poll_s(self._store))
        return answer

    def _find_missing(self, counter: str) -> list[int]:
        """The ranks that have not counted themselves; asked one by one."""
        store = self._store
        return [rank for rank in range(store.size) if not store.has(f"{counter}/{rank}")]
