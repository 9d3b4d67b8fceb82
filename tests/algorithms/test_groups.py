"""Process groups of algorithms: nodes, errors, and groups that end."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import AsyncModelAverage, ByteGrad, Decentralized, attach
from ddpopt.algorithms.comm import Groups
from ddpopt.errors import OptionError
from tests.support.models import MLP, WIDTH
from tests.support.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("given", "variable", "size"), [(2, None, 2), (None, "4", 4), (2, "4", 2)])
def test_a_nodes_size_is_given_or_torchruns(
    monkeypatch: pytest.MonkeyPatch, given: int | None, variable: str | None, size: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert ByteGrad(local_world_size=given).ranks_per_node(8) == size
    assert ByteGrad(hierarchical=False, local_world_size=given).ranks_per_node(8) == 1


def test_a_size_that_is_unknown_or_does_not_divide_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(OptionError, match="LOCAL_WORLD_SIZE is not set"):
        ByteGrad().ranks_per_node(8)
    with pytest.raises(OptionError, match="8 ranks cannot be divided into nodes of 3"):
        ByteGrad(local_world_size=3).ranks_per_node(8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(OptionError, match="LOCAL_WORLD_SIZE is 'two'; it must be a whole number"):
        ByteGrad().ranks_per_node(8)


def _nodes(rank: int) -> list[float]:
    """Two nodes of two ranks, and then one of all."""
    values = []
    for size in (2, 4):
        groups = Groups(dist.group.WORLD, CPU, size)
        value = torch.tensor(float(rank))
        groups.reduce(value, lambda ranks, value: ranks.all_reduce(value).wait())
        values.append(value.item())
        dist.barrier()
        groups.end()
    return values


def test_nodes_average_leaders_meet_and_nodes_are_told(four_ranks: Ranks) -> None:
    """0.5 and 2.5 are the nodes' means, 3 their sum; 1.5 is the mean of one node of all."""
    assert four_ranks.run(_nodes) == [[3.0, 1.5]] * 4


def _num_open() -> tuple[int, int]:
    """Return how many process groups there are, and how many descriptors are open."""
    gc.collect()
    num_groups = len(torch.distributed.distributed_c10d._world.pg_map)
    return num_groups, len(os.listdir("/proc/self/fd"))


def _attach_and_detach(rank: int, algorithm: Any) -> list[tuple[int, int]]:
    """Return what is open before the first time and after the second and fourth one."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = [_num_open()]
    for _ in range(2):
        for _ in range(2):
            handle = attach(ddp, optimizer, algorithm)
            for _ in range(2):
                ddp(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
            handle.detach()
            del handle
        seen.append(_num_open())
    return seen


@pytest.mark.parametrize(
    "algorithm",
    [
        Decentralized(local_world_size=2),
        ByteGrad(hierarchical=False),
        AsyncModelAverage(sync_interval_ms=5),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_groups_end_when_the_algorithm_is_detached(four_ranks: Ranks, algorithm: Any) -> None:
    """And close their connections."""
    for before, second, fourth in four_ranks.run(_attach_and_detach, algorithm):
        assert second[0] == fourth[0] == before[0]
        assert fourth[1] <= second[1]
