"""`Decentralized`: ranks average their weights while forward and backward run.

Source: decentralized SGD as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpopt.algorithms._runtime.groups import mean, swap
from ddpopt.algorithms._runtime.handle import Training
from ddpopt.algorithms._runtime.worker import BackgroundHandle
from ddpopt.algorithms.api import HierarchicalAlgorithm
from ddpopt.config import check_choice
from ddpopt.errors import OptionError
from ddpopt.ranks.agreement import communicating

PEER_SELECTIONS = ("all", "shift_one")


class DecentralizedHandle(BackgroundHandle):
    """As `BackgroundHandle`."""

    algorithm: Decentralized
    _averaged: torch.futures.Future[list[torch.Tensor]] | None = None

    def begin_step(self) -> None:
        """Start averaging a copy of the weights."""
        if (self.num_steps - 1) % self.algorithm.communication_interval == 0:
            flat, num_exchanges = self.weights.copy(), self.num_communications
            self._averaged = self.worker.submit(lambda: self._average(flat, num_exchanges))
            self.num_communications += 1

    def before_update(self) -> None:
        """Take over the averaged weights, if any were sent in this step."""
        if self._averaged is not None:
            averaged, self._averaged = self._averaged, None
            with communicating(f"averaging weights in step {self.num_steps}"):
                flat = averaged.wait()
            self.weights.assign(flat)

    def _average(self, flat: list[torch.Tensor], num_exchanges: int) -> list[torch.Tensor]:
        def with_peer(values: torch.Tensor, group: dist.ProcessGroup) -> None:
            peer = rotating_peer(group.rank(), group.size(), num_exchanges)
            (other,) = swap(values, [peer], group)
            values.add_(other).div_(2)

        by_leaders = mean if self.algorithm.peer_selection == "all" else with_peer
        for values in flat:
            self.groups.reduce(values, by_leaders)
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Decentralized(HierarchicalAlgorithm[DecentralizedHandle]):
    """Ranks average their weights with all others, or with one other rank in turn.

    In step t a copy of rank i's weights x_i is averaged while it computes its gradient at x_i.
    Before the update the average replaces the weights: x_i <- mean_j(x_j) for `"all"`,
    (x_i + x_peer) / 2 for `"shift_one"`. Then its own optimizer takes a step with its gradient.

    Attributes:
        peer_selection: `"all"`, or `"shift_one"`: a different peer each time, at a fraction of the
            traffic, for an even number of ranks (of nodes, if hierarchical).
        hierarchical: Average within each node first, then between nodes.
        communication_interval: Steps from one average to the next; the first step has one.
    """

    handle_type = DecentralizedHandle
    peer_selection: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        HierarchicalAlgorithm.__post_init__(self)
        check_choice("peer_selection", self.peer_selection, PEER_SELECTIONS)

    def check(self, training: Training) -> None:
        """Raise the reason if this cannot be attached to `training` on this rank."""
        size = self.ranks_per_node(training.group.size())
        num_peers = training.group.size() // size
        if self.peer_selection == "shift_one" and num_peers % 2:
            kind = f"nodes of {size} ranks" if self.hierarchical else "ranks"
            raise OptionError(
                f"peer_selection='shift_one' pairs an even number, and there are {num_peers} "
                f"{kind} (hierarchical={self.hierarchical}; True is the default); use "
                "peer_selection='all', or hierarchical=False with an even number of ranks"
            )


def rotating_peer(rank: int, num_ranks: int, num_exchanges: int) -> int:
    """Return the rank that `rank` averages with after `num_exchanges` earlier exchanges.

    The lower half of the ranks rotates against the upper half: each rank meets every rank of the
    other half in `num_ranks / 2` exchanges, and is its peer's peer. `num_ranks` is even.
    Source: Bagua's `shift_one` (arXiv 2107.01499).
    """
    half = num_ranks // 2
    if rank < half:
        return (num_exchanges + rank) % half + half
    return (rank - half - num_exchanges) % half
