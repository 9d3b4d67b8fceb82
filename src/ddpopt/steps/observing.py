"""What only observes a training does not end it.

An error of ours in a hook of DDP's, of autograd's or of a forward would be raised into a step that
may not even use ddpopt. It costs what was observed, and one warning says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpopt import _logs

# The errors that were reported; each is told once a process, whichever module it is of.
_reported: set[str] = set()


def observing(call: Callable[..., object]) -> Callable[..., None]:
    """A hook that reports an error of `call`, instead of raising it."""

    def observe(*args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            report(error)

    return observe


def report(error: Exception) -> None:
    """Warn of an error of an observer, unless one with its text was reported before."""
    text = f"{type(error).__name__}: {error}"
    if text not in _reported:
        _reported.add(text)
        _logs.warning(
            "ddpopt could not observe a step, and training goes on without that (a recording, "
            "times or buckets may be missing): %s; please report this",
            text,
            exc_info=error,
        )
