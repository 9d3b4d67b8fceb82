"""Values that rooms keep of DDP modules: defaults, resets, and modules that are dropped."""

from __future__ import annotations

import copy
import gc
import weakref
from unittest import mock

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _slots
from ddpopt._slots import Lifetime, ModuleSlot, forget_compiled
from ddpopt._torch import replace_reducer


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


def test_a_module_without_a_value_has_a_new_default(one_rank: None) -> None:
    """A default is not stored, so that asking leaves nothing behind."""
    slot = ModuleSlot(list[int], Lifetime.MODULE)
    first, second = _ddp(), _ddp()
    slot.get(first).append(1)
    assert slot.get(first) == []
    slot.set(first, [2])
    assert (slot.get(first), slot.get(second)) == ([2], [])


def test_a_value_is_dropped_with_its_module(one_rank: None) -> None:
    slot = ModuleSlot(nn.Module, Lifetime.MODULE)
    ddp, value = _ddp(), nn.Module()
    slot.set(ddp, value)
    reference = weakref.ref(value)
    del value
    gc.collect()
    assert reference() is slot.get(ddp)
    del ddp
    gc.collect()
    assert reference() is None


def test_a_reset_clears_what_goes_with_code_and_a_new_reducer_its_own(one_rank: None) -> None:
    """A plan's buckets stay in force at a reset: they are the Reducer's."""
    with mock.patch.object(_slots, "_slots_of_code", []):
        slots = {lifetime: ModuleSlot(str, lifetime) for lifetime in Lifetime}
        ddp = _ddp()

        def values() -> dict[Lifetime, str]:
            return {lifetime: slot.get(ddp) for lifetime, slot in slots.items()}

        for slot in slots.values():
            slot.set(ddp, "something")
        forget_compiled()
        expected = {Lifetime.MODULE: "something", Lifetime.REDUCER: "something", Lifetime.CODE: ""}
        assert values() == expected
        replace_reducer(ddp, [[0, 1]], [1000])
        assert values() == {**expected, Lifetime.REDUCER: ""}
        assert all(slot.find(_ddp()) is None for slot in slots.values())


def test_a_copy_begins_without_values(one_rank: None) -> None:
    ddp = _ddp()
    for slot in (ModuleSlot(str, lifetime) for lifetime in Lifetime):
        slot.set(ddp, "something")
        assert slot.get(copy.deepcopy(ddp)) == ""
