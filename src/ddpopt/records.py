"""Which plans are in force for which DDP module: kept here, read by the backend and by `explain`.

Entries live as long as their DDP module, and until `torch._dynamo.reset()`.
"""

from __future__ import annotations

import weakref

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


def earlier_parameters(ddp: DistributedDataParallel, graph: str) -> frozenset[int]:
    """Return the parameters, by index, of graphs that run before this one in forward.

    A graph's name is its frame and the number of the frame's compile, as in `4/0`. Frames are
    first compiled in forward order.
    """
    frame = _frame(graph)
    earlier: set[int] = set()
    for plan in plans_of(ddp):
        if _frame(plan.graph) == frame:
            break
        earlier |= {parameter.index for parameter in plan.arrival}
    return frozenset(earlier)


def _frame(graph: str) -> str:
    return graph.partition("/")[0]


def clear() -> None:
    """Forget everything, as `torch._dynamo.reset()` forgets compiled code."""
    _plans.clear()
