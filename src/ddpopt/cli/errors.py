"""The exception of the command line for what its user gave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ddpopt import _files
from ddpopt.errors import DDPOptError


class InputError(DDPOptError, ValueError):
    """An argument, a file or a factory is not what a command can work with; exit status 2."""


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
        InputError: its folder is missing, or there is something else than a file.
    """
    try:
        if path is not None:
            _files.check_can_write(path)
    except OSError as error:
        raise InputError(str(error)) from error
