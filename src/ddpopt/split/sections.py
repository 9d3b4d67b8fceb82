"""What both splits share when compiling sections: their names in errors, and progress reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ddpopt import _logs, _torch
from ddpopt.errors import SectionCompileError

_T = TypeVar("_T")

_QUIET_S = 3.0  # of compiling before anything is reported


class SectionCompiler:
    """Compiles the sections of one graph."""

    def __init__(self, graph: str, num_sections: int) -> None:
        self._graph = graph
        self._num_sections = num_sections
        self._began_s = time.monotonic()

    def compile(self, index: int, where: str, compile_it: Callable[[], _T]) -> _T:
        """Compile a section as `naming_section` does; report which one it is if this takes long."""
        taken_s = time.monotonic() - self._began_s
        if taken_s >= _QUIET_S:
            _logs.progress(
                "graph %s: compiling section %d of %d, after %.0f s",
                self._graph,
                index + 1,
                self._num_sections,
                taken_s,
            )
        return naming_section(where, compile_it)


def naming_section(where: str, compile_it: Callable[[], _T]) -> _T:
    """Return what `compile_it` returns.

    Raises:
        SectionCompileError: `compile_it` raised anything but what a compiler tells Dynamo with.
    """
    try:
        return compile_it()
    except _torch.control_flow_exceptions():
        raise
    except Exception as error:
        raise SectionCompileError(f"{type(error).__name__} on {where}: {error}") from error
