"""`Exchange`: sums of which each rank gets its part, and parts that all ranks get, begun at once.

gloo's own reduce-scatter sends as much as its allreduce, and its all-gather copies. So ranks on the
CPU send each other the parts themselves: with n ranks each sends (n - 1) / n of the values, which
is the least. Other backends have collectives that do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """Begins exchanges with all ranks of a group, which all begin them in the same order.

    Each method returns works; `wait` of all of them ends the exchange, and until then no tensor
    that was given may change.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.num_ranks = group.rank(), group.size()
        self._is_pairwise = dist.get_backend(group) == "gloo" and device.type == "cpu"

    def reduce_scatter(
        self, values: torch.Tensor, part: torch.Tensor
    ) -> tuple[list[Any], Callable[[], None]]:
        """Begin to sum this rank's part of `values`, of shape [num_values], into `part`.

        Parts follow each other, each of the length of `part`, those at the end shorter or empty.
        Returns works, and what completes the sum in `part` once they have ended.
        """
        size = part.numel()
        if not self._is_pairwise:
            padded = values
            if values.numel() != size * self.num_ranks:
                padded = values.new_zeros(size * self.num_ranks)
                padded[: values.numel()].copy_(values)
            return [
                dist.reduce_scatter_tensor(part, padded, group=self.group, async_op=True)
            ], lambda: None
        parts = [values[size * rank : size * (rank + 1)] for rank in range(self.num_ranks)]
        own = parts[self.rank]
        received = [torch.empty_like(own) for _ in parts]
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        if others:
            received[others[0]] = part[: own.numel()]

        def add() -> None:
            total = part[: own.numel()]
            if not others:
                total.copy_(own)
                return
            total.add_(own)
            for rank in others[1:]:
                total.add_(received[rank])

        return self._swap(parts, received), add

    def all_gather(self, values: torch.Tensor) -> list[Any]:
        """Begin to give all ranks each one's part of `values`, whose length the ranks divide."""
        parts = list(values.view(self.num_ranks, -1))
        if self._is_pairwise:
            return self._swap([parts[self.rank]] * self.num_ranks, parts)
        own = parts[self.rank]
        return [dist.all_gather_into_tensor(values, own, group=self.group, async_op=True)]

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Any]:
        """Send `sent[r]` to each other rank r, and receive into `received[r]`; not if empty.

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
