"""Compiling the sections of one graph, one after the other: progress, and errors that say which."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ddpopt import _logs, _torch
from ddpopt.errors import NotCutError, Reason

_BETWEEN_REPORTS_S = 3.0  # of compiling; as long before the first report

_T = TypeVar("_T")


@dataclass(slots=True)
class SectionCompiler:
    """Compiles the sections of one graph."""

    graph: str  # its name
    num_sections: int
    _began_s: float = field(default_factory=time.monotonic)
    _reported_s: float = 0.0  # how long sections had been compiled at the last report

    def compile(self, index: int, description: str, compile_it: Callable[[], _T]) -> _T:
        """Compile the section of this index by calling `compile_it`; return what that returns.

        Where all sections together take long, a message says at times which one is being compiled.

        Raises:
            NotCutError: `compile_it` raised; the error has the section's `description`.
        """
        taken_s = time.monotonic() - self._began_s
        if taken_s >= self._reported_s + _BETWEEN_REPORTS_S:
            self._reported_s = taken_s
            text = "graph %s: compiling section %d of %d, after %.0f s"
            _logs.progress(text, self.graph, index + 1, self.num_sections, taken_s)
        try:
            return compile_it()
        except _torch.control_flow_exceptions():
            raise  # no failure: they tell Dynamo to trace the frame again, or to leave it alone
        except Exception as error:
            # Whatever the inner compiler raises. If it does so on the whole graph as well, that
            # error is the user's; else only overlap is lost.
            detail = f"{type(error).__name__} on {description}: {error}"
            raise NotCutError(Reason.SECTION_FAILED, detail) from error
