"""Text for people, and files that appear whole. It knows nothing about what it shows."""

from __future__ import annotations

import functools
import hashlib
import html
import importlib.metadata
import itertools
import os
import reprlib
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

_MIB = 1024 * 1024
_COLUMN_WIDTH = 40
_QUOTED_WIDTH = 120


class _ShortRepr(reprlib.Repr):
    """`repr`, but of the beginnings of containers, and of both ends of texts and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = _QUOTED_WIDTH // 2
        self.maxlevel = 2

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to write a number of more than 4300 digits.
        if value.bit_length() > 1000:
            return f"a whole number of {value.bit_length()} bits"
        return super().repr_int(value, level)


_short_repr = _ShortRepr()


def quote(value: object) -> str:
    """A value that a user gave, as an error names it: one line of at most some 120 characters.

    It is safe for whatever a file may hold, such as lists in a thousand lists.
    """
    try:
        text = " ".join(_short_repr.repr(value).split())
    except Exception:  # the class of the value may do anything to describe it
        return f"a {type(value).__name__}"
    if len(text) <= _QUOTED_WIDTH:
        return text
    half = _QUOTED_WIDTH // 2 - 2
    return f"{text[:half]}...{text[-half:]}"


def quote_text(text: str) -> str:
    """The text of somebody else's error in one line, without its middle if that is long."""
    line = " ".join(text.split())
    limit = 4 * _QUOTED_WIDTH
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


def format_bytes(num_bytes: int) -> str:
    """A size as people read it: `1.50 MiB`, `12.0 KiB`, `80 B`."""
    if num_bytes >= _MIB:
        return f"{num_bytes / _MIB:.2f} MiB"
    if num_bytes >= 1024:
        return f"{num_bytes / 1024:.1f} KiB"
    return f"{num_bytes} B"


def format_ms(time_s: float | None) -> str:
    """A time in milliseconds, or `-` if there is none."""
    return "-" if time_s is None else f"{time_s * 1e3:.1f}"


def count(number: int, noun: str) -> str:
    """Return `1 bucket`, `2 buckets`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shorten(names: Sequence[str]) -> str:
    """A text with as many names as fit into a column, and how many more there are."""
    width = itertools.accumulate(len(name) + 2 for name in names)
    num_shown = max(1, sum(end <= _COLUMN_WIDTH for end in width))
    shown = ", ".join(names[:num_shown])
    hidden = len(names) - num_shown
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text, the header's first, with columns aligned: the last one left, others right."""
    # Of all columns but the last; `zip` leaves that out.
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header) - 1)]
    return [
        "  " + "  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in (header, *rows)
    ]


def as_html(text: str) -> str:
    """A text with its columns, for notebooks, which call a value's `_repr_html_`."""
    return f"<pre>{html.escape(text)}</pre>"


# ---- files --------------------------------------------------------------------------------------


def check_can_write(path: str | Path) -> None:
    """Raise OSError if `path` cannot be written to, as far as one look tells."""
    path = Path(path)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {folder}; make it")
    if path.exists() and not path.is_file():
        what = "it is a folder, a pipe or a device; name a file"
        raise FileExistsError(f"{path} cannot be written: {what}")


def write_text(path: str | Path, text: str) -> None:
    """Write a file, or replace it; it appears whole or not at all, and no link is followed.

    What UTF-8 cannot express is written as an escape.
    """
    check_can_write(path)
    beside = Path(path).parent / f".ddpopt-{secrets.token_hex(8)}.tmp"
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def new_folder(parent: Path, name: str) -> Path:
    """Make a folder for its user alone, its name with a random suffix if it is taken; return it."""
    try:
        (parent / name).mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    return parent / name


# ---- this package -------------------------------------------------------------------------------


def installed_version() -> str:
    """The release of ddpopt, or "not installed" if only its source is on the path."""
    try:
        return importlib.metadata.version("ddpopt")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def source_digest() -> str:
    """A digest that distinguishes this version of ddpopt's code from all others."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
