"""`Algorithm`: the values that it takes, and the size of a node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpopt.algorithms import (
    ByteGrad,
    Decentralized,
)
from ddpopt.errors import OptionError
from tests.support.algorithms import attached_mlp, flat_weights
from tests.support.models import WIDTH
from tests.support.ranks import Ranks

# ---- attach: what it refuses, on all ranks, and that ranks start equal -----------------------


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"peer_selection": "ring"}, OptionError, "'ring'"),
        ({"communication_interval": 0}, OptionError, "0; it must be a whole number, 1 or more"),
        ({"communication_interval": 1.0}, TypeError, "float"),
        ({"communication_interval": True}, TypeError, "bool"),
        ({"hierarchical": 1}, TypeError, "hierarchical is 1"),
        ({"local_world_size": 0}, OptionError, "local_world_size is 0"),
        ({"local_world_size": -1}, OptionError, "local_world_size is -1"),
    ],
)
def test_bad_values_are_refused_when_the_algorithm_is_made(
    options: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        Decentralized(**options)


def _unequal_groups(rank: int) -> float:
    """Only rank 0 has made further groups, by which torch would name the algorithm's."""
    mine = [dist.new_group([0], use_local_synchronization=True) for _ in range(3 * (1 - rank))]
    ddp, optimizer, handle = attached_mlp(Decentralized(local_world_size=2))
    ddp(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    handle.detach()
    for group in mine:
        dist.destroy_process_group(group)
    return flat_weights(ddp).sum().item()


def test_ranks_may_be_in_different_numbers_of_groups(ranks: Ranks) -> None:
    first, second = ranks.run(_unequal_groups)
    assert first == second


@pytest.mark.parametrize(("given", "variable", "size"), [(2, None, 2), (None, "4", 4), (2, "4", 2)])
def test_a_nodes_size_is_given_or_torchruns(
    monkeypatch: pytest.MonkeyPatch, given: int | None, variable: str | None, size: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert ByteGrad(local_world_size=given).ranks_per_node(8) == size
    assert ByteGrad(hierarchical=False, local_world_size=given).ranks_per_node(8) == 1


def test_a_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(OptionError, match="LOCAL_WORLD_SIZE is 'two'; it must be a whole number"):
        ByteGrad().ranks_per_node(8)
