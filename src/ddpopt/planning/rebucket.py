"""`rebucket`: give an existing DDP module the buckets of a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._events import Observer, Priority, ignore, observe
from ddpopt._text import count, shorten
from ddpopt.errors import PlanError
from ddpopt.planning.plan import BucketPlan
from ddpopt.ranks.agree import Fact, RankReport, require_equal
from ddpopt.split import state
from ddpopt.split.state import KEEPING_BUCKETS, find_mode


def rebucket(model: torch.nn.Module, plan: BucketPlan | str | os.PathLike[str]) -> None:
    """Rebuild the Reducer of a DDP model with exactly the buckets of `plan`, or of a saved one.

    Comm hooks and all options are kept; a hook of yours that keeps state by bucket must drop it.
    This is a collective call: every rank of DDP's process group must make it with an equal plan,
    between a step and the next forward. A backward whose forward ran before the call raises. Graphs
    compiled with `backend="ddpopt"` are compiled again in the next forward.

    Raises:
        PlanError: on all ranks, if on any of them the plan does not fit the model, plans differ,
            a backward is running, or DDP is in a mode in which its Reducer cannot be replaced.
        PeerError: a rank did not make this call.
        TypeError: there is no DistributedDataParallel at the top of `model`, or `plan` is no plan.
        OSError: the plan's file cannot be read.
    """
    ddp = state.ddp_of(model)
    if isinstance(plan, str | os.PathLike):
        plan = BucketPlan.load(Path(plan))
    if not isinstance(plan, BucketPlan):
        raise TypeError(
            "rebucket takes a BucketPlan or the path of a saved one; this is a "
            f"{type(plan).__name__}"
        )
    agree(ddp, plan)
    apply(ddp, plan)
    state.get(ddp).take_new_limits()
    _forbid_backward(ddp)


def find_obstacle(ddp: DistributedDataParallel) -> str:
    """Say why no plan can be applied to `ddp` now; "" if one can."""
    if _torch.is_in_backward():
        return "a backward is running; call rebucket between a step and the next forward"
    return find_lasting_obstacle(ddp)


def find_lasting_obstacle(ddp: DistributedDataParallel) -> str:
    """Say why no plan can be applied to `ddp` as it is set up; "" if one can."""
    mode = find_mode(ddp, KEEPING_BUCKETS)
    if mode is not None:
        return f"this DDP module's buckets cannot be changed: {mode.value}"
    # By name: importing its class needs numpy.
    if any(type(kept).__name__ == "PowerSGDState" for kept in _torch.hook_states(ddp)):
        return (
            "its comm hook is PowerSGD, which keeps errors by bucket; give "
            "DistributedDataParallel the plan's ddp_kwargs() instead"
        )
    own = list(_torch.reducer_parameters(ddp).values())
    if len({p.group for p in own}) > 1 or any(p.is_sparse for p in own):
        return (
            "its parameters are of several dtypes or devices, or sparse, for which DDP forms "
            "buckets apart; give DistributedDataParallel the plan's ddp_kwargs() instead"
        )
    return ""


def find_misfit(ddp: DistributedDataParallel, plan: BucketPlan) -> str:
    """Say how the parameters of `plan` differ from those that `ddp` reduces; "" if they match."""
    own = {p.name: p.num_bytes for p in _torch.reducer_parameters(ddp).values()}
    planned = {gradient.name: gradient.num_bytes for gradient in plan.profile.gradients}
    remedy = "plan for this very model"
    for names, where in ((own.keys() - planned, "in the plan"), (planned.keys() - own, "reduced")):
        if names:
            shown = shorten(sorted(names))
            are = "is" if len(names) == 1 else "are"
            return f"{count(len(names), 'parameter')} {are} not {where} ({shown}); {remedy}"
    for name, size in own.items():
        if planned[name] != size:
            sizes = f"{size} bytes, and {planned[name]} in the plan"
            return f"the gradient of {name} has {sizes}; {remedy}"
    return ""


def agree(ddp: DistributedDataParallel, plan: BucketPlan) -> None:
    """Raise on all ranks unless all can apply the same plan. Collective.

    Raises:
        PlanError: the first problem, or the ranks that differ from the first one.
        PeerError: a rank did not make this call.
    """
    problem = find_obstacle(ddp) or find_misfit(ddp, plan)
    require_equal(
        ddp,
        RankReport([Fact("the plan", plan.hash)], PlanError(problem) if problem else None),
        PlanError,
        "make the plan on one rank and broadcast its to_json()",
        title="buckets stay as they are: ",
    )


def apply(ddp: DistributedDataParallel, plan: BucketPlan) -> None:
    """Give `ddp` the buckets of a plan that fits."""
    buckets = indices_of(ddp, plan)
    _torch.replace_reducer(ddp, buckets, plan.caps_bytes)
    state.get(ddp).give_buckets(buckets, plan)


def take_back(
    ddp: DistributedDataParallel, buckets: Sequence[Sequence[int]], caps_bytes: Sequence[int]
) -> None:
    """Give `ddp` back the buckets, by index, that it had before a plan, and their limits."""
    _torch.replace_reducer(ddp, buckets, caps_bytes)
    state.get(ddp).give_buckets(buckets)


def indices_of(ddp: DistributedDataParallel, plan: BucketPlan) -> list[list[int]]:
    """Return the buckets of a plan that fits, by parameter index."""
    index_of = {p.name: p.index for p in _torch.reducer_parameters(ddp).values()}
    return [[index_of[name] for name in bucket.parameters] for bucket in plan.buckets]


def plan_of(ddp: DistributedDataParallel) -> BucketPlan | None:
    """Return the plan that gave `ddp` its buckets, None if they are DDP's own."""
    plan: BucketPlan | None = state.get(ddp).bucket_plan
    return plan


def _forbid_backward(ddp: DistributedDataParallel) -> None:
    """Make backward raise until the next forward: a new Reducer does not know earlier ones."""

    def refuse(_gradient: torch.Tensor) -> None:
        raise PlanError(
            "this backward belongs to a forward from before ddpopt.rebucket, whose gradients "
            "would not be reduced; call rebucket between a step and the next forward"
        )

    _allow_backward(ddp)
    reduced = _torch.reducer_parameters(ddp)
    with _torch.requiring_grad(reduced):
        handles = [
            parameter.register_hook(refuse)  # type: ignore[no-untyped-call]  # as torch has it
            for parameter in reduced
        ]
    # If nothing has been compiled yet, nobody else notices that a forward has begun.
    _torch.hide_from_dynamo()
    begin = ddp.register_forward_pre_hook(lambda module, _inputs: _allow_backward(module))
    state.get(ddp).guards = [*handles, begin]
    observe(ddp, Priority.REBUCKET, _Permission())


class _Permission(Observer):
    def before_forward(self, ddp: DistributedDataParallel) -> None:
        _allow_backward(ddp)


def _allow_backward(ddp: DistributedDataParallel) -> None:
    known = state.get(ddp)
    for handle in known.guards:
        handle.remove()
    known.guards = ()
    ignore(ddp, Priority.REBUCKET)
