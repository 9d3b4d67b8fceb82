"""What is known of each DDP module: the plans in force, the buckets it formed, what was observed.

The backend and the runner write it; the backend and `explain` read it. Entries live as long as
their DDP module, and until `torch._dynamo.reset()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.buckets import Parameter, ReducerRules
from ddpopt.plans import Observation, Plan


@dataclass(slots=True)
class _Record:
    """`actual_buckets` are the Reducer's after its rebuild, by parameter index, in launch order."""

    caps_bytes: tuple[int, ...] = ()
    plans: dict[str, Plan] = field(default_factory=dict)
    actual_buckets: Sequence[Sequence[int]] | None = None
    num_comparisons: int = 0
    observation: Observation | None = None


_records: weakref.WeakKeyDictionary[DistributedDataParallel, _Record] = weakref.WeakKeyDictionary()


def of(ddp: DistributedDataParallel) -> _Record:
    """Return what is known of a module, to be read or added to."""
    return _records.setdefault(ddp, _Record())


def rules_of(ddp: DistributedDataParallel | None) -> ReducerRules | None:
    """Return how a module's Reducer forms buckets, None without a module."""
    if ddp is None:
        return None
    record = of(ddp)
    record.caps_bytes = record.caps_bytes or _torch.reducer_caps(ddp)
    return ReducerRules(caps_bytes=record.caps_bytes, is_rebuilt=_torch.follows_arrival_order(ddp))


def keep(ddp: DistributedDataParallel, plan: Plan) -> None:
    """Note that `plan` is in force for `ddp`, in place of an earlier one of the same graph."""
    of(ddp).plans[plan.graph] = plan


def plans_of(ddp: DistributedDataParallel) -> tuple[Plan, ...]:
    """Return the plans in force for a module, in the order in which they were made."""
    return tuple(of(ddp).plans.values())


def arrival_around(
    ddp: DistributedDataParallel, graph: str
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Return the parameters of graphs that run after and of those that run before this one.

    Each in the order in which gradients arrive: those of later graphs before this graph's own,
    those of earlier graphs after. A graph's name is its frame and the number of the frame's
    compile, as in `4/0`; frames are first compiled in forward order.
    """
    # A plan for evaluation has no parameters, and takes nothing from its frame's training plan.
    by_frame = {_frame(plan.graph): plan.arrival for plan in plans_of(ddp) if plan.arrival}
    frames = list(by_frame)
    own = frames.index(_frame(graph)) if _frame(graph) in by_frame else len(frames)
    later = [p for frame in reversed(frames[own + 1 :]) for p in by_frame[frame]]
    earlier = [p for frame in reversed(frames[:own]) for p in by_frame[frame]]
    return tuple(later), tuple(earlier)


def _frame(graph: str) -> str:
    return graph.partition("/")[0]


def clear() -> None:
    """Forget everything, as `torch._dynamo.reset()` forgets compiled code."""
    _records.clear()
