"""What a command shows: tables by rich on a terminal, plain text, JSON, or a file.

rich is an extra of this package; without it, or where stdout is no terminal, text is plain.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpopt import _files
from ddpopt._text import printable, table
from ddpopt.errors import DDPOptError

_STYLES = {"ok": "green", "found": "green", "problem": "bold red", "missing": "bold red"}


class InputError(DDPOptError, ValueError):
    """An argument, a file or a factory is not what a command can work with; exit status 2."""


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
        self._has_rich = (
            not as_json and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        )

    def show(self, report: Report) -> None:
        """Print a report."""
        if self._as_json:
            print(json.dumps(report.data, indent=1, allow_nan=False))
            return
        for part in report.parts:
            if isinstance(part, str):
                print("\n".join(map(printable, part.split("\n"))))
                continue
            rows = [tuple(map(printable, row)) for row in part.rows]
            if self._has_rich:
                _print_by_rich(part.header, rows)
            else:
                print("\n".join(table(part.header, rows)))

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar during this block, which calls what it is given `total` times."""
        if not self._has_rich:
            yield lambda: None
            return
        console = importlib.import_module("rich.console").Console(stderr=True)
        bars = importlib.import_module("rich.progress").Progress(console=console, transient=True)
        with bars:
            bar = bars.add_task(title, total=total)
            yield lambda: bars.advance(bar)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn errors of the file system in this block into one that says what failed.

    Raises:
        InputError: a file cannot be read or written.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what}: {error}") from error


def check_can_write(path: Path | None) -> None:
    """Find out before long work whether its result can be written to a file.

    Raises:
        InputError: its folder is missing, or something other than a file has that name.
    """
    try:
        if path is not None:
            _files.check_can_write(path)
    except OSError as error:
        raise InputError(str(error)) from error


def _print_by_rich(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = importlib.import_module("rich.text").Text  # so that nothing is taken for markup
    shown = importlib.import_module("rich.table").Table()
    for index, title in enumerate(header):
        is_last = index == len(header) - 1
        shown.add_column(text(title), justify="left" if is_last else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(text(cell, style=_STYLES.get(cell, "")) for cell in row))
    importlib.import_module("rich.console").Console().print(shown)
