"""The process groups of an algorithm: all ranks, or the nodes' first ranks and each node's own.

[Note: hierarchical] With `hierarchical=True` the ranks of a node first average among themselves,
then the node's first rank, its leader, communicates for it, and sends the others the result.
Nodes have equal numbers of ranks, and a node's ranks are consecutive, as with torchrun.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.algorithms._runtime.tally import note_sent, ring_bytes, sent_bytes


class Groups:
    """Process groups that nobody else communicates on; see [Note: hierarchical].

    `leaders` are the ranks that communicate for all, every rank if not hierarchical; it is None on
    the others. `node` is None if a node is one rank. `place` is the index of this rank or node, and
    their number.
    """

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, ranks_per_node: int):
        """Make groups with the ranks, the backend and the timeout of `parent`. Collective."""
        ranks, rank = dist.get_process_group_ranks(parent), dist.get_rank(parent)
        first = rank - rank % ranks_per_node
        self.place = (rank // ranks_per_node, len(ranks) // ranks_per_node)
        name = _new_name(parent)
        self.everyone = _make_group(name, ranks, parent, device)
        self.leaders: dist.ProcessGroup | None = self.everyone
        self.node: dist.ProcessGroup | None = None
        if ranks_per_node > 1:
            members, leaders = ranks[first : first + ranks_per_node], ranks[::ranks_per_node]
            self.node = _make_group(f"{name}-node-{first}", members, parent, device)
            self.leaders = None
            if rank == first:
                self.leaders = _make_group(f"{name}-leaders", leaders, parent, device)

    def average_node(self, values: torch.Tensor) -> None:
        """Replace `values` by its mean over the ranks of this node, in place. Collective."""
        if self.node is not None:
            mean(values, self.node)

    def tell_node(self, values: torch.Tensor) -> None:
        """Overwrite `values` with those of this node's leader, in place. Collective."""
        if self.node is not None:
            dist.broadcast(values, group=self.node, group_src=0)

    def reduce(
        self, values: torch.Tensor, by_leaders: Callable[[torch.Tensor, dist.ProcessGroup], None]
    ) -> None:
        """Average within each node, then among leaders by `by_leaders`, in place. Collective."""
        self.average_node(values)
        if self.leaders is not None:
            by_leaders(values, self.leaders)
        self.tell_node(values)

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent so far, except within its node; see `tally.py`."""
        leaders = None if self.leaders is self.everyone else self.leaders
        return sent_bytes(self.everyone) + sent_bytes(leaders)

    def end(self) -> None:
        """Destroy the groups. All ranks have to be done with them, or some lose connections."""
        for group in {self.everyone, self.leaders, self.node} - {None}:
            dist.destroy_process_group(group)


def make_agreement_group(parent: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Make a gloo group of the ranks of `parent`, for flags on the CPU. Collective."""
    ranks = dist.get_process_group_ranks(parent)
    return _make_group(_new_name(parent), ranks, parent, device, "gloo")


def _new_name(parent: dist.ProcessGroup) -> str:
    """Return a name that was never used before, the same on all ranks. Collective."""
    name = [f"ddpopt-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(name, group=parent, group_src=0)
    return name[0]


def _make_group(
    name: str,
    ranks: Sequence[int],
    parent: dist.ProcessGroup,
    device: torch.device,
    backend: str = "",
) -> dist.ProcessGroup:
    """Make a group; only its ranks have to call this."""
    with _torch.naming_groups(name):
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=_torch.group_timeout(parent, device),
            backend=backend or dist.get_backend(parent),
            use_local_synchronization=True,
        )
    return group


def mean(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace `values` by its mean over the ranks of `group`, in place. Collective."""
    note_sent(group, ring_bytes(values.nbytes, group.size()))
    dist.all_reduce(values, group=group)
    values.div_(dist.get_world_size(group))


def swap(
    values: torch.Tensor, peers: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send `values` to each of the peers, given by rank in the group; return what each has sent.

    Receives come first: with gloo, ranks that begin to send before they can receive take turns on a
    link that carries both. Measured: steps of 2.9 s instead of 1.6 s at 10 Mbit/s.

    gloo sends and receives in CPU memory only, and ends the process if given GPU memory.
    """
    note_sent(group, len(peers) * values.nbytes)
    device = values.device
    if dist.get_backend(group) == "gloo":
        values = values.cpu()
    received = [torch.empty_like(values) for _ in peers]
    operations = [
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer)
        for peer, other in zip(peers, received, strict=True)
    ]
    operations += [dist.P2POp(dist.isend, values, group=group, group_peer=p) for p in peers]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [other.to(device) for other in received]
