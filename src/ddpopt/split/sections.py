"""What both splits share when compiling sections: their names in errors, and progress reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ddpopt import _logs, _torch
from ddpopt.errors import SectionCompileError

_T = TypeVar("_T")

_QUIET_S = 3.0  # of compiling before anything is reported


@dataclass(frozen=True, slots=True)
class SectionCompiler:
    """Compiles the sections of one graph."""

    graph: str
    num_sections: int
    _began_s: float = field(default_factory=time.monotonic)

    def compile(self, index: int, where: str, compile_it: Callable[[], _T]) -> _T:
        """Compile a section as `naming_section` does; report which one it is if this takes long."""
        taken_s = time.monotonic() - self._began_s
        if taken_s >= _QUIET_S:
            text = "graph %s: compiling section %d of %d, after %.0f s"
            _logs.progress(text, self.graph, index + 1, self.num_sections, taken_s)
        return naming_section(where, compile_it)


def naming_section(where: str, compile_it: Callable[[], _T]) -> _T:
    """Return what `compile_it` returns; raise SectionCompileError if it raises an error."""
    try:
        return compile_it()
    except _torch.control_flow_exceptions():
        raise
    except Exception as error:
        raise SectionCompileError(f"{type(error).__name__} on {where}: {error}") from error
