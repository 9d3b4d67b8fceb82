"""The timeline of an iteration, against cases worked out by hand and against its own inverse."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.planning.costs import AllreduceCost, Gradient, Profile
from ddpopt.planning.merging import best_buckets
from ddpopt.planning.timeline import predict, ready_times, undisturbed


def _profile(times: list[float], sizes: list[int], **more: float) -> Profile:
    gradients = tuple(
        Gradient(name=f"p{k}", num_bytes=size, ready_s=at_s)
        for k, (at_s, size) in enumerate(zip(times, sizes, strict=True))
    )
    return Profile(gradients=gradients, **{"backward_s": times[-1], **more})


COST = AllreduceCost(startup_s=1, s_per_byte=1)


def test_allreduces_run_in_order_and_wait_for_each_other() -> None:
    """The first runs from 1 to 5, waiting for nothing; the second, ready at 2, from 5 to 8."""
    timeline = predict(_profile([1, 2], [3, 2], forward_s=4, between_s=1), (1, 1), COST)
    first, second = timeline.buckets
    assert (first.ready_s, first.launched_s, first.finished_s) == (1, 1, 5)
    assert (second.ready_s, second.launched_s, second.finished_s) == (2, 5, 8)
    assert (timeline.computed_s, timeline.backward_s, timeline.iteration_s) == (2, 8, 13)
    assert (timeline.alone_s, timeline.exposed_s, timeline.communication_s) == (7, 6, 7)
    assert timeline.bound_s == 7


def test_communication_costs_more_than_its_exposed_part() -> None:
    """The first allreduce, of 2, runs from 1 to 3, and halves the speed of what is computed."""
    cost = AllreduceCost(startup_s=0, s_per_byte=1, interference=0.5)
    timeline = predict(_profile([1, 3], [2, 1]), (1, 1), cost)
    assert (timeline.computed_s, timeline.backward_s) == (4, 5)
    assert (timeline.iteration_s - timeline.alone_s, timeline.exposed_s) == (2, 1)


def test_one_bucket_starts_when_the_last_gradient_is_ready() -> None:
    (bucket,) = predict(_profile([1, 2], [3, 2]), (2,), COST).buckets
    assert (bucket.launched_s, bucket.finished_s) == (2, 8)


def test_each_cut_delays_what_comes_after_it() -> None:
    timeline = predict(_profile([1, 2, 3], [1, 1, 1], cut_s=0.25), (1, 1, 1), COST)
    assert [bucket.ready_s for bucket in timeline.buckets] == [1, 2.25, 3.5]


def test_each_launch_delays_what_comes_after_it() -> None:
    cost = dataclasses.replace(COST, launch_s=0.25)
    timeline = predict(_profile([1, 2, 3], [1, 1, 1]), (1, 1, 1), cost)
    assert [bucket.ready_s for bucket in timeline.buckets] == [1, 2.25, 3.5]


def test_an_allreduce_slows_computation_down_while_it_runs() -> None:
    """It starts at 1 and moves bytes from 2 to 5; at half the speed, 4 is reached at 5.5."""
    cost = AllreduceCost(startup_s=1, s_per_byte=1, interference=0.5)
    timeline = predict(_profile([1, 4], [3, 1]), (1, 1), cost)
    assert timeline.computed_s == pytest.approx(5.5)


def test_computation_slows_an_allreduce_down_while_it_runs() -> None:
    """Of its 3 seconds 1 is done in those from 2 to 4, and 2 after computation has ended."""
    cost = AllreduceCost(startup_s=1, s_per_byte=1, contention=2)
    timeline = predict(_profile([1, 4], [3, 1]), (1, 1), cost)
    assert timeline.buckets[0].finished_s == pytest.approx(6)


def test_gradients_of_two_groups_need_two_allreduces() -> None:
    gradients = tuple(
        Gradient(name=group, num_bytes=2, ready_s=1, group=group) for group in ("half", "float")
    )
    timeline = predict(Profile(gradients=gradients, backward_s=1), (2,), COST)
    assert [bucket.num_bytes for bucket in timeline.buckets] == [2, 2]
    assert timeline.backward_s == 7


costs = st.builds(
    AllreduceCost,
    startup_s=st.sampled_from([0, 0.05, 1]),
    s_per_byte=st.sampled_from([0, 1e-4, 1e-3]),
    interference=st.sampled_from([0, 0.3, 0.8]),
    contention=st.sampled_from([1, 1.5, 3]),
    launch_s=st.sampled_from([0, 0.01]),
)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Profile, tuple[int, ...]]:
    times = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=12)))
    sizes = draw(st.lists(st.integers(1, 100), min_size=len(times), max_size=len(times)))
    buckets: list[int] = []
    while sum(buckets) < len(times):
        buckets.append(draw(st.integers(1, len(times) - sum(buckets))))
    return _profile(times, sizes), tuple(buckets)


@given(_cases(), costs)
def test_measured_times_can_be_freed_from_the_disturbance(case, cost) -> None:
    """`undisturbed` returns from predicted times to those that they were predicted from."""
    profile, sizes = case
    measured_s = ready_times(profile, sizes, cost)
    measured = profile.with_ready_times(measured_s, backward_s=measured_s[-1])
    freed_s = undisturbed(measured, sizes, cost)
    assert freed_s == pytest.approx([g.ready_s for g in profile.gradients], abs=1e-9)


@given(_cases(), costs)
def test_nothing_waits_without_reason(case, cost) -> None:
    """An allreduce is launched once its bucket is ready and the one before it has finished."""
    profile, sizes = case
    timeline = predict(profile, sizes, cost)
    assert timeline.backward_s >= profile.backward_s - 1e-12
    previous_s = 0.0
    for bucket in timeline.buckets:
        assert bucket.launched_s == pytest.approx(max(bucket.ready_s, previous_s))
        previous_s = bucket.finished_s


@given(_cases(), costs, st.sampled_from([0.0, 0.3, 2.0]))
def test_no_plan_beats_the_bound(case, cost, forward_s) -> None:
    """The bounds of all plans' timelines hold, also for the best plan."""
    profile, drawn_sizes = case
    profile = dataclasses.replace(profile, forward_s=forward_s)
    count = len(profile.gradients)
    for sizes in (drawn_sizes, (1,) * count, (count,), best_buckets(profile, cost)):
        timeline = predict(profile, sizes, cost)
        for other in (drawn_sizes, (1,) * count):
            bound_s = predict(profile, other, cost).bound_s
            assert timeline.iteration_s >= bound_s - 1e-9
