"""Update each bucket's parameters when that is reduced, while DDP still reduces those behind it.

With `require_manual_backward_finalization`, of torch 2.15, DDP's backward waits for no allreduce.
So the update of early buckets hides behind the reduction of late ones, which nothing else does
when backward is over.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW


class Launched:
    """The buckets of the last backward whose parameters were not updated yet, in order."""

    def __init__(self) -> None:
        self.ddp: Any = None  # a weak proxy: DDP has to go before its process group
        self.buckets: list[tuple[list[Tensor], torch.futures.Future[Tensor]]] = []

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket, as DDP's comm hook."""
        future = allreduce_hook(dist.group.WORLD, bucket)
        self.buckets.append((bucket.parameters(), future))
        return future


# A peer's process has one model. The hook has no state, nor anything else that could be one by
# bucket: ddpopt would not tune the buckets of such a hook.
_launched = Launched()


def leave_unfinished(module: nn.Module, **of_ddp: Any) -> DistributedDataParallel:
    """Return a DDP module whose backward waits for no allreduce; `AdamWByBucket` does."""
    # A gradient is a view of its bucket, so that it is reduced as soon as that is.
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, **of_ddp)
    ddp.require_manual_backward_finalization = True
    # DDP refuses a hook whose annotations are text, as they are here.
    ddp.register_comm_hook(None, lambda _state, bucket: _launched.reduce(bucket))
    _launched.ddp = weakref.proxy(ddp)
    return ddp


class AdamWByBucket(AdamW):
    """Updates parameters bucket by bucket, as soon as each is reduced."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not _launched.buckets:  # under no_sync
            super().step(closure)
            return
        buckets, _launched.buckets = _launched.buckets, []
        (group,) = self.param_groups
        for parameters, future in buckets:
            future.wait()
            # AdamW updates what its groups have; the state of each parameter stays with it.
            self.param_groups = [group | {"params": parameters}]
            super().step(closure)
        self.param_groups = [group]
        _launched.ddp.finalize_backward()
