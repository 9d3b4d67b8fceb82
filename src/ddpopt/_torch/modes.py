"""Modes and comm hooks of a DDP module."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt._indices import ParameterIndex
from ddpopt._torch import names
from ddpopt._torch.parameters import reducer_parameters
from ddpopt._torch.reducer import log_of


def syncs_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether DDP reduces the gradients of a forward that runs now: not under no_sync."""
    return bool(names.SYNCS_GRADIENTS.get(ddp))


def is_in_join(ddp: DistributedDataParallel) -> bool:
    return bool(names.JOIN_CONFIG.get(ddp).enable)


def has_optimizer_in_backward(ddp: DistributedDataParallel) -> bool:
    """Whether backward steps an optimizer (`apply_optimizer_in_backward`)."""
    return any(map(names.OPTIMIZERS_IN_BACKWARD.is_in, ddp.parameters()))


def has_delayed_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether DDP reduces some parameters after backward (`delay_all_reduce_named_params`)."""
    return bool(names.DELAYED_PARAMS.get(ddp))


def awaiting_delayed(ddp: DistributedDataParallel) -> tuple[ParameterIndex, ...]:
    """The parameters, by index, at whose gradient DDP reduces the delayed parameters' gradients.

    Delayed are the parameters that DDP was given as `delay_all_reduce_named_params`.
    """
    if not has_delayed_parameters(ddp):
        return ()
    # A method of DDP's, which DDP has put as a hook on the tensors of these parameters.
    delayed_hook = names.DELAYED_HOOK.get(type(ddp))
    indices = []
    for tensor, parameter in reducer_parameters(ddp).items():
        hooks = (names.TENSOR_HOOKS.get(tensor) or {}).values()
        if any(getattr(hook, "__func__", None) is delayed_hook for hook in hooks):
            indices.append(parameter.index)
    return tuple(indices)


class BucketReduction:
    """What reduces the buckets of a DDP module: an algorithm, or DDP's allreduce when that is gone.

    It is the state of the only comm hook that the module can get, and stays when an algorithm goes.
    DDP's Reducer keeps it alive from C++, where no cycles are collected, so it has weak references;
    copies of the module lose it.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        # Returns the algorithm's function, from a bucket to the future of its gradients; None while
        # no algorithm is attached. Set by the algorithm's `Handle`.
        self.find_algorithm: Callable[[], Callable[[Any], Any] | None] = lambda: None
        ddp.register_comm_hook(self, BucketReduction.reduce)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy, or what is unpickled, is None

    @property
    def is_idle(self) -> bool:
        """Whether DDP's own allreduce runs, as if there were no comm hook."""
        return self.find_algorithm() is None

    def reduce(self, bucket):  # type: ignore[no-untyped-def]  # DDP refuses Any
        """The comm hook, which DDP calls with each bucket whose gradients have arrived."""
        algorithm, ddp = self.find_algorithm(), self._ddp()
        assert ddp is not None  # it is in its backward
        return allreduce_hook(ddp.process_group, bucket) if algorithm is None else algorithm(bucket)


def bucket_reduction(ddp: DistributedDataParallel) -> BucketReduction | None:
    """This module's `BucketReduction`; None if no algorithm has ever been attached to it."""
    states = (state for _, state in _registered_hooks(ddp) if isinstance(state, BucketReduction))
    return next(states, None)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a comm hook reduces gradients, in Python or one of DDP's own in C++."""
    reduction = bucket_reduction(ddp)
    is_registered = bool(log_of(ddp).get(names.COMM_HOOK.text))
    return is_registered and (reduction is None or not reduction.is_idle)


def hook_states(ddp: DistributedDataParallel) -> list[Any]:
    """Return what comm hooks registered in Python may keep between buckets.

    For each hook: the state that it was registered with, and objects bound to it, except what
    cannot change, such as numbers. Left out is the hook of an algorithm that was detached, which
    only calls DDP's allreduce.
    """
    states: list[Any] = []
    for hook, state in _registered_hooks(ddp):
        if not (isinstance(state, BucketReduction) and state.is_idle):
            states += filter(_may_change, (state, *_bound_to(hook)))
    return states


def _bound_to(hook: Any) -> list[Any]:
    """What a hook keeps: its object, its partial arguments, the variables of its closure.

    Functions among them are looked into as well, each once: two may have each other. A hook that is
    a callable object keeps itself.
    """
    if isinstance(hook, types.MethodType):
        return [hook.__self__]
    found: list[Any] = []
    seen: set[int] = set()
    pending = [hook]
    while pending:
        kept = pending.pop()
        if id(kept) in seen:
            continue
        seen.add(id(kept))
        if isinstance(kept, functools.partial):
            pending += [kept.func, *kept.args, *kept.keywords.values()]
        elif isinstance(kept, types.FunctionType):
            for cell in kept.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty one
                    pending.append(cell.cell_contents)
        else:
            found.append(kept)
    return found


# Types whose values cannot be changed from bucket to bucket.
_CONSTANTS = (
    *(type(None), int, float, str, type, torch.dtype, torch.device, dist.ProcessGroup),
    *(types.FunctionType, types.BuiltinFunctionType),
)


def _may_change(kept: Any) -> bool:
    """Whether something may be a state that a hook changes from bucket to bucket."""
    return not isinstance(kept, _CONSTANTS)


def runs_optimizers(ddp: DistributedDataParallel) -> bool:
    """Whether a comm hook is one of torch's that update parameters, by numbers of buckets."""
    hooks = (hook for hook, _ in _registered_hooks(ddp))
    return any(getattr(hook, "__module__", "").endswith(".ddp_zero_hook") for hook in hooks)


class CommHook(NamedTuple):
    """A comm hook in Python, or with `hook` None one of DDP's own in C++, of the kind `state`."""

    hook: Any
    state: Any


def possible_hooks(ddp: DistributedDataParallel) -> list[CommHook]:
    """The comm hook of the module's Reducer; several if torch does not tell which of them it is.

    A Reducer takes the first hook that it is given, and refuses further ones. But DDP's list gets
    refused hooks too, and DDP's log names the last hook. If A is registered, then B, B is refused:

        list [A, B], log "B", and A reduces gradients

    A copy of a module, or a loaded one, has the original's list, but a Reducer without any hook. If
    B is registered with a copy of a module that has A, B reduces gradients, with the same list and
    log.
    """
    logged = str(log_of(ddp).get(names.COMM_HOOK.text, ""))
    if not logged:
        return []
    hooks = [CommHook(hook, state) for hook, state in names.COMM_HOOKS.get(ddp)]
    if logged.startswith("BuiltinCommHookType."):
        kinds = names.BUILTIN_HOOKS.get().__members__
        hooks.append(CommHook(None, kinds[logged.rpartition(".")[2]]))
    # `__setstate__` sets the process group before all else, the constructor does so later.
    is_copy_or_loaded = next(iter(vars(ddp))) == "process_group"
    # LIMIT: one of DDP's own in C++, registered before the first in Python, is in force unseen:
    # `_register_builtin_comm_hook`, which torch does not document, notes it nowhere but in the log.
    return hooks if is_copy_or_loaded else hooks[:1]


def find_unknown_hook(ddp: DistributedDataParallel) -> str:
    """Say why it is not known which comm hook reduces gradients; "" if it is."""
    # Several only if the module is a copy or was loaded: see `possible_hooks`.
    num_hooks = len(possible_hooks(ddp))
    if num_hooks < 2:
        return ""
    return (
        f"of its {num_hooks} comm hooks one is in force, and DDP does not tell which: it is a copy "
        "of a module that had one, or was loaded; register hooks with the module that "
        "DistributedDataParallel's constructor makes"
    )


def _registered_hooks(ddp: DistributedDataParallel) -> list[CommHook]:
    """Those of the possible comm hooks that are in Python."""
    return [each for each in possible_hooks(ddp) if each.hook is not None]
