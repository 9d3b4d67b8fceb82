"""Replicas of a module, for `DataParallel`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddpopt._torch import names

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

    As `torch.nn.DataParallel` makes one, but that `parameters()` of it works. `tensors` has all
    parameters; buffers that are not in it stay. `hooks` has what takes the place of each of
    `forward_hooks`, by the `id` of that.
    """
    copies = {m: names.REPLICATE.of(m)() for m in module.modules()}
    for original, copied in copies.items():
        children = names.MODULES.of(original)
        names.MODULES.of(copied).update(
            {n: None if child is None else copies[child] for n, child in children.items()}
        )
        buffers = names.BUFFERS.of(copied)
        buffers.update({n: tensors.get(b, b) for n, b in buffers.items() if b is not None})
        parameters = names.PARAMETERS.of(original)
        own = {name: None if p is None else tensors[p] for name, p in parameters.items()}
        for name, tensor in own.items():
            if tensor is not None:
                setattr(copied, name, tensor)  # RNNs list their weights anew when one is set
        names.PARAMETERS.set(copied, own)
        for row in _HOOKS:
            if found := row.of(original):
                row.set(copied, type(found)((key, hooks[id(h)]) for key, h in found.items()))
    made: torch.nn.Module = copies[module]
    return made


def compiling_replicas(num_devices: int) -> contextlib.AbstractContextManager[None]:
    """Compile, in a block, what is to run on that many devices at the same time.

    A function may be compiled as often on each device as it may on one. Hooks that come or go are
    noticed. Backward is compiled with its forward: autograd has a thread for each device, and they
    would compile at the same time.
    """
    return names.settings(
        {
            names.RECOMPILE_LIMIT: names.RECOMPILE_LIMIT.get() * num_devices,
            names.SKIP_HOOK_GUARDS: False,
            names.COMPILE_BACKWARD_NOW: True,
        }
    )
