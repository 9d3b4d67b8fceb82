"""DDP's `lazy_bucket_allocation`, since torch 2.15: buckets' memory is given back after a backward.

All that ddpopt does with buckets has the same result with these, to the bit. Tuning is tested with
them in tests/planning/test_tuner.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import algorithms
from ddpopt._torch.names import installed_release
from tests.support.algorithms import ALGORITHMS, optimizer_for
from tests.support.beside import compiled
from tests.support.models import MLP, batches
from tests.support.on_ranks import gather, on_ranks
from tests.support.plans import COST

pytestmark = pytest.mark.skipif(
    installed_release() < (2, 15), reason="DDP has lazy_bucket_allocation since torch 2.15"
)

# The one that is left out depends on time.
REPEATABLE = [name for name in ALGORITHMS if name != "AsyncModelAverage"]


def _train(rank: int, what: str, **ddp_options: bool) -> list[torch.Tensor]:
    """Train on other batches on each rank, with something in between; return the weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        MLP(3), bucket_cap_mb=0.03, gradient_as_bucket_view=True, **ddp_options
    )
    algorithm = ALGORITHMS.get(what)
    lr = 1e-3 if what == "QAdam" else 0.1
    optimizer = optimizer_for(algorithm, ddp.parameters(), lr=lr, warmup_steps=2)
    handle = None if algorithm is None else algorithms.attach(ddp, optimizer, algorithm)
    model = compiled(ddp)

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
        plan = ddpopt.BucketPlan.from_json(gather(plan.to_json())[0])
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


@pytest.mark.quick("nothing")
@pytest.mark.parametrize("what", ["nothing", "record", "rebucket", *REPEATABLE])
@on_ranks(2)
def test_lazy_buckets_change_nothing_but_memory(rank: int, what: str) -> None:
    lazy = _train(rank, what, lazy_bucket_allocation=True)
    assert all(map(torch.equal, lazy, _train(rank, what)))
