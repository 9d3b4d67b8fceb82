"""Read JSON that anybody may have written: of limited size, checked value by value, never executed.

A reader says by a shape what it takes. What a document means is its reader's affair, as is the
exception that its users see.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_LONGEST_NUMBER = 40  # characters, of which a float's repr has 24 at most
_LONGEST_TEXT = 10_000
_DEEPEST = 100  # objects and lists in one another
_MARKS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
_SHOWN = 60  # characters of a value in a message


class MalformedError(Exception):
    """What is wrong in a document, and where; raised and caught inside of ddpopt.

    `what` follows on the place of a value (`cost.startup_s`), or on "it", the document.
    """

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(f"{place or 'it'} {what}")
        self.what = what
        self.place = place

    def below(self, place: str) -> MalformedError:
        """Return the same of a value that is below `place`."""
        joint = "." if self.place and not self.place.startswith("[") else ""
        return MalformedError(self.what, f"{place}{joint}{self.place}")


def show(value: object) -> str:
    """Return a value as a message may have it: short, and without control characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    return json.dumps(value)


# ---- files ------------------------------------------------------------------------------------


def read_text(path: str | Path, most_bytes: int) -> str:
    """Return the text of a file of at most `most_bytes`.

    Pipes and devices, which may have no end or never begin, are not read.

    Raises:
        MalformedError: it is no regular file, larger, or not in UTF-8.
        OSError: it cannot be read.
    """
    # A pipe that nobody writes to would block here without O_NONBLOCK, which Windows has not.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedError("is a folder, a pipe or a device, not a regular file")
        _check_size(status.st_size, most_bytes)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1) or b""  # it may have grown since
    finally:
        os.close(descriptor)
    _check_size(len(content), most_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"is no text in UTF-8 (byte {error.start})") from error


def _check_size(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise MalformedError(f"has {num_bytes} bytes or more, over the limit of {most_bytes}")


# ---- JSON -------------------------------------------------------------------------------------


def parse(text: str, shape: Shape, most_bytes: int) -> Any:
    """Return what JSON text says, if it has this shape.

    Stricter than Python's own: no key twice in an object, no NaN or Infinity, no number of more
    than forty characters, no more than a hundred objects and lists in one another.

    Raises:
        MalformedError: it has another shape, is no JSON, or is larger.
    """
    if not isinstance(text, str):
        raise MalformedError(f"is a {type(text).__name__}, not text")
    _check_size(len(text), most_bytes)
    _check_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=lambda digits: int(_of_sane_length(digits)),
            parse_float=lambda digits: float(_of_sane_length(digits)),
            parse_constant=_refuse_constant,
        )
    except ValueError as error:
        raise MalformedError(f"is no JSON ({error})") from error
    return shape.read(value)


def _check_depth(text: str) -> None:
    """Refuse what Python's decoder, which recurses in C, could not take everywhere."""
    depth, is_string = 0, False
    for found in _MARKS.finditer(text):
        mark = found[0]
        if mark == '"':
            is_string = not is_string
        elif not is_string and mark in "[{":
            depth += 1
            if depth > _DEEPEST:
                raise MalformedError(f"has over {_DEEPEST} objects and lists in one another")
        elif not is_string and mark in "]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        twice = max(counts, key=counts.__getitem__)
        raise MalformedError(f"has the key {show(twice)} twice in one object")
    return found


def _of_sane_length(digits: str) -> str:
    if len(digits) > _LONGEST_NUMBER:
        raise MalformedError(
            f"has a number of {len(digits)} characters, over the limit of {_LONGEST_NUMBER}"
        )
    return digits


def _refuse_constant(name: str) -> Any:
    raise MalformedError(f"has a number that is {name}; all must be finite")


# ---- shapes -----------------------------------------------------------------------------------


class Shape(Protocol):
    """What a value has to be."""

    def read(self, value: Any) -> Any:
        """Return `value`, with tuples in place of lists.

        Raises:
            MalformedError: it is anything else.
        """


def _wrong(value: object, expected: str) -> MalformedError:
    return MalformedError(f"is {show(value)}; it must be {expected}")


@dataclass(frozen=True, slots=True)
class Text:
    """A string; with `is_plain` one without control characters."""

    is_plain: bool = False

    def read(self, value: Any) -> str:
        """See `Shape`."""
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
            raise _wrong(value, f"text of at most {_LONGEST_TEXT} characters")
        if self.is_plain and not value.isprintable():
            raise _wrong(value, "text without control characters")
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer; `true` and `1.0` are none."""

    least: int
    most: int

    def read(self, value: Any) -> int:
        """See `Shape`."""
        if type(value) is not int or not self.least <= value <= self.most:
            raise _wrong(value, f"a whole number from {self.least} to {self.most}")
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number; `true` is none."""

    least: float
    most: float

    def read(self, value: Any) -> float:
        """See `Shape`."""
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or not self.least <= value <= self.most:
            raise _wrong(value, f"a number from {self.least:g} to {self.most:g}")
        return value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Maybe:
    """This, or null."""

    shape: Shape

    def read(self, value: Any) -> Any:
        """See `Shape`."""
        return None if value is None else self.shape.read(value)


@dataclass(frozen=True, slots=True)
class List:
    """A list of `least` to `most` values of one shape."""

    shape: Shape
    least: int
    most: int

    def read(self, value: Any) -> tuple[Any, ...]:
        """See `Shape`."""
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise _wrong(value, f"a list of {self.least} to {self.most}")
        return tuple(_read_at(f"[{index}]", self.shape, item) for index, item in enumerate(value))


@dataclass(frozen=True, slots=True)
class Row:
    """A list with a shape for each of its values."""

    shapes: tuple[Shape, ...]

    def read(self, value: Any) -> tuple[Any, ...]:
        """See `Shape`."""
        if not isinstance(value, list) or len(value) != len(self.shapes):
            raise _wrong(value, f"a list of {len(self.shapes)}")
        pairs = enumerate(zip(self.shapes, value, strict=True))
        return tuple(_read_at(f"[{index}]", shape, item) for index, (shape, item) in pairs)


@dataclass(frozen=True, slots=True)
class Record:
    """An object with these keys; with `is_open` others may be there, which are not looked at."""

    required: Mapping[str, Shape]
    optional: Mapping[str, Shape] = field(default_factory=dict)
    is_open: bool = False

    def read(self, value: Any) -> dict[str, Any]:
        """See `Shape`."""
        if not isinstance(value, dict):
            raise _wrong(value, f"an object with {', '.join(self.required)}")
        for key in self.required:
            if key not in value:
                raise MalformedError(f"has no {key!r}")
        shapes = {**self.required, **self.optional}
        found = dict(value)
        for key, item in value.items():
            if key in shapes:
                found[key] = _read_at(key, shapes[key], item)
            elif not self.is_open:
                raise MalformedError(f"has a key {show(key)} that is unknown here")
        return found


def _read_at(place: str, shape: Shape, value: Any) -> Any:
    try:
        return shape.read(value)
    except MalformedError as error:
        raise error.below(place) from None
