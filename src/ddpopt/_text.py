"""Text for people: readable sizes, tables, names that cannot control a terminal.

It knows nothing about what it shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_MIB = 1024 * 1024
_COLUMN_WIDTH = 40


def format_bytes(num_bytes: int) -> str:
    """Return a size as people read it: `1.50 MiB`, `12.0 KiB`, `80 B`."""
    if num_bytes >= _MIB:
        return f"{num_bytes / _MIB:.2f} MiB"
    if num_bytes >= 1024:
        return f"{num_bytes / 1024:.1f} KiB"
    return f"{num_bytes} B"


def format_ms(time_s: float | None) -> str:
    """Return a time in milliseconds, or `-` if there is none."""
    return "-" if time_s is None else f"{time_s * 1e3:.1f}"


def count(number: int, noun: str) -> str:
    """Return `1 bucket`, `2 buckets`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return text with control characters escaped, so that no name can control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(names: Sequence[str]) -> str:
    """Return as many names as fit into a column, and how many more there are."""
    names = [printable(name) for name in names]
    width = itertools.accumulate(len(name) + 2 for name in names)
    num_shown = max(1, sum(end <= _COLUMN_WIDTH for end in width))
    shown = ", ".join(names[:num_shown])
    hidden = len(names) - num_shown
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the last one left, the others right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header) - 1)]
    return [
        "  " + "  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in (header, *rows)
    ]
