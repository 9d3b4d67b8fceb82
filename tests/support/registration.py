"""ddpopt's backend where it is not installed, as it is in a process that never looked it up."""

from __future__ import annotations

from typing import Any

import torch._dynamo.backends.distributed as in_tree
from torch.nn.parallel import DistributedDataParallel

# What `ddpopt.backend.install` replaces.
_PLACES: tuple[tuple[Any, str], ...] = (
    (in_tree, "DDPOptimizer"),
    (DistributedDataParallel, "_run_ddp_forward"),
)


def is_installed() -> bool:
    """Whether all is replaced that the backend replaces; to install it once more takes 25 ms."""
    return all(hasattr(getattr(owner, name), "ddpopt_replaces") for owner, name in _PLACES)


def uninstall() -> None:
    """Undo `ddpopt.backend.install`, so that torch's classes and modules are as torch has them."""
    for owner, name in _PLACES:
        current = getattr(owner, name)
        setattr(owner, name, getattr(current, "ddpopt_replaces", current))
