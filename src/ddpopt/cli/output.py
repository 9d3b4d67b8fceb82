"""What a command shows: tables drawn by rich on a terminal, plain text, JSON, or a file.

rich is an extra of this package; without it, or if stdout is not a terminal, text is plain.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ddpopt._text import table
from ddpopt.errors import DDPOptError

LATENCY_US = 50.0  # of a message, where no other is given
_STYLES = {"ok": "green", "found": "green", "problem": "bold red", "missing": "bold red"}
_T = TypeVar("_T")


class InputError(DDPOptError, ValueError):
    """A command cannot work with an argument, a variable, a file or a factory; exit status 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of equal length under a header."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a command found: `data` for `--json`, `parts` for people, and the exit status."""

    data: Any
    parts: Sequence[str | Table]
    status: int = 0


class Screen:
    """Where a report is shown; made before the work, since that may write elsewhere."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._draws_with_rich = (
            not as_json and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        )

    def show(self, report: Report) -> None:
        """Print a report on stdout, its data as JSON or its parts."""
        if self._as_json:
            print(json.dumps(report.data, indent=1, allow_nan=False))
            return
        for part in report.parts:
            if isinstance(part, str):
                print(part)
                continue
            if self._draws_with_rich:
                _print_by_rich(part.header, part.rows)
            else:
                print("\n".join(table(part.header, part.rows)))

    def track(self, items: Sequence[_T], title: str) -> Iterable[_T]:
        """An iterable of these items, which advances a progress bar on stderr for each."""
        if not self._draws_with_rich:  # for JSON, and where stdout is a file, there is no bar
            return items
        console = importlib.import_module("rich.console").Console(stderr=True)
        track: Any = importlib.import_module("rich.progress").track
        tracked: Iterable[_T] = track(items, title, console=console, transient=True)
        return tracked


@contextlib.contextmanager
def as_input_error(what: str) -> Iterator[None]:
    """Raise InputError, which says `what`, if a file cannot be read or written in this block."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what}: {error}") from error


def _print_by_rich(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Draw a table; a cell with exactly a text of `_STYLES` has that style."""
    text = importlib.import_module("rich.text").Text  # so that nothing is interpreted as markup
    drawn = importlib.import_module("rich.table").Table()
    for index, title in enumerate(header):
        is_last = index == len(header) - 1
        drawn.add_column(text(title), justify="left" if is_last else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(text(cell, style=_STYLES.get(cell, "")) for cell in row))
    importlib.import_module("rich.console").Console().print(drawn)
