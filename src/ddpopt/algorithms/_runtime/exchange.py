"""`Exchange`: means of which each rank gets its part, and parts that all ranks get.

gloo's own reduce-scatter sends as much as its allreduce, and its all-gather copies. So ranks on the
CPU send each other the parts themselves: with n ranks each sends (n - 1) / n of the values, which
is the minimum. Other backends have collectives that do the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpopt.algorithms._runtime.tally import note_sent

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
