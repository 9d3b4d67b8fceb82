"""A store whose process is stopped: it answers nobody."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ddpopt import _torch
from ddpopt.ranks import store

LIMIT_S = 300.0  # a test that waits so long has failed


class HangingStore:
    """A store that never lets anybody connect: `clone` blocks until the block ends.

    It gives up after `LIMIT_S`, so that a test that waits for it fails.
    """

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.num_calls = 0

    def clone(self) -> Any:
        self.num_calls += 1
        self.is_over.wait(LIMIT_S)
        raise RuntimeError("over")


@contextlib.contextmanager
def hanging_store() -> Iterator[HangingStore]:
    """Have each process group of this process such a store in this block, and no connection yet."""
    hanging = HangingStore()
    try:
        with (
            mock.patch.object(_torch, "store_of", return_value=hanging),
            mock.patch.object(store, "_connections", weakref.WeakKeyDictionary()),
        ):
            yield hanging
    finally:
        hanging.is_over.set()
