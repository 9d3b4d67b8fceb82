"""Values that rooms keep of DDP modules: defaults, resets, and modules that are dropped."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _slots
from ddpopt._slots import Slot, forget_until_reset


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


def test_a_module_without_a_value_has_a_new_default(one_rank: None) -> None:
    """A default is not stored, so that asking leaves nothing behind."""
    slot = Slot(list[int], is_kept_at_reset=True)
    first, second = _ddp(), _ddp()
    slot.get(first).append(1)
    assert slot.get(first) == []
    slot.set(first, [2])
    assert (slot.get(first), slot.get(second)) == ([2], [])


def test_a_value_is_dropped_with_its_module(one_rank: None) -> None:
    slot = Slot(nn.Module, is_kept_at_reset=True)
    ddp, value = _ddp(), nn.Module()
    slot.set(ddp, value)
    reference = weakref.ref(value)
    del value
    gc.collect()
    assert reference() is slot.get(ddp)
    del ddp
    gc.collect()
    assert reference() is None


def test_a_reset_clears_the_slots_that_are_not_kept(one_rank: None) -> None:
    with mock.patch.object(_slots, "_until_reset", []):
        kept, dropped = Slot(str, is_kept_at_reset=True), Slot(str, is_kept_at_reset=False)
        ddp = _ddp()
        for slot in (kept, dropped):
            slot.set(ddp, "something")
        forget_until_reset()
        assert (kept.get(ddp), dropped.get(ddp)) == ("something", "")
