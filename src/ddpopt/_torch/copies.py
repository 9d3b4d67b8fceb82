"""Copies of a compiled DDP model, for steps of `verify` and `warmup`; replicas of a module."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt._torch import names
from ddpopt._torch.ddp import make_reducer, reducer_parameters
from ddpopt._torch.dynamo import (
    compiled_functions,
    compiled_parts,
    context_apart,
    context_of,
    unwrap_compiled,
)


class CompiledCopy(NamedTuple):
    """What was made: `model`, the `ddp` in it, and the copy of each module below."""

    model: torch.nn.Module
    ddp: DistributedDataParallel
    copies: dict[torch.nn.Module, torch.nn.Module]


def copy_compiled(
    model: torch.nn.Module, deep_copy: Callable[[Any, dict[int, Any]], Any], *, is_apart: bool
) -> CompiledCopy:
    """Return a copy of a compiled DDP model with a Reducer of its own.

    Options are the same, comm hooks are left out, and nothing is communicated. Dynamo runs the
    same compiled code for both, unless the copy `is_apart`: then it is compiled separately.
    """
    parts = compiled_parts(model)
    contexts = {id(part): context_apart(part) if is_apart else part for part in parts}
    ddp = unwrap_compiled(model)
    assert isinstance(ddp, DistributedDataParallel)
    twin: DistributedDataParallel = object.__new__(type(ddp))
    copies: dict[int, Any] = {**contexts, id(ddp): twin}  # by the original's id
    _copy_ddp(ddp, twin, deep_copy(ddp.module, copies))
    optimized = names.OPTIMIZED_MODULE.get()
    modules = {part: copies[id(part)] for part in ddp.modules() if id(part) in copies}
    for part, copied in modules.items():
        if not isinstance(part, optimized):  # those compile themselves
            for name, function in compiled_functions(part).items():
                compile_alike = contexts[id(context_of(function))]
                vars(copied)[name] = compile_alike(_rebound(function, copies))
    outer = None if model is ddp else contexts[id(names.DYNAMO_CTX.of(model))]
    return CompiledCopy(twin if outer is None else outer(twin), twin, modules)


def _copy_ddp(
    ddp: DistributedDataParallel, twin: DistributedDataParallel, module: torch.nn.Module
) -> None:
    """Make `twin` a DDP module like `ddp` around `module`; DDP's constructor would communicate."""
    state = vars(ddp)
    copied = {name: copy.copy(value) for name, value in state.items() if isinstance(value, dict)}
    vars(twin).update({**state, **copied})
    names.MODULES.set(twin, {"module": module})
    names.COMM_HOOKS.set(twin, [])
    names.HAS_REBUILT_BUCKETS.set(twin, False)
    for row in (names.SYNCS_GRADIENTS, names.SYNCS_BUFFERS):
        row.set(twin, True)
    for row in (names.REDUCER, names.LOGGER, names.COMPILED_CALL):
        row.set(twin, None)
    ignored = names.IGNORED_PARAMETERS.of(ddp)
    own = [parameter for name, parameter in module.named_parameters() if name not in ignored]
    names.MODULE_PARAMETERS.set(twin, own)
    names.ASSIGN_BUFFERS.of(twin)()
    tensors = dict(module.named_parameters(remove_duplicate=False))
    reduced = list(reducer_parameters(ddp).values())
    make_reducer(twin, [tensors[parameter.name] for parameter in reduced], reduced)


def keep_local(ddp: DistributedDataParallel) -> None:
    """Keep a module that was just made from communicating, in forward and in backward."""
    names.SYNCS_GRADIENTS.set(ddp, False)
    names.SYNCS_BUFFERS.set(ddp, False)
    if ddp.static_graph:  # its first backward would allreduce despite no_sync
        names.STATIC_ENQUEUED.set(ddp, True)


def _rebound(function: Callable[..., Any], copies: Mapping[int, Any]) -> Callable[..., Any]:
    """Return the function that `torch.compile` was given; for an original's method, its copy's."""
    original = names.ORIG_CALLABLE.of(function)
    if not inspect.ismethod(original):
        return original
    return types.MethodType(original.__func__, copies.get(id(original.__self__), original.__self__))


_HOOKS = (names.FORWARD_PRE_HOOKS, names.FORWARD_HOOKS)


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after the forward of a module and its submodules."""
    return [hook for m in module.modules() for row in _HOOKS for hook in row.of(m).values()]


def replica(
    module: torch.nn.Module,
    tensors: Mapping[torch.Tensor, torch.Tensor],
    hooks: Mapping[int, Callable[..., Any]],
) -> torch.nn.Module:
    """Return a copy of a module's structure with other tensors and hooks, all else shared.

    It is like those of `torch.nn.DataParallel`, except that its `parameters()` works. `tensors` has
    all parameters; buffers that are not in it are kept. `hooks` has the replacement for each of
    `forward_hooks`, by the hook's `id`.
    """
    copies = {m: names.REPLICATE.of(m)() for m in module.modules()}
    for original, copied in copies.items():
        children = names.MODULES.of(original)
        names.MODULES.of(copied).update(
            {n: None if child is None else copies[child] for n, child in children.items()}
        )
        buffers = names.BUFFERS.of(copied)
        buffers.update({n: tensors.get(b, b) for n, b in buffers.items() if b is not None})
        parameters = names.PARAMETERS.of(original).items()
        own = {name: None if p is None else tensors[p] for name, p in parameters}
        for name, tensor in own.items():
            if tensor is not None:
                setattr(copied, name, tensor)  # RNNs rebuild their list of weights when one is set
        names.PARAMETERS.set(copied, own)
        for row in _HOOKS:
            if found := row.of(original):
                row.set(copied, type(found)((key, hooks[id(h)]) for key, h in found.items()))
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
