"""Which plans are in force for which DDP module: kept here, read by the backend and by `explain`.

Entries live as long as their DDP module, and until `torch._dynamo.reset()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch.nn.parallel import DistributedDataParallel

from ddpopt.plan import Plan

_plans: weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, Plan]] = (
    weakref.WeakKeyDictionary()
)


def keep(ddp: DistributedDataParallel, plan: Plan) -> None:
    """Note that `plan` is in force for `ddp`, in place of an earlier one of the same graph."""
    _plans.setdefault(ddp, {})[plan.graph] = plan


def plans_of(ddp: DistributedDataParallel) -> tuple[Plan, ...]:
    """Return the plans in force for a module, in the order in which they were made."""
    return tuple(_plans.get(ddp, {}).values())


def earlier_parameters(ddp: DistributedDataParallel, own: Collection[int]) -> frozenset[int]:
    """Return the parameters, by index, of graphs that run before one with the parameters `own`.

    Graphs are first compiled in forward order; a recompiled one is known by its parameters.
    """
    earlier: set[int] = set()
    for plan in plans_of(ddp):
        indices = {parameter.index for parameter in plan.arrival}
        if indices == set(own):
            break
        earlier |= indices
    return frozenset(earlier - set(own))


def clear() -> None:
    """Forget everything, as `torch._dynamo.reset()` forgets compiled code."""
    _plans.clear()
