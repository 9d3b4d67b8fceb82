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

    Predicted times count from the start of backward, and recorded ones as the docstring of
    `inspection/recording.py` says; `finished_s` is None where it was not recorded.
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
        return max(0.0, _reduced_s(self.buckets) - self.computed_s)


def _reduced_s(buckets: Sequence[BucketTimes]) -> float:
    """When the last of predicted buckets is reduced: their allreduces run one after the other."""
    finished_s = buckets[-1].finished_s
    assert finished_s is not None, "a prediction knows when each bucket is reduced"
    return finished_s


def bucket_table(buckets: Sequence[BucketTimes], title: str, texts: Iterable[str]) -> list[str]:
    """A table of buckets, with a last column that has this title and these texts."""
    rows = [
        (
            f"{bucket.index}",
            format_bytes(bucket.num_bytes),
            format_ms(bucket.ready_s),
            format_ms(bucket.launched_s),
            format_ms(bucket.finished_s),
            text,
        )
        for bucket, text in zip(buckets, texts, strict=True)
    ]
    return table(("bucket", "size", "ready ms", "launch", "finish", title), rows)


# ---- Prediction ----------------------------------------------------------------------------------


def predict(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> Timeline:
    """The timeline of an iteration with these buckets.

    `bucket_sizes` says how many gradients, in the profile's order, each bucket holds; if a bucket
    has gradients of several groups, each group is an allreduce of its own.
    """
    backward = _run_backward(profile, bucket_sizes, cost)
    alone_s = profile.forward_s + profile.between_s + profile.backward_s + profile.after_s
    return Timeline(
        forward_s=profile.forward_s,
        computed_s=backward.computed_s,
        backward_s=max(backward.computed_s, _reduced_s(backward.buckets)) + profile.after_s,
        between_s=profile.between_s,
        alone_s=alone_s,
        communication_s=sum(cost.seconds(bucket.num_bytes) for bucket in backward.buckets),
        # No buckets can be faster: not than the computation, nor than one allreduce of everything.
        bound_s=max(alone_s, cost.seconds(profile.num_bytes)),
        buckets=backward.buckets,
    )


def ready_times(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> list[float]:
    """When each gradient is ready while allreduces of these buckets run alongside."""
    return _run_backward(profile, bucket_sizes, cost).ready_s


class _Backward(NamedTuple):
    """A simulated backward: when each gradient is ready, and when all is computed; its buckets."""

    ready_s: list[float]
    computed_s: float
    buckets: tuple[BucketTimes, ...]


def _run_backward(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> _Backward:
    """Simulate a backward, with the allreduces of these buckets beside it."""
    # Between two buckets backward is cut, and an allreduce is launched. Both take time from
    # computation, so a gradient behind k buckets is ready later by k times that.
    per_bucket_s = profile.cut_s + cost.launch_s
    assert sum(bucket_sizes) == len(profile.gradients), "each gradient is in one bucket"
    # When computation would make each gradient, and end, if no allreduce slowed it down.
    goals: list[float] = []
    num_buckets_before = 0
    for size in bucket_sizes:
        members = profile.gradients[len(goals) : len(goals) + size]
        goals += [gradient.ready_s + num_buckets_before * per_bucket_s for gradient in members]
        num_buckets_before += 1
    goals.append(profile.backward_s + (num_buckets_before - 1) * per_bucket_s)

    planned = profile.buckets_of(bucket_sizes)
    transfers = [_Transfer(bucket.num_bytes, bucket.last + 1) for bucket in planned]
    reached, spans = _run(goals, transfers, cost)

    buckets: list[BucketTimes] = []
    for index, bucket in enumerate(planned):
        launched_s, finished_s = spans[index]
        ready_s = reached[bucket.last]
        buckets.append(BucketTimes(index, bucket.num_bytes, ready_s, launched_s, finished_s))
    return _Backward(reached[:-1], reached[-1], tuple(buckets))


class _Transfer(NamedTuple):
    """A transfer, which may begin once `num_goals` goals have been reached."""

    num_bytes: int
    num_goals: int


def _run(
    goals: Sequence[float], transfers: Sequence[_Transfer], cost: AllreduceCost
) -> tuple[list[float], list[tuple[float, float]]]:
    """Simulate computation and communication side by side, from event to event.

    A goal of g is reached after g seconds of computation at full speed. Transfers run one after
    another. Return when each goal is reached, and when each transfer begins and ends.
    """
    now_s = 0.0
    done_s = 0.0  # of the computation
    # The phases that the running transfer still has, and their seconds. The last one runs: first
    # the start-up, then the bytes. The list is empty while no transfer runs.
    phases: list[float] = []
    launched_s = 0.0
    reached: list[float] = []
    spans: list[tuple[float, float]] = []
    while len(reached) < len(goals) or len(spans) < len(transfers):
        if not phases and len(spans) < len(transfers):
            next_transfer = transfers[len(spans)]
            if len(reached) >= next_transfer.num_goals:
                launched_s = now_s
                phases = [cost.s_per_byte * next_transfer.num_bytes, cost.startup_s]

        # Only while bytes move do the two slow each other down.
        is_computing = len(reached) < len(goals)
        is_moving = len(phases) == 1
        speed = 1 - cost.interference if is_moving else 1.0
        slowness = cost.contention if is_moving and is_computing else 1.0

        # Go on to the next event: a goal is reached, or a phase of the transfer ends, or both.
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


# ---- Its inverse ---------------------------------------------------------------------------------


def undisturbed(profile: Profile, bucket_sizes: Sequence[int], cost: AllreduceCost) -> list[float]:
    """Measured times of gradients as they would be if no allreduce had run meanwhile.

    `profile` has the measured times, which include what cuts cost, and `bucket_sizes` the buckets
    of the measured run. With a `cut_s` of 0 and one group this is the inverse of `ready_times`.
    """
    ready_s = [gradient.ready_s for gradient in profile.gradients]
    buckets = profile.buckets_of(bucket_sizes)

    # When the bytes of each bucket moved: from behind the start-up to the end.
    moving: list[tuple[float, float]] = []
    for bucket in buckets:
        previous_end_s = moving[-1][1] if moving else 0.0
        begin_s = max(ready_s[bucket.last], previous_end_s) + cost.startup_s
        # The part that runs beside computation takes longer.
        transfer_s = cost.s_per_byte * bucket.num_bytes
        beside_s = min(transfer_s, max(0.0, ready_s[-1] - begin_s) / cost.contention)
        moving.append((begin_s, begin_s + beside_s * cost.contention + transfer_s - beside_s))

    # Take from each gradient's time what computation lost to allreduces before it.
    result: list[float] = []
    last_indices = [bucket.last for bucket in buckets]
    lost_s = 0.0  # to the allreduces that have ended
    num_ended = 0
    for at_s in ready_s:
        while num_ended < len(moving) and moving[num_ended][1] <= at_s:
            begin_s, end_s = moving[num_ended]
            lost_s += (end_s - begin_s) * cost.interference
            num_ended += 1
        running_s = max(0.0, at_s - moving[num_ended][0]) if num_ended < len(moving) else 0.0
        num_launched = bisect.bisect_left(last_indices, len(result))
        alone_s = at_s - lost_s - running_s * cost.interference - num_launched * cost.launch_s
        # Some of the gradients that arrived together may have been ready before a launch.
        earliest_s = result[-1] if result else 0.0
        result.append(max(alone_s, earliest_s, 0.0))
    return result
