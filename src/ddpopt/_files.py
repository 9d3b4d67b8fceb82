"""Files that others may tamper with: what is read is checked, and writing follows no link.

What a document means is up to its reader, and so is the exception that users see.

[Note: files of others]
In a folder that several users share, such as /tmp, anybody can guess a name and plant a link
there that leads to a file of ours. So a file is created under a random name beside its place and
then moved there, which also makes it appear whole or not at all. A folder is always a new one, and
belongs to its user alone. Whoever owns the folder above may still put another one in its place, so
a `PrivateFolder` knows its own by more than its name.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import stat
import typing
from pathlib import Path
from typing import Any

from ddpopt._text import count

_LONGEST_NUMBER = 40  # characters; a float's repr has at most 24
_DEEPEST = 100  # nested objects and lists
_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]+|\\.)*"?|[\[{\]}]', re.DOTALL)
_SHOWN = 60  # characters of a value in a message
_BINARY = getattr(os, "O_BINARY", 0)  # Windows has this one, and not the other two
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | _BINARY
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | _BINARY


class MalformedError(ValueError):
    """What is wrong in a document, and where; raised and caught inside ddpopt."""


# ---- reading ----------------------------------------------------------------------------------


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


def read_text(path: str | Path, most_bytes: int) -> str:
    """Return a regular file's text; MalformedError if it is not one, too large or not UTF-8."""
    descriptor = os.open(path, os.O_RDONLY | _NO_WAIT)  # for example for a pipe without a writer
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            # A pipe or a device may have no end, or never begin.
            raise MalformedError("it is a folder, a pipe or a device, not a regular file")
        _check_size(status.st_size, most_bytes)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1)  # it may have grown since
    finally:
        os.close(descriptor)
    _check_size(len(content), most_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"it is not text in UTF-8 (byte {error.start})") from error


def parse(text: str, most_bytes: int) -> Any:
    """Return what JSON text says, or raise MalformedError.

    Stricter than Python's parser: no duplicate keys in an object, no NaN or Infinity, no number of
    more than forty characters, at most a hundred levels of objects and lists.
    """
    _check_size(len(text), most_bytes)
    depth = 0  # Python's decoder recurses in C, and deep nesting can crash it
    for found in _STRINGS_AND_BRACKETS.finditer(text):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > _DEEPEST:
            raise MalformedError(f"it has over {_DEEPEST} objects and lists in one another")
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_int=lambda digits: int(_of_sane_length(digits)),
            parse_float=lambda digits: float(_of_sane_length(digits)),
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
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


def show(value: object) -> str:
    """Return a value as text for a message: short, and without control characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {count(len(value), 'item')}" if value else "an empty list"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    return json.dumps(value)


def _check_size(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise MalformedError(f"it has {num_bytes} bytes or more, over the limit of {most_bytes}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise MalformedError(f"it has the key {show(twice)} twice in one object")
    return found


def _of_sane_length(digits: str) -> str:
    if len(digits) > _LONGEST_NUMBER:
        raise MalformedError(
            f"it has a number of {len(digits)} characters, over the limit of {_LONGEST_NUMBER}"
        )
    return digits


def _refuse_constant(name: str) -> Any:
    raise MalformedError(f"it has a number that is {name}; all must be finite")


# ---- writing ----------------------------------------------------------------------------------


def check_can_write(path: str | Path) -> None:
    """Raise OSError if `path` cannot be written to, as far as one look tells."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {folder}; make it")
    status = _status(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        what = "it is a folder, a pipe or a device; name a file"
        if stat.S_ISLNK(status.st_mode):
            what = "it is a link, and links are not followed; name the file that it leads to"
        raise FileExistsError(f"{path} cannot be written: {what}")


def write_text(path: str | Path, text: str) -> None:
    """Write a file, or replace one of this user's; it appears whole or not at all.

    What UTF-8 cannot express is written as an escape. A replaced file passes on its mode.
    Raises FileExistsError if there is something else of that name, or another user's file.
    """
    check_can_write(path)
    beside = Path(path).parent / f".ddpopt-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            replaced = _status(path)
            if replaced is not None and os.fstat(descriptor).st_uid not in (0, replaced.st_uid):
                owner = f"another user (uid {replaced.st_uid})"  # root could replace it
                raise FileExistsError(
                    f"{path} cannot be written: it belongs to {owner}; name another file"
                )
            if replaced is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))
            file.write(text.encode(errors="backslashreplace"))
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


@dataclasses.dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder that this process made, and that only its user can read or write.

    `status` tells it from another one put in its place; see [Note: files of others].
    """

    path: Path
    status: os.stat_result

    @classmethod
    def make(cls, parent: Path, name: str) -> PrivateFolder:
        """Make a folder, with a random suffix if the name is taken."""
        path = parent / name
        while os.path.lexists(path):
            path = parent / f"{name}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        return cls(path, path.lstat())

    def make_inside(self, name: str) -> PrivateFolder:
        """Make a folder in this one. Raises OSError, as `write_text` does, if this has moved."""
        self._check_place()
        return self.make(self.path, name)

    def write_text(self, name: str, text: str) -> None:
        """Write a file in the folder, or overwrite one of ours; links are not followed."""
        self._check_place()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_LINK
        with os.fdopen(os.open(self.path / name, flags, 0o666), "wb") as file:
            file.write(text.encode(errors="backslashreplace"))

    def _check_place(self) -> None:
        if not os.path.samestat(self.path.lstat(), self.status):
            raise FileExistsError(f"{self.path} is not the folder that was made there")


def _status(path: str | Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path)
    return None
