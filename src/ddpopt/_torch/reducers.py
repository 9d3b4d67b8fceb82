"""Reducers: a new one, with other buckets, for a DDP module that is training."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt._torch import names
from ddpopt._torch.autograd import queue_callback
from ddpopt._torch.ddp import builtin_hook, reducer_parameters, registered_hooks, requiring_grad
from ddpopt.reducer import Parameter


def check_names_for_tuning(ddp: DistributedDataParallel) -> None:
    """Find out, before a step depends on it, whether buckets can be changed while training.

    Raises:
        TorchDriftError: a name that is needed for it has moved.
    """
    for row in (
        names.DDP_INIT_HELPER,
        names.COMM_HOOKS,
        names.GET_LOGGING_DATA,
        names.JOIN_CONFIG,
        names.REMOVE_AUTOGRAD_HOOKS,
        names.LOGGER,
    ):
        row.of(ddp)
    names.ASSIGN_BUCKETS.get()
    names.GROUP_STORE.get()
    queue_callback()


def replace_reducer(
    ddp: DistributedDataParallel, buckets: Sequence[Sequence[int]], caps_bytes: Sequence[int]
) -> None:
    """Give `ddp` a new Reducer with these buckets, by parameter index, in launch order.

    As DDP's constructor makes it, with the same options and comm hooks. It rebuilds its buckets
    after its first iteration as any Reducer, by the limits `caps_bytes`, one for each bucket.
    """
    reduced = reducer_parameters(ddp)
    hooks, own_hook = registered_hooks(ddp), builtin_hook(ddp)
    names.HAS_REBUILT_BUCKETS.set(ddp, False)
    names.CAPS_BYTES.set(ddp, list(caps_bytes))
    if names.BUCKET_CONFIG.is_expected:
        config = names.BUCKET_CONFIG.of(ddp)
        changed = dataclasses.replace(config, per_bucket_bytes_caps=tuple(caps_bytes))
        names.BUCKET_CONFIG.set(ddp, changed)
    _drop_reducer(ddp)
    # DDP reverses the buckets that it is given.
    assigned = ([list(bucket) for bucket in reversed(buckets)], list(reversed(caps_bytes)))
    with names.ASSIGN_BUCKETS.replaced_by(lambda *_args, **_kwargs: assigned):
        make_reducer(ddp, list(reduced), list(reduced.values()))
    for hook, state in hooks:
        names.SET_HOOK_NAME.of(names.LOGGER.of(ddp))(hook.__qualname__)
        names.REGISTER_HOOK.get()(names.REDUCER.of(ddp), state, hook)
    if own_hook is not None:
        names.SET_HOOK_NAME.of(names.LOGGER.of(ddp))(str(own_hook))
        names.REGISTER_BUILTIN_HOOK.get()(names.REDUCER.of(ddp), own_hook)


def _drop_reducer(ddp: DistributedDataParallel) -> None:
    """Free the buckets of `ddp` before there are others.

    `torch.compile(ddp)` makes functions with all attributes of `ddp`, by `functools.wraps`. They
    would keep the Reducer, and its logger that keeps it too.
    """
    names.REMOVE_AUTOGRAD_HOOKS.of(ddp)()
    attributes = (names.REDUCER.name, names.LOGGER.name)
    for owner in gc.get_referrers(names.REDUCER.of(ddp)):
        if isinstance(owner, dict) and owner.keys() >= {*attributes, "process_group"}:
            owner.update(dict.fromkeys(attributes))


def make_reducer(
    ddp: DistributedDataParallel, tensors: Sequence[torch.Tensor], parameters: Sequence[Parameter]
) -> None:
    """Give `ddp` a Reducer of these, as DDP's constructor makes it; some may be frozen now."""
    is_sparse = [parameter.is_sparse for parameter in parameters]
    named = {parameter.index: parameter.name for parameter in parameters}
    with requiring_grad(tensors):
        names.DDP_INIT_HELPER.of(ddp)(list(tensors), is_sparse, named, ddp.static_graph)
    if ddp.static_graph:
        names.STATIC_ENQUEUED.set(ddp, False)
        names.REDUCER_SET_STATIC.of(names.REDUCER.of(ddp))()
        names.LOGGER_SET_STATIC.of(names.LOGGER.of(ddp))()


def prepare_reducer(ddp: DistributedDataParallel) -> None:
    """Tell a Reducer that was made inside of DDP's forward that this forward has begun."""
    names.PREPARE_FOR_FORWARD.of(names.REDUCER.of(ddp))()
