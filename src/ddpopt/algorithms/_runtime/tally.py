"""What an algorithm has done so far, as numbers for `ddpopt.metrics`; and bytes sent on a group.

Bytes are those of the values and codes that this rank sends, computed from their sizes, without
headers: an allreduce is assumed to be a ring.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch.distributed as dist

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
