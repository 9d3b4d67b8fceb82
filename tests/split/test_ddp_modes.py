"""Which modes of DDP keep their Reducer or their allreduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import DDPMode
from ddpopt.split.state import (
    KEEPING_ALLREDUCE,
    KEEPING_BUCKETS,
    KEEPING_FROM_REHEARSAL,
    find_mode,
)


def _ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(2, 2), **options)


def _mixed() -> DistributedDataParallel:
    ddp = _ddp()
    ddp.mixed_precision = object()
    return ddp


def _stepping() -> DistributedDataParallel:
    model = torch.nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return DistributedDataParallel(model)


def _delaying() -> DistributedDataParallel:
    model = torch.nn.Linear(2, 2)
    return DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("weight", model.weight)],
        param_to_hook_all_reduce=model.bias,
    )


def _frozen() -> DistributedDataParallel:
    ddp = _ddp()
    ddp.requires_grad_(False)
    return ddp


MADE = {
    DDPMode.MIXED_PRECISION: _mixed,
    DDPMode.OPTIMIZER_IN_BACKWARD: _stepping,
    DDPMode.DELAYED_PARAMETERS: _delaying,
    DDPMode.FROZEN: _frozen,
}


@pytest.mark.parametrize("mode", MADE, ids=lambda mode: mode.name)
def test_a_mode_is_found_by_what_it_stands_in_the_way_of(one_rank: None, mode: DDPMode) -> None:
    """And by nothing else."""
    ddp = MADE[mode]()
    for modes in (KEEPING_BUCKETS, KEEPING_ALLREDUCE, KEEPING_FROM_REHEARSAL):
        assert find_mode(ddp, modes) is (mode if mode in modes else None)


def test_join_keeps_both(one_rank: None) -> None:
    """While its context is open; not before."""
    ddp = _ddp()
    assert find_mode(ddp, KEEPING_BUCKETS) is None
    with ddp.join():
        assert find_mode(ddp, KEEPING_BUCKETS) is find_mode(ddp, KEEPING_ALLREDUCE) is DDPMode.JOIN
