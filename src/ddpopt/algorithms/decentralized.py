"""`Decentralized`: ranks average their weights, while forward and backward run.

Source: decentralized SGD as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddpopt.algorithms._runtime.groups import mean, swap
from ddpopt.algorithms._runtime.handle import Training
from ddpopt.algorithms._runtime.worker import BackgroundHandle
from ddpopt.algorithms.api import HierarchicalAlgorithm, check_count
from ddpopt.config import check_choice
from ddpopt.errors import OptionError
from ddpopt.ranks.faults import communicating

PEER_SELECTIONS = ("all", "shift_one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decentralized(HierarchicalAlgorithm["DecentralizedHandle"]):
    """Ranks average their weights with all others, or with one other rank in turn.

    In step t rank i computes its gradient g_i at its weights x_i, while a copy of x_i is averaged
    in the background. Before the update the average takes the weights' place:
    x_i <- mean_j(x_j) for `"all"`, (x_i + x_peer) / 2 for `"shift_one"`; then its own optimizer
    makes its step with g_i, which is neither averaged nor divided. Momentum stays on each rank.

    Attributes:
        peer_selection: `"all"`, or `"shift_one"`: another peer each time, which halves the
            ranks' difference at a fraction of the traffic and needs an even number of ranks (of
            nodes, if hierarchical).
        hierarchical: Average within each node first, then between nodes; see
            [Note: hierarchical] in `algorithms/_runtime/groups.py`.
        communication_interval: Steps from one average to the next; the first step has one.
        local_world_size: Ranks on each node; None is LOCAL_WORLD_SIZE, which torchrun sets.

    Raises:
        OptionError: a value is out of its range.
        TypeError: a value has another type.
    """

    peer_selection: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        HierarchicalAlgorithm.__post_init__(self)
        check_choice("peer_selection", self.peer_selection, PEER_SELECTIONS)
        check_count("communication_interval", self.communication_interval, 1)

    def check(self, training: Training) -> None:
        """Raise the reason if this cannot be attached there on this rank."""
        size = self.ranks_per_node(training.group.size())
        num_peers = training.group.size() // size
        if self.peer_selection == "shift_one" and num_peers % 2:
            kind = f"nodes of {size} ranks" if self.hierarchical else "ranks"
            raise OptionError(
                f"peer_selection='shift_one' pairs an even number, and there are {num_peers} "
                f"{kind} (hierarchical={self.hierarchical}; True is the default); use "
                "peer_selection='all', or hierarchical=False with an even number of ranks"
            )

    def make_handle(self, training: Training) -> DecentralizedHandle:
        """Put this to work on a model."""
        return DecentralizedHandle(training, self)


class DecentralizedHandle(BackgroundHandle):
    """As `BackgroundHandle`."""

    def __init__(self, training: Training, algorithm: Decentralized) -> None:
        super().__init__(training, algorithm)
        self._interval = algorithm.communication_interval
        self._is_all = algorithm.peer_selection == "all"
        self._averaged: torch.futures.Future[Any] | None = None

    def begin_step(self) -> None:
        """Send a copy of the weights on its way."""
        if (self.num_steps - 1) % self._interval == 0:
            flat, exchange = self.weights.copy(), self.num_communications
            self._averaged = self.worker.submit(lambda: self._average(flat, exchange))
            self.num_communications += 1

    def before_update(self) -> None:
        """Take the averaged weights, if any were sent in this step."""
        if self._averaged is not None:
            averaged, self._averaged = self._averaged, None
            with communicating(f"averaging weights in step {self.num_steps}"):
                flat = averaged.wait()
            self.weights.assign(flat)

    def _average(self, flat: list[torch.Tensor], exchange: int) -> list[torch.Tensor]:
        groups = self.groups
        peer = 0 if self._is_all else rotating_peer(groups.index, groups.num_leaders, exchange)
        for values in flat:
            groups.average_node(values)
            if groups.leaders is not None and self._is_all:
                mean(values, groups.leaders)
            elif groups.leaders is not None:
                (other,) = swap(values, [peer], groups.leaders)
                values.add_(other).div_(2)
            groups.tell_node(values)
        return flat


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
