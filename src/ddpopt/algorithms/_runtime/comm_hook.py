"""The one comm hook that DDP is given: it calls the algorithm that is attached, if any."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import AttachError

Bucket = Any  # torch.distributed.GradBucket
GradientFuture = Any  # torch.futures.Future[torch.Tensor]; DDP refuses annotations of other names
_Reduce = Callable[[Bucket], GradientFuture]

# What reduces the buckets of a DDP module now. It can have a comm hook only once in its life, so it
# stays in here when its algorithm goes; and its Reducer keeps the hook alive from C++, where no
# cycle is collected, so that all references are weak.
_attached: weakref.WeakKeyDictionary[DistributedDataParallel, Callable[[], _Reduce | None]] = (
    weakref.WeakKeyDictionary()
)


def _reduce(find_ddp, bucket):  # type: ignore[no-untyped-def]  # see GradientFuture
    ddp = find_ddp()
    reduce = _attached[ddp]()
    return allreduce_hook(ddp.process_group, bucket) if reduce is None else reduce(bucket)


def check_free(ddp: DistributedDataParallel) -> None:
    """Raise AttachError if `ddp` has an algorithm, or a comm hook that is not ours."""
    if ddp not in _attached and _torch.has_comm_hook(ddp):
        raise AttachError(
            "this DDP module has a comm hook, and takes only one; attach the algorithm to a DDP "
            "module without"
        )
    if ddp in _attached and _attached[ddp]() is not None:
        raise AttachError("this model has an algorithm already; detach it first")


def occupy(ddp: DistributedDataParallel, reduce: _Reduce) -> None:
    """Have a method reduce the buckets of `ddp` from now on, as long as its object lives."""
    if ddp not in _attached:
        ddp.register_comm_hook(weakref.ref(ddp), _reduce)
    _attached[ddp] = weakref.WeakMethod(reduce)


def release(ddp: DistributedDataParallel) -> None:
    """Have DDP's own allreduce reduce them again."""
    _attached[ddp] = lambda: None
