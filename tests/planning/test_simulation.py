"""The simulator: cases worked by hand, its limits, and allreduces played message by message."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.errors import PlanError
from ddpopt.planning.costs import AllreduceCost, Gradient, Network, Profile
from ddpopt.planning.plan import BucketPlan, plan_buckets
from ddpopt.planning.simulation import Stragglers, format_bandwidth, parse_bandwidth, simulate

DOCS = Path(__file__).parents[2] / "docs"
COST = AllreduceCost(startup_s=0.5, s_per_byte=0.1)
FREE = AllreduceCost(startup_s=0.0, s_per_byte=0.0)


def _plan(
    ready_s: tuple[float, ...] = (1.0, 2.0, 3.0),
    num_bytes: tuple[int, ...] = (10, 10, 10),
    sizes: tuple[int, ...] = (1, 1, 1),
    cost: AllreduceCost = COST,
    **times: Any,
) -> BucketPlan:
    """Three gradients in three buckets; forward takes 1 s, the optimizer 0.5 s."""
    gradients = tuple(
        Gradient(name=f"p{i}", num_bytes=size, ready_s=at)
        for i, (size, at) in enumerate(zip(num_bytes, ready_s, strict=True))
    )
    around = {"backward_s": ready_s[-1], "forward_s": 1.0, "between_s": 0.5, **times}
    profile = Profile(gradients=gradients, **around)
    return BucketPlan(profile=profile, cost=cost, world_size=2, sizes=sizes)


@st.composite
def _plans(draw: st.DrawFn) -> BucketPlan:
    steps = draw(st.lists(st.floats(0, 1), min_size=1, max_size=12))
    ready = tuple(sum(steps[: i + 1]) for i in range(len(steps)))
    sizes = []
    while sum(sizes) < len(steps):
        sizes.append(draw(st.integers(1, len(steps) - sum(sizes))))
    return _plan(
        ready_s=ready,
        num_bytes=tuple(draw(st.integers(1, 10**6)) for _ in steps),
        sizes=tuple(sizes),
        backward_s=ready[-1] + draw(st.floats(0, 1)),
        forward_s=draw(st.floats(0.01, 1)),
        cut_s=draw(st.floats(0, 0.1)),
    )


_costs = st.builds(AllreduceCost, startup_s=st.floats(0, 0.1), s_per_byte=st.floats(0, 1e-6))
_networks = st.builds(
    Network,
    latency_s=st.floats(0, 0.01),
    bytes_per_s=st.floats(1e5, 1e12),
    algorithm=st.sampled_from(["ring", "tree", "hierarchical"]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
)
_sizes = st.integers(2, 100_000)
_stragglers = st.builds(Stragglers, mean_delay=st.floats(0, 1), seed=st.integers())


def test_allreduces_wait_for_gradients_and_for_each_other() -> None:
    """With allreduces of 1.5 s, gradients at 1, 2 and 3 s, the second and third have to wait."""
    simulation = simulate(_plan(), world_size=2)
    timeline = simulation.timeline
    times = [(b.ready_s, b.launched_s, b.finished_s) for b in timeline.buckets]
    assert times == [(1.0, 1.0, 2.5), (2.0, 2.5, 4.0), (3.0, 4.0, 5.5)]
    assert timeline.iteration_s == 1.0 + 5.5 + 0.5

    assert timeline.exposed_s == 2.5
    assert timeline.bound_s == 4.5
    assert simulation.efficiency == pytest.approx(4.5 / 7)


def test_the_plans_own_ring_is_extended_to_more_ranks() -> None:
    """On 2 ranks it has 2 steps of 0.25 s, with half of the bytes each; on 4, 6 of a quarter."""
    assert simulate(_plan(), world_size=2).cost == AllreduceCost(startup_s=0.5, s_per_byte=0.1)
    cost = simulate(_plan(), world_size=4).cost
    assert cost.startup_s == pytest.approx(6 * 0.25)
    assert cost.s_per_byte == pytest.approx(6 / 4 / 10)
    assert simulate(_plan(), world_size=1).cost == AllreduceCost(startup_s=0, s_per_byte=0)


def test_an_allreduce_cost_is_used_as_it_is() -> None:
    """The number of ranks does not change it."""
    cost = AllreduceCost(startup_s=1.0, s_per_byte=0.0, interference=0.25)
    assert simulate(_plan(), world_size=64, network=cost).cost == cost


def test_the_basis_says_what_is_extrapolated() -> None:
    """The network is the plan's ring, one of given links, or a given cost."""
    network = Network(latency_s=0.1, bytes_per_s=1e3, algorithm="tree")
    bases = [
        simulate(_plan(source="measured"), world_size=num_ranks, network=links).basis
        for num_ranks, links in ((2, None), (8, None), (8, network), (8, FREE))
    ]
    assert [basis.partition("allreduce: ")[2] for basis in bases] == [
        "as in the plan",
        "ring, extrapolated from 2 ranks to 8",
        "tree, computed from given links",
        "as given",
    ]
    assert all(basis.startswith("computation: measured;") for basis in bases)


def test_stragglers_delay_all_computation_by_the_slowest_ranks_factor() -> None:
    """Gradients, forward and optimizer take 1 + x times as long; the baseline does not."""
    stragglers = Stragglers(mean_delay=0.1, seed=3)
    simulation = simulate(_plan(), world_size=64, network=FREE, stragglers=stragglers)
    factor = stragglers.slowdown(64)
    assert factor > 1
    assert [b.ready_s for b in simulation.timeline.buckets] == [factor, 2 * factor, 3 * factor]
    assert simulation.timeline.iteration_s == pytest.approx(4.5 * factor)
    assert simulation.efficiency == pytest.approx(1 / factor)


def test_a_rank_that_is_always_slow_is_a_slower_profile() -> None:
    """Allreduces wait for it: with twice the time, gradients at 2, 4 and 6 s, and 1.5 s for each.

    A rank that is slow for some gradients makes those late, and what follows.
    """
    plan = _plan()
    slow = dataclasses.replace(plan, profile=plan.profile.slowed(2))
    timeline = simulate(slow, world_size=2).timeline
    assert [b.finished_s for b in timeline.buckets] == [3.5, 5.5, 7.5]
    assert timeline.iteration_s == 2 + 7.5 + 1
    late = plan.profile.with_ready_times([1.0, 5.0, 6.0], backward_s=6.0)
    partly = simulate(dataclasses.replace(plan, profile=late), world_size=2).timeline
    assert [b.finished_s for b in partly.buckets] == [2.5, 6.5, 8.0]


@pytest.mark.parametrize("num_ranks", [1, 10, 100_000])
def test_the_mean_of_the_slowest_is_that_of_exponential_delays(num_ranks: int) -> None:
    """The largest of N exponentials has mean 1 + 1/2 + ... + 1/N and variance 1 + 1/4 + ..."""
    draws = [Stragglers(mean_delay=1.0, seed=k).slowdown(num_ranks) - 1 for k in range(4000)]
    mean = sum(1 / k for k in range(1, num_ranks + 1))
    deviation = math.sqrt(sum(1 / k**2 for k in range(1, num_ranks + 1)))
    assert abs(statistics.fmean(draws) - mean) < 5 * deviation / math.sqrt(len(draws))
    assert statistics.pstdev(draws) == pytest.approx(deviation, rel=0.1)


@given(plan=_plans(), network=_networks, ranks=_sizes, stragglers=_stragglers)
def test_equal_arguments_give_equal_simulations(
    plan: BucketPlan, network: Network, ranks: int, stragglers: Stragglers
) -> None:
    """A seed decides all that is random."""
    first, second = (
        simulate(plan, world_size=ranks, network=network, stragglers=stragglers) for _ in range(2)
    )
    assert first == second
    assert str(first) == str(second)


def test_a_backward_of_hardly_any_time_is_shown_too() -> None:
    """Found by hypothesis: the width of the picture over so small a time is infinite."""
    plan = _plan(ready_s=(1e-308,), num_bytes=(1,), sizes=(1,))
    assert "efficiency" in str(simulate(plan, world_size=1))


def test_another_seed_is_another_iteration() -> None:
    """With a mean delay of 0 there is none to draw."""
    slow = {Stragglers(mean_delay=0.1, seed=seed).slowdown(8) for seed in range(20)}
    assert len(slow) == 20
    assert Stragglers(mean_delay=0.0).slowdown(100_000) == 1.0


@given(plan=_plans(), network=_networks, ranks=_sizes, stragglers=st.none() | _stragglers)
def test_no_iteration_beats_its_bound(
    plan: BucketPlan, network: Network, ranks: int, stragglers: Stragglers | None
) -> None:
    """Nothing exposed is negative, and efficiency is at most 1."""
    simulation = simulate(plan, world_size=ranks, network=network, stragglers=stragglers)
    timeline = simulation.timeline
    rounding = 1e-9 * timeline.iteration_s
    assert timeline.exposed_s >= -rounding
    assert timeline.iteration_s >= timeline.bound_s - rounding
    assert 0 < simulation.efficiency <= 1 + 1e-9


@given(plan=_plans(), cost=_costs, part=st.floats(0.01, 0.9))
def test_interference_never_makes_an_iteration_shorter(
    plan: BucketPlan, cost: AllreduceCost, part: float
) -> None:
    """Computation loses speed while an allreduce runs."""
    slowed = dataclasses.replace(cost, interference=part)
    without, with_it = (
        simulate(plan, world_size=2, network=network).timeline.iteration_s
        for network in (cost, slowed)
    )
    assert with_it >= without * (1 - 1e-9)


@given(plan=_plans(), ranks=_sizes)
def test_a_perfect_network_leaves_the_computation(plan: BucketPlan, ranks: int) -> None:
    """Without latency and with endless bandwidth an iteration is computation and cuts."""
    network = Network(latency_s=0.0, bytes_per_s=1e300)
    timeline = simulate(plan, world_size=ranks, network=network).timeline
    cuts_s = (len(plan.sizes) - 1) * plan.profile.cut_s
    assert timeline.iteration_s == pytest.approx(timeline.alone_s + cuts_s)


@given(
    plan=_plans(),
    network=_networks,
    few=st.integers(1, 4000),
    more=st.integers(1, 25),
    mean=st.floats(0, 1),
)
def test_more_ranks_are_never_faster(
    plan: BucketPlan, network: Network, few: int, more: int, mean: float
) -> None:
    """Nodes are whole, and stragglers have one seed."""
    stragglers = Stragglers(mean_delay=mean, seed=1)
    nodes = [network.ranks_per_node * count for count in (few, few * more)]
    first, second = (
        simulate(plan, world_size=n, network=network, stragglers=stragglers).timeline.iteration_s
        for n in nodes
    )
    assert first <= second * (1 + 1e-9)


@given(plan=_plans(), network=_networks, ranks=_sizes, factor=st.floats(1, 100))
def test_a_better_network_is_never_slower(
    plan: BucketPlan, network: Network, ranks: int, factor: float
) -> None:
    """A better one has more bandwidth, or less latency."""
    iteration_s = simulate(plan, world_size=ranks, network=network).timeline.iteration_s
    for better in (
        dataclasses.replace(network, bytes_per_s=network.bytes_per_s * factor),
        dataclasses.replace(network, latency_s=network.latency_s / factor),
    ):
        faster_s = simulate(plan, world_size=ranks, network=better).timeline.iteration_s
        assert faster_s <= iteration_s * (1 + 1e-9)


def test_a_thousand_buckets_on_many_ranks_take_little_work() -> None:
    """The number of calls grows with the buckets, not with the ranks."""
    count = 1000
    plan = _plan(
        ready_s=tuple(float(i) for i in range(count)),
        num_bytes=(1000,) * count,
        sizes=(1,) * count,
        cost=AllreduceCost(startup_s=0.1, s_per_byte=1e-3, interference=0.3),
    )
    stragglers = Stragglers(mean_delay=0.1)
    calls = {
        ranks: _count_calls(lambda n=ranks: simulate(plan, world_size=n, stragglers=stragglers))
        for ranks in (3, 100_000)
    }
    assert calls[100_000] < 1.1 * calls[3] < 100 * count


def _count_calls(function: Any) -> int:
    count = 0

    def profiler(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profiler)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.quick("0")
@pytest.mark.parametrize("ranks", [0, -1, 2.0, "8", None])
def test_a_bad_world_size_is_refused_by_name(ranks: Any) -> None:
    with pytest.raises(PlanError, match=repr(ranks)):
        simulate(_plan(), world_size=ranks)


@pytest.mark.parametrize("mean", [-0.1, math.inf, math.nan])
def test_a_bad_mean_delay_is_refused_by_name(mean: float) -> None:
    with pytest.raises(PlanError, match=f"mean_delay is {mean}"):
        Stragglers(mean_delay=mean)


def test_a_plan_for_one_rank_implies_no_cost_for_more() -> None:
    """It can be simulated on one rank all the same."""
    plan = dataclasses.replace(_plan(), world_size=1)
    assert simulate(plan, world_size=1).timeline.exposed_s > 0
    with pytest.raises(PlanError, match="of 1 rank"):
        simulate(plan, world_size=4)


def test_text_fits_a_terminal() -> None:
    """Long plans show both ends; nothing is wider than 80 characters."""
    count = 1000
    plan = _plan(
        ready_s=tuple(0.001 * i for i in range(count)),
        num_bytes=(10**8,) * count,
        sizes=(1,) * count,
    )
    network = Network(latency_s=1e-5, bytes_per_s=1e10, algorithm="tree")
    slow = Stragglers(mean_delay=0.01)
    simulation = simulate(plan, world_size=100_000, network=network, stragglers=slow)
    lines = str(simulation).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) <= 80
    # Ten buckets stand before the line that says how many are left out, and ten after it.
    assert "980 more" in lines[-11]
    assert [int(line.split()[0]) for line in lines[-10:]] == list(range(990, 1000))
    assert [int(line.split()[0]) for line in lines[-21:-11]] == list(range(10))


def test_text_draws_waiting_and_running() -> None:
    """The backward of `_plan` takes 5.5 s, in 24 columns."""
    text = str(simulate(_plan(), world_size=2))
    assert text.startswith("2 ranks: iteration 7000.0 ms, efficiency 64.3%\n")
    bars = [line.split("0  ")[-1] for line in text.splitlines()[-3:]]
    assert [(bar.count("-"), bar.count("=")) for bar in bars] == [(0, 6), (2, 7), (4, 7)]
    short = str(simulate(_plan(cost=FREE), world_size=2)).splitlines()[-3:]
    assert [line.count("=") for line in short] == [1, 1, 1]


def test_json_holds_all_numbers_with_their_names() -> None:
    """They are those of the first test; a bucket is an object with names, not a list."""
    content = json.loads(simulate(_plan(), world_size=2).to_json())
    assert content["efficiency"] == pytest.approx(4.5 / 7)
    assert content["timeline"]["exposed_s"] == 2.5
    assert content["timeline"]["buckets"][1] == {
        "index": 1,
        "num_bytes": 10,
        "ready_s": 2.0,
        "launched_s": 2.5,
        "finished_s": 4.0,
    }


# Allreduces played message by message, to hold the formulas of Network against.


class _Rings:
    """A ring allreduce among `ranks`: who holds which addends of each part, and until when.

    A rank passes a part on as soon as it has it and its link is free.
    """

    def __init__(self, ranks: list[int], num_bytes: float, latency_s: float, rate: float) -> None:
        self.ranks, self.latency_s = ranks, latency_s
        self.rate_of = dict.fromkeys(ranks, rate)
        self.part = num_bytes / len(ranks)
        self.held = {r: [{r} for _ in ranks] for r in ranks}
        self.ready_s = dict.fromkeys(ranks, 0.0)
        self.link_s = dict.fromkeys(ranks, 0.0)

    def turn(self, shift: int, *, adds: bool) -> None:
        """Every rank sends one part to the next one."""
        size = len(self.ranks)
        sent = []
        for place, rank in enumerate(self.ranks):
            index = (place - shift) % size
            start_s = max(self.ready_s[rank], self.link_s[rank])
            self.link_s[rank] = start_s + self.part / self.rate_of[rank]
            arrival_s = self.link_s[rank] + self.latency_s
            sent.append((self.ranks[(place + 1) % size], index, self.held[rank][index], arrival_s))
        for rank, index, addends, arrival_s in sent:
            held = self.held[rank][index]
            assert not adds or not held & addends, "an addend counted twice"
            self.held[rank][index] = held | addends if adds else set(addends)
            self.ready_s[rank] = arrival_s

    def scatter(self) -> None:
        for step in range(len(self.ranks) - 1):
            self.turn(step, adds=True)

    def gather(self) -> None:
        for step in range(len(self.ranks) - 1):
            self.turn(step - 1, adds=False)

    def is_reduced(self) -> bool:
        return all(part == set(self.ranks) for parts in self.held.values() for part in parts)


def _play_ring(
    num_ranks: int, num_bytes: float, latency_s: float, rate: float, rate_of_1: float | None = None
) -> float:
    """How long an allreduce takes; rank 1's link may have another rate than the others."""
    ring = _Rings(list(range(num_ranks)), num_bytes, latency_s, rate)
    if rate_of_1 is not None:
        ring.rate_of[1] = rate_of_1
    ring.scatter()
    ring.gather()
    assert ring.is_reduced()
    return max(ring.ready_s.values())


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 16])
def test_ring_formula_is_what_its_messages_take(num_ranks: int) -> None:
    """Every rank ends with the sum of all, at the time that the formula says."""
    cost = Network(latency_s=0.01, bytes_per_s=100.0).allreduce(num_ranks)
    assert cost.seconds(840) == pytest.approx(_play_ring(num_ranks, 840, 0.01, 100.0))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_ring_is_as_fast_as_its_slowest_link(num_ranks: int) -> None:
    """One link at a quarter of the rate is a network of that rate, but for the latency.

    The latency of a message that waits for the slow link passes while it waits, so that the
    formula is an upper bound.
    """

    def played_s(latency_s: float) -> float:
        return _play_ring(num_ranks, 840.0, latency_s, 100.0, rate_of_1=25.0)

    def predicted_s(latency_s: float) -> float:
        network = Network(latency_s=latency_s, bytes_per_s=25.0)
        return network.allreduce(num_ranks).seconds(840)

    assert predicted_s(0.0) == pytest.approx(played_s(0.0))
    assert played_s(0.0) < played_s(0.01) <= predicted_s(0.01)


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (3, 4), (4, 8)])
def test_hierarchical_formula_is_what_its_messages_take(num_nodes: int, per_node: int) -> None:
    """Nodes scatter within, each of their ranks is in a ring between nodes, and they gather."""
    inside = _Rings(list(range(per_node)), 840.0, 0.001, 1000.0)
    inside.scatter()
    scattered_s = max(inside.ready_s.values())
    # The rings between nodes run at once and share each node's link.
    between_s = _play_ring(num_nodes, 840.0 / per_node, 0.01, 100.0 / per_node)
    inside.gather()
    assert inside.is_reduced()
    network = Network(
        latency_s=0.01,
        bytes_per_s=100.0,
        algorithm="hierarchical",
        ranks_per_node=per_node,
        node_latency_s=0.001,
        node_bytes_per_s=1000.0,
    )
    played_s = scattered_s + between_s + (max(inside.ready_s.values()) - scattered_s)
    assert network.allreduce(num_nodes * per_node).seconds(840) == pytest.approx(played_s)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 13])
def test_tree_latency_is_what_its_messages_take(num_ranks: int) -> None:
    """Small messages go up a binomial tree, halving who is left each round, and down again."""
    held = {rank: {rank} for rank in range(num_ranks)}
    sends, at_s = [], 0.0
    left = list(range(num_ranks))
    while len(left) > 1:
        for parent, child in zip(left[::2], left[1::2], strict=False):
            held[parent] |= held[child]
            sends.append((at_s, parent, child))
        left, at_s = left[::2], at_s + 0.01
    assert held[0] == set(range(num_ranks))
    knows_s = {0: at_s}
    for _, parent, child in reversed(sends):
        knows_s[child] = knows_s[parent] = knows_s[parent] + 0.01
    network = Network(latency_s=0.01, bytes_per_s=1e300, algorithm="tree")
    assert network.allreduce(num_ranks).seconds(1) == pytest.approx(max(knows_s.values()))


@pytest.mark.parametrize("num_ranks", [8, 12, 16, 64])
def test_tree_rate_is_that_of_the_busiest_link_of_a_pair_of_trees(num_ranks: int) -> None:
    """Two mirrored trees carry half of the bytes each, up and down; no rank is inside of both."""
    received = dict.fromkeys(range(num_ranks), 0.0)
    sent = dict.fromkeys(range(num_ranks), 0.0)
    inner: list[set[int]] = []
    for mirrored in (False, True):
        edges = _edges(range(num_ranks))
        if mirrored:
            edges = [(num_ranks - 1 - parent, num_ranks - 1 - child) for parent, child in edges]
        inner.append({parent for parent, _ in edges})
        for parent, child in edges:
            for source, target in ((child, parent), (parent, child)):
                sent[source] += 840 / 2
                received[target] += 840 / 2
    assert not inner[0] & inner[1]
    busiest = max(*sent.values(), *received.values())
    network = Network(latency_s=0.0, bytes_per_s=100.0, algorithm="tree")
    assert network.allreduce(num_ranks).seconds(840) == pytest.approx(busiest / 100)


def _edges(ranks: range) -> list[tuple[int, int]]:
    """Return (parent, child) of a binary tree in order, in which odd ranks alone are parents."""
    if len(ranks) < 2:
        return []
    middle = (len(ranks) // 2 - 1) | 1
    halves = [half for half in (ranks[:middle], ranks[middle + 1 :]) if half]
    edges = [(ranks[middle], _top(half)) for half in halves]
    return edges + [edge for half in halves for edge in _edges(half)]


def _top(ranks: range) -> int:
    return ranks[(len(ranks) // 2 - 1) | 1] if len(ranks) > 1 else ranks[0]


def test_one_nodes_ranks_use_its_inner_links_only() -> None:
    """With each algorithm the 8 ranks of one node are a ring inside of it."""
    for algorithm in ("ring", "tree", "hierarchical"):
        network = Network(
            latency_s=1.0,
            bytes_per_s=1.0,
            algorithm=algorithm,
            ranks_per_node=8,
            node_latency_s=0.01,
            node_bytes_per_s=100.0,
        )
        assert network.allreduce(8).seconds(840) == pytest.approx(_play_ring(8, 840, 0.01, 100.0))


def test_the_model_of_the_figure_is_gpt2_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 774,030,080 parameters, and for a token 6 FLOPs for each, plus attention's."""
    figure = _figure(monkeypatch)
    assert sum(parameter.count for parameter in figure.parameters()) == 774_030_080
    profile = figure.profile()
    flops = (profile.forward_s + profile.backward_s) * figure.FLOP_PER_S
    tokens = figure.SEQUENCES * figure.CONTEXT
    assert flops / tokens == pytest.approx(6 * 774e6 + 36 * 12 * 1024 * 1280, rel=0.01)


def test_no_curve_of_the_figure_is_above_the_planned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 800 Gbit/s it is at 97 % on 1,024 ranks, DDP's at 69 %; a slow link has the least."""
    figure = _figure(monkeypatch)
    curves = [figure.curve(speed) for speed in figure.GBIT_PER_S]
    for curve in curves:
        for planned, *others in zip(curve.planned, curve.default, curve.at_end, strict=True):
            assert planned >= max(others) - 1e-12
    fast, *_, slow = curves
    assert (round(fast.planned[-1], 2), round(fast.default[-1], 2)) == (0.97, 0.69)
    assert slow.planned[-1] < fast.planned[-1]


def _figure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    import gpt2_large

    return gpt2_large


def test_a_plan_made_for_a_cluster_beats_others_there() -> None:
    """Without interference and cuts, planning is optimal, so no uniform buckets are better."""
    plan = _plan(ready_s=(0.1, 0.2, 0.3, 0.4), num_bytes=(5, 50, 5, 1), sizes=(4,))
    network = Network(latency_s=0.001, bytes_per_s=300.0)
    planned = plan_buckets(plan.profile, network.allreduce(16), 16)
    best = simulate(planned, world_size=16, network=network).efficiency
    for sizes in ((4,), (1, 1, 1, 1), (2, 2), (3, 1), (1, 3), (1, 2, 1), (1, 1, 2), (2, 1, 1)):
        other = dataclasses.replace(plan, sizes=sizes)
        assert simulate(other, world_size=16, network=network).efficiency <= best + 1e-12


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8bit", 1.0),
        ("1kbit", 125.0),
        ("100mbit", 12.5e6),
        ("10gbit", 1.25e9),
        ("0.4tbit", 50e9),
        ("2.5Gbit", 312.5e6),
        (" 1 gbit ", 125e6),
        (".5mbit", 62500.0),
        ("10Gbps", 1.25e9),
        ("10 Gb/s", 1.25e9),
    ],
)
def test_bandwidths_are_read_as_bits_in_powers_of_1000(text: str, bytes_per_s: float) -> None:
    """So does tc."""
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text",
    ["", "10", "gbit", "0gbit", "-1gbit", "1GB/s", "1GBps", "1GiB", "1gibit", "1e9bit", "1 g bit"],
)
def test_texts_that_are_no_bandwidth_are_refused(text: str) -> None:
    """The message has the text and the units; GB/s is in bytes."""
    with pytest.raises(PlanError, match=re.escape(repr(text)) + ".*gbit"):
        parse_bandwidth(text)


@given(st.integers(1, 999_999), st.sampled_from(["bit", "kbit", "mbit", "gbit", "tbit"]))
def test_a_formatted_bandwidth_is_read_as_the_same(number: int, unit: str) -> None:
    """Six digits of it stay."""
    rate = parse_bandwidth(f"{number}{unit}")
    assert parse_bandwidth(format_bandwidth(rate)) == pytest.approx(rate, rel=1e-5)


def test_bandwidths_are_shown_in_the_largest_unit_of_which_there_is_one() -> None:
    rates = [0.05, 125.0, 12.5e6, 1.25e9, 312.5e6, 50e9, 125e9]
    texts = ["0.4bit", "1kbit", "100mbit", "10gbit", "2.5gbit", "400gbit", "1tbit"]
    assert [format_bandwidth(rate) for rate in rates] == texts
