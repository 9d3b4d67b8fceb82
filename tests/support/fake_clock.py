"""A clock by which time passes as a test says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from unittest import mock


class FakeClock:
    """Takes the place of Python's `time` in modules of ours.

    Time passes by `pass_time` and `sleep`, and by `tick_s` after each reading (or by the next of
    several numbers). `on_sleep` says what a sleep does in place of passing the time.
    """

    def __init__(
        self,
        tick_s: float | Iterable[float] = 0.0,
        on_sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.now_s = 0.0
        self._ticks_s = iter(tick_s) if isinstance(tick_s, Iterable) else itertools.repeat(tick_s)
        self.sleep = on_sleep or self.pass_time

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic(self) -> float:
        reading_s = self.now_s
        self.now_s += next(self._ticks_s)
        return reading_s

    perf_counter = monotonic

    def time_ns(self) -> int:
        return round(self.monotonic() * 1e9)

    @contextlib.contextmanager
    def replacing_time_of(self, *modules: ModuleType) -> Iterator[FakeClock]:
        """Have these modules, which import `time`, read this clock in the block."""
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(mock.patch.object(module, "time", self))
            yield self
