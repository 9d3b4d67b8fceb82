"""Where the ranks of a group find out, through its store, whether all are here and can go on.

No collective is used, so none of the process group's timeouts runs. What ranks do before and after
is up to the caller.

[Note: meetings]
Ranks meet at a *board*: what they told under one name, which is equal on all ranks and is used
once. In a *meeting* each rank tells which phase it is in, and one of its threads that it is alive;
it ends when all are done, however long one of them works, or with an error if one fails or falls
silent. An *appointment* has one deadline and one answer, that of the first rank to write it: the
last one to come, one that cannot go on, or one that waited too long.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from ddpopt import _logs
from ddpopt.errors import PeerError
from ddpopt.ranks.stores import LONGEST_TEXT, Board, next_key

_RANKS_SHOWN = 8  # in a message
_POLL_S = 0.05
_REPORT_S = 30.0
_BEATS = 10  # in the time after which a rank counts as lost

_DONE, _FAILED, _ABSENT = "done", "failed", "absent"
_ANNOUNCED, _CAME, _GO = "announced", "came", "go"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 3 and 5 more`, showing at most 8."""
    all_ranks = sorted(ranks)
    shown = ", ".join(map(str, all_ranks[:_RANKS_SHOWN]))
    more = f" and {len(all_ranks) - _RANKS_SHOWN} more" if len(all_ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' if len(all_ranks) > 1 else ''} {shown}{more}"


@contextlib.contextmanager
def meeting(group: dist.ProcessGroup, name: str, phase: str, *, silence_s: float) -> Iterator[None]:
    """Name a block that all ranks run; it ends on no rank before it has ended on all.

    Every rank of the group must make the same number of meetings of each name.

    Raises:
        PeerError: another rank raised in the block or has told nothing for `silence_s` seconds, or
            the store does not answer for as long.
    """
    board = Board(group, name, next_key(group, name), silence_s)
    board.tell(phase)
    try:
        with _beating(board, phase):
            yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
        with contextlib.suppress(PeerError):  # the block's own error is what matters
            board.tell(f"{_FAILED}\nin {phase}, {reason}")
        raise
    board.tell(_DONE)
    _wait(board)


@contextlib.contextmanager
def _beating(board: Board, phase: str) -> Iterator[None]:
    """Tell a new word at intervals, from a thread."""
    is_over = threading.Event()

    def beat() -> None:
        for number in itertools.count():
            if is_over.wait(board.limit_s / _BEATS):
                return
            with contextlib.suppress(PeerError):  # the main thread will find out too
                board.tell(f"{phase}\n{number}")

    thread = threading.Thread(target=beat, name=f"ddpopt {board.title}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _wait(board: Board) -> None:
    """Return when all ranks are done."""
    heard = {rank: ("", time.monotonic()) for rank in range(board.size)}  # words, and since when
    report_s = time.monotonic() + _REPORT_S
    while missing := _hear(board, heard):
        now_s = time.monotonic()
        for rank, phase in missing.items():
            if now_s - heard[rank][1] > board.limit_s:
                raise PeerError(
                    f"{board.title}: rank {rank} has told nothing for {board.limit_s:.0f} s (its "
                    f"last word: {phase}); it has ended, hangs, or did not make this call; look at "
                    "its log and start all ranks again, or give a higher silence_s"
                )
        if now_s > report_s:
            report_s = now_s + _REPORT_S
            if board.rank == min(heard.keys() - missing.keys()):  # one rank's log is enough
                named = ", ".join(f"rank {rank} ({phase})" for rank, phase in missing.items())
                _logs.warning("%s: still waiting for %s", board.title, named)
        time.sleep(_POLL_S)


def _hear(board: Board, heard: dict[int, tuple[str, float]]) -> dict[int, str]:
    """Return the phase of each rank that is not done, and note new words."""
    missing: dict[int, str] = {}
    for rank, word in enumerate(board.words()):
        phase, _, text = word.partition("\n")
        if phase == _FAILED:
            raise PeerError(
                f"{board.title}: rank {rank} raised {text}; this is that rank's error: look at its "
                "log"
            )
        if word != heard[rank][0]:
            heard[rank] = (word, time.monotonic())
        if phase != _DONE:
            missing[rank] = phase or _ABSENT
    return missing


class Appointment:
    """All ranks go on together, or none does; nobody waits longer than `limit_s`.

    Creating it announces this rank, before the last collective that precedes the appointment; so
    nobody waits for a rank that is not announced. `absence` is what is said of such a rank.

    Raises:
        PeerError: the store has gone or does not answer.
    """

    def __init__(
        self, group: dist.ProcessGroup, title: str, key: str, limit_s: float, *, absence: str
    ) -> None:
        self._absence = absence
        self._board = Board(group, title, key, limit_s)
        self._board.tell(_ANNOUNCED)

    def keep(self, problem: str | None) -> str | None:
        """Return why ranks do not go on, None if they do; the same on all ranks.

        Raises:
            PeerError: the store has gone or does not answer, so that nobody knows.
        """
        answer = self._board.put_first("answer", self._find_answer(problem))
        return None if answer == _GO else answer

    def _find_answer(self, problem: str | None) -> str:
        """Return this rank's answer, as soon as it has one or the board has."""
        board = self._board
        if problem:
            return f"on rank {board.rank}: {problem}"
        absent = [rank for rank, word in enumerate(board.words()) if not word]
        if absent:
            return f"{name_ranks(absent)} {self._absence}"
        board.tell(_CAME)
        until_s = time.monotonic() + board.limit_s
        while board.get("answer") == [""]:
            late = [rank for rank, word in enumerate(board.words()) if word != _CAME]
            if not late:
                return _GO
            if time.monotonic() > until_s:
                return f"{name_ranks(late)} did not come within {board.limit_s:.0f} s"
            time.sleep(_POLL_S)
        return ""
