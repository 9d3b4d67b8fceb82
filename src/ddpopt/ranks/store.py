"""A process group's store: the one module that calls one, each call with a time limit.

A store whose process is stopped, or whose machine is cut off, answers nobody, and torch waits
forever for all answers, whatever `set_timeout` was given (2.13: `get` and `wait` notice their
timeout, and then wait for the store to confirm it); if the store has ended, torch tries to connect
for minutes. So a thread of ours makes all calls, and a caller waits for the thread's answer up to
the caller's own time limit.

[Note: connections]
A process makes one connection to a group's store, and one thread for it, in the group's first
meeting; both end with the group. Connecting may take long: torch looks up the name of the host
behind each new connection (2.13), which takes 5 s or multiples of that where a name server is slow
or overrun, for one process after another. So connecting has a time limit of its own, and a rank
that waits for others in a first meeting allows for it: see `GroupStore.allowance_s`.

A thread that hangs in a call is left alone, and the next meeting makes another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ddpopt import _torch
from ddpopt.errors import PeerError

LONGEST_TEXT = 500  # characters of an error that other ranks get
_RANKS_SHOWN = 8  # in a message
_CONNECTING_S = 60.0  # the longest that connecting may take, unless more is allowed for a call
# The longest `allowance_s`: a rank that has died never connects, and is not waited for longer.
_LONGEST_ALLOWANCE_S = 300.0
_PARTS_OF_LIMIT = 10  # in which an answer is waited for

T = TypeVar("T")


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 3 and 5 more`, showing at most 8."""
    all_ranks = sorted(ranks)
    shown = ", ".join(map(str, all_ranks[:_RANKS_SHOWN]))
    more = f" and {len(all_ranks) - _RANKS_SHOWN} more" if len(all_ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' if len(all_ranks) > 1 else ''} {shown}{more}"


def why_no_meeting(group: dist.ProcessGroup) -> str:
    """Say why the ranks of a group cannot meet; "" if they can. May raise TorchDriftError."""
    if _torch.store_of(group) is not None:
        return ""
    return (
        f"its process group, a {type(group).__name__}, is not one that torch.distributed made, so "
        "it has no store through which ranks could meet"
    )


# ---- The connection ------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """What a call returned, or what it raised."""

    value: Any
    error: Exception | None


class _Question(NamedTuple):
    """A call for the thread to make, and where it puts the answer."""

    call: Callable[[Any], Any]
    answers: queue.SimpleQueue[_Answer]


@dataclass(slots=True)
class _Sign:
    """A sign of life, which the thread writes at intervals."""

    write: Callable[[Any], None]
    interval_s: float
    due_s: float = 0.0


class _Connection:
    """A connection of this process to a store, with the thread that uses it."""

    def __init__(self, groups_store: Any) -> None:
        self.signs: dict[str, _Sign] = {}  # by key
        self.connecting_s: float | None = None  # how long it took; None until then
        self.process = os.getpid()  # a process that is forked has this object, but no such thread
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._serve, args=(groups_store,), name="ddpopt store", daemon=True
        )
        self.thread.start()

    def ask(self, call: Callable[[Any], T], limit_s: float) -> T:
        """What a call of the store returns; TimeoutError after the limit; or the call's own error.

        Connecting, which the first call waits for, may take longer.
        """
        answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._questions.put(_Question(call, answers))
        if self.connecting_s is None:
            limit_s = max(limit_s, _CONNECTING_S)
        answer = None
        # In parts, so that a process that was stopped for longer than the limit has time to see the
        # answer: its threads go on in any order.
        for _ in range(_PARTS_OF_LIMIT):
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=limit_s / _PARTS_OF_LIMIT)
                break
        if answer is None:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        if answer.error is not None:
            raise answer.error
        value: T = answer.value
        return value

    def close(self) -> None:
        """End the thread, and with it the connection."""
        self._questions.put(None)

    def _serve(self, groups_store: Any) -> None:
        """Answer questions, and write signs of life in between, until `close`."""
        began_s = time.monotonic()
        # Not the group's own connection, which would outlive the group with a thread that hangs.
        connect = _answer_of(_connect_anew, groups_store)
        del groups_store
        self.connecting_s = time.monotonic() - began_s
        while True:
            try:
                question = self._questions.get(timeout=self._seconds_to_next_sign())
            except queue.Empty:
                if connect.error is None:
                    self._write_signs(connect.value)
                continue
            if question is None:
                return
            is_connected = connect.error is None
            answer = _answer_of(question.call, connect.value) if is_connected else connect
            question.answers.put(answer)
            # They would keep alive, until the next question, whatever the call refers to.
            del question, answer

    def _seconds_to_next_sign(self) -> float | None:
        due_s = [sign.due_s for sign in list(self.signs.values())]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _write_signs(self, store: Any) -> None:
        for sign in list(self.signs.values()):
            if sign.due_s <= time.monotonic():
                with contextlib.suppress(Exception):  # who waits for others will find out too
                    sign.write(store)
                sign.due_s = time.monotonic() + sign.interval_s


def _answer_of(call: Callable[[Any], Any], store: Any) -> _Answer:
    try:
        return _Answer(call(store), None)
    except Exception as error:  # for the asker to see, whatever it is
        return _Answer(None, error)


def _connect_anew(store: Any) -> Any:
    """A new connection to a store, or the store itself if it is written in Python."""
    c10d: Any = dist  # whose types leave these names out
    base = store
    while isinstance(base, c10d.PrefixStore):
        base = base.underlying_store
    kind: Any = type(base)
    # The base class stands for a store in Python whose Python object is not known any more.
    is_in_python = kind is c10d.Store or kind.__module__.partition(".")[0] != "torch"
    has_no_clone = getattr(kind, "clone", None) is c10d.Store.clone
    return store if is_in_python and has_no_clone else store.clone()


# By a group's object, with which its connection ends; torch may forget the group earlier.
_connections: weakref.WeakKeyDictionary[Any, _Connection] = weakref.WeakKeyDictionary()


def _connection_of(group: dist.ProcessGroup) -> tuple[_Connection, bool]:
    """This process's connection to a group's store, and whether it was made here."""
    connection = _connections.get(group)
    if connection is not None and connection.process == os.getpid():
        return connection, False
    connection = _Connection(_torch.store_of(group))
    _connections[group] = connection
    # Not as Python exits, when `atexit` functions may still meet: a daemon's thread ends by itself.
    weakref.finalize(group, connection.close).atexit = False
    return connection, True


# ---- Calls ---------------------------------------------------------------------------------------


class GroupStore:
    """The part of a group's store under one key, for one meeting.

    Each call raises PeerError, which begins with `title`, if the store fails or has not answered
    within `limit_s` seconds; `problem` then says so, and no further call is made.

    Raises:
        TorchDriftError: this release does not expose a group's store.
    """

    def __init__(self, group: dist.ProcessGroup, title: str, key: str, limit_s: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.title, self.limit_s = title, limit_s
        self.problem = ""
        self._key = key
        self._group = group  # or the connection would end
        self._connection, self._is_first = _connection_of(group)

    @property
    def allowance_s(self) -> float:
        """For how long another rank may still be connecting when this one has; until then 0.

        Connections are made one after another, so the last rank waits up to n times as long as the
        first. Only in the group's first meeting.
        """
        if not self._is_first or self._connection.connecting_s is None:
            return 0.0
        return min(self.size * self._connection.connecting_s, _LONGEST_ALLOWANCE_S)

    def set(self, name: str, value: str) -> None:
        """Write a value, in place of a previous one."""
        self._ask(lambda store: store.set(self._path(name), value))

    def set_first(self, name: str, value: str) -> str:
        """Write a value unless there is one; return the one that exists then."""
        first: bytes = self._ask(lambda store: store.compare_set(self._path(name), "", value))
        return first.decode()

    def count(self, name: str) -> int:
        """Count a counter, which begins at 0, up by one; return the new number."""
        return self._ask(lambda store: int(store.add(self._path(name), 1)))

    def read_count(self, name: str) -> int:
        return self._ask(lambda store: int(store.add(self._path(name), 0)))

    def has(self, name: str) -> bool:
        return self._ask(lambda store: bool(store.check([self._path(name)])))

    def find(self, name: str) -> str:
        """A value, "" if there is none, for which `get` alone would wait."""

        def read(store: Any) -> str:
            path = self._path(name)
            return store.get(path).decode() if store.check([path]) else ""

        return self._ask(read)

    def get_all(self, names: Iterable[str]) -> list[str]:
        """These values, each of which has to exist, by one request."""
        paths = [self._path(name) for name in names]
        return self._ask(lambda store: [value.decode() for value in store.multi_get(paths)])

    @contextlib.contextmanager
    def writing(self, name: str, values: Iterator[str], interval_s: float) -> Iterator[None]:
        """Write the next of some values, from the connection's thread, at the end of each interval.

        An error in that is not reported.
        """
        path = self._path(name)
        sign = _Sign(lambda store: store.set(path, next(values)), interval_s)
        sign.due_s = time.monotonic() + interval_s
        self._connection.signs[path] = sign
        self._ask(lambda _: None)  # so that the thread learns of it
        try:
            yield
        finally:
            self._connection.signs.pop(path, None)

    def _path(self, name: str) -> str:
        return f"{self._key}/{name}"

    def _ask(self, call: Callable[[Any], T]) -> T:
        """What a call returns; raises PeerError if it fails, or if one has failed before."""
        cause: Exception | None = None
        if not self.problem:
            try:
                return self._connection.ask(call, self.limit_s)
            except Exception as error:
                cause = error
                self.problem = str(error)[:LONGEST_TEXT] or type(error).__name__
                self._give_up_connection()
        raise PeerError(
            f"{self.title}: the process group's store has gone ({self.problem}); the process that "
            "holds it, mostly rank 0's, has ended or hangs: look at its log and start all ranks "
            "again"
        ) from cause

    def _give_up_connection(self) -> None:
        """Let the next meeting make another: this one's thread may hang."""
        if _connections.get(self._group) is self._connection:
            del _connections[self._group]
        self._connection.close()
