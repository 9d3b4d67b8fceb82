"""GradientAllReduce against DDP itself, by nodes against flat, and sums against means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import GradientAllReduce, attach
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks


def _gradients(rank: int, algorithm: GradientAllReduce | None) -> tuple[torch.Tensor, int]:
    """Return the gradients after three steps, two micro-batches each."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(4), bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = attach(ddp, optimizer, algorithm) if algorithm else None
    for x in batches(rank, [(4, WIDTH)] * 3):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(x).pow(2).sum().backward()
        ddp(x + 1).pow(2).sum().backward()
        optimizer.step()
    count = 0
    if handle is not None:
        count = handle.num_communications
        handle.detach()
    return torch.cat([p.grad.flatten() for p in ddp.parameters()]), count


NODES = {"hierarchical": True, "local_world_size": 2}


def test_it_is_bitwise_what_ddp_does(four_ranks: Ranks) -> None:
    expected = four_ranks.run(_gradients, None)
    for (gradient, count), (reference, _) in zip(
        four_ranks.run(_gradients, GradientAllReduce()), expected, strict=True
    ):
        assert torch.equal(gradient, reference)
        assert count >= 3


@pytest.mark.parametrize("options", [{}, NODES], ids=["mean", "mean by nodes"])
def test_all_ranks_end_bitwise_equal(four_ranks: Ranks, options: dict[str, Any]) -> None:
    (expected, _), *_ = four_ranks.run(_gradients, None)
    results = four_ranks.run(_gradients, GradientAllReduce(**options))
    for gradient, _ in results:
        assert torch.equal(gradient, results[0][0])
        torch.testing.assert_close(gradient, expected)


def _one_step(rank: int, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = attach(ddp, optimizer, GradientAllReduce(**options))
    ddp(batches(rank, [(4, WIDTH)])[0]).pow(2).sum().backward()
    handle.detach()
    return torch.cat([p.grad.flatten() for p in ddp.parameters()])


@pytest.mark.parametrize("nodes", [{}, NODES], ids=["flat", "by nodes"])
def test_a_sum_is_the_mean_times_the_ranks(four_ranks: Ranks, nodes: dict[str, Any]) -> None:
    means = four_ranks.run(_one_step, nodes)
    sums = four_ranks.run(_one_step, {"average": False, **nodes})
    for mean, total in zip(means, sums, strict=True):
        torch.testing.assert_close(total, 4 * mean)


@pytest.mark.parametrize("value", [0, None, "yes"])
def test_a_bad_value_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="average is"):
        GradientAllReduce(average=value)
