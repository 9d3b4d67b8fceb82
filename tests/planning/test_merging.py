"""Merged buckets are the best there are, as brute force over all ways to merge finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpopt.planning.costs import AllreduceCost, Gradient, Profile
from ddpopt.planning.merging import best_buckets, buckets_of_caps, merge, uniform_buckets
from ddpopt.planning.plan import BucketPlan
from ddpopt.planning.timeline import predict


def _profile(times: list[float], sizes: list[int], cut_s: float = 0.0) -> Profile:
    gradients = tuple(
        Gradient(name=f"p{k}", num_bytes=size, ready_s=at_s)
        for k, (at_s, size) in enumerate(zip(times, sizes, strict=True))
    )
    return Profile(gradients=gradients, backward_s=times[-1], cut_s=cut_s)


def _all_ways(count: int) -> Iterator[tuple[int, ...]]:
    if not count:
        yield ()
    for first in range(1, count + 1):
        for rest in _all_ways(count - first):
            yield (first, *rest)


def _objective(profile: Profile, sizes: tuple[int, ...], cost: AllreduceCost) -> float:
    """The time of backward by the formula of [Note: merging], straight from its definition."""
    finished_s = 0.0
    stop = 0
    for size in sizes:
        members = profile.gradients[stop : stop + size]
        stop += size
        num_bytes = sum(gradient.num_bytes for gradient in members)
        finished_s = max(finished_s, members[-1].ready_s) + cost.seconds(num_bytes)
    return finished_s + (profile.cut_s + cost.launch_s) * (len(sizes) - 1)


@st.composite
def _profiles(draw: st.DrawFn) -> Profile:
    steps = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.5]))
    times = sorted(draw(st.lists(steps, min_size=1, max_size=9)))
    sizes = draw(st.lists(st.integers(1, 100), min_size=len(times), max_size=len(times)))
    return _profile(times, sizes, draw(st.sampled_from([0, 0.01, 0.1, 0.5])))


costs = st.builds(
    AllreduceCost,
    startup_s=st.sampled_from([0, 0.01, 0.1, 1]),
    s_per_byte=st.sampled_from([0, 1e-3, 1e-2]),
    launch_s=st.sampled_from([0, 0.05]),
)


@settings(max_examples=300, deadline=None)
@given(_profiles(), costs)
def test_no_way_to_merge_is_better(profile: Profile, cost: AllreduceCost) -> None:
    sizes = merge(profile, [g.ready_s for g in profile.gradients], cost)
    assert sum(sizes) == len(profile.gradients)
    best = min(_objective(profile, way, cost) for way in _all_ways(len(profile.gradients)))
    assert _objective(profile, sizes, cost) == pytest.approx(best, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(_profiles(), costs, st.sampled_from([0.2, 0.7]), st.sampled_from([1.0, 2.0]))
def test_where_both_slow_each_other_down_no_cap_is_better(
    profile: Profile, cost: AllreduceCost, interference: float, contention: float
) -> None:
    slowed = AllreduceCost(
        startup_s=cost.startup_s,
        s_per_byte=cost.s_per_byte,
        interference=interference,
        contention=contention,
    )
    best_s = predict(profile, best_buckets(profile, slowed), slowed).backward_s
    for exponent in range(8):
        caps = buckets_of_caps(profile, (max(1, profile.num_bytes >> exponent),))
        assert best_s <= 1.005 * predict(profile, caps, slowed).backward_s + 1e-9


def test_where_starting_is_free_the_last_bucket_is_as_small_as_it_can_be() -> None:
    """Computation is the bottleneck: all but the last gradient are reduced behind it."""
    profile = _profile([float(k) for k in range(1, 101)], [10] * 100)
    cost = AllreduceCost(startup_s=0.0, s_per_byte=0.01)
    sizes = best_buckets(profile, cost)
    assert sizes[-1] == 1
    assert predict(profile, sizes, cost).backward_s == pytest.approx(100.1)


def test_where_starting_is_dear_one_bucket_is_best() -> None:
    profile = _profile([float(k) for k in range(1, 101)], [10] * 100)
    assert best_buckets(profile, AllreduceCost(startup_s=1e3, s_per_byte=1e-3)) == (100,)


def test_dear_cuts_make_fewer_buckets() -> None:
    times, sizes = [float(k) for k in range(1, 101)], [10] * 100
    cost = AllreduceCost(startup_s=0.01, s_per_byte=0.09)
    cheap = best_buckets(_profile(times, sizes), cost)
    dear = best_buckets(_profile(times, sizes, cut_s=5.0), cost)
    assert 1 <= len(dear) < len(cheap)


def test_dear_launches_make_fewer_buckets() -> None:
    """They do so whether or not computation and allreduces disturb each other."""
    times, sizes = [float(k) for k in range(1, 101)], [10] * 100
    for beside in ({}, {"interference": 0.3, "contention": 1.2}):
        cheap = AllreduceCost(startup_s=0.01, s_per_byte=0.09, **beside)
        dear = dataclasses.replace(cheap, launch_s=5.0)
        numbers = [len(best_buckets(_profile(times, sizes), cost)) for cost in (cheap, dear)]
        assert 1 <= numbers[1] < numbers[0]


def test_ten_thousand_gradients_are_planned() -> None:
    """The search ends, since layers stop where nothing is won any more; no time is asserted."""
    times = [k * 1e-4 for k in range(10_000)]
    profile = _profile(times, [1 + k % 7 for k in range(10_000)], cut_s=5e-5)
    cost = AllreduceCost(startup_s=1e-5, s_per_byte=0.9 / 40_000)
    sizes = best_buckets(profile, cost)
    assert sum(sizes) == 10_000
    assert predict(profile, sizes, cost).backward_s < 1.02 * profile.backward_s


@settings(max_examples=100, deadline=None)
@given(_profiles(), st.sets(st.integers(0, 8)), costs, st.sampled_from([1.0, 1.5]))
def test_gradients_without_elements_are_where_the_reducer_puts_them(
    profile: Profile, hollow: set[int], cost: AllreduceCost, contention: float
) -> None:
    """The caps of the best buckets form these buckets again, and nothing breaks."""
    gradients = tuple(
        dataclasses.replace(g, num_bytes=0) if k in hollow else g
        for k, g in enumerate(profile.gradients)
    )
    profile = dataclasses.replace(profile, gradients=gradients)
    sizes = best_buckets(profile, dataclasses.replace(cost, contention=contention))
    assert sum(sizes) == len(gradients)
    plan = BucketPlan(profile=profile, cost=cost, world_size=2, sizes=sizes)
    assert buckets_of_caps(profile, plan.caps_bytes) == sizes


def test_caps_close_buckets_as_the_reducer_does() -> None:
    profile = _profile([1, 2, 3, 4, 5], [4, 4, 4, 4, 4])
    assert buckets_of_caps(profile, (4, 8)) == (1, 2, 2)
    assert buckets_of_caps(profile, (12,)) == (3, 2)
    assert buckets_of_caps(profile, (5,)) == (2, 2, 1)


def test_uniform_caps_go_from_all_bytes_to_one_by_halves() -> None:
    profile = _profile([1, 2, 3, 4], [4, 4, 4, 4])
    by_cap = [(4,), (2, 2), *[(1, 1, 1, 1)] * 3]  # of 16 bytes, 8, 4, 2 and 1
    assert list(uniform_buckets(profile)) == by_cap
    assert list(uniform_buckets(_profile([1, 2], [0, 0]))) == [(2,)]
