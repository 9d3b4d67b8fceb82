"""DDP's `lazy_bucket_allocation`, since torch 2.15: buckets' memory is given back after a backward.

All that ddpopt does with buckets has the same result with these, to the bit. Tuning is tested with
them in tests/planning/test_tuner.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import algorithms
from ddpopt._torch.names import installed_release
from tests.support.algorithms import ALGORITHMS, optimizer_for
from tests.support.models import MLP, batches
from tests.support.plans import COST
from tests.support.ranks import Ranks

pytestmark = pytest.mark.skipif(
    installed_release() < (2, 15), reason="DDP has lazy_bucket_allocation since torch 2.15"
)

LAZY = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True}
# The one that is left out depends on time.
REPEATABLE = [name for name in ALGORITHMS if name != "AsyncModelAverage"]


def _train(rank: int, what: str, ddp_options: dict[str, Any]) -> list[torch.Tensor]:
    """Train on other batches on each rank, with something in between; return the weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(3), bucket_cap_mb=0.03, **ddp_options)
    algorithm = ALGORITHMS.get(what)
    lr = 1e-3 if what == "QAdam" else 0.1
    optimizer = optimizer_for(algorithm, ddp.parameters(), lr=lr, warmup_steps=2)
    handle = None if algorithm is None else algorithms.attach(ddp, optimizer, algorithm)
    model = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    inputs = batches(rank, [(8, 64)] * 8)
    for x in inputs[:4]:
        step(x)
    if what == "rebucket":
        optimizer.zero_grad()
        plan = ddpopt.plan(MLP(3), inputs[0], network=COST, world_size=2, backend=None)
        plan = ddpopt.BucketPlan.from_json(_from_rank_0(plan.to_json()))
        ddpopt.rebucket(ddp, dataclasses.replace(plan, sizes=(2, 4)))
    if what == "record":
        with ddpopt.record(ddp) as recording:
            for x in inputs[4:]:
                step(x)
        assert recording.median_step() is not None
        assert len(recording.median_step().buckets) > 1
    else:
        for x in inputs[4:]:
            step(x)
    if handle is not None:
        handle.detach()
    else:
        assert len(ddpopt.explain(ddp).cuts[-1].sections) > 1
    return [p.detach().clone() for p in ddp.parameters()]


def _from_rank_0(text: str) -> str:
    shared = [text]
    torch.distributed.broadcast_object_list(shared)
    return shared[0]


@pytest.mark.quick("nothing")
@pytest.mark.parametrize("what", ["nothing", "record", "rebucket", *REPEATABLE])
def test_lazy_buckets_change_nothing_but_memory(ranks: Ranks, what: str) -> None:
    lazy = ranks.run(_train, what, LAZY)
    usual = ranks.run(_train, what, {"gradient_as_bucket_view": True})
    for weights, expected in zip(lazy, usual, strict=True):
        assert all(map(torch.equal, weights, expected))
