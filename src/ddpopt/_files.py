"""Write files where others may write too: no link is followed, and nobody else's file is replaced.

[Note: files of others]
In a folder that several users share, such as /tmp, anybody can foresee a name and plant a link
there that leads to a file of ours. So a file is made under a random name beside its place and then
moved there, by which it is there whole or not at all; a folder is made anew, for its user alone.
Whoever owns the folder above may still put another one in its place, which is why a
`PrivateFolder` knows its own by more than its name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NUM_ATTEMPTS = 8  # to find a name that no folder has
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_HAS_DESCRIPTORS = {os.open, os.mkdir, os.stat} <= os.supports_dir_fd


def find_obstacle(path: str | Path) -> str:
    """Say why nothing can be written to `path`, as far as one look tells; "" if nothing is known.

    For those who work long before they write.
    """
    path = Path(path).absolute()
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; make it first"
    status = _status(path)
    if status is None or stat.S_ISREG(status.st_mode):
        return ""
    if stat.S_ISLNK(status.st_mode):
        return "it is a link, and links are not followed; name the file that it leads to"
    return "it is a folder, a pipe or a device; name a file"


def write_text(path: str | Path, text: str) -> None:
    """Write a file, or replace one of this user's; it is there whole or not at all.

    What UTF-8 cannot express is written as an escape. A file that is replaced hands its mode on.

    Raises:
        FileExistsError: there is something else of that name, or another user's file.
        OSError: it cannot be written.
    """
    path = Path(path)
    _refuse(path, find_obstacle(path))
    beside = path.parent / f".ddpopt-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(beside, _NEW | _NO_LINK, 0o666)  # less what the umask takes
    try:
        with os.fdopen(descriptor, "wb") as file:
            _check_own(path, os.fstat(file.fileno()).st_uid)
            status = _status(path)
            if status is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
            file.write(_encode(text))
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _check_own(path: Path, user: int) -> None:
    """Raise where another user has a file at `path`; new files belong to `user`."""
    status = _status(path)
    if status is not None and user not in (0, status.st_uid):  # root may
        _refuse(path, f"it belongs to another user (uid {status.st_uid}); name another file")


def _refuse(path: Path, obstacle: str) -> None:
    if obstacle:
        kind = FileNotFoundError if _status(path) is None else FileExistsError
        raise kind(f"{path} is not written: {obstacle}")


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder that this process made, which only its user can read or write.

    `identity` tells it from one that was put in its place; see [Note: files of others].
    """

    path: Path
    identity: tuple[int, int]  # device and inode

    @classmethod
    def make(cls, parent: Path, name: str) -> PrivateFolder:
        """Make one in a folder that may be others'; a name that is taken gets a random end.

        Raises:
            OSError: it cannot be made.
        """
        return cls._make(parent, name, None)

    def make_inside(self, name: str) -> PrivateFolder:
        """Make one in this one, as `make`.

        Raises:
            OSError: it cannot be made, or this folder is no longer where it was.
        """
        with self._opened() as descriptor:
            return self._make(self.path, name, descriptor)

    @classmethod
    def _make(cls, parent: Path, name: str, descriptor: int | None) -> PrivateFolder:
        ends = ["", *(f"-{secrets.token_hex(4)}" for _ in range(_NUM_ATTEMPTS))]
        for path in (parent / f"{name}{end}" for end in ends):
            place = path if descriptor is None else path.name
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700, dir_fd=descriptor)
                return cls(path, _identity(os.lstat(place, dir_fd=descriptor)))
        raise FileExistsError(f"there are too many folders {parent / name}-*")

    def write_text(self, name: str, text: str) -> None:
        """Write a file in it, anew if it is there.

        Raises:
            OSError: it cannot be written, it is a link, or this folder is no longer where it was.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_LINK
        with self._opened() as folder:
            place = self.path / name if folder is None else name
            descriptor = os.open(place, flags, 0o666, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encode(text))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Give a descriptor of this very folder, None where the system knows none of folders."""
        if not _HAS_DESCRIPTORS:
            yield None
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if _identity(os.fstat(descriptor)) != self.identity:
                raise FileExistsError(f"{self.path} is not the folder that was made there")
            yield descriptor
        finally:
            os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
