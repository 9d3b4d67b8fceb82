"""Process groups of the first ranks, each made once."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_groups: dict[tuple[int, float], dist.ProcessGroup] = {}


def first_ranks(num_ranks: int, timeout_s: float = 300) -> dist.ProcessGroup | None:
    """Return a group of the first ranks; None on the others. Collective, the first time.

    Each of gloo's groups has three threads, which look for work a hundred times a second until the
    process ends: with a group for each test they took a quarter of the processor.
    """
    key = (num_ranks, timeout_s)
    if key not in _groups:
        timeout = timedelta(seconds=timeout_s)
        _groups[key] = dist.new_group(list(range(num_ranks)), timeout=timeout)
    return _groups[key] if dist.get_rank() < num_ranks else None
