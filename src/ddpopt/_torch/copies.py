"""Copies of compiled DDP modules, and replicas of modules on several devices."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt._torch import names
from ddpopt._torch.compiled import (
    compiled_functions,
    compiled_parts,
    context_of,
    context_with_own_code,
    unwrap_compiled,
)
from ddpopt._torch.new_reducer import make_reducer
from ddpopt._torch.parameters import names_now, reducer_parameters


class CompiledCopy(NamedTuple):
    """A copy of a compiled DDP model."""

    model: nn.Module
    ddp: DistributedDataParallel  # `model` itself, or the DDP module that it wraps
    copies: dict[nn.Module, nn.Module]  # by the originals: the DDP module and those below
    memo: dict[int, Any]  # as `copy.deepcopy` keeps it: all copies, by the originals' ids


def copy_compiled(
    model: nn.Module, deep_copy: Callable[[Any, dict[int, Any]], Any], *, has_own_code: bool
) -> CompiledCopy:
    """A copy of a compiled DDP model with a Reducer of its own.

    Options are the same, comm hooks are left out, and nothing is communicated. Dynamo runs the
    same compiled code for both, unless the copy `has_own_code`, compiled for the copy alone.
    `deep_copy(value, memo)` copies as `copy.deepcopy` does.
    """
    ddp = unwrap_compiled(model)
    assert isinstance(ddp, DistributedDataParallel)
    memo: dict[int, Any] = {}
    # With these in the memo, compiled modules are copied with the contexts that they are to have,
    # and what refers to the DDP module will refer to its copy.
    for context in compiled_parts(model):
        memo[id(context)] = context_with_own_code(context) if has_own_code else context
    copied_ddp: DistributedDataParallel = object.__new__(type(ddp))
    memo[id(ddp)] = copied_ddp
    module = deep_copy(ddp.module, memo)
    _copy_ddp(ddp, copied_ddp, module, lambda tensor: deep_copy(tensor, memo))
    optimized = names.OPTIMIZED_MODULE.get()
    # A module may define how it is copied, and then not all below it have copies.
    copies = {part: memo[id(part)] for part in ddp.modules() if id(part) in memo}
    # Functions are not copied: a copied module's compiled functions still run the original's code.
    for part, copied in copies.items():
        if not isinstance(part, optimized):  # those were copied with their contexts
            for name, function in compiled_functions(part).items():
                copied_context = memo[id(context_of(function))]
                vars(copied)[name] = copied_context(rebound(function, memo))
    if model is ddp:  # which `ddp.compile()`, or a part's, has compiled in place
        copied_model: nn.Module = copied_ddp
    else:
        copied_model = memo[id(names.DYNAMO_CTX.get(model))](copied_ddp)
    memo[id(model)] = copied_model  # for what is copied with this memo later, such as a loss
    return CompiledCopy(copied_model, copied_ddp, copies, memo)


def _copy_ddp(
    ddp: DistributedDataParallel,
    copied_ddp: DistributedDataParallel,
    module: nn.Module,
    copy_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Make `copied_ddp` a DDP module like `ddp` around `module`.

    DDP's constructor would communicate. `copy_of` copies a parameter that the Reducer has and
    `ddp.module` has no more.
    """
    # Dictionaries are copied, since a module keeps its submodules and hooks in some.
    for name, value in vars(ddp).items():
        vars(copied_ddp)[name] = copy.copy(value) if isinstance(value, dict) else value
    copied_ddp.module = module
    # What the copy has not: comm hooks, a Reducer that rebuilt its buckets, and the original's
    # no_sync, Reducer, logger and compiled call.
    names.COMM_HOOKS.set([], copied_ddp)
    names.HAS_REBUILT_BUCKETS.set(False, copied_ddp)
    for attribute in (names.SYNCS_GRADIENTS, names.SYNCS_BUFFERS):
        attribute.set(True, copied_ddp)
    for attribute in (names.REDUCER, names.LOGGER, names.COMPILED_CALL):
        attribute.set(None, copied_ddp)
    ignored = names.IGNORED_PARAMETERS.get(ddp)
    parameters = [p for name, p in module.named_parameters() if name not in ignored]
    names.MODULE_PARAMETERS.set(parameters, copied_ddp)
    names.ASSIGN_BUFFERS.get(copied_ddp)()  # those of the copied module, which DDP broadcasts
    copied_by_name = dict(module.named_parameters(remove_duplicate=False))
    # By the module's own names, which the copy has too.
    name_of, tensors = names_now(ddp), []
    record_of = reducer_parameters(ddp)  # each parameter's name, bytes and whether it is sparse
    for tensor in record_of:
        is_there = tensor in name_of
        tensors.append(copied_by_name[name_of[tensor]] if is_there else copy_of(tensor))
    make_reducer(copied_ddp, tensors, list(record_of.values()))


def keep_local(ddp: DistributedDataParallel) -> None:
    """Keep a DDP module that has made no step from communicating, in forward and in backward."""
    names.SYNCS_GRADIENTS.set(False, ddp)
    names.SYNCS_BUFFERS.set(False, ddp)
    if ddp.static_graph:  # its first backward would allreduce despite no_sync
        names.STATIC_ENQUEUED.set(True, ddp)


def rebound(function: Callable[..., Any], copies: Mapping[int, Any]) -> Callable[..., Any]:
    """The function that `torch.compile` made this one of; for an original's method, its copy's.

    `copies` has the copies of objects, by the originals' ids.
    """
    original = names.ORIG_CALLABLE.get(function)
    # `torch.compile` puts a function around a method of a class that Dynamo skips, since torch 2.15
    # also for `DistributedDataParallel.compile`. Compiling the copy's method puts one around that.
    if inspect.isfunction(original):
        wrapping_code = names.WRAP_INLINE.get().__code__.co_consts
        if original.__code__ in wrapping_code:
            original = original.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
    if not inspect.ismethod(original):
        return original
    return types.MethodType(original.__func__, copies.get(id(original.__self__), original.__self__))


# Each module has its hooks in these two dictionaries.
_HOOK_DICTS = (names.FORWARD_PRE_HOOKS, names.FORWARD_HOOKS)


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that run before and after the forward of a module and its submodules."""
    return [hook for m in module.modules() for d in _HOOK_DICTS for hook in d.get(m).values()]


def replica(
    module: nn.Module,
    tensors: Mapping[torch.Tensor, torch.Tensor],
    hooks: Mapping[int, Callable[..., Any]],
) -> nn.Module:
    """A copy of a module's structure with other tensors and hooks, all else shared.

    It is like those of `torch.nn.DataParallel`, except that its `parameters()` works. `tensors` has
    a tensor, which is no `nn.Parameter`, for each parameter; buffers that are not in it are kept.
    `hooks` has the replacement for each of `forward_hooks`, by the hook's `id`.
    """
    # torch's replicas have dictionaries of their own for children, buffers and parameters, the last
    # one empty. All else, so the dictionaries of hooks, they share with the original.
    copies = {m: names.REPLICATE.get(m)() for m in module.modules()}
    for original, copied in copies.items():
        children = names.MODULES.get(original)  # `named_children` has shared ones once
        names.MODULES.get(copied).update(
            {n: None if child is None else copies[child] for n, child in children.items()}
        )
        buffers = names.BUFFERS.get(copied)
        buffers.update({n: tensors.get(b, b) for n, b in buffers.items() if b is not None})
        parameters = names.PARAMETERS.get(original).items()
        copied_parameters = {name: None if p is None else tensors[p] for name, p in parameters}
        for name, tensor in copied_parameters.items():
            if tensor is not None:
                setattr(copied, name, tensor)  # RNNs rebuild their list of weights when one is set
        names.PARAMETERS.set(copied_parameters, copied)  # for `parameters()`
        for hook_dict in _HOOK_DICTS:
            if originals := hook_dict.get(original):
                replaced = ((key, hooks[id(hook)]) for key, hook in originals.items())
                hook_dict.set(type(originals)(replaced), copied)
    return copies[module]


def compiling_replicas(num_devices: int) -> contextlib.AbstractContextManager[None]:
    """Compile, in a block, what is to run on this many devices concurrently.

    A function may be compiled as often on each device as otherwise on one. Hooks that come or go
    are noticed. Backward is compiled with its forward, not concurrently by autograd's threads.
    """
    return names.settings(
        {
            names.RECOMPILE_LIMIT: names.RECOMPILE_LIMIT.get() * num_devices,
            names.SKIP_HOOK_GUARDS: False,
            names.COMPILE_BACKWARD_NOW: True,
        }
    )
