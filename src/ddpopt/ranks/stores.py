"""What the ranks of a group tell each other through its store, with a time limit on each wait.

A store whose process is stopped, or whose machine is cut off, answers nobody, and torch waits
forever for most answers; if the store has ended, torch tries to connect for minutes. So no other
module calls a store, and this one makes each call in a thread.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ddpopt import _torch
from ddpopt.errors import PeerError

LONGEST_TEXT = 500  # characters of an error that is told to other ranks

T = TypeVar("T")

_num_made: collections.Counter[str] = collections.Counter()


def next_key(group: dist.ProcessGroup, name: str) -> str:
    """Return a key that no board had; it is equal on ranks that asked equally often for `name`."""
    own = f"{group.group_name}/{name}"
    _num_made[own] += 1
    return f"ddpopt/{name}/{_num_made[own]}"


class Board:
    """What ranks tell under one key: one word each, and named notes.

    It has a connection of its own to the store, so that other calls do not wait for it. Each call
    raises PeerError, which begins with `title`, if the store fails or has not answered within
    `limit_s` seconds; `problem` then says so, and no further call is made.

    Raises:
        TorchDriftError: this release does not expose a group's store.
    """

    def __init__(self, group: dist.ProcessGroup, title: str, key: str, limit_s: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.title, self.limit_s = title, limit_s
        self.problem = ""
        self._key = key
        self._store = _torch.store_of(group)  # the group's, until the first call
        self._is_own = False

    def tell(self, word: str) -> None:
        """Write this rank's word, in place of the previous one."""
        self.put(str(self.rank), word)

    def words(self) -> list[str]:
        """Return each rank's word, "" for those that told none."""
        return self.get(*map(str, range(self.size)))

    def put(self, name: str, text: str) -> None:
        """Write a note, in place of the previous one."""
        self._ask(lambda store: store.set(f"{self._key}/{name}", text))

    def put_first(self, name: str, text: str) -> str:
        """Write a note unless there is one; return the one that exists then."""
        key = f"{self._key}/{name}"
        first: bytes = self._ask(lambda store: store.compare_set(key, "", text))
        return first.decode()

    def get(self, *names: str) -> list[str]:
        """Return these notes, "" for missing ones."""
        keys = [f"{self._key}/{name}" for name in names]

        def read(store: Any) -> list[str]:
            if store.check(keys):
                return [value.decode() for value in store.multi_get(keys)]
            return [store.get(key).decode() if store.check([key]) else "" for key in keys]

        return self._ask(read)

    def count(self, name: str) -> int:
        """Add 1 to a counter, and return it."""
        number: int = self._ask(lambda store: store.add(f"{self._key}/{name}", 1))
        return number

    def _ask(self, call: Callable[[Any], T]) -> T:
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                if not self._is_own:  # the group's own would outlive the group
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
    """Return a new connection to a store, or the store itself if it is written in Python."""
    try:
        return store.clone()
    except RuntimeError as error:
        if "pure virtual" in str(error):
            return store
        raise
