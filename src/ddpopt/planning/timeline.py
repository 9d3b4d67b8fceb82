"""The timeline of one iteration: when each bucket is ready, and when its allreduce runs.

The model: backward computes; a bucket is ready when its last gradient is; allreduces run one
after another, in the buckets' order, while computation goes on. Each may slow down the other.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpopt._text import format_bytes, format_ms, table
from ddpopt.planning.costs import AllreduceCost, Profile


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """When a bucket's last gradient was ready, and its allreduce was launched and finished.

    Predicted times count from the start of backward, and recorded ones as `Recording` says;
    `finished_s` is None where it was not recorded.
    """

    index: int
    num_bytes: int
    ready_s: float
    launched_s: float
    finished_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted times of one iteration.

    Times of `buckets`, `computed_s` (the end of backward's computation) and `backward_s` (its end,
    with what follows the last allreduce) count from the start of backward. `alone_s` is the
    iteration without communication, `communication_s` the sum of all allreduces. `bound_s` is a
    bound that no buckets can beat: the longer of `alone_s` and one allreduce of all gradients.
    """

    forward_s: float
    computed_s: float
    backward_s: float
    between_s: float
    alone_s: float
    communication_s: float
    bound_s: float
    buckets: tuple[BucketTimes, ...]

    @property
    def iteration_s(self) -> float:
        """Forward, backward, and what lies between backward and the next forward."""
        return self.forward_s + self.backward_s + self.between_s

    @property
    def exposed_s(self) -> float:
        """How long communication runs while nothing is computed, as recordings measure it.

        Less than the iteration takes beyond `alone_s`: communication also slows computation down.
        """
        reduced_s = max((bucket.finished_s or 0.0 for bucket in self.buckets), default=0.0)
        return max(0.0, reduced_s - self.computed_s)


def bucket_table(buckets: Sequence[BucketTimes], title: str, texts: Iterable[str]) -> list[str]:
    """A table of buckets, with a last column that has this title and these texts."""
    rows = [
        (
            f"{bucket.index}",
            format_bytes(bucket.num_bytes),
            *map(format_ms, (bucket.ready_s, bucket.launched_s, bucket.finished_s)),
            text,
        )
        for bucket, text in zip(buckets, texts, strict=True)
    ]
    return table(("bucket", "size", "ready ms", "launch", "finish", title), rows)


def predict(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> Timeline:
    """The timeline of an iteration with these buckets.

    `bucket_sizes` says how many gradients, in the profile's order, each bucket holds; if a bucket
    has gradients of several groups, each group is an allreduce of its own.
    """
    reached, buckets = _run_backward(profile, bucket_sizes, cost)
    alone_s = profile.forward_s + profile.between_s + profile.backward_s + profile.after_s
    return Timeline(
        forward_s=profile.forward_s,
        computed_s=reached[-1],
        backward_s=max(reached[-1], buckets[-1].finished_s or 0.0) + profile.after_s,
        between_s=profile.between_s,
        alone_s=alone_s,
        communication_s=sum(cost.seconds(bucket.num_bytes) for bucket in buckets),
        bound_s=max(alone_s, cost.seconds(profile.num_bytes)),
        buckets=tuple(buckets),
    )


def ready_times(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> list[float]:
    """Return when each gradient is ready while allreduces of these buckets run alongside."""
    return _run_backward(profile, bucket_sizes, cost)[0][:-1]


def _run_backward(
    profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost
) -> tuple[list[float], list[BucketTimes]]:
    """Return when each gradient is ready and, at the end, when computation ends; and buckets."""
    queue = profile.allreduces(bucket_sizes)
    cuts = [k for k, size in enumerate(bucket_sizes) for _ in range(size)]
    # Each gradient, and the end of backward, is a goal: the computation done by then, in seconds.
    cut_s = profile.cut_s + cost.launch_s
    goals = [g.ready_s + k * cut_s for g, k in zip(profile.gradients, cuts, strict=True)]
    goals.append(profile.backward_s + cuts[-1] * cut_s)
    transfers = [_Transfer(each.num_bytes, each.last + 1) for each in queue]
    reached, spans = _run(goals, transfers, cost)
    return reached, [
        BucketTimes(index, each.num_bytes, reached[each.last], *span)
        for index, (each, span) in enumerate(zip(queue, spans, strict=True))
    ]


class _Transfer(NamedTuple):
    """A transfer, which may begin once `num_goals` goals have been reached."""

    num_bytes: int
    num_goals: int


def _run(
    goals: Sequence[float], transfers: Sequence[_Transfer], cost: AllreduceCost
) -> tuple[list[float], list[tuple[float, float]]]:
    """Simulate computation and communication side by side, from event to event.

    A goal is the computation, in seconds, that is done when it is reached. Return when each goal is
    reached, and when each transfer begins and ends.
    """
    now_s = done_s = launched_s = 0.0
    phases: list[float] = []  # what is left of a transfer, in seconds: its bytes, its start-up
    reached: list[float] = []
    spans: list[tuple[float, float]] = []
    while len(reached) < len(goals) or len(spans) < len(transfers):
        if not phases and len(spans) < len(transfers):
            following = transfers[len(spans)]
            if len(reached) >= following.num_goals:
                launched_s = now_s
                phases = [cost.s_per_byte * following.num_bytes, cost.startup_s]
        is_computing = len(reached) < len(goals)
        is_moving = len(phases) == 1
        speed = 1 - cost.interference if is_moving else 1.0
        slowness = cost.contention if is_moving and is_computing else 1.0
        compute_s = (goals[len(reached)] - done_s) / speed if is_computing else math.inf
        transfer_s = phases[-1] * slowness if phases else math.inf
        step_s = min(compute_s, transfer_s)
        now_s += step_s
        if phases:
            phases[-1] -= step_s / slowness
        if compute_s <= transfer_s:
            done_s = goals[len(reached)]
            reached.append(now_s)
        elif is_computing:
            done_s += step_s * speed
        if transfer_s <= compute_s:
            phases.pop()
            if not phases:
                spans.append((launched_s, now_s))
    return reached, spans


def undisturbed(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> list[float]:
    """Return measured times of gradients as they would be if no allreduce had run meanwhile.

    `profile` has the measured times, and `bucket_sizes` the buckets of the measured run. This is
    the inverse of `ready_times`.
    """
    ready_s = [gradient.ready_s for gradient in profile.gradients]
    queue = profile.allreduces(bucket_sizes)
    ends = [allreduce.last for allreduce in queue]
    busy: list[tuple[float, float]] = []
    for allreduce in queue:
        free_s = busy[-1][1] if busy else 0.0
        moving_s = max(ready_s[allreduce.last], free_s) + cost.startup_s
        left_s = cost.s_per_byte * allreduce.num_bytes
        beside_s = min(left_s, max(0.0, ready_s[-1] - moving_s) / cost.contention)
        busy.append((moving_s, moving_s + beside_s * cost.contention + left_s - beside_s))
    result: list[float] = []
    lost_s = 0.0  # to the allreduces that have ended
    passed = 0
    for at_s in ready_s:
        while passed < len(busy) and busy[passed][1] <= at_s:
            lost_s += (busy[passed][1] - busy[passed][0]) * cost.interference
            passed += 1
        running_s = max(0.0, at_s - busy[passed][0]) if passed < len(busy) else 0.0
        launched = bisect.bisect_left(ends, len(result))
        alone_s = at_s - lost_s - running_s * cost.interference - launched * cost.launch_s
        # Some of the gradients that arrived together may have been ready before a launch.
        result.append(max([alone_s, *result[-1:], 0.0]))
    return result
