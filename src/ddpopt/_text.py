"""Text: for people, as JSON documents that are not believed, and in files that appear whole.

It knows nothing about what it shows. What a document means is up to its reader, and so is the
exception that users see.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import secrets
import tempfile
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MIB = 1024 * 1024
_COLUMN_WIDTH = 40
_SHOWN = 60  # characters of a value in a message


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


def show(value: object) -> str:
    """Return a value as text for a message: short, and without control characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {count(len(value), 'item')}" if value else "an empty list"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# ---- JSON ---------------------------------------------------------------------------------------


class MalformedError(ValueError):
    """What is wrong in a document, and where; raised and caught inside ddpopt."""


def parse(source: str | Path, most_bytes: int) -> Any:
    """Return what a file, or a text, says in JSON; MalformedError if it is none or too large."""
    content: str | bytes = source if isinstance(source, str) else b""
    if isinstance(source, Path):
        with source.open("rb") as file:
            content = file.read(most_bytes + 1)  # a device may have no end
    if len(content) > most_bytes:
        raise MalformedError(f"it is over the limit of {most_bytes} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"it is not JSON ({error})") from error


def build(kind: Any, value: Any, place: str = "", *, is_open: bool = False) -> Any:
    """Return a value of `parse` as one of this type, or raise MalformedError with its place.

    `kind` is str, int, float, one of these or None, a tuple of such types, or a dataclass, whose
    fields are an object's keys and whose own checks apply. If `is_open`, objects may have other
    keys too. `true` and `1.0` are not ints. A place reads like `cost.startup_s`.
    """
    if dataclasses.is_dataclass(kind):
        return _build_object(kind, value, place, is_open=is_open)
    options = typing.get_args(kind)
    if type(None) in options:
        return None if value is None else build(options[0], value, place, is_open=is_open)
    if options:  # of a tuple
        is_endless = options[-1] is ...
        expected = "a list" if is_endless else f"a list of {count(len(options), 'item')}"
        if isinstance(value, list) and (is_endless or len(value) == len(options)):
            kinds = options[:1] * len(value) if is_endless else options
            return tuple(
                build(each, item, f"{place}[{index}]", is_open=is_open)
                for index, (each, item) in enumerate(zip(kinds, value, strict=True))
            )
    elif kind is str:
        expected = "text"
        if isinstance(value, str):
            return value
    else:
        expected = f"a {'whole ' if kind is int else ''}number below 2**63"
        if type(value) in (int, kind) and abs(value) < 2**63:  # so that sums stay finite
            return value
    raise MalformedError(f"{place or 'it'} is {show(value)}; it must be {expected}")


def _build_object(kind: Any, value: Any, place: str, *, is_open: bool) -> Any:
    hints = _hints(kind)
    needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    if not isinstance(value, dict):
        expected = f"an object with {', '.join(needed)}"
        raise MalformedError(f"{place or 'it'} is {show(value)}; it must be {expected}")
    for name in needed:
        if name not in value:
            raise MalformedError(f"{place or 'it'} has no {name!r}")
    found = {}
    for name, item in value.items():
        if name in hints:
            below = f"{place}.{name}" if place else name
            found[name] = build(hints[name], item, below, is_open=is_open)
        elif not is_open:
            raise MalformedError(f"{place or 'it'} has a key {show(name)} that is unknown here")
    try:
        return kind(**found)
    except ValueError as error:
        raise MalformedError(f"{place}: {error}" if place else f"{error}") from error


_hints = functools.cache(typing.get_type_hints)


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
    """Make a folder for its user alone, with a random suffix if the name is taken."""
    try:
        (parent / name).mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    return parent / name


# ---- this package -------------------------------------------------------------------------------


def installed_version() -> str:
    """Return the release of ddpopt, or "not installed" if only its source is on the path."""
    try:
        return importlib.metadata.version("ddpopt")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def source_digest() -> str:
    """Return a digest that distinguishes this version of ddpopt's code from all others."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
