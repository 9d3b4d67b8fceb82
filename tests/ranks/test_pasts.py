"""Ranks with different pasts meet: what is counted belongs to the process group, not its name."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.planning.tuner import find_tuner
from ddpopt.split import state
from tests.support.beside import compiled
from tests.support.models import MLP, batches
from tests.support.ranks import MakeRanks

_NUM_STEPS = 24  # in which a search ends


def _train_verified(rank: int, num_steps: int) -> str:
    """Train a model with the search for buckets, after it was warmed up and verified."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    model = compiled(ddp, inner="eager", buckets="auto")
    inputs = batches(rank, [(8, 64)] * num_steps)
    ddpopt.warmup(model, inputs[0])
    assert ddpopt.verify(model, inputs[0]).passed
    for x in inputs:
        model(x).sum().backward()
    tuner = find_tuner(state.ddp_of(model))
    assert tuner is not None
    assert tuner.is_done or num_steps < _NUM_STEPS
    return tuner.outcome


def _live_on(rank: int, num_ranks_before: int, store: str) -> str:
    """Train in a group of one rank, if this one was there, and then in a group of all ranks."""
    dist.destroy_process_group()
    if rank < num_ranks_before:
        dist.init_process_group("gloo", init_method=f"file://{store}{rank}", rank=0, world_size=1)
        for _ in range(2):
            _train_verified(0, 2)
        torch._dynamo.reset()
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return _train_verified(rank, _NUM_STEPS)


def test_a_rank_that_lived_on_meets_one_that_is_new(make_ranks: MakeRanks, tmp_path: Path) -> None:
    """A rank lives on at an in-process restart, in a reused actor, and beside a spare rank."""
    first, second = make_ranks(2).run(_live_on, 1, str(tmp_path / "store"))
    assert first == second
    assert "did not" not in first
