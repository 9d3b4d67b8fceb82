"""Decisions for other buckets, from times that the tests choose."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from ddpopt.planning import AllreduceCost, decision
from ddpopt.planning.stopwatch import Measured
from tests.support.models import MLP
from tests.support.ranks import Ranks


def _decide(_rank: int, left_s: float, allreduce_s: float) -> decision.Decision:
    """Decide for one bucket, whose allreduce follows 40 ms of backward, and `left_s` more."""
    ddp = DistributedDataParallel(MLP())
    num_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters())
    measured = Measured(
        buckets=(tuple(reversed(range(12))),),
        ready_s=tuple(k * 0.04 / 12 for k in range(1, 13)),
        forward_s=0.06,
        backward_s=0.04 + allreduce_s + left_s,
    )
    cost = AllreduceCost(startup_s=0.0, s_per_byte=allreduce_s / num_bytes)
    return decision.decide(ddp, [measured] * 2, cost)


def test_a_small_gain_has_to_exceed_the_predictions_error(ranks: Ranks) -> None:
    """A gain of some 5 % does not where 7 % of the iteration is unexplained; one of 20 % does."""
    sure, _ = ranks.run(_decide, 0.0, 0.007)
    unsure, _ = ranks.run(_decide, 0.008, 0.007)
    large, _ = ranks.run(_decide, 0.03, 0.05)
    assert sure.is_better
    assert 0.03 < sure.gain < 0.1
    assert not unsure.is_better
    assert 0.03 < unsure.gain < 0.1
    assert "7.0%, since the prediction leaves 7.0% of one unexplained" in unsure.text
    assert large.is_better
