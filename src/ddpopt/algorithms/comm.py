"""What algorithms communicate with: process groups of their own, which count what they send.

Bytes are those of the values and codes that this rank sends, without headers; an allreduce is
assumed to be a ring.

[Note: hierarchical] With `hierarchical=True` the ranks of a node first average among themselves,
then the node's first rank, its leader, communicates for it, and sends the others the result.
Nodes have equal numbers of ranks, and a node's ranks are consecutive, as with torchrun.

[Note: pairwise] gloo's own reduce-scatter sends as much as its allreduce, and its all-gather
copies. So ranks on the CPU send each other the parts themselves: with n ranks each sends
(n - 1) / n of the values, which is the minimum. Other backends have collectives that do the same.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _torch

_sent_bytes: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()
_noting = threading.Lock()  # workers send too


def note_sent(group: dist.ProcessGroup, num_bytes: float) -> None:
    """Note that this rank sends this many bytes to other ranks of a group."""
    with _noting:
        _sent_bytes[group] = sent_bytes(group) + num_bytes


def sent_bytes(group: dist.ProcessGroup | None) -> float:
    """Return how many bytes this rank has noted as sent on a group; 0 without a group."""
    return 0.0 if group is None else _sent_bytes.get(group, 0.0)


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """Return how many bytes each rank sends in an allreduce of `num_bytes`."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


@dataclass(slots=True)
class Tally:
    """Steps since an algorithm was attached; see [Note: steps].

    In a skipped step ranks exchanged nothing. `stale_steps` are those since the last exchange
    whose result this rank has taken over. `is_reduced` says that gradients were reduced in the
    current step; `known_communications` are those before it.
    """

    num_steps: int = 0
    num_skipped_steps: int = 0
    num_skipped_updates: int = 0
    stale_steps: int = 0
    is_reduced: bool = False
    known_communications: int = 0

    def end_step(self, num_communications: int) -> None:
        """Count a step, given the number of communications after it."""
        self.num_steps += 1
        if self.is_reduced or num_communications > self.known_communications:
            self.stale_steps = 0
        else:
            self.num_skipped_steps += 1
            self.stale_steps += 1
        self.is_reduced, self.known_communications = False, num_communications


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


_CACHED = 2**16  # elements of a few tensors that fit into a core's cache

Works = list[Any]  # torch.distributed.Work
Complete = Callable[[], object]
Follow = Callable[[str, int, int, Works], Works]  # what, of which bucket, of how many bytes


class Exchange:
    """Begins exchanges with all ranks of a group, which must all begin them in the same order.

    Each method returns works; waiting for all of them ends the exchange, and until then no given
    tensor may change.

    Attributes:
        waited_s: How long `wait` took, in all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        follow: Follow = lambda _what, _bucket, _num_bytes, works: works,
    ) -> None:
        """Take `follow`, which gets the works of an exchange and returns those to wait for."""
        self.group = group
        self.follow = follow
        self.waited_s = 0.0
        self.rank, self.num_ranks = group.rank(), group.size()
        self._is_pairwise = dist.get_backend(group) == "gloo" and device.type == "cpu"

    def wait(self, works: Works) -> None:
        """Return when these works have ended."""
        began_s = time.perf_counter()
        try:
            for work in works:
                work.wait()
        finally:
            self.waited_s += time.perf_counter() - began_s

    def mean_scatter(self, values: torch.Tensor, part: torch.Tensor) -> tuple[Works, Complete]:
        """Start computing this rank's part of the mean of all ranks' `values` into `part`.

        `values` has shape [num_values] and may be overwritten. Parts are consecutive, each as long
        as `part`, those at the end shorter or empty. Returns works, and a function that completes
        the mean when they have ended.
        """
        size, divisor = part.numel(), self.num_ranks
        note_sent(self.group, values.nbytes * (self.num_ranks - 1) / self.num_ranks)
        if values.dtype is torch.float16:  # a sum of which may be too large
            values.div_(divisor)
            divisor = 1
        if not self._is_pairwise:
            padded = values
            if values.numel() != size * self.num_ranks:
                padded = values.new_zeros(size * self.num_ranks)
                padded[: values.numel()].copy_(values)
            work = dist.reduce_scatter_tensor(part, padded, group=self.group, async_op=True)
            return [work], lambda: part.div_(divisor)
        parts = [values[size * rank : size * (rank + 1)] for rank in range(self.num_ranks)]
        own = parts[self.rank]
        mean = part[: own.numel()]
        received = [mean, *(torch.empty_like(own) for _ in range(2, self.num_ranks))]
        received.insert(self.rank, own)
        if self.num_ranks == 1:
            mean.copy_(own)
            return [], lambda: None
        others = [own, *(r for r in received if r is not own and r is not mean)]

        def complete() -> None:
            # Piece by piece, so that sums are still cached when they are divided.
            for sums, *addends in zip(
                *(torch.split(t, _CACHED) for t in (mean, *others)), strict=True
            ):
                for addend in addends:
                    sums.add_(addend)
                sums.div_(divisor)

        return self._swap(parts, received), complete

    def all_gather(self, values: torch.Tensor) -> Works:
        """Start sending each rank's part of `values` to all ranks; parts are of equal length."""
        parts = list(values.view(self.num_ranks, -1))
        note_sent(self.group, parts[self.rank].nbytes * (self.num_ranks - 1))
        if self._is_pairwise:
            return self._swap([parts[self.rank]] * self.num_ranks, parts)
        own = parts[self.rank]
        return [dist.all_gather_into_tensor(values, own, group=self.group, async_op=True)]

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Works:
        """Send `sent[r]` to each other rank r, and receive into `received[r]`; skip empty ones.

        Receives come first: a rank that sends before it can receive waits for its peer.
        """
        peers = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        receiving = [
            dist.irecv(received[peer], group=self.group, group_src=peer)
            for peer in reversed(peers)
            if received[peer].numel()
        ]
        sending = [
            dist.isend(sent[peer], group=self.group, group_dst=peer)
            for peer in peers
            if sent[peer].numel()
        ]
        return [*receiving, *sending]


class FlatWeights:
    """Parameters as a few flat tensors, each of one dtype and device and of bounded size.

    A parameter is never divided; one larger than `bucket_bytes` has a bucket of its own. With None,
    all parameters of one dtype and device share a bucket.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], bucket_bytes: int | None = None) -> None:
        open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._buckets: list[list[torch.Tensor]] = []
        for parameter in parameters:
            kind = (parameter.dtype, parameter.device)
            bucket = open_buckets.get(kind)
            if bucket is None or (
                bucket_bytes is not None
                and sum(p.nbytes for p in (*bucket, parameter)) > bucket_bytes
            ):
                bucket = open_buckets[kind] = []
                self._buckets.append(bucket)
            bucket.append(parameter)

    @torch.no_grad()
    def copy(self) -> list[torch.Tensor]:
        """Return the current weights, one tensor of shape [num_elements] per bucket."""
        return [torch.cat([p.detach().reshape(-1) for p in bucket]) for bucket in self._buckets]

    @torch.no_grad()
    def assign(self, flat: Sequence[torch.Tensor]) -> None:
        """Overwrite the parameters in place with tensors like those that `copy` returns."""
        for parameter, value in self._pairs(flat):
            parameter.copy_(value)

    @torch.no_grad()
    def add(self, flat: Sequence[torch.Tensor]) -> None:
        """Add tensors like those that `copy` returns to the parameters, in place."""
        for parameter, value in self._pairs(flat):
            parameter.add_(value)

    def _pairs(self, flat: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for bucket, values in zip(self._buckets, flat, strict=True):
            parts = torch.split(values, [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                yield parameter, part.view(parameter.shape)
