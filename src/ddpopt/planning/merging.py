"""Merge gradients into buckets so that the last allreduce is finished as early as possible.

[Note: merging]
Few large buckets save start-up costs; many small ones start earlier. With serial allreduces of
cost a + b * bytes this is the problem of Shi, Chu and Li, "MG-WFBP: Efficient data communication
for distributed synchronous SGD algorithms" (INFOCOM 2019). Let t(i) be the time at which gradient
i is ready, S(i) the bytes of the first i, and F(k, i) the earliest time at which the first i can
be reduced in k buckets or fewer. The last of these buckets starts behind some j:

    F(k, i) = min over j < i of  max(F(k - 1, j), t(i)) + a + b * (S(i) - S(j))

Since F(k, j) grows with j, those j with F <= t(i) are a prefix, of which the last one is best; for
the others F(k - 1, j) - b * S(j) has to be smallest, which is the minimum over a range of j.
So a layer k takes n log n steps, which run as tensor operations. A cut costs computation too, and
so does a launch: what is minimised is F(k, n) + (cut + launch) * (k - 1), as if each delayed the
end by its full cost. Layers end when no prefix gains from one more bucket, or when cuts and
launches alone cost more than can be gained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from ddpopt.planning.costs import AllreduceCost, Profile
from ddpopt.planning.timeline import predict, ready_times
from ddpopt.reducer import is_full

_ROUNDS = 4  # of planning with the ready times that result from the last plan
_AS_GOOD = 1.005  # times the best predicted backward
_REAL_GAIN = 1e-9  # seconds; less is rounding


def best_buckets(profile: Profile, cost: AllreduceCost) -> tuple[int, ...]:
    """How many gradients each of the best buckets holds, in the order of the profile.

    They are optimal (see [Note: merging]) if computation and allreduces do not slow each other
    down. If they do, candidates are the optimal buckets for the times at which gradients are ready
    under the previous plan, and those of uniform caps. Of all that are predicted to be about as
    good as the best, the one whose largest bucket is smallest depends least on predictions, and was
    the fastest when measured.
    """
    if not cost.interference and cost.contention == 1:
        return merge(profile, [gradient.ready_s for gradient in profile.gradients], cost)
    candidates = list(uniform_buckets(profile))
    # Some allreduces run beside computation, and their bytes take longer, and some do not.
    beside_cost = dataclasses.replace(cost, s_per_byte=cost.s_per_byte * cost.contention)
    for assumed_cost in dict.fromkeys((cost, beside_cost)):
        candidates += _plan_repeatedly(profile, cost, assumed_cost, candidates)

    def largest_bytes(sizes: Sequence[int]) -> int:
        return max(bucket.num_bytes for bucket in profile.buckets_of(sizes))

    times_s = {sizes: predict(profile, sizes, cost).backward_s for sizes in candidates}
    enough_s = min(times_s.values()) * _AS_GOOD
    good = [sizes for sizes, time_s in times_s.items() if time_s <= enough_s]
    return min(good, key=lambda sizes: (largest_bytes(sizes), len(sizes)))


def _plan_repeatedly(
    profile: Profile,
    cost: AllreduceCost,
    assumed_cost: AllreduceCost,
    known: Collection[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """Candidates found in turns: gradients' ready times under one plan give the next plan.

    Ends at sizes that are `known` or have come before. Sizes are merged as if allreduces took the
    `assumed_cost`.
    """
    candidates: list[tuple[int, ...]] = []
    ready_s: Sequence[float] = [gradient.ready_s for gradient in profile.gradients]
    for _ in range(_ROUNDS):
        sizes = merge(profile, ready_s, assumed_cost)
        if sizes in known or sizes in candidates:
            break
        candidates.append(sizes)
        ready_s = ready_times(profile, sizes, cost)
    return candidates


def merge(profile: Profile, ready_s: Sequence[float], cost: AllreduceCost) -> tuple[int, ...]:
    """The buckets that minimise the objective of [Note: merging]."""
    num_bytes = [0] + [gradient.num_bytes for gradient in profile.gradients]
    problem = _Problem(
        ready=torch.tensor(ready_s, dtype=torch.float64),
        sent=torch.tensor(num_bytes, dtype=torch.float64).cumsum(0) * cost.s_per_byte,
        startup_s=cost.startup_s,
    )
    # F(0, .): without buckets only nothing can be reduced, which is done at 0.
    no_buckets = torch.full_like(problem.sent, torch.inf)
    no_buckets[0] = 0.0
    layers = [no_buckets]
    # The objective with one bucket, two, and so on.
    values: list[float] = []
    per_bucket_s = profile.cut_s + cost.launch_s

    # No number of buckets can end earlier than this, without cuts and launches.
    bound_s = max(ready_s[0] + cost.seconds(profile.num_bytes), ready_s[-1] + cost.startup_s)
    while bound_s + per_bucket_s * len(values) < min(values, default=torch.inf):
        layer = problem.next_layer(layers[-1])
        if not bool((layer < layers[-1] - _REAL_GAIN).any()):
            break
        layers.append(layer)
        values.append(float(layer[-1]) + per_bucket_s * len(values))

    # The fewest buckets among those that are best.
    enough_s = min(values) + _REAL_GAIN
    num_buckets = 1
    while values[num_buckets - 1] > enough_s:
        num_buckets += 1
    return _as_formed(profile, problem.trace_back(layers[: num_buckets + 1]))


class _Problem(NamedTuple):
    """`ready[i]` is t(i + 1) and `sent[i]` is b * S(i) of [Note: merging]; a layer is F(k, .)."""

    ready: torch.Tensor
    sent: torch.Tensor
    startup_s: float

    def next_layer(self, before: torch.Tensor) -> torch.Tensor:
        """F(k, .), given F(k - 1, .)."""
        # For each i at once. The largest j there is: i - 1.
        last = torch.arange(len(self.ready))
        # The last j such that the first j are reduced when gradient i is ready.
        done = torch.searchsorted(before, self.ready, right=True).sub_(1).minimum(last)
        at_once = self.ready - self.sent[done]
        queued = _minima_of_ranges(before - self.sent, done + 1, last)
        finish = torch.minimum(at_once, queued) + self.startup_s + self.sent[1:]
        return torch.cat([before[:1], torch.minimum(before[1:], finish)])

    def trace_back(self, layers: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The sizes of the buckets that attain F(k, n), given the layers F(0, .) to F(k, .).

        At most k, since a layer takes over what fewer buckets attain.
        """
        sizes: list[int] = []
        stop = len(self.ready)
        for before in reversed(layers[:-1]):
            # What follows the start of the bucket is the same for each j, and is left out.
            starts = torch.maximum(before[:stop], self.ready[stop - 1]) - self.sent[:stop]
            start = int(starts.argmin())
            sizes.append(stop - start)
            stop = start
            if not stop:
                break
        return tuple(reversed(sizes))


def _minima_of_ranges(
    values: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """The minimum of `values[first[i]..last[i]]` for each i, infinity for an empty range.

    It computes minima over all ranges whose length is a power of 2; two of those cover any range.
    A row of `table` has those of one length, and behind them, where none fits, what is never read.
    """
    table = [values]
    while 2 ** len(table) <= len(values):
        half = 2 ** (len(table) - 1)
        shorter = table[-1]
        table.append(torch.cat([torch.minimum(shorter[:-half], shorter[half:]), shorter[-half:]]))
    length = (last - first + 1).clamp(min=1)
    level = length.to(torch.float64).log2().floor().to(torch.int64)
    # Of an empty range any value is read, which is dropped.
    stacked, start = torch.stack(table), first.minimum(last)
    minima = torch.minimum(stacked[level, start], stacked[level, last + 1 - 2**level])
    return torch.where(first <= last, minima, torch.inf)


def _as_formed(profile: Profile, sizes: Sequence[int]) -> tuple[int, ...]:
    """The buckets that the Reducer forms if its caps are the sizes of these, in bytes.

    They are equal except for gradients without elements: the Reducer closes a bucket when it is
    full, so those that follow go to the next one.
    """
    caps_bytes: list[int] = []
    start = 0
    for size in sizes:
        num_bytes = sum(gradient.num_bytes for gradient in profile.gradients[start : start + size])
        if num_bytes:
            caps_bytes.append(num_bytes)
        start += size
    # Without a gradient that has elements there is one bucket, which no cap closes.
    return buckets_of_caps(profile, caps_bytes or [1])


def uniform_caps(profile: Profile) -> Iterator[int]:
    """Caps in bytes, from one bucket to one gradient in each, by powers of 2."""
    cap_bytes = max(1, profile.num_bytes)
    while cap_bytes:
        yield cap_bytes
        cap_bytes //= 2


def uniform_buckets(profile: Profile) -> Iterator[tuple[int, ...]]:
    """The buckets of each of `uniform_caps`."""
    for cap_bytes in uniform_caps(profile):
        yield _as_formed(profile, buckets_of_caps(profile, (cap_bytes,)))


def buckets_of_caps(profile: Profile, caps_bytes: Sequence[int]) -> tuple[int, ...]:
    """The buckets that DDP's Reducer forms with these caps, for gradients of one group.

    The k-th cap is for the k-th bucket, the last one for all further ones. Of several groups, for
    each of which the Reducer fills buckets apart, this is an approximation for predictions.
    """
    # The same rule as in `reducer.predict_buckets`, for one group: a search calls this often, while
    # other ranks wait.
    sizes: list[int] = []
    size = num_bytes = 0
    for gradient in profile.gradients:
        size += 1
        num_bytes += gradient.num_bytes
        if is_full(num_bytes, caps_bytes, len(sizes)):
            sizes.append(size)
            size = num_bytes = 0
    if size:
        sizes.append(size)
    return tuple(sizes)
