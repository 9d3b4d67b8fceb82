"""Modes of a DDP module in which its Reducer or its allreduce cannot be replaced.

The sentences that users read are those of `errors.DDPMode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import DDPMode

KEEPING_BUCKETS = (
    DDPMode.MIXED_PRECISION,
    DDPMode.OPTIMIZER_IN_BACKWARD,
    DDPMode.JOIN,
)
KEEPING_ALLREDUCE = (
    DDPMode.MIXED_PRECISION,
    DDPMode.OPTIMIZER_IN_BACKWARD,
    DDPMode.DELAYED_PARAMETERS,
    DDPMode.JOIN,
)
KEEPING_FROM_REHEARSAL = (DDPMode.FROZEN, *KEEPING_ALLREDUCE)

_IS_IN: dict[DDPMode, Callable[[DistributedDataParallel], bool]] = {
    DDPMode.MIXED_PRECISION: lambda ddp: ddp.mixed_precision is not None,
    DDPMode.OPTIMIZER_IN_BACKWARD: _torch.has_optimizer_in_backward,
    DDPMode.DELAYED_PARAMETERS: _torch.has_delayed_parameters,
    DDPMode.JOIN: _torch.is_in_join,
    DDPMode.FROZEN: lambda ddp: not any(p.requires_grad for p in ddp.parameters()),
}


def find_mode(ddp: DistributedDataParallel, modes: Sequence[DDPMode]) -> DDPMode | None:
    """Return the first of these modes that `ddp` is in."""
    return next((mode for mode in modes if _IS_IN[mode](ddp)), None)
