"""What rooms keep of DDP modules: each its own, typed, for one of three lifetimes.

A copy of a module, deep or pickled, is another module: it begins without values.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch

T = TypeVar("T")
_MISSING: Any = object()


class Lifetime(enum.Enum):
    """When a module's value is dropped; with the module at the latest."""

    MODULE = "with the module"
    REDUCER = "when the module gets another Reducer"
    CODE = "at torch._dynamo.reset(), which drops compiled code"


# The slots of Lifetime.CODE. Slots live as long as the process, what is in them as their kind says.
_slots_of_code: list[ModuleSlot[Any]] = []


class ModuleSlot(Generic[T]):
    """A value for each DDP module, which one room reads and writes.

    It must not hold the module, or neither would ever be freed.
    """

    def __init__(self, default: Callable[[], T], lifetime: Lifetime) -> None:
        """Make a slot; `default` makes the value of a module that has none."""
        self._default = default
        self._is_of_reducer = lifetime is Lifetime.REDUCER
        # By the module, or by its Reducer.
        self._values: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()
        if lifetime is Lifetime.CODE:
            _slots_of_code.append(self)  # for `forget_compiled`

    def get(self, ddp: DistributedDataParallel) -> T:
        """The module's value; a default, which is not kept, if it has none."""
        value = self._values.get(self._key(ddp), _MISSING)
        return self._default() if value is _MISSING else value

    def set(self, ddp: DistributedDataParallel, value: T) -> None:
        self._values[self._key(ddp)] = value

    def find(self, ddp: DistributedDataParallel) -> T | None:
        """The module's own value; None where `get` would make a default."""
        return self._values.get(self._key(ddp))

    def modules(self) -> list[DistributedDataParallel]:
        """The modules that have a value of their own, in the order in which they got it."""
        assert not self._is_of_reducer, "a Reducer does not tell its module"
        return list(self._values)

    def clear(self) -> None:
        self._values.clear()

    def _key(self, ddp: DistributedDataParallel) -> Any:
        return _torch.reducer_of(ddp) if self._is_of_reducer else ddp


def forget_compiled() -> None:
    """Drop what goes with compiled code, as `torch._dynamo.reset()` drops that."""
    for slot in _slots_of_code:
        slot.clear()
