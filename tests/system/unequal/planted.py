"""Faults of one rank that are planted to see whether they are found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.system.fuzzing import planted

LOSES_GRADIENTS = "a section's gradients are lost on one rank"
LONE_COLLECTIVE = "a forward with gradients is collective"
SWALLOWS_ERRORS = "an error of a backward is swallowed"
BUGS = (LOSES_GRADIENTS, LONE_COLLECTIVE, SWALLOWS_ERRORS)


@contextlib.contextmanager
def planting(name: str, rank: int) -> Iterator[None]:
    """Run ddpopt with one of these faults, or with none."""
    if name == LOSES_GRADIENTS and rank == 1:
        with planted.bug("a section's gradients are lost"):
            yield
    elif name == LONE_COLLECTIVE:
        with mock.patch.object(DistributedDataParallel, "_pre_forward", _broadcasting):
            yield
    elif name == SWALLOWS_ERRORS:
        with mock.patch.object(torch.Tensor, "backward", _swallowing):
            yield
    else:
        assert name in ("", LOSES_GRADIENTS), f"there is no fault {name!r}"
        yield


_pre_forward = DistributedDataParallel._pre_forward
_backward = torch.Tensor.backward


def _broadcasting(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        dist.barrier(ddp.process_group)
    return _pre_forward(ddp, *args, **kwargs)


def _swallowing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    with contextlib.suppress(RuntimeError):
        _backward(tensor, *args, **kwargs)
