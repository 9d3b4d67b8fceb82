"""Which rank is slow, from times that the tests choose: its own, not its waiting."""

from __future__ import annotations

import pytest

from ddpopt.planning.spread import Spread, find_spread
from ddpopt.planning.stopwatch import Measured

STEP = {"forward": 0.02, "backward": 0.03, "what lies between two steps": 0.01}


def _spread(
    num_ranks: int, slow: int, *, broadcasts_buffers: bool = False, **late: float
) -> Spread:
    """Compare ranks of which one is late; the others wait for it until their backward ends."""
    measured = [_measured(rank, late if rank == slow else {}) for rank in range(num_ranks)]
    return find_spread(measured, broadcasts_buffers=broadcasts_buffers)


def _measured(rank: int, late: dict[str, float]) -> Measured:
    forward_s, last_gradient_s, between_s = (STEP[part] + late.get(part, 0.0) for part in STEP)
    return Measured(
        host=f"node{rank // 8}",
        ready_s=(last_gradient_s / 2, last_gradient_s),
        forward_s=forward_s,
        backward_s=0.2 - forward_s - between_s,  # all iterations take equally long
        between_s=between_s,
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 64])
@pytest.mark.parametrize("part", STEP)
def test_the_rank_that_computes_longer_is_named_with_its_host_and_not_those_that_wait(
    num_ranks: int, part: str
) -> None:
    """The slowest rank is behind by the time that it computes longer, also of two ranks."""
    slow = min(17, num_ranks - 1)
    spread = _spread(num_ranks, slow, **{part: 0.04})
    assert (spread.slowest_rank, spread.slowest_part) == (slow, part)
    assert (spread.median_s, spread.behind_s) == pytest.approx((0.06, 0.04))
    for word in (f"rank {slow} (node{slow // 8})", "60.0 ms", "40.0 more", "straggler", part):
        assert word in str(spread)


def test_a_rank_that_is_a_little_slower_is_no_straggler() -> None:
    assert "straggler" not in str(_spread(8, 3, forward=0.005))


def test_where_buffers_are_broadcast_nobody_is_blamed_for_what_lies_between_steps() -> None:
    """Ranks wait for each other there; that it is not known is said."""
    late = {"what lies between two steps": 0.04}
    spread = _spread(8, 3, broadcasts_buffers=True, **late)
    assert not spread.has_straggler
    assert "broadcast_buffers=False" in str(spread)
    assert _spread(8, 3, broadcasts_buffers=True, forward=0.04, **late).slowest_part == "forward"
