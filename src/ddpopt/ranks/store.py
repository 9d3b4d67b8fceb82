"""What ranks find out through their group's store: no collective, and a time limit on each wait.

So none of the process group's timeouts runs. A store whose process is stopped, or whose machine is
cut off, answers nobody, and torch waits forever for all answers, whatever `set_timeout` was given
(2.13: `get` and `wait` notice their timeout, and then wait for the store to confirm it); if the
store has ended, torch tries to connect for minutes. So no other module calls a store, and this one
makes each call in a thread.

[Note: meetings]
In a *monitored block* each rank writes which phase it is in, and one of its threads that it is
alive; the block ends when all are done, however long one of them works, or with an error if one
fails or falls silent. A *joint decision* has one deadline and one answer, that of the first rank to
write it: the last one to come, one that cannot go on, or one that waited too long.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ddpopt import _logs, _torch
from ddpopt.errors import PeerError

LONGEST_TEXT = 500  # characters of an error that other ranks get
_RANKS_SHOWN = 8  # in a message
_POLL_S = 0.05
_REPORT_S = 30.0
_BEATS = 10  # in the time after which a rank counts as lost

_DONE, _FAILED, _ABSENT = "done", "failed", "absent"
_ANNOUNCED, _CAME, _GO = "announced", "came", "go"
_NOT_NOW = "not now\n"  # what the answer begins with if ranks may ask again

T = TypeVar("T")

# How often each name was asked for, by process group: not by the group's name, which the next group
# of a process that lives on has again, with ranks that begin to count.
_num_made: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 3 and 5 more`, showing at most 8."""
    all_ranks = sorted(ranks)
    shown = ", ".join(map(str, all_ranks[:_RANKS_SHOWN]))
    more = f" and {len(all_ranks) - _RANKS_SHOWN} more" if len(all_ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' if len(all_ranks) > 1 else ''} {shown}{more}"


def next_key(group: dist.ProcessGroup, name: str) -> str:
    """A new key, which is equal on ranks that asked equally often for `name`."""
    num_made = _num_made.setdefault(group, collections.Counter())
    num_made[name] += 1
    return f"ddpopt/{name}/{num_made[name]}"


def why_no_meeting(group: dist.ProcessGroup) -> str:
    """Say why the ranks of a group cannot meet; "" if they can."""
    if _torch.store_of(group) is not None:
        return ""
    return (
        f"its process group, a {type(group).__name__}, is not one that torch.distributed made, so "
        "it has no store through which ranks could meet"
    )


class GroupStore:
    """The part of a group's store under one key: a value of each rank, and named ones.

    It has a connection of its own to the store, so that other calls do not wait for it. Each call
    raises PeerError, which begins with `title`, if the store fails or has not answered within
    `limit_s` seconds; `problem` then says so, and no further call is made.

    Raises:
        TorchDriftError: this release does not expose a group's store.
    """

    def __init__(self, group: dist.ProcessGroup, title: str, key: str, limit_s: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.title, self.limit_s = title, limit_s
        self.problem = ""
        self._key = key
        self._store = _torch.store_of(group)  # the group's, until the first call
        self._is_own = False

    def set_own(self, value: str) -> None:
        """Write this rank's value, in place of the previous one."""
        self._ask(lambda store: store.set(f"{self._key}/{self.rank}", value))

    def get_all(self) -> list[str]:
        """Return each rank's value, "" for those that wrote none."""
        return self.get(*map(str, range(self.size)))

    def set_first(self, name: str, value: str) -> str:
        """Write a value unless there is one; return the one that exists then."""
        key = f"{self._key}/{name}"
        first: bytes = self._ask(lambda store: store.compare_set(key, "", value))
        return first.decode()

    def get(self, *names: str) -> list[str]:
        """Return these values, "" for missing ones."""
        keys = [f"{self._key}/{name}" for name in names]

        def read(store: Any) -> list[str]:
            if store.check(keys):
                return [value.decode() for value in store.multi_get(keys)]
            return [store.get(key).decode() if store.check([key]) else "" for key in keys]

        return self._ask(read)

    def _ask(self, call: Callable[[Any], T]) -> T:
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                # If this thread hangs, it keeps its connection; the group's own would then outlive
                # the group.
                if not self._is_own:
                    self._store, self._is_own = _connect_anew(self._store), True
                answers.append(call(self._store))
            except Exception as error:  # for the asker to see, whatever it is
                errors.append(error)

        if not self.problem:
            thread = threading.Thread(target=run, name="ddpopt store", daemon=True)
            thread.start()
            thread.join(self.limit_s)
            if answers:
                return answers[0]
            self.problem = f"no answer within {self.limit_s:g} s"
            if errors:
                self.problem = str(errors[0])[:LONGEST_TEXT] or type(errors[0]).__name__
        raise PeerError(
            f"{self.title}: the process group's store has gone ({self.problem}); the process that "
            "holds it, mostly rank 0's, has ended or hangs: look at its log and start all ranks "
            "again"
        ) from (errors[0] if errors else None)


def _connect_anew(store: Any) -> Any:
    """A new connection to a store, or the store itself if it is written in Python."""
    try:
        return store.clone()
    except RuntimeError as error:
        if "pure virtual" in str(error):
            return store
        raise


@contextlib.contextmanager
def monitored_block(
    group: dist.ProcessGroup, name: str, phase: str, *, silence_s: float
) -> Iterator[None]:
    """Name a block that all ranks run; it ends on no rank before it has ended on all.

    Every rank of the group must run the same number of blocks of each name.

    Raises:
        PeerError: another rank raised in the block or has been silent for `silence_s` seconds, or
            the store does not answer for as long.
    """
    store = GroupStore(group, name, next_key(group, name), silence_s)
    store.set_own(phase)
    try:
        with _heartbeat(store, phase):
            yield
    except BaseException as error:
        # KeyboardInterrupt too: the others are told, and it goes on.
        reason = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
        with contextlib.suppress(PeerError):  # the block's own error is what matters
            store.set_own(f"{_FAILED}\nin {phase}, {reason}")
        raise
    store.set_own(_DONE)
    _wait_for_all(store)


@contextlib.contextmanager
def _heartbeat(store: GroupStore, phase: str) -> Iterator[None]:
    """Write a new value at intervals, from a thread: what runs in the block may compile for long.

    The other ranks cannot tell that from a rank that has ended, of which the store knows nothing.
    """
    is_over = threading.Event()

    def beat() -> None:
        for number in itertools.count():
            if is_over.wait(store.limit_s / _BEATS):
                return
            with contextlib.suppress(PeerError):  # the main thread will find out too
                store.set_own(f"{phase}\n{number}")

    thread = threading.Thread(target=beat, name=f"ddpopt {store.title}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _wait_for_all(store: GroupStore) -> None:
    """Return when all ranks are done."""
    changed = [("", time.monotonic())] * store.size  # each rank's value, and since when
    report_s = time.monotonic() + _REPORT_S
    while True:
        # The store answers at some time between the two, where this process may be held up. So a
        # rank has been silent for at least as long as from an answer to a later question.
        asked_s = time.monotonic()
        values = store.get_all()
        answered_s = time.monotonic()
        missing: dict[int, str] = {}
        for rank, value in enumerate(values):
            phase, _, text = value.partition("\n")
            if phase == _FAILED:
                raise PeerError(
                    f"{store.title}: rank {rank} raised {text}; this is that rank's error: look at "
                    "its log"
                )
            if value != changed[rank][0]:
                changed[rank] = (value, answered_s)
            if phase != _DONE:
                missing[rank] = phase or _ABSENT
                if asked_s - changed[rank][1] > store.limit_s:
                    raise PeerError(
                        f"{store.title}: rank {rank} has been silent for {store.limit_s:.0f} s "
                        f"(its last report: {missing[rank]}); it has ended, hangs, or did not make "
                        "this call; look at its log and start all ranks again, or give a higher "
                        "silence_s"
                    )
        if not missing:
            return
        if asked_s > report_s:
            report_s = asked_s + _REPORT_S
            if store.rank == min(set(range(store.size)) - missing.keys()):  # one log is enough
                named = ", ".join(f"rank {rank} ({phase})" for rank, phase in missing.items())
                _logs.warning("%s: still waiting for %s", store.title, named)
        time.sleep(_POLL_S)


class Refusal(NamedTuple):
    """Why ranks do not go on; `is_for_now` says that the reason may be gone at the next chance."""

    reason: str
    is_for_now: bool = False


class JointDecision:
    """All ranks go on together, or none does; nobody waits longer than `limit_s`.

    Creating it announces this rank, before the last collective that precedes the decision; so
    nobody waits for a rank that is not announced. No other decision may have its `key`.

    Raises:
        PeerError: the store has gone or does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, title: str, key: str, limit_s: float) -> None:
        self._store = GroupStore(group, title, key, limit_s)
        self._store.set_own(_ANNOUNCED)

    def decide(self, problem: str = "", *, is_for_now: bool = False) -> Refusal | None:
        """Return why ranks do not go on, None if they do; the same on all ranks.

        This rank's `problem`, if it has one, may be one that `is_for_now`.

        Raises:
            PeerError: the store has gone or does not answer, so that nobody knows.
        """
        answer = self._store.set_first("answer", self._find_answer(problem, is_for_now))
        if answer == _GO:
            return None
        return Refusal(answer.removeprefix(_NOT_NOW), answer.startswith(_NOT_NOW))

    def _find_answer(self, problem: str, is_for_now: bool) -> str:
        """Return this rank's answer, as soon as it has one or the store has."""
        store = self._store
        if problem:
            return f"{_NOT_NOW if is_for_now else ''}on rank {store.rank}: {problem}"
        absent = [rank for rank, value in enumerate(store.get_all()) if not value]
        if absent:
            return f"{name_ranks(absent)} did not begin it in the same step"
        store.set_own(_CAME)
        until_s = time.monotonic() + store.limit_s
        while store.get("answer") == [""]:
            late = [rank for rank, value in enumerate(store.get_all()) if value != _CAME]
            if not late:
                return _GO
            if time.monotonic() > until_s:
                return f"{name_ranks(late)} did not come within {store.limit_s:.0f} s"
            time.sleep(_POLL_S)
        return ""
