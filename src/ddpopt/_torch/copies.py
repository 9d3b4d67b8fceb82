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
    context_of_copy,
    unwrap_compiled,
)
from ddpopt._torch.new_reducer import make_reducer
from ddpopt._torch.parameters import names_now, reducer_parameters


class CompiledCopy(NamedTuple):
    """What was made: `model`, the `ddp` in it, and the copy of each module below."""

    model: nn.Module
    ddp: DistributedDataParallel
    copies: dict[nn.Module, nn.Module]
    memo: dict[int, Any]  # as `copy.deepcopy` keeps it: all copies, by the originals' ids


def copy_compiled(
    model: nn.Module, deep_copy: Callable[[Any, dict[int, Any]], Any], *, has_own_code: bool
) -> CompiledCopy:
    """A copy of a compiled DDP model with a Reducer of its own.

    Options are the same, comm hooks are left out, and nothing is communicated. Dynamo runs the
    same compiled code for both, unless the copy `has_own_code`, compiled for the copy alone.
    """
    parts = compiled_parts(model)
    contexts = {id(part): context_of_copy(part) if has_own_code else part for part in parts}
    ddp = unwrap_compiled(model)
    assert isinstance(ddp, DistributedDataParallel)
    copied_ddp: DistributedDataParallel = object.__new__(type(ddp))
    copies: dict[int, Any] = {**contexts, id(ddp): copied_ddp}  # by the original's id
    module = deep_copy(ddp.module, copies)
    _copy_ddp(ddp, copied_ddp, module, lambda tensor: deep_copy(tensor, copies))
    optimized = names.OPTIMIZED_MODULE.get()
    modules = {part: copies[id(part)] for part in ddp.modules() if id(part) in copies}
    for part, copied in modules.items():
        if not isinstance(part, optimized):  # those compile themselves
            for name, function in compiled_functions(part).items():
                compile_alike = contexts[id(context_of(function))]
                vars(copied)[name] = compile_alike(rebound(function, copies))
    outer = None if model is ddp else contexts[id(names.DYNAMO_CTX.get(model))]
    made = copied_ddp if outer is None else outer(copied_ddp)
    copies[id(model)] = made
    return CompiledCopy(made, copied_ddp, modules, copies)


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
    state = vars(ddp)
    copied = {name: copy.copy(value) for name, value in state.items() if isinstance(value, dict)}
    vars(copied_ddp).update({**state, **copied})
    copied_ddp.module = module
    names.COMM_HOOKS.set([], copied_ddp)
    names.HAS_REBUILT_BUCKETS.set(False, copied_ddp)
    for row in (names.SYNCS_GRADIENTS, names.SYNCS_BUFFERS):
        row.set(True, copied_ddp)
    for row in (names.REDUCER, names.LOGGER, names.COMPILED_CALL):
        row.set(None, copied_ddp)
    ignored = names.IGNORED_PARAMETERS.get(ddp)
    own = [parameter for name, parameter in module.named_parameters() if name not in ignored]
    names.MODULE_PARAMETERS.set(own, copied_ddp)
    names.ASSIGN_BUFFERS.get(copied_ddp)()
    copied_by_name = dict(module.named_parameters(remove_duplicate=False))
    # By the module's own names, which the copy has too.
    name_of, tensors = names_now(ddp), []
    for tensor in (reduced := reducer_parameters(ddp)):
        is_there = tensor in name_of
        tensors.append(copied_by_name[name_of[tensor]] if is_there else copy_of(tensor))
    make_reducer(copied_ddp, tensors, list(reduced.values()))


def keep_local(ddp: DistributedDataParallel) -> None:
    """Keep a module that was just made from communicating, in forward and in backward."""
    names.SYNCS_GRADIENTS.set(False, ddp)
    names.SYNCS_BUFFERS.set(False, ddp)
    if ddp.static_graph:  # its first backward would allreduce despite no_sync
        names.STATIC_ENQUEUED.set(True, ddp)


def rebound(function: Callable[..., Any], copies: Mapping[int, Any]) -> Callable[..., Any]:
    """The function that `torch.compile` was given; for an original's method, its copy's."""
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


_HOOKS = (names.FORWARD_PRE_HOOKS, names.FORWARD_HOOKS)


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that run before and after the forward of a module and its submodules."""
    return [hook for m in module.modules() for row in _HOOKS for hook in row.get(m).values()]


def replica(
    module: nn.Module,
    tensors: Mapping[torch.Tensor, torch.Tensor],
    hooks: Mapping[int, Callable[..., Any]],
) -> nn.Module:
    """A copy of a module's structure with other tensors and hooks, all else shared.

    It is like those of `torch.nn.DataParallel`, except that its `parameters()` works. `tensors` has
    all parameters; buffers that are not in it are kept. `hooks` has the replacement for each of
    `forward_hooks`, by the hook's `id`.
    """
    copies = {m: names.REPLICATE.get(m)() for m in module.modules()}
    for original, copied in copies.items():
        children = names.MODULES.get(original)  # `named_children` has shared ones once
        names.MODULES.get(copied).update(
            {n: None if child is None else copies[child] for n, child in children.items()}
        )
        buffers = names.BUFFERS.get(copied)
        buffers.update({n: tensors.get(b, b) for n, b in buffers.items() if b is not None})
        parameters = names.PARAMETERS.get(original).items()
        own = {name: None if p is None else tensors[p] for name, p in parameters}
        for name, tensor in own.items():
            if tensor is not None:
                setattr(copied, name, tensor)  # RNNs rebuild their list of weights when one is set
        names.PARAMETERS.set(own, copied)
        for row in _HOOKS:
            if found := row.get(original):
                row.set(type(found)((key, hooks[id(h)]) for key, h in found.items()), copied)
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
