"""The one comm hook that DDP is given: it calls the algorithm that is attached, if any."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import AttachError

Bucket = Any  # torch.distributed.GradBucket
GradientFuture = Any  # torch.futures.Future[torch.Tensor]; DDP refuses annotations of other names
_Reduce = Callable[[Bucket], GradientFuture]


class _CommHook:
    """What DDP's Reducer calls for each bucket.

    It can be registered only once in a module's life, so it stays when an algorithm goes. The
    Reducer keeps it alive from C++, where no cycle is collected: `find_reduce` holds weakly what
    an algorithm does with a bucket.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.find_reduce: Callable[[], _Reduce | None] = lambda: None


_registered: weakref.WeakKeyDictionary[DistributedDataParallel, _CommHook] = (
    weakref.WeakKeyDictionary()
)


def _reduce(hook, bucket):  # type: ignore[no-untyped-def]  # see GradientFuture
    reduce = hook.find_reduce()
    return allreduce_hook(hook.group, bucket) if reduce is None else reduce(bucket)


def check_free(ddp: DistributedDataParallel) -> None:
    """Raise AttachError if `ddp` has an algorithm, or a comm hook that is not ours."""
    hook = _registered.get(ddp)
    if hook is None and _torch.has_comm_hook(ddp):
        raise AttachError(
            "this DDP module has a comm hook, and takes only one; attach the algorithm to a DDP "
            "module without"
        )
    if hook is not None and hook.find_reduce() is not None:
        raise AttachError("this model has an algorithm already; detach it first")


def occupy(ddp: DistributedDataParallel, reduce: _Reduce) -> None:
    """Have a method reduce the buckets of `ddp` from now on, as long as its object lives."""
    if ddp not in _registered:
        hook = _registered[ddp] = _CommHook(ddp.process_group)
        ddp.register_comm_hook(hook, _reduce)
    _registered[ddp].find_reduce = weakref.WeakMethod(reduce)


def release(ddp: DistributedDataParallel) -> None:
    """Have DDP's own allreduce reduce them again."""
    _registered[ddp].find_reduce = lambda: None
