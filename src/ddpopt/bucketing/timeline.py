"""One iteration on a time line: when each bucket is ready, and when its allreduce runs.

The model: backward computes; a bucket is ready when its last gradient is; allreduces run one
after another, in the buckets' order, while computation goes on. Each may slow the other down.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpopt.bucketing.costs import AllreduceCost, Profile, by_group


class BucketTimes(NamedTuple):
    """The times of one bucket, in seconds after backward began."""

    num_bytes: int
    ready_s: float
    launched_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted times of one iteration.

    Times of `buckets`, `computed_s` (the end of backward's computation) and `backward_s` (its end,
    with what comes after the last allreduce) count from the start of backward. `alone_s` is the
    iteration without communication, `communication_s` the sum of all allreduces.
    """

    forward_s: float
    computed_s: float
    backward_s: float
    between_s: float
    alone_s: float
    communication_s: float
    buckets: tuple[BucketTimes, ...]

    @property
    def iteration_s(self) -> float:
        """Forward, backward, and what lies between backward and the next forward."""
        return self.forward_s + self.backward_s + self.between_s

    @property
    def exposed_s(self) -> float:
        """How much longer the iteration is than without communication."""
        return self.iteration_s - self.alone_s

    @property
    def bound_s(self) -> float:
        """What no plan can beat: the larger of computation and communication."""
        return max(self.alone_s, self.communication_s)


def predict(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> Timeline:
    """Return the timeline of an iteration with these buckets.

    `bucket_sizes` tells how many gradients, in the profile's order, each bucket holds; where
    gradients of several groups meet in one, each group is an allreduce of its own.
    """
    allreduces = _allreduces(profile, bucket_sizes)
    run = _run(profile, bucket_sizes, allreduces, cost)
    buckets = tuple(
        BucketTimes(allreduce.num_bytes, run.ready_s[allreduce.last], *times)
        for allreduce, times in zip(allreduces, run.allreduces, strict=True)
    )
    around_s = profile.forward_s + profile.between_s
    return Timeline(
        forward_s=profile.forward_s,
        computed_s=run.computed_s,
        backward_s=max(run.computed_s, buckets[-1].finished_s) + profile.after_s,
        between_s=profile.between_s,
        alone_s=around_s + profile.backward_s,
        communication_s=sum(cost.seconds(bucket.num_bytes) for bucket in buckets),
        buckets=buckets,
    )


def ready_times(
    profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost
) -> tuple[float, ...]:
    """Return when each gradient is ready while allreduces of these buckets run beside."""
    return _run(profile, bucket_sizes, _allreduces(profile, bucket_sizes), cost).ready_s


class _Allreduce(NamedTuple):
    """An allreduce; it waits for the gradient at the place `last`."""

    num_bytes: int
    last: int


def _allreduces(profile: Profile, bucket_sizes: Sequence[int]) -> list[_Allreduce]:
    ends = itertools.accumulate(bucket_sizes)
    return [
        _Allreduce(sum(gradient.num_bytes for gradient in gradients), stop - 1)
        for members, stop in zip(profile.split(bucket_sizes), ends, strict=True)
        for gradients in by_group(members).values()
    ]


class _Run(NamedTuple):
    ready_s: tuple[float, ...]
    computed_s: float
    allreduces: list[tuple[float, float]]  # launched, finished


def _run(
    profile: Profile,
    bucket_sizes: Sequence[int],
    queue: Sequence[_Allreduce],
    cost: AllreduceCost,
) -> _Run:
    """Follow computation and communication side by side, from event to event."""
    cuts = [k for k, size in enumerate(bucket_sizes) for _ in range(size)]
    # Each gradient, and the end of backward, as the computation that is done by then.
    cut_s = profile.cut_s + cost.launch_s
    goals = [g.ready_s + k * cut_s for g, k in zip(profile.gradients, cuts, strict=True)]
    goals.append(profile.backward_s + cuts[-1] * cut_s)
    now_s = done_s = 0.0
    launched_s: float | None = None
    phases: list[float] = []  # what is left of an allreduce: its transfer, its start-up
    reached: list[float] = []
    finished: list[tuple[float, float]] = []
    while len(reached) < len(goals) or len(finished) < len(queue):
        waiting = queue[len(finished)] if len(finished) < len(queue) else None
        if launched_s is None and waiting is not None and len(reached) > waiting.last:
            launched_s, phases = now_s, [cost.s_per_byte * waiting.num_bytes, cost.startup_s]
        is_computing = len(reached) < len(goals)
        is_moving = len(phases) == 1
        speed = 1 - cost.interference if is_moving else 1.0
        slowness = cost.contention if is_moving and is_computing else 1.0
        compute_s = (goals[len(reached)] - done_s) / speed if is_computing else math.inf
        reduce_s = phases[-1] * slowness if phases else math.inf
        step_s = min(compute_s, reduce_s)
        now_s += step_s
        if phases:
            phases[-1] -= step_s / slowness
        if compute_s <= reduce_s:
            done_s = goals[len(reached)]
            reached.append(now_s)
        else:
            done_s += step_s * speed
        if reduce_s <= compute_s:
            phases.pop()
        if launched_s is not None and not phases:
            finished.append((launched_s, now_s))
            launched_s = None
    return _Run(tuple(reached[:-1]), reached[-1], finished)


def undisturbed(
    ready_s: Sequence[float], bucket_bytes: Sequence[tuple[int, int]], cost: AllreduceCost
) -> list[float]:
    """Return measured times of gradients as they would be if no allreduce had run meanwhile.

    `bucket_bytes` are the buckets of the measured run: for each the place of its last gradient,
    and its bytes. The inverse of what `predict` does.
    """
    end_s = ready_s[-1]
    ends = [last for last, _ in bucket_bytes]
    busy: list[tuple[float, float]] = []
    for last, num_bytes in bucket_bytes:
        moving_s = max(ready_s[last], busy[-1][1] if busy else 0.0) + cost.startup_s
        left_s = cost.s_per_byte * num_bytes
        beside_s = min(left_s, max(0.0, end_s - moving_s) / cost.contention)
        busy.append((moving_s, moving_s + beside_s * cost.contention + left_s - beside_s))
    result: list[float] = []
    lost_s = 0.0  # by the allreduces that were over
    passed = 0
    for at_s in ready_s:
        while passed < len(busy) and busy[passed][1] <= at_s:
            lost_s += (busy[passed][1] - busy[passed][0]) * cost.interference
            passed += 1
        running_s = max(0.0, at_s - busy[passed][0]) if passed < len(busy) else 0.0
        launched = bisect.bisect_left(ends, len(result))
        alone_s = at_s - lost_s - running_s * cost.interference - launched * cost.launch_s
        # Of gradients that arrived together, some may have been ready before a launch.
        result.append(max([alone_s, *result[-1:], 0.0]))
    return result
