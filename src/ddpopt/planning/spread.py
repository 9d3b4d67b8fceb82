"""How ranks differ in what a step computes, from what each of them measured.

Iterations say nothing of it: a rank that is done waits in allreduces for the slowest, so all take
equally long. What a rank computes is its forward, its backward up to the last gradient, and what it
does until the next forward; none of these includes the wait at the end of backward.

LIMIT: collectives of the program's own, such as a synchronised norm's, are waits within these. And
before each forward DDP broadcasts buffers, if there are any, for which ranks wait too (with gloo
all of them, rank 0 included): then the time between two steps is in the median, as on all ranks,
but ranks are not compared by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddpopt._text import format_ms
from ddpopt.planning.stopwatch import Measured

# The part of a step's computation by which a rank has to be behind to be called a straggler.
_MUCH_BEHIND = 0.1
_PARTS = ("forward", "backward", "what lies between two steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The slowest rank beside the one in the middle."""

    # The sum of the medians of a step's parts.
    median_s: float
    slowest_rank: int
    slowest_host: str
    # How much longer the slowest rank computes, and the part of the step that adds most to it.
    behind_s: float
    slowest_part: str
    # The median time between two steps, if ranks wait for each other there; 0.0 if they do not.
    waiting_between_s: float = 0.0

    @property
    def has_straggler(self) -> bool:
        return self.behind_s > _MUCH_BEHIND * self.median_s

    def __str__(self) -> str:
        text = (
            f"a step's computation takes {format_ms(self.median_s)} ms on the median rank, "
            f"{format_ms(self.behind_s)} more on rank {self.slowest_rank} "
            f"({self.slowest_host}), the slowest"
        )
        if self.has_straggler:
            text += (
                f": a straggler, for which all others wait, most of all because of "
                f"{self.slowest_part}; look at its processor's load and clock, and its data loading"
            )
        if self.waiting_between_s > _MUCH_BEHIND * self.median_s:
            text += (
                f"\n  {format_ms(self.waiting_between_s)} ms of the median lie between two steps, "
                "where ranks wait for each other, as DDP broadcasts its buffers: which rank takes "
                "that long is not known, unless DDP is given broadcast_buffers=False"
            )
        return text


def find_spread(measured_by_rank: Sequence[Measured], *, broadcasts_buffers: bool) -> Spread:
    """Compare ranks, none of which has had a problem.

    `broadcasts_buffers` says that DDP does, so that ranks wait for each other before each forward.
    Of two ranks the faster one counts as the one in the middle, so that the slower one is as far
    behind as it really is.
    """
    parts_by_rank: list[tuple[float, ...]] = []
    for measured in measured_by_rank:
        last_gradient_s = max(measured.ready_s)  # from the end of forward, the loss included
        parts_by_rank.append((measured.forward_s, last_gradient_s, measured.between_s))
    medians = [statistics.median_low(times) for times in zip(*parts_by_rank, strict=True)]

    behind_by_rank: list[list[float]] = []  # for each part, 0 where a rank is not behind
    for parts in parts_by_rank:
        behind = [max(0.0, s - median) for s, median in zip(parts, medians, strict=True)]
        if broadcasts_buffers:
            behind[-1] = 0.0  # what lies between two steps is waiting too
        behind_by_rank.append(behind)
    behind_s = [sum(behind) for behind in behind_by_rank]
    slowest = behind_s.index(max(behind_s))
    worst_part = behind_by_rank[slowest].index(max(behind_by_rank[slowest]))
    return Spread(
        median_s=sum(medians),
        slowest_rank=slowest,
        slowest_host=measured_by_rank[slowest].host,
        behind_s=behind_s[slowest],
        slowest_part=_PARTS[worst_part],
        waiting_between_s=medians[-1] if broadcasts_buffers else 0.0,
    )
