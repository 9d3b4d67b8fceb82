"""ddpopt's backend where it is not installed, as it is in a process that never looked it up."""

from __future__ import annotations

from typing import Any

import torch._dynamo.backends.distributed as in_tree
from torch.nn.parallel import DistributedDataParallel


def uninstall() -> None:
    """Undo `ddpopt.backend.install`, so that torch's classes and modules are as torch has them."""
    places: tuple[tuple[Any, str], ...] = (
        (in_tree, "DDPOptimizer"),
        (DistributedDataParallel, "_run_ddp_forward"),
    )
    for owner, name in places:
        current = getattr(owner, name)
        setattr(owner, name, getattr(current, "ddpopt_replaces", current))
