"""`explain`: the plans in force for a DDP model, as data and as a readable table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, records
from ddpopt.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The plans of one model, one a compiled graph, in the order in which they were made."""

    model: str
    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        if not self.plans:
            return (
                f"ddpopt has compiled no graph of this {self.model}. Either its forward has not "
                "run yet, or it does not run under torch.compile(..., backend='ddpopt'), or "
                "Dynamo skips it (as it skips a torch.nn container right under DDP)."
            )
        return "\n\n".join(str(plan) for plan in self.plans)


def explain(model: torch.nn.Module) -> Explanation:
    """Return the plans that ddpopt made for a DDP model, which print as a table.

    `model` is a DistributedDataParallel module, or what `torch.compile` made of one. Plans exist
    once a forward with gradients has run.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
    """
    ddp = _torch.uncompiled(model)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"explain takes a DistributedDataParallel module, or the result of torch.compile on "
            f"one; this is a {type(ddp).__name__}"
        )
    return Explanation(model=type(ddp.module).__name__, plans=records.plans_of(ddp))
