"""Calls of a process group's store that are waited for no longer than a limit.

A store whose process is stopped, or whose machine is cut off, answers nobody, and torch waits for
most of its answers for ever; to one that has ended it tries to connect for minutes. So no other
module calls a store but from a thread. What is said through it is the affair of the callers.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ddpopt import _torch

_CLOSING_S = 1.0
_LONGEST_TEXT = 500

T = TypeVar("T")
_Answers = queue.SimpleQueue[tuple[Any, Exception | None]]
_Calls = queue.SimpleQueue[tuple[Callable[[Any], Any], _Answers] | None]  # None is the last


class StoreGoneError(RuntimeError):
    """The process group's store fails, or does not answer in time."""


class StoreConnection:
    """A connection of its own to a group's store; other calls of the store do not wait for it.

    Calls are made one after the other, by a thread that ends with the connection. The first that
    fails, or is not answered in time, is the last: whoever asks after it is told so at once.

    Raises:
        TorchDriftError: this release tells no group's store.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._problem = ""
        self._calls: _Calls = queue.SimpleQueue()
        held = [_torch.store_of(group)]  # the thread drops it, or it would outlive its group
        self._thread = threading.Thread(
            target=_serve, args=(held, self._calls), name="ddpopt store", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)

    def ask(self, call: Callable[[Any], T], limit_s: float) -> T:
        """Return `call(store)`.

        Raises:
            StoreGoneError: it failed, or has not returned after `limit_s` seconds, or one before it
                did.
        """
        if self._problem:
            raise StoreGoneError(self._problem)
        answers: _Answers = queue.SimpleQueue()
        self._calls.put((call, answers))
        try:
            answer, error = answers.get(timeout=limit_s)
        except queue.Empty:
            self._problem = f"no answer within {limit_s:g} s"
            self._calls.put(None)
            raise StoreGoneError(self._problem) from None
        if error is not None:
            self._problem = str(error)[:_LONGEST_TEXT] or type(error).__name__
            raise StoreGoneError(self._problem) from error
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Make no further call, and end the thread unless the store keeps it."""
        self._calls.put(None)
        if not self._problem:
            self._thread.join(_CLOSING_S)


def _serve(held: list[Any], calls: _Calls) -> None:
    own = None
    while (request := calls.get()) is not None:
        call, answers = request
        try:
            if held:
                own = _connect_anew(held.pop())
            answers.put((call(own), None))
        except Exception as error:  # the asker's to see, whatever it is
            answers.put((None, error))
            return
        del request, call, answers  # they may hold what holds the connection, which ends then


def _connect_anew(store: Any) -> Any:
    """Return another connection to a store; the store itself if it is one written in Python."""
    try:
        return store.clone()
    except RuntimeError as error:
        if "pure virtual" in str(error):
            return store
        raise
