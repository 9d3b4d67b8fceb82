"""Shards: pieces of all ranks make up the parameters, whatever their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpopt.algorithms.comm import Communicator, Exchange
from ddpopt.algorithms.shards import Shard, flatten, is_dense
from tests.support.groups import first_ranks
from tests.support.ranks import Ranks

SHAPES = [(7,), (), (3, 5), (0,), (100,), (2, 3, 4, 4)]


def _divide(rank: int, num_ranks: int) -> Any:
    group = first_ranks(num_ranks)
    if group is None:
        return None
    torch.manual_seed(0)
    parameters = [torch.randn(shape) for shape in SHAPES]
    parameters[-1] = parameters[-1].to(memory_format=torch.channels_last)
    copies = [p.clone() for p in parameters]
    exchange = Exchange(Communicator(group, torch.device("cpu")))
    shard = Shard(0, range(len(parameters)), parameters, exchange)
    kept = [
        torch.equal(a, b) and a.stride() == b.stride()
        for a, b in zip(parameters, copies, strict=True)
    ]
    for member in shard.members:
        member.piece.detach().add_(1)
    shard.send("sending", shard.indices)
    shard.wait()
    sent = [torch.equal(a, b + 1) for a, b in zip(parameters, copies, strict=True)]
    states = [
        member.cut_state({"step": torch.tensor(3.0), "m": value})
        for member, value in zip(shard.members, copies, strict=True)
    ]
    whole = shard.gather_states(states)
    gathered = [
        torch.equal(s["m"], c) and float(s["step"]) == 3 for s, c in zip(whole, copies, strict=True)
    ]
    values = torch.cat([flatten(c, p) for c, p in zip(copies, parameters, strict=True)]) * (
        rank + 1
    )
    works, complete = exchange.mean_scatter(values, shard.gradient)
    for work in works:
        work.wait()
    complete()
    means = [c * (num_ranks + 1) / 2 for c in copies]
    averaged = [torch.allclose(g, m) for g, m in zip(shard.gather_gradients(), means, strict=True)]
    shard.release()
    return kept + sent + gathered + averaged, sum(m.piece.numel() for m in shard.members)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_pieces_of_all_ranks_make_up_the_parameters(four_ranks: Ranks, num_ranks: int) -> None:
    """Parameters, optimizer states and gradients; some pieces are empty."""
    found = four_ranks.run(_divide, num_ranks)[:num_ranks]
    assert all(all(checks) for checks, _ in found)
    assert sum(size for _, size in found) == sum(torch.Size(s).numel() for s in SHAPES)


def test_what_has_gaps_is_not_dense() -> None:
    assert is_dense(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    assert not is_dense(torch.empty(4, 8)[:, :3])
    assert not is_dense(torch.empty(1).expand(4))
