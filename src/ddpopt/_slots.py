"""What rooms keep of DDP modules: each its own, typed, and dropped with the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

# Slots of this package, for the life of the process; what is in them ends with its module.
_until_reset: list[Slot[Any]] = []


class Slot(Generic[T]):
    """A value for each DDP module, which one room reads and writes.

    It must not hold the module, or neither would ever be freed.
    """

    def __init__(self, default: Callable[[], T], *, is_kept_at_reset: bool) -> None:
        """Make a slot; `default` makes the value of a module that has none.

        What does not depend on compiled code is kept at `torch._dynamo.reset()`.
        """
        self._default = default
        self._values: weakref.WeakKeyDictionary[DistributedDataParallel, T]
        self._values = weakref.WeakKeyDictionary()
        if not is_kept_at_reset:
            _until_reset.append(self)

    def get(self, ddp: DistributedDataParallel) -> T:
        return self._values[ddp] if ddp in self._values else self._default()

    def set(self, ddp: DistributedDataParallel, value: T) -> None:
        self._values[ddp] = value

    def items(self) -> list[tuple[DistributedDataParallel, T]]:
        return list(self._values.items())

    def clear(self) -> None:
        self._values.clear()


def forget_until_reset() -> None:
    """Drop what goes with compiled code, as `torch._dynamo.reset()` drops that."""
    for slot in _until_reset:
        slot.clear()
