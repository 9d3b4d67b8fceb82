"""Who exchanges weights with whom: pure functions of ranks and of how often they communicated."""

from __future__ import annotations


def rotating_peer(rank: int, num_ranks: int, num_exchanges: int) -> int:
    """Return the rank that `rank` averages with after `num_exchanges` earlier exchanges.

    The lower half of the ranks rotates against the upper half, so that each rank meets another
    one each time and all of the other half in `num_ranks / 2` exchanges; it is its peer's peer.
    The rule is Bagua's `shift_one` (arXiv 2107.01499), for an even number of ranks.
    """
    half = num_ranks // 2
    if rank < half:
        return (num_exchanges + rank) % half + half
    return (rank - half - num_exchanges) % half


def ring_neighbours(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the ranks to the left and to the right; both are the same of two ranks."""
    return (rank - 1) % num_ranks, (rank + 1) % num_ranks
