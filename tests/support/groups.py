"""Process groups of the first ranks, each made once."""

from __future__ import annotations

import torch.distributed as dist

_groups: dict[int, dist.ProcessGroup] = {}


def first_ranks(num_ranks: int) -> dist.ProcessGroup | None:
    """Return a group of the first ranks; None on the others. Collective, the first time.

    Each of gloo's groups has three threads, which look for work a hundred times a second until the
    process ends: with a group for each test they took a quarter of the processor.
    """
    if num_ranks not in _groups:
        _groups[num_ranks] = dist.new_group(list(range(num_ranks)))
    return _groups[num_ranks] if dist.get_rank() < num_ranks else None
