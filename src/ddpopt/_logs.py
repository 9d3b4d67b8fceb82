"""Where ddpopt's messages go: torch's loggers, under the `TORCH_LOGS` names that people know.

- `dynamo`, `distributed` or `ddp`: bucket boundaries and fallbacks, no graphs;
- `ddp_graphs`: the graph that was cut, its sections' graphs, and a forward's stitched one;
- `+ddpopt`: the messages of the first kind, on each rank.

Nothing is formatted while its logger is off: pass objects whose `str` does the work.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from ddpopt import _torch

_torch_log = logging.getLogger(_torch.LOG_NAME)
_own_log = logging.getLogger("ddpopt")
_graph_log = _torch.graph_logger()


def info(message: str, *args: object) -> bool:
    """Log at INFO with torch's logger or else ours, whichever is on; return False if neither is."""
    return _log_at(logging.INFO, message, *args)


def info_of_rank(rank: int, message: str, *args: object) -> bool:
    """As `info` on rank 0; on the others at DEBUG, since of 512 ranks all would say the same.

    A program that logs at INFO, as workers of Ray do, reads it once; `TORCH_LOGS=+ddpopt` has it of
    each rank.
    """
    return _log_at(logging.DEBUG if rank else logging.INFO, message, *args)


def _log_at(level: int, message: str, *args: object) -> bool:
    for logger in (_torch_log, _own_log):
        if logger.isEnabledFor(level):
            logger.log(level, message, *args, stacklevel=3)
            return True
    return False


def warning(message: str, *args: object, exc_info: Exception | None = None) -> None:
    """Log at WARNING, which torch prints unless the user turned it off."""
    _torch_log.warning(message, *args, stacklevel=2, exc_info=exc_info)


def add_note(error: Exception, note: str) -> None:
    """Add a line to what is shown of an error; on Python 3.10, which has no notes, warn of it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        warning("%s", note)


def progress(message: str, *args: object) -> None:
    """Log at INFO; if that is off, print it to rank 0's stderr, a terminal or not."""
    if not info(message, *args) and os.environ.get("RANK", "0") == "0":
        print(f"ddpopt: {message % args}", file=sys.stderr)


def is_showing_graphs() -> bool:
    """Whether `TORCH_LOGS=ddp_graphs` is on."""
    return _graph_log.isEnabledFor(logging.DEBUG)


def graph(title: str, render: Callable[[], str]) -> None:
    """Dump a graph under `TORCH_LOGS=ddp_graphs`; `render` is called only if that is on."""
    if is_showing_graphs():
        _graph_log.debug("\n---%s---\n%s", title, render(), stacklevel=2)
