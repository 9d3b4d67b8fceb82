"""Process groups of algorithms: nodes, errors, and groups that are used again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ddpopt.algorithms._runtime.groups import make_groups, ranks_per_node
from ddpopt.errors import OptionError
from tests.support.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("given", "variable", "size"), [(2, None, 2), (None, "4", 4), (2, "4", 2)])
def test_a_nodes_size_is_given_or_torchruns(
    monkeypatch: pytest.MonkeyPatch, given: int | None, variable: str | None, size: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert ranks_per_node(True, given, 8) == size
    assert ranks_per_node(False, given, 8) == 1


def test_a_size_that_is_unknown_or_does_not_divide_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(OptionError, match="LOCAL_WORLD_SIZE is not set"):
        ranks_per_node(True, None, 8)
    with pytest.raises(OptionError, match="8 ranks cannot be divided into nodes of 3"):
        ranks_per_node(True, 3, 8)


def _nodes(rank: int) -> list[float]:
    """Two nodes of two ranks, and then of all; groups that were released are used again."""
    values = []
    world = dist.group.WORLD
    seen = []
    for size in (2, 4, 2, 4, 2):
        lease = make_groups(world, CPU, size)
        groups = lease.value
        seen.append(groups.everyone)
        value = torch.tensor(float(rank))
        groups.average_node(value)
        if groups.leaders is not None:
            dist.all_reduce(value, group=groups.leaders)
        groups.tell_node(value)
        values.append(value.item())
        lease.release()
    assert seen[0] is seen[2] is seen[4]
    assert seen[1] is seen[3]
    return values


def test_nodes_average_leaders_meet_and_nodes_are_told(four_ranks: Ranks) -> None:
    """0.5 and 2.5 are the nodes' means, 3 their sum; 1.5 is the mean of one node of all."""
    assert four_ranks.run(_nodes) == [[3.0, 1.5, 3.0, 1.5, 3.0]] * 4


def _release_on_one(rank: int) -> float:
    """Rank 0 has released, as when others dropped their model: all make new ones."""
    world = dist.group.WORLD
    lost = make_groups(world, CPU, 1)
    if rank == 0:
        lost.release()
    lease = make_groups(world, CPU, 1)
    value = torch.tensor(1.0)
    dist.all_reduce(value, group=lease.value.everyone)
    lease.release()
    return value.item()


def test_what_only_some_ranks_released_is_not_used_again(four_ranks: Ranks) -> None:
    assert four_ranks.run(_release_on_one) == [4.0] * 4
