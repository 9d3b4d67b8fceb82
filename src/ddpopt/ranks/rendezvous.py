"""Where ranks wait for each other by their group's store: as long as somebody works, or a moment.

No collective is used, so no time limit of the process group's runs. It knows phases and texts;
what ranks do in them is the caller's affair.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from ddpopt import _logs
from ddpopt.errors import PeerError
from ddpopt.ranks import stores
from ddpopt.ranks.stores import StoreConnection, StoreGoneError

_POLL_S = 0.05
_REPORT_S = 30.0
_BEATS = 10  # in the time after which a rank is given up
_LONGEST_TEXT = 500  # characters of an error that other ranks are told

_DONE, _FAILED, _ABSENT = "done", "failed", "absent"
_GO = "go"
_RANKS_SHOWN = 8

T = TypeVar("T")

_num_meetings: collections.Counter[str] = collections.Counter()


class Meeting:
    """`with Meeting(...) as meeting:` ends on no rank before it has ended on all.

    Each rank tells in which phase it is, and a thread of it that it lives. A rank that raises in
    the block, or tells nothing for `silence_s` seconds, ends it on all others with PeerError; so
    does a store that does not answer for as long.
    Every rank of the group must make equally many meetings of a name.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, silence_s: float) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._store = StoreConnection(group)
        key = f"{group.group_name}/{name}"
        _num_meetings[key] += 1
        self._key = f"ddpopt/{name}/{_num_meetings[key]}"
        self._name = name
        self._silence_s = silence_s
        self._phase, self._text, self._num_beats = "start", "", 0
        self._lock = threading.Lock()  # a beat must not overwrite a later phase
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"ddpopt {name}", daemon=True)

    def enter(self, phase: str) -> None:
        """Tell the other ranks what this one does now."""
        self._tell(phase)

    def __enter__(self) -> Meeting:
        self._tell("start")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._tell(_DONE)
                self._wait()
            else:
                with contextlib.suppress(PeerError):  # the block's error is the one to see
                    reason = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
                    self._tell(_FAILED, f"in {self._phase}, {reason}")
        finally:
            self._is_over.set()
            self._thread.join()
            self._store.close()

    def _tell(self, phase: str, text: str = "") -> None:
        with self._lock:
            self._phase, self._text = phase, text
            self._num_beats += 1
            word = f"{phase}\n{self._num_beats}\n{text}"
            self._ask(lambda store: store.set(f"{self._key}/{self._rank}", word))

    def _ask(self, call: Callable[[Any], T]) -> T:
        try:
            return self._store.ask(call, self._silence_s)
        except StoreGoneError as error:
            raise _without_store(self._name, error) from error

    def _beat(self) -> None:
        while not self._is_over.wait(self._silence_s / _BEATS):
            with contextlib.suppress(PeerError):  # the main thread finds out too
                if self._phase not in (_DONE, _FAILED):
                    self._tell(self._phase, self._text)

    def _wait(self) -> None:
        """Return when all ranks are done.

        Raises:
            PeerError: a rank raised or is silent, or the store has gone.
        """
        heard: dict[int, tuple[str, float]] = {}  # each rank's last word, and when it was new
        report_s = time.monotonic() + _REPORT_S
        while True:
            words = self._ask(self._read)
            now_s = time.monotonic()
            phases = {rank: self._hear(rank, word, heard, now_s) for rank, word in enumerate(words)}
            missing = {rank: phase for rank, phase in phases.items() if phase != _DONE}
            if not missing:
                return
            silent = [rank for rank in missing if now_s - heard[rank][1] > self._silence_s]
            if silent:
                rank = silent[0]
                raise PeerError(
                    f"{self._name}: rank {rank} has told nothing for {self._silence_s:.0f} s "
                    f"(its last word: {phases[rank]}); it has ended, hangs, or did not make this "
                    "call; look at its log and start all ranks again, or give a higher silence_s"
                )
            if now_s > report_s:
                report_s = now_s + _REPORT_S
                self._report(missing)
            time.sleep(_POLL_S)

    def _read(self, store: Any) -> list[str]:
        """Return the last word of each rank."""
        keys = [f"{self._key}/{rank}" for rank in range(self._size)]
        return [store.get(key).decode() if store.check([key]) else _ABSENT for key in keys]

    def _hear(self, rank: int, word: str, heard: dict[int, tuple[str, float]], now_s: float) -> str:
        """Return a rank's phase by its word; raise if it failed."""
        if heard.get(rank, ("", 0.0))[0] != word:
            heard[rank] = (word, now_s)
        phase, _, rest = word.partition("\n")
        if phase == _FAILED:
            raise PeerError(
                f"{self._name}: rank {rank} raised {rest.partition(chr(10))[2]}; this is that "
                "rank's error: look at its log"
            )
        return phase

    def _report(self, missing: dict[int, str]) -> None:
        if self._rank == min(set(range(self._size)) - missing.keys()):  # one rank's log is enough
            named = ", ".join(f"rank {rank} ({phase})" for rank, phase in missing.items())
            _logs.warning("%s: still waiting for %s", self._name, named)


class Appointment:
    """All ranks go on together, or none does; nobody waits longer than `limit_s`.

    There is one answer, which whoever writes it first gives: the last rank to come, one that cannot
    go on, or one that waited too long. A rank announces itself before the last collective that
    comes before the appointment; so one that did not is not waited for.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, limit_s: float) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._name, self._limit_s = group, name, limit_s

    def announce(self) -> None:
        """Tell the other ranks that this one will come.

        Raises:
            PeerError: the store has gone or does not answer.
        """
        self._ask(lambda store: store.set(f"{self._name}/announced/{self._rank}", ""))

    def keep(self, problem: str) -> str:
        """Return why ranks do not go on, "" if they do; the same on all ranks.

        Raises:
            PeerError: the store has gone or does not answer, so that nobody knows.
        """
        answer = self._ask(lambda store: self._keep(store, problem))
        return "" if answer == _GO else answer

    def _keep(self, store: Any, problem: str) -> str:
        if problem:
            return self._answer(store, f"on rank {self._rank}, {problem}")
        if missing := self._find_missing(store, "announced"):
            return self._answer(store, f"{missing} not look for them in the same steps")
        store.set(f"{self._name}/came/{self._rank}", "")
        if store.add(f"{self._name}/num_came", 1) == self._size:
            return self._answer(store, _GO)
        until_s = time.monotonic() + self._limit_s
        while not store.check([f"{self._name}/answer"]):
            if time.monotonic() > until_s:
                missing = self._find_missing(store, "came") or "ranks did"
                return self._answer(store, f"{missing} not come within {self._limit_s:.0f} s")
            time.sleep(_POLL_S)
        return self._answer(store, "")

    def _answer(self, store: Any, word: str) -> str:
        """Give an answer, unless there is one; return the one that there is."""
        text: bytes = store.compare_set(f"{self._name}/answer", "", word)
        return text.decode()

    def _find_missing(self, store: Any, what: str) -> str:
        """Return the subject of a sentence on the ranks that did not do that, "" if all did."""
        keys = {rank: f"{self._name}/{what}/{rank}" for rank in range(self._size)}
        if store.check(list(keys.values())):
            return ""
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        shown = ", ".join(map(str, missing[:_RANKS_SHOWN]))
        more = f" and {len(missing) - _RANKS_SHOWN} more" if len(missing) > _RANKS_SHOWN else ""
        return f"rank {shown} did" if len(missing) == 1 else f"ranks {shown}{more} did"

    def _ask(self, call: Callable[[Any], T]) -> T:
        try:
            return stores.ask(self._group, call, 2 * self._limit_s)
        except StoreGoneError as error:
            raise _without_store("looking for better buckets", error) from error


def _without_store(name: str, error: StoreGoneError) -> PeerError:
    return PeerError(
        f"{name}: the process group's store has gone ({error}); the process that holds it, mostly "
        "rank 0's, has ended or hangs: look at its log and start all ranks again"
    )
