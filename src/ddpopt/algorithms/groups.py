"""The process groups of an algorithm: all ranks, or the nodes' first ranks and each node's own.

[Note: hierarchical] With `hierarchical=True` the ranks of a node first average among themselves,
then the node's first rank, its leader, communicates for it, and tells the others the result.
Nodes have equal numbers of ranks, and a node's ranks follow each other, as torchrun has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.errors import OptionError


def ranks_per_node(hierarchical: bool, local_world_size: int | None, num_ranks: int) -> int:
    """Return how many ranks average before their node communicates; 1 if not hierarchical.

    Raises:
        OptionError: it is not known, or does not divide `num_ranks`.
    """
    if not hierarchical:
        return 1
    given = local_world_size if local_world_size is not None else os.environ.get("LOCAL_WORLD_SIZE")
    if given is None:
        raise OptionError(
            "hierarchical=True (the default) needs the number of ranks on each node, and "
            "LOCAL_WORLD_SIZE is not set; start with torchrun, give local_world_size, or pass "
            "hierarchical=False"
        )
    size = int(given)
    if num_ranks % size:
        raise OptionError(
            f"{num_ranks} ranks cannot be divided into nodes of {size} (local_world_size or "
            "LOCAL_WORLD_SIZE); pass hierarchical=False, or equal numbers of ranks on all nodes"
        )
    return size


def find_node_problem(
    hierarchical: bool, local_world_size: int | None, group: dist.ProcessGroup
) -> Exception | None:
    """Return what `ranks_per_node` would raise for this group."""
    try:
        ranks_per_node(hierarchical, local_world_size, group.size())
    except OptionError as error:
        return error
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Process groups that nobody else communicates on; see [Note: hierarchical].

    `leaders` are the ranks that communicate for all: every rank, if not hierarchical. It is None
    on ranks that do not. `index` is this rank's place among them. `node` is None where a node is
    one rank.
    """

    everyone: dist.ProcessGroup
    leaders: dist.ProcessGroup | None
    node: dist.ProcessGroup | None
    num_leaders: int
    index: int

    def average_node(self, values: torch.Tensor) -> None:
        """Replace `values` by its mean over the ranks of this node, in place. Collective."""
        if self.node is not None:
            mean(values, self.node)

    def tell_node(self, values: torch.Tensor) -> None:
        """Overwrite `values` by those of this node's leader, in place. Collective."""
        if self.node is not None:
            dist.broadcast(values, group=self.node, group_src=0)

    def destroy(self) -> None:
        """Give the groups back to torch."""
        for group in {self.everyone, self.leaders, self.node} - {None}:
            dist.destroy_process_group(group)


def make_groups(parent: dist.ProcessGroup, device: torch.device, node_size: int) -> Groups:
    """Make groups with the ranks, the backend and the timeout of `parent`. Collective."""
    ranks = dist.get_process_group_ranks(parent)
    place = dist.get_rank(parent)
    first = place // node_size * node_size
    options: dict[str, Any] = {
        "timeout": _torch.group_timeout(parent, device),
        "backend": dist.get_backend(parent),
        "use_local_synchronization": True,
    }
    leaders: dist.ProcessGroup | None
    node: dist.ProcessGroup | None = None
    with _equally_many_groups(parent):
        everyone = leaders = dist.new_group(ranks, **options)
        if node_size > 1:  # leaders last, since only they have one
            node = dist.new_group(ranks[first : first + node_size], **options)
            leaders = dist.new_group(ranks[::node_size], **options) if place == first else None
    return Groups(
        everyone=everyone,
        leaders=leaders,
        node=node,
        num_leaders=len(ranks) // node_size,
        index=place // node_size,
    )


@contextlib.contextmanager
def _equally_many_groups(parent: dist.ProcessGroup) -> Iterator[None]:
    """Have all ranks of `parent` know equally many process groups in this block. Collective.

    torch names a group that only its members make by their number on the rank that makes it, and
    members with different names wait for each other until their timeout.
    """
    counts = [0] * parent.size()
    dist.all_gather_object(counts, _torch.num_groups(), group=parent)
    alone = [dist.get_rank()]
    missing = max(counts) - counts[dist.get_rank(parent)]
    fillers = [dist.new_group(alone, use_local_synchronization=True) for _ in range(missing)]
    yield
    for filler in fillers:
        dist.destroy_process_group(filler)


def mean(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace `values` by its mean over the ranks of `group`, in place. Collective."""
    dist.all_reduce(values, group=group)
    values.div_(dist.get_world_size(group))
