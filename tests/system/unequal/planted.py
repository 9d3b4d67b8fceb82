"""Faults that are planted to see whether they are found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.system.fuzzing import planted
from tests.system.unequal.twin import EAGER

LOSES_GRADIENTS = "a section's gradients are lost on one rank"
LONE_COLLECTIVE = "each forward with gradients is collective"
RAISES_IN_EAGER = "one rank raises in eager DDP"
BUGS = (LOSES_GRADIENTS, LONE_COLLECTIVE, RAISES_IN_EAGER)


@contextlib.contextmanager
def planting(name: str, kind: str, rank: int) -> Iterator[None]:
    """Run a twin of this kind with one of these faults, or with none."""
    assert name in ("", *BUGS), f"there is no fault {name!r}"
    if name == LOSES_GRADIENTS and kind != EAGER and rank == 1:
        with planted.bug("a section's gradients are lost"):
            yield
    elif name == LONE_COLLECTIVE and kind != EAGER:
        with mock.patch.object(DistributedDataParallel, "_pre_forward", _meeting):
            yield
    elif name == RAISES_IN_EAGER and kind == EAGER and rank == 1:
        with mock.patch.object(torch.Tensor, "backward", side_effect=RuntimeError("planted")):
            yield
    else:
        yield


_pre_forward = DistributedDataParallel._pre_forward


def _meeting(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        dist.barrier(ddp.process_group)
    return _pre_forward(ddp, *args, **kwargs)
