"""One iteration on a time line: when each bucket is ready, and when its allreduce runs.

The model: backward computes; a bucket is ready when its last gradient is; allreduces run one
after another, in the buckets' order, while computation goes on (at a lower speed where it
interferes).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpopt.planning.costs import AllreduceCost, Profile


class BucketTimes(NamedTuple):
    """Of one bucket, in seconds after backward began."""

    num_bytes: int
    ready_s: float
    launched_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted times of one iteration.

    Times of `buckets`, `computed_s` (the end of backward's computation) and `backward_s` (the end
    of the last allreduce, if that is later) count from the start of backward. `alone_s` is the
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
    clock = _Clock(cost)
    buckets = []
    stop = 0
    for index, size in enumerate(bucket_sizes):
        members = profile.gradients[stop : stop + size]
        stop += size
        work_s = members[-1].ready_s + index * profile.cut_s
        ready_s = clock.compute(work_s)
        groups: dict[str, int] = {}
        for gradient in members:
            groups[gradient.group] = groups.get(gradient.group, 0) + gradient.num_bytes
        buckets += [clock.communicate(num_bytes, ready_s) for num_bytes in groups.values()]
    computed_s = clock.compute(profile.backward_s + (len(bucket_sizes) - 1) * profile.cut_s)
    around_s = profile.forward_s + profile.between_s
    return Timeline(
        forward_s=profile.forward_s,
        computed_s=computed_s,
        backward_s=max(computed_s, buckets[-1].finished_s),
        between_s=profile.between_s,
        alone_s=around_s + profile.backward_s,
        communication_s=sum(cost.seconds(bucket.num_bytes) for bucket in buckets),
        buckets=tuple(buckets),
    )


def ready_times(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> list[float]:
    """Return when each gradient is ready while allreduces of these buckets run beside."""
    clock = _Clock(cost)
    for bucket in predict(profile, bucket_sizes, cost).buckets:
        clock.communicate(bucket.num_bytes, bucket.ready_s)
    return [clock.compute(gradient.ready_s) for gradient in profile.gradients]


class _Clock:
    """Computation and communication side by side; both only move forward."""

    def __init__(self, cost: AllreduceCost) -> None:
        self._cost = cost
        self._speed = 1 - cost.interference
        self._now_s = 0.0  # up to where computation has been followed
        self._work_s = 0.0  # how much of it is done then
        self._busy: list[tuple[float, float]] = []  # allreduces not yet passed

    def compute(self, work_s: float) -> float:
        """Return when `work_s` of undisturbed computation are done."""
        while self._work_s < work_s:
            rest_s = work_s - self._work_s
            start_s, stop_s = self._busy[0] if self._busy else (float("inf"), float("inf"))
            if self._now_s < start_s:
                step_s = min(rest_s, start_s - self._now_s)
                self._now_s, self._work_s = self._now_s + step_s, self._work_s + step_s
                if step_s == rest_s:
                    break
                continue
            step_s = min(rest_s / self._speed, stop_s - self._now_s)
            if step_s == rest_s / self._speed:
                self._now_s, self._work_s = self._now_s + step_s, work_s
                break
            self._now_s, self._work_s = stop_s, self._work_s + step_s * self._speed
            del self._busy[0]
        return self._now_s

    def communicate(self, num_bytes: int, ready_s: float) -> BucketTimes:
        """Run an allreduce as soon as it is ready and those before it are done."""
        last_s = self._busy[-1][1] if self._busy else 0.0
        launched_s = max(ready_s, last_s)
        finished_s = launched_s + self._cost.seconds(num_bytes)
        self._busy.append((launched_s, finished_s))
        return BucketTimes(num_bytes, ready_s, launched_s, finished_s)


def without_interference(
    ready_s: Sequence[float],
    backward_s: float,
    busy: Sequence[tuple[float, float]],
    interference: float,
) -> tuple[list[float], float]:
    """Return measured times as they would be if no allreduce had slowed computation down.

    `busy` are the times in which an allreduce ran, in order, apart from each other. The inverse
    of what `predict` does with interference.
    """
    marks = sorted({0.0, *itertools.chain.from_iterable(busy)})
    work_s = [0.0]
    for start_s, stop_s in itertools.pairwise(marks):
        middle_s = (start_s + stop_s) / 2
        is_busy = any(first <= middle_s < last for first, last in busy)
        speed = 1 - interference if is_busy else 1.0
        work_s.append(work_s[-1] + (stop_s - start_s) * speed)

    def undisturbed(at_s: float) -> float:
        index = max(i for i, mark in enumerate(marks) if mark <= max(at_s, 0.0))
        middle_s = (marks[index] + at_s) / 2
        is_busy = any(first <= middle_s < last for first, last in busy)
        return work_s[index] + (at_s - marks[index]) * (1 - interference if is_busy else 1.0)

    return [undisturbed(at_s) for at_s in ready_s], undisturbed(backward_s)
