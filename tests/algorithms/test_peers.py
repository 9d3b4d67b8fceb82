"""Which rank averages with which: the published table, and what makes a rotation right."""

from __future__ import annotations

import pytest

from ddpopt.algorithms.decentralized import ring_neighbours, rotating_peer

TABLE = {
    2: ["10", "10"],
    4: ["2301", "3210", "2301"],
    6: ["345012", "453201", "534120", "345012"],
    8: ["45670123", "56743012", "67452301", "74561230"],
}


@pytest.mark.parametrize("num_ranks", TABLE)
def test_the_rotation_is_bagua_s(num_ranks: int) -> None:
    for exchange, row in enumerate(TABLE[num_ranks]):
        peers = [rotating_peer(rank, num_ranks, exchange) for rank in range(num_ranks)]
        assert peers == [int(digit) for digit in row]


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 10, 64])
def test_a_rank_is_its_peers_peer_and_meets_the_whole_other_half(num_ranks: int) -> None:
    half = num_ranks // 2
    for rank in range(num_ranks):
        met = [rotating_peer(rank, num_ranks, exchange) for exchange in range(half)]
        others = range(half, num_ranks) if rank < half else range(half)
        assert sorted(met) == list(others)
        for exchange, peer in enumerate(met):
            assert rotating_peer(peer, num_ranks, exchange) == rank


def test_a_ring_closes() -> None:
    assert [ring_neighbours(rank, 4) for rank in range(4)] == [(3, 1), (0, 2), (1, 3), (2, 0)]
    assert [ring_neighbours(rank, 2) for rank in range(2)] == [(1, 1), (0, 0)]
    assert ring_neighbours(0, 1) == (0, 0)
