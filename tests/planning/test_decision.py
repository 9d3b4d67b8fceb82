"""Decisions for other buckets, from times that the tests choose."""

from __future__ import annotations

import pytest
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


def _measured(ready_s: tuple[float, ...], forward_s: float, between_s: float) -> Measured:
    return Measured(
        buckets=((3, 2), (1, 0)), ready_s=ready_s, forward_s=forward_s, between_s=between_s
    )


def test_a_gradient_is_as_late_as_on_the_rank_where_it_is_latest(one_rank: None) -> None:
    """Of ranks that are slow in different parts; and gradients stay in the order of arrival."""
    ddp = DistributedDataParallel(MLP(2))
    fast_first = _measured((0.1, 0.2, 0.6, 0.7), forward_s=0.3, between_s=0.02)
    fast_last = _measured((0.3, 0.4, 0.35, 0.5), forward_s=0.2, between_s=0.04)
    profile = decision._worst_case_profile(ddp, [fast_first, fast_last])
    assert [gradient.ready_s for gradient in profile.gradients] == [0.3, 0.4, 0.6, 0.7]
    assert profile.backward_s == 0.7
    assert (profile.forward_s, profile.between_s) == (0.3, 0.04)


@pytest.mark.parametrize(
    "other",
    [Measured(problem="no step"), Measured(buckets=((3, 2, 1, 0),))],
    ids=["nothing measured", "other buckets"],
)
def test_ranks_that_cannot_be_compared_keep_their_buckets(one_rank: None, other: Measured) -> None:
    """One has measured nothing, or has other buckets."""
    first = _measured((0.1, 0.2, 0.3, 0.4), forward_s=0.3, between_s=0.02)
    cost = AllreduceCost(startup_s=0.0, s_per_byte=0.0)
    decided = decision.decide(DistributedDataParallel(MLP(2)), [first, other], cost)
    assert decided.text.startswith(decision.STAY)
    assert "rank 1" in decided.text
    assert (decided.is_better, decided.plan) == (False, "")


def _iteration(seconds: float) -> Measured:
    return Measured(forward_s=seconds / 4, backward_s=seconds / 2, between_s=seconds / 4)


def test_a_change_is_judged_by_the_slowest_rank() -> None:
    """Before and after; it may be another one."""
    before = [_iteration(1.0), _iteration(2.0)]
    assert not decision.judge(before, [_iteration(1.5), _iteration(1.0)], 0.2).undoes_change
    assert decision.judge(before, [_iteration(2.0), _iteration(0.5)], 0.2).undoes_change
