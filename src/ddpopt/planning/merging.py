"""Merge gradients into buckets so that the last allreduce is finished as early as possible.

[Note: merging]
Few large buckets save start-up costs; many small ones start earlier. With serial allreduces of
cost a + b * bytes this is the problem of Shi, Chu and Li, "MG-WFBP: Efficient data communication
for distributed synchronous SGD algorithms" (INFOCOM 2019). Let t(i) be the time at which gradient
i is ready, S(i) the bytes of the first i, and F(k, i) the earliest time at which the first i can
be reduced in k buckets or fewer. The last of these buckets starts behind some j:

    F(k, i) = min over j < i of  max(F(k - 1, j), t(i)) + a + b * (S(i) - S(j))

Since F(k, j) grows with j, those j with F <= t(i) are a prefix, of which the last one is best; for
the others F(k - 1, j) - b * S(j) has to be smallest, which is the minimum over a sliding window.
So a layer k takes n log n steps, which run as tensor operations. A cut costs computation too, and
so does a launch: what is minimised is F(k, n) + (cut + launch) * (k - 1), as if each delayed the
end by its full cost. Layers end when no prefix gains from one more bucket, or when cuts and
launches alone cost more than can be gained.

[Note: merging for a whole iteration]
With sharded updates (see [Note: sharded iterations]) both halves of communication count. Let g be
how long the transfers from a bucket's own to the last one's take, back to back. The last sum ends
at the maximum of t + g over all buckets, where t belongs to the bucket's last gradient. Gathers run
in the opposite order, so g is also when a bucket's gather ends, counted from the start of the
update, which takes u seconds (its first part, before which no gather can begin, is neglected).
Forward, of f seconds, is late by the maximum of g - u - f * (1 - t / B), for a backward of B
seconds, or not at all. So the same problem is solved for two sets of ready times, t and f / B * t;
and, since a plan for which neither maximum can be reduced without increasing the other also has the
smallest max(first, second + d) for some d, for the sets max(t, f / B * t + d), with d from
min(0, B - f) - u to max(0, B - f). The plan with the shortest iteration is taken; it is at most
half a step of d longer than the best. One more bucket costs one cut and two launches; half of that
is charged to each maximum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from ddpopt.planning.costs import ALLREDUCE, SHARDED, AllreduceCost, Profile
from ddpopt.planning.timeline import predict, ready_times
from ddpopt.reducer import cap_of

_ROUNDS = 4  # of planning with the ready times that result from the last plan
BALANCES = 32  # steps of d in [Note: merging for a whole iteration]
_AS_GOOD = 1.005  # times the best predicted backward, or iteration
_REAL_GAIN = 1e-9  # seconds; less is rounding


def best_buckets(
    profile: Profile, cost: AllreduceCost, communication: str = ALLREDUCE
) -> tuple[int, ...]:
    """Return how many gradients each bucket holds, in the order of the profile.

    They are optimal (see [Note: merging]) if computation and allreduces do not slow each other
    down. If they do, candidates are the optimal buckets for the times at which gradients are ready
    under the previous plan, and those of uniform caps. Of all that are predicted to be about as
    good as the best, the one whose largest bucket is smallest depends least on predictions, and was
    the fastest when measured. With `communication="sharded"` the whole iteration counts, and
    candidates are those of [Note: merging for a whole iteration].
    """
    is_sharded = communication == SHARDED
    is_undisturbed = not cost.interference and cost.contention == 1
    if is_undisturbed and not is_sharded:
        return merge(profile, [gradient.ready_s for gradient in profile.gradients], cost)
    candidates = [] if is_undisturbed else list(uniform_buckets(profile))
    beside = dataclasses.replace(cost, s_per_byte=cost.s_per_byte * cost.contention)
    for slowed in dict.fromkeys((cost, beside)):
        if is_sharded:
            candidates += _balanced(profile, slowed)
        else:
            candidates += _fixed_points(profile, cost, slowed, candidates)

    def seconds(sizes: Sequence[int]) -> float:
        timeline = predict(profile, sizes, cost, communication)
        return timeline.iteration_s if is_sharded else timeline.backward_s

    def largest_bytes(sizes: Sequence[int]) -> int:
        return max(allreduce.num_bytes for allreduce in profile.allreduces(sizes))

    times_s = {sizes: seconds(sizes) for sizes in candidates}
    least_s = min(times_s.values())
    enough_s = least_s + _REAL_GAIN if is_undisturbed else least_s * _AS_GOOD
    good = [sizes for sizes, time_s in times_s.items() if time_s <= enough_s]
    return min(good, key=lambda sizes: (largest_bytes(sizes), len(sizes)))


def _fixed_points(
    profile: Profile, cost: AllreduceCost, slowed: AllreduceCost, known: Collection[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return plans, each of them the best for the ready times under the previous one."""
    found: list[tuple[int, ...]] = []
    ready_s: Sequence[float] = [gradient.ready_s for gradient in profile.gradients]
    for _ in range(_ROUNDS):
        sizes = merge(profile, ready_s, slowed)
        if sizes in known or sizes in found:
            break
        found.append(sizes)
        ready_s = ready_times(profile, sizes, cost)
    return found


def _balanced(profile: Profile, cost: AllreduceCost) -> list[tuple[int, ...]]:
    """Return the plans of [Note: merging for a whole iteration]."""
    ready_s = [gradient.ready_s for gradient in profile.gradients]
    whole_s = profile.backward_s or 1.0
    in_forward_s = [profile.forward_s * (t / whole_s) for t in ready_s]  # no ratio can be too large
    charged = dataclasses.replace(profile, cut_s=profile.cut_s / 2)
    longer_s = profile.backward_s - profile.forward_s
    first_s, last_s = min(0.0, longer_s) - profile.between_s, max(0.0, longer_s)
    found = []
    for balance in range(BALANCES + 1):
        late_s = first_s + (last_s - first_s) * balance / BALANCES
        balanced_s = [max(t, f + late_s) for t, f in zip(ready_s, in_forward_s, strict=True)]
        least_s = max(profile.backward_s, profile.between_s + profile.forward_s + late_s)
        found.append(merge(charged, balanced_s, cost.half, least_s))
    return found


def merge(
    profile: Profile, ready_s: Sequence[float], cost: AllreduceCost, least_s: float = 0.0
) -> tuple[int, ...]:
    """Return the buckets that minimise the objective of [Note: merging].

    Ending before `least_s` gains nothing.
    """
    num_bytes = [0, *(gradient.num_bytes for gradient in profile.gradients)]
    problem = _Problem(
        ready=torch.tensor(ready_s, dtype=torch.float64),
        sent=torch.tensor(num_bytes, dtype=torch.float64).cumsum(0) * cost.s_per_byte,
        startup_s=cost.startup_s,
    )
    # Without buckets only nothing can be reduced, which is done at 0.
    layers = [torch.full_like(problem.sent, torch.inf).index_fill(0, torch.tensor(0), 0.0)]
    values: list[float] = []
    cut_s = profile.cut_s + cost.launch_s
    first_s = ready_s[0] + cost.seconds(profile.num_bytes)
    least = max(first_s, ready_s[-1] + cost.startup_s, least_s)
    while least + cut_s * len(values) < min(values, default=torch.inf):
        layer = problem.next_layer(layers[-1])
        if not bool((layer < layers[-1] - _REAL_GAIN).any()):
            break
        layers.append(layer)
        values.append(max(float(layer[-1]), least_s) + cut_s * len(values))
    enough = min(values) + _REAL_GAIN
    best = next(k for k, value in enumerate(values, start=1) if value <= enough)
    return problem.trace_back(layers[: best + 1])


class _Problem(NamedTuple):
    """`ready[i]` is t(i + 1) and `sent[i]` is b * S(i) of [Note: merging]; a layer is F(k, .)."""

    ready: torch.Tensor
    sent: torch.Tensor
    startup_s: float

    def next_layer(self, before: torch.Tensor) -> torch.Tensor:
        """Return F(k, .), given F(k - 1, .)."""
        last = torch.arange(len(self.ready))  # j = i - 1, the largest there is for each i
        done = torch.searchsorted(before, self.ready, right=True).sub_(1).minimum(last)
        at_once = self.ready - self.sent[done]
        queued = _window_minima(before - self.sent, done + 1, last)
        finish = torch.minimum(at_once, queued) + self.startup_s + self.sent[1:]
        return torch.cat([before[:1], torch.minimum(before[1:], finish)])

    def trace_back(self, layers: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the buckets that lead to the end of the last layer."""
        sizes: list[int] = []
        stop = len(self.ready)
        for before in reversed(layers[:-1]):
            starts = torch.maximum(before[:stop], self.ready[stop - 1]) - self.sent[:stop]
            start = int(starts.argmin())
            sizes.append(stop - start)
            stop = start
            if not stop:
                break
        return tuple(reversed(sizes))


def _window_minima(values: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the minimum of `values[first[i]..last[i]]` for each i, infinity for an empty range.

    It computes minima over all ranges whose length is a power of 2; two of those cover any range.
    """
    table = [values]
    while 2 ** len(table) <= len(values):
        half = 2 ** (len(table) - 1)
        shorter = table[-1]
        table.append(torch.cat([torch.minimum(shorter[:-half], shorter[half:]), shorter[-half:]]))
    length = (last - first + 1).clamp(min=1)
    level = length.to(torch.float64).log2().floor().to(torch.int64)
    stacked, shown = torch.stack(table), first.minimum(last)
    minima = torch.minimum(stacked[level, shown], stacked[level, last + 1 - 2**level])
    return torch.where(first <= last, minima, torch.inf)


def uniform_buckets(profile: Profile) -> Iterator[tuple[int, ...]]:
    """Return the buckets of uniform caps, from one bucket to one gradient each, by powers of 2."""
    cap = profile.num_bytes
    while cap:
        yield buckets_of_caps(profile, (cap,))
        cap //= 2


def buckets_of_caps(profile: Profile, caps_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the buckets that DDP's Reducer forms with these caps, for gradients of one group.

    The k-th cap is for the k-th bucket, the last one for all further ones.
    """
    sizes: list[int] = []
    count = num_bytes = 0
    for gradient in profile.gradients:
        count, num_bytes = count + 1, num_bytes + gradient.num_bytes
        if num_bytes >= cap_of(caps_bytes, len(sizes)):
            sizes.append(count)
            count = num_bytes = 0
    return tuple([*sizes, count] if count else sizes)
