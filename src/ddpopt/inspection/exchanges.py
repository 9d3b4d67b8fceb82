"""Records the exchanges of sharded updates: when each began, ended and was waited for.

A gloo work that receives does not report that it has ended unless somebody waits for it. So a
thread waits for all exchanges, in the order in which they began, and whoever needs one waits for
the thread. On a GPU works do report it, and the thread polls them; whoever needs one also waits
for the works themselves, which makes its stream wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from ddpopt.inspection.recording import RecordedExchange
from ddpopt.planning.timer import Clock, read_host

_POLL_S = 1e-4
_LAST_S = 1.0  # at most, for the end of a recording to wait for exchanges that still run


class Follower:
    """Waits for exchanges, and notes when they end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun: queue.SimpleQueue[_Waiter | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def follow(self, exchange: RecordedExchange, works: Sequence[Any]) -> list[Any]:
        """Follow an exchange that has begun; return what to wait for in place of its works."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddpopt-record", daemon=True)
            self._thread.start()
        waiter = _Waiter(exchange, works, self._clock)
        self._begun.put(waiter)
        return [waiter]

    def close(self) -> None:
        """End after the exchanges that have begun, or after a short time."""
        self._begun.put(None)
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        while (waiter := self._begun.get()) is not None:
            waiter.run()
            waiter.exchange.finished_s = read_host()
            waiter.ended.set()


class _Waiter:
    """Stands in for an exchange's works."""

    def __init__(self, exchange: RecordedExchange, works: Sequence[Any], clock: Clock) -> None:
        self.exchange = exchange
        self.ended = threading.Event()
        self._works = works
        self._clock = clock
        self._failure: Exception | None = None

    def run(self) -> None:
        try:
            for work in self._works:
                if self._clock.is_on_cpu:
                    work.wait()
                else:
                    while not work.is_completed():
                        time.sleep(_POLL_S)
        except Exception as failure:
            self._failure = failure

    def wait(self) -> None:
        """Return when all works have ended; raise what went wrong."""
        self.exchange.wanted_s = self._clock.now()
        if self._clock.is_on_cpu:
            self.ended.wait()
            if self._failure is not None:
                raise self._failure
        else:
            for work in self._works:
                work.wait()
        self.exchange.had_s = self._clock.now()
