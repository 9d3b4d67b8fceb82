"""The one comm hook that DDP is given: it calls the algorithm that is attached, if any."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import AttachError

Bucket = Any  # torch.distributed.GradBucket
GradientFuture = Any  # torch.futures.Future[torch.Tensor]; DDP refuses annotations of other names


class _Reduces(Protocol):
    def on_bucket(self, bucket: Bucket) -> GradientFuture: ...


class _CommHook:
    """What DDP's Reducer calls for each bucket.

    It can be registered only once in a module's life, so it stays when an algorithm goes. The
    Reducer keeps it alive from C++, where no cycle is collected: the handle is held weakly.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.handle: weakref.ref[_Reduces] | None = None

    def live_handle(self) -> _Reduces | None:
        """Return the handle that is attached, if any."""
        return None if self.handle is None else self.handle()


_registered: weakref.WeakKeyDictionary[DistributedDataParallel, _CommHook] = (
    weakref.WeakKeyDictionary()
)


def _reduce(hook, bucket):  # type: ignore[no-untyped-def]  # see GradientFuture
    handle = hook.live_handle()
    return allreduce_hook(hook.group, bucket) if handle is None else handle.on_bucket(bucket)


def check_free(ddp: DistributedDataParallel) -> None:
    """Raise AttachError if `ddp` has an algorithm, or a comm hook that is not ours."""
    hook = _registered.get(ddp)
    if hook is None and _torch.has_comm_hook(ddp):
        raise AttachError(
            "this DDP module has a comm hook, and takes only one; attach the algorithm to a DDP "
            "module without"
        )
    if hook is not None and hook.live_handle() is not None:
        raise AttachError("this model has an algorithm already; detach it first")


def occupy(ddp: DistributedDataParallel, handle: _Reduces) -> None:
    """Have `handle` reduce the buckets of `ddp` from now on."""
    if ddp not in _registered:
        hook = _registered[ddp] = _CommHook(ddp.process_group)
        ddp.register_comm_hook(hook, _reduce)
    _registered[ddp].handle = weakref.ref(handle)


def release(ddp: DistributedDataParallel) -> None:
    """Have DDP's own allreduce reduce them again."""
    _registered[ddp].handle = None
