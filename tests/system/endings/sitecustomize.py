"""Fail programs that destroy a process group while a DDP module lives.

Python imports this at its start where this folder is on its path. A Reducer that is freed after
its group may hang the program, once in many runs (see docs/faq.md); this sees it in each.
"""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_destroy = dist.destroy_process_group


def _destroy_if_alone(group: Any = None) -> None:
    if group is not None and group is not dist.group.WORLD:
        _destroy(group)  # one of an algorithm, which no Reducer holds
        return
    ddps = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    if ddps:
        raise AssertionError(f"{len(ddps)} DDP modules outlive their process group")
    _destroy(group)


dist.destroy_process_group = _destroy_if_alone
