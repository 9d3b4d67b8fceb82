"""Costs of an allreduce and the profile of an iteration: formulas, fits, and what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ddpopt
from ddpopt.planning.costs import AllreduceCost, Device, Gradient, Network, Profile, fit_cost


def test_a_ring_sends_all_but_one_part_twice() -> None:
    """Each of 2 ranks sends half of the bytes twice, in 2 messages in a row."""
    cost = Network(latency_s=1e-3, bytes_per_s=1e6).allreduce(2)
    assert cost.startup_s == pytest.approx(2e-3)
    assert cost.seconds(1e6) == pytest.approx(1.002)


def test_one_rank_communicates_nothing() -> None:
    assert Network(latency_s=1, bytes_per_s=1).allreduce(1).seconds(100) == 0


@pytest.mark.parametrize(
    ("num_ranks", "startup_s", "s_per_byte"),
    [
        (1, 0.0, 0.0),
        (2, 0.02, 2 / 2 * 0.5),  # 2 steps of 10 ms; a link moves 2 bytes a second
        (8, 0.14, 14 / 8 * 0.5),
        (16, 0.30, 30 / 16 * 0.5),
    ],
)
def test_a_ring_of_other_ranks_has_other_steps_and_bytes(
    num_ranks: int, startup_s: float, s_per_byte: float
) -> None:
    """By hand: 2 (n - 1) steps of 10 ms, and 2 (n - 1) / n of the bytes at 2 bytes a second."""
    of_8 = AllreduceCost(startup_s=0.14, s_per_byte=0.875, contention=1.5, launch_s=0.01)
    cost = of_8.extrapolated(8, num_ranks)
    assert cost.startup_s == pytest.approx(startup_s)
    assert cost.s_per_byte == pytest.approx(s_per_byte)
    assert cost.contention == 1.5
    assert cost.launch_s == (0.01 if num_ranks > 1 else 0)
    links = Network(latency_s=0.01, bytes_per_s=2.0).allreduce(num_ranks)
    assert links.startup_s == pytest.approx(startup_s)
    assert links.s_per_byte == pytest.approx(s_per_byte)


def _ring(network: Network, nodes: int) -> tuple[float, float]:
    """Messages go from rank to rank; the n-th part of the bytes is on its way longest."""
    inside = network.ranks_per_node
    num_ranks = nodes * inside
    hops = [
        network.latency_s if (rank + 1) % inside == 0 else network.node_latency_s
        for rank in range(num_ranks)
    ]
    latency_s = 0.0
    for start in range(num_ranks):
        way = [hops[(start + step) % num_ranks] for step in range(2 * num_ranks - 2)]
        latency_s = max(latency_s, sum(way))
    rates = [network.bytes_per_s, *([network.node_bytes_per_s] if inside > 1 else [])]
    step_s = max(1 / num_ranks / rate for rate in rates)
    return latency_s, (2 * num_ranks - 2) * step_s


def _tree(network: Network, nodes: int) -> tuple[float, float]:
    """Up a tree of the nodes, and of the ranks in each, and down again, in small pieces."""
    latency_s = 0.0
    for num, hop_s in (
        (nodes, network.latency_s),
        (network.ranks_per_node, network.node_latency_s),
    ):
        left = num
        while left > 1:
            left = (left + 1) // 2
            latency_s += 2 * hop_s
    rates = [network.bytes_per_s]
    if network.ranks_per_node > 1:
        rates.append(network.node_bytes_per_s)
    return latency_s, 2 / min(rates)


_POSITIVE = st.floats(1e-6, 1e6)


@given(
    algorithm=st.sampled_from([_ring, _tree]),
    nodes=st.integers(2, 9),
    inside=st.integers(1, 5),
    latencies_s=st.tuples(_POSITIVE, _POSITIVE),
    rates=st.tuples(_POSITIVE, _POSITIVE),
)
def test_the_formulas_for_nodes_are_what_their_messages_take(
    algorithm: Callable[[Network, int], tuple[float, float]],
    nodes: int,
    inside: int,
    latencies_s: tuple[float, float],
    rates: tuple[float, float],
) -> None:
    """Messages are followed one by one, over links between nodes and within them.

    test_simulation.py plays those of one ring, and of a hierarchical allreduce.
    """
    # Links within a node are faster; else a ring's longest way is another one.
    node_latency_s, latency_s = sorted(latencies_s)
    network = Network(
        latency_s=latency_s,
        bytes_per_s=rates[0],
        algorithm=algorithm.__name__[1:],
        ranks_per_node=inside,
        node_latency_s=node_latency_s,
        node_bytes_per_s=rates[1],
    )
    cost = network.allreduce(nodes * inside)
    expected_latency_s, expected_per_byte_s = algorithm(network, nodes)
    assert cost.startup_s == pytest.approx(expected_latency_s)
    assert cost.s_per_byte == pytest.approx(expected_per_byte_s)


def test_a_fit_finds_the_cost_among_disturbed_times() -> None:
    """Two of seven measurements ten times too long change it by little."""
    noise = random.Random(0)
    sizes = [1000 * 4**k for k in range(7)]
    times = [1e-3 + n * 8e-9 * noise.uniform(0.99, 1.01) for n in sizes]
    times[1] *= 10
    times[4] *= 10
    cost = fit_cost(sizes, times)
    assert cost.startup_s == pytest.approx(1e-3, rel=0.15)
    assert cost.s_per_byte == pytest.approx(8e-9, rel=0.05)


def test_a_fit_never_gives_a_negative_cost() -> None:
    cost = fit_cost([1, 2, 3], [3.0, 2.0, 1.0])
    assert cost.s_per_byte == 0
    assert cost.startup_s >= 0


def test_a_fit_of_one_size_is_refused() -> None:
    with pytest.raises(ddpopt.errors.PlanError, match="two different sizes"):
        fit_cost([8, 8], [1.0, 2.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllreduceCost(startup_s=-1, s_per_byte=0), r"startup_s is -1; .*0 or more"),
        (lambda: AllreduceCost(startup_s=0, s_per_byte=float("nan")), "s_per_byte is nan"),
        (lambda: AllreduceCost(startup_s=0, s_per_byte=0, interference=1), "below 1"),
        (lambda: AllreduceCost(startup_s=0, s_per_byte=0, contention=0.5), "contention is 0.5"),
        (lambda: Network(latency_s=0, bytes_per_s=0), "bytes_per_s is 0"),
        (lambda: Network(latency_s=0, bytes_per_s=1, algorithm="star"), "'star'.*'ring'"),
        (lambda: Network(latency_s=0, bytes_per_s=1).allreduce(0), "world_size is 0"),
        (lambda: AllreduceCost(startup_s=0, s_per_byte=0).extrapolated(1, 2), "of 1 rank"),
        (lambda: AllreduceCost(startup_s=0, s_per_byte=0).extrapolated(2, 0), "to_ranks is 0"),
        (lambda: Device(flops_per_s={}, bytes_per_s=1), "flops_per_s is empty"),
        (lambda: Gradient(name="w", num_bytes=-1, ready_s=0), "num_bytes is -1"),
        (lambda: Profile(gradients=(), backward_s=1), "no gradients"),
        (lambda: _profile([2.0, 1.0], 3), "in the order of their ready_s"),
        (lambda: _profile([1.0, 2.0], 1.5), r"backward_s is 1.5, before the last gradient at 2"),
    ],
)
def test_bad_input_is_refused_by_name_and_limit(make, message: str) -> None:
    with pytest.raises(ddpopt.errors.PlanError, match=message):
        make()


def _profile(ready_s: list[float], backward_s: float) -> Profile:
    gradients = tuple(Gradient(name=f"{t}", num_bytes=4, ready_s=t) for t in ready_s)
    return Profile(gradients=gradients, backward_s=backward_s)


def test_numbers_from_which_infinity_would_follow_are_refused() -> None:
    """An iteration of such times would never end: sums overflow, and differences are NaN."""
    gradient = Gradient(name="p", num_bytes=4, ready_s=0.0)
    with pytest.raises(
        ddpopt.errors.PlanError, match=r"cut_s is 1e\+308; it must be .* below 1e\+18"
    ):
        Profile(gradients=(gradient,), backward_s=1.0, cut_s=1e308)
    with pytest.raises(ddpopt.errors.PlanError, match="startup_s is inf"):
        AllreduceCost(startup_s=math.inf, s_per_byte=0.0)


def test_a_dtype_without_a_rate_of_its_own_computes_as_the_slowest() -> None:
    """A call takes as long as its arithmetic or its memory, whichever is longer."""
    device = Device(flops_per_s={torch.float32: 1.0, torch.bfloat16: 4.0}, bytes_per_s=2.0)
    seconds = {
        dtype: device.seconds(8, 2, dtype)
        for dtype in (None, torch.float32, torch.bfloat16, torch.float16)
    }
    assert list(seconds.values()) == [8, 8, 2, 8]
    assert device.seconds(8, 20, torch.bfloat16) == 10
