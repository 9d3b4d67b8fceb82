"""What ddpopt logs while a test looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from ddpopt import _logs


@contextlib.contextmanager
def logged(kind: str) -> Iterator[list[str]]:
    """Collect the lines of a kind ("info", "warning", "progress") of this block; none is printed.

    The kinds are the functions of `ddpopt._logs`.
    """
    lines: list[str] = []

    def collect(text: str, *args: object) -> bool:
        lines.append(text % args)
        return True

    with mock.patch.object(_logs, kind, collect):
        yield lines
