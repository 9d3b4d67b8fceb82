"""What is known of each DDP module: plans in force, buckets formed or assigned, what was observed.

The backend and the runner write it; the backend and `explain` read it. Entries live as long as
their DDP module, and until `torch._dynamo.reset()`. What others know of a DDP module, such as the
plan of its buckets, is theirs: they keep it in a table of `new_table`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.reducer import Parameter, ReducerRules, known_buckets
from ddpopt.split.plan import NodeText, SplitPlan, frame_of

Nodes = tuple[tuple[NodeText, ...], ...]  # of each section of a graph


@dataclass(slots=True)
class _Record:
    """`actual_buckets` are the Reducer's after its rebuild, by parameter index, in launch order.

    `assigned_buckets` are those that `rebucket` gave it. `caps_bytes` are the Reducer's limits when
    graphs were cut for it, `nodes` are those of the graphs that `plans` are of. `is_trial` says
    that code compiled now is to be replaced when the tuner is done, `is_copy` that it is a
    rehearsal's module. `code` is what Dynamo compiled for it, as `_torch.forget_code` takes it.
    """

    caps_bytes: tuple[int, ...] = ()
    plans: dict[str, SplitPlan] = field(default_factory=dict)
    nodes: dict[str, Nodes] = field(default_factory=dict)
    actual_buckets: Sequence[Sequence[int]] | None = None
    num_comparisons: int = 0
    assigned_buckets: Sequence[Sequence[int]] | None = None
    is_trial: bool = False
    is_copy: bool = False
    code: list[Any] = field(default_factory=list)

    @property
    def has_forward_sections(self) -> bool:
        """Whether a graph is cut in forward, which is to be cut anew for other buckets."""
        return any(plan.sections and plan.split == "forward" for plan in self.plans.values())

    @property
    def known_buckets(self) -> Sequence[Sequence[int]] | None:
        """The Reducer's buckets: as it told them, or as it was given them."""
        return self.actual_buckets or self.assigned_buckets


epoch = 0  # how often a module was given other buckets
has_drifted = False  # whether a graph was compiled without telling for which module
_records: weakref.WeakKeyDictionary[DistributedDataParallel, _Record] = weakref.WeakKeyDictionary()
_tables: list[weakref.WeakKeyDictionary[DistributedDataParallel, Any]] = [_records]


def new_table() -> weakref.WeakKeyDictionary[DistributedDataParallel, Any]:
    """Return a table for what another module knows of DDP modules, which `clear` empties too."""
    table: weakref.WeakKeyDictionary[DistributedDataParallel, Any] = weakref.WeakKeyDictionary()
    _tables.append(table)
    return table


def of(ddp: DistributedDataParallel) -> _Record:
    """Return what is known of a module, to be read or added to."""
    record = _records.get(ddp)
    if record is None:  # setdefault would make one at each call, and forwards call this
        record = _records[ddp] = _Record()
    return record


def ddp_of(model: torch.nn.Module) -> DistributedDataParallel:
    """Return the DDP module at the top of a model, or raise TypeError."""
    ddp = _torch.unwrap_compiled(model)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            "this takes a DistributedDataParallel module, or the result of torch.compile on one; "
            f"this is a {type(ddp).__name__}"
        )
    return ddp


def rules_of(ddp: DistributedDataParallel | None) -> ReducerRules | None:
    """Return how a module's Reducer forms buckets, None without a module."""
    if ddp is None:
        return None
    record = of(ddp)
    record.caps_bytes = record.caps_bytes or _torch.reducer_caps(ddp)
    return ReducerRules(
        caps_bytes=record.caps_bytes,
        is_rebuilt=_torch.follows_arrival_order(ddp),
        is_trial=record.is_trial,
    )


def forget_code(ddp: DistributedDataParallel) -> None:
    """Have Dynamo forget what it compiled for a module whose rules are others now."""
    code = of(ddp).code
    _torch.forget_code(code)
    code.clear()


def keep(ddp: DistributedDataParallel, plan: SplitPlan, nodes: Nodes) -> None:
    """Note that `plan` is in force for `ddp`, in place of an earlier one of the same graph."""
    record = of(ddp)
    record.nodes[plan.graph] = nodes
    if record.assigned_buckets is not None and plan.buckets and not plan.is_shared:
        parameters = list(_torch.reducer_parameters(ddp).values())
        rules = rules_of(ddp)
        assert rules is not None
        plan = plan.with_buckets(known_buckets(parameters, record.assigned_buckets, rules))
    record.plans[plan.graph] = plan


def assign(ddp: DistributedDataParallel, buckets: Sequence[Sequence[int]]) -> None:
    """Note that `ddp` was given these buckets, by parameter index, and will form them again."""
    global epoch  # noqa: PLW0603  # a counter of all modules: runners compare it at each call
    epoch += 1
    record = of(ddp)
    record.assigned_buckets, record.actual_buckets, record.num_comparisons = buckets, None, 0
    for plan in record.plans.values():
        keep(ddp, plan, record.nodes[plan.graph])


def plans_of(ddp: DistributedDataParallel) -> tuple[SplitPlan, ...]:
    """Return the plans in force for a module, in the order in which they were made."""
    return tuple(of(ddp).plans.values())


def arrival_around(
    ddp: DistributedDataParallel, graph: str, parameters: Collection[int]
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Return the parameters of graphs that run after and of those that run before this one.

    Each in the order in which gradients arrive: those of later graphs before this graph's own,
    those of earlier graphs after. A graph's name is its frame and the number of the frame's
    compile, as in `4/0`; frames are first compiled in forward order. `parameters` are the graph's
    own: where its frame was compiled before, without parameters, and a frame that came after has
    some of them, the graph is in the place of that one, which a graph break had made.
    """
    # A plan for evaluation has no parameters, and takes nothing from its frame's training plan.
    by_frame = {plan.frame: plan.arrival for plan in plans_of(ddp) if plan.arrival}
    frames, frame = list(by_frame), frame_of(graph)
    replaced = (
        other
        for other in frames
        if _number(other) > _number(frame) and any(p.index in parameters for p in by_frame[other])
    )
    first = frame if frame in by_frame else next(replaced, None)
    own = frames.index(first) if first is not None else len(frames)
    later = [p for other in reversed(frames[own:]) if other != frame for p in by_frame[other]]
    earlier = [p for other in reversed(frames[:own]) for p in by_frame[other]]
    return tuple(later), tuple(earlier)


def _number(frame: str) -> int:
    return int(frame) if frame.isdigit() else 0  # a graph that is not Dynamo's has no name


def note_drift() -> None:
    """Note that a graph is compiled whose runs will not be told of, for want of private names."""
    global has_drifted  # noqa: PLW0603  # a matter of the process: its torch lacks a name
    has_drifted = True


def clear() -> None:
    """Forget everything, as `torch._dynamo.reset()` forgets compiled code."""
    global has_drifted  # noqa: PLW0603  # as above
    for table in _tables:
        table.clear()
    has_drifted = False
