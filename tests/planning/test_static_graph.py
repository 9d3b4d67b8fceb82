"""How often each gradient of a static graph arrives is counted once, on two ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.planning import static_graph
from tests.planning.test_new_reducer import WIDTH, Net, Uneven
from tests.support.models import batches, train
from tests.support.plans import plan_of
from tests.support.ranks import Ranks, error_of


def _count(rank: int) -> list[Mapping[int, int] | None]:
    """What is known after each step of a loop."""
    torch._dynamo.reset()
    ddp = DistributedDataParallel(Uneven(), static_graph=True)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    x = batches(rank, [(4, WIDTH)])[0]
    known = []

    def note() -> None:
        known.append(static_graph.find_arrivals(ddp))

    train(ddp, [x], compiled)
    note()
    with ddp.no_sync():
        compiled(x).sum().backward()
    note()
    compiled(x)
    output = compiled(x)
    output.register_hook(_fail)
    assert error_of(output.sum().backward).startswith("ArithmeticError")
    note()
    compiled(x).sum().backward()
    note()
    torch._dynamo.reset()
    note()
    return known


def _fail(_gradient: torch.Tensor) -> None:
    raise ArithmeticError


def test_arrivals_are_those_of_a_backward_that_ddp_reduces(ranks: Ranks) -> None:
    """Neither DDP's own first one, nor one under no_sync, nor one that raises counts.

    That of the scale arrives too, as None.
    """
    scale, weight_0, bias_0, weight_1, bias_1 = range(5)
    arrivals = {scale: 1, weight_0: 2, bias_0: 2, weight_1: 1, bias_1: 1}
    for known in ranks.run(_count):
        assert known == [None, None, None, arrivals, arrivals]


def _compile_on_rank_0(rank: int) -> str:
    torch._dynamo.reset()
    ddp = DistributedDataParallel(Net(), static_graph=True)
    run = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    train(ddp, batches(rank, [(4, WIDTH)] * 3), run if rank == 0 else None)
    ddp.zero_grad()
    return error_of(lambda: ddpopt.rebucket(ddp, plan_of(ddp.module, (1, 3, 2))))


def test_ranks_of_which_some_do_not_know_keep_their_buckets(ranks: Ranks) -> None:
    """What is communicated with a change depends on it."""
    for error in ranks.run(_compile_on_rank_0):
        assert error.startswith("PlanError: buckets stay as they are: rank 1 differs from rank 0")
        assert "how often gradients arrive (static_graph=True) is unknown instead of known" in error
