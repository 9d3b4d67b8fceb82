"""Replicas of a module: new in each forward, sharing what Python objects the module has.

Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ddpopt import _torch

Hook = Callable[..., Any]


def check_module(module: nn.Module, refused: tuple[type[nn.Module], ...]) -> None:
    """Refuse a module whose replicas would not run as replicas.

    Raises:
        TypeError: it is no module.
        ValueError: it, or a part of it, is compiled or scripted already, or of one of the classes
            that are refused for being parallel themselves.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give an nn.Module")
    for name, part in module.named_modules():
        which = f"module {name!r}" if name else "the module"
        kind = type(part).__name__
        if _torch.is_compiled_module(part):
            raise ValueError(
                f"{which} ({kind}) is compiled already, and its replicas would all run the "
                "original's parameters; give the uncompiled module: DataParallel compiles it"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"{which} ({kind}) is a ScriptModule, which torch.compile leaves as it is; give "
                "the module that it was scripted from"
            )
        if isinstance(part, refused):
            raise ValueError(f"{which} ({kind}) is parallel already; give the module that it wraps")


def check_placement(module: nn.Module, device: torch.device) -> None:
    """Refuse to replicate a module that is not on the first device.

    Raises:
        ValueError: a parameter or buffer is elsewhere.
    """
    parameters, buffers = module.named_parameters(), module.named_buffers()
    for kind, named in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in named:
            if tensor.device != device:
                raise ValueError(
                    f"{kind} {name!r} is on {tensor.device}, and replicas are made from "
                    f"{device}, the first of the devices; call .to({str(device)!r}) first"
                )


class Hooks:
    """The forward hooks of a module as its replicas call them: uncompiled.

    Compiled, a hook that appends to a list would be recompiled in each forward, and replicas
    that run at the same time would write over each other's entries. torch's own hooks
    (`spectral_norm`, pruning) only compute, and stay in the graph.
    """

    def __init__(self) -> None:
        # By id; a hook is kept beside what calls it, so that no other hook gets its id. What calls
        # it stays the same, because graphs are guarded on it.
        self._known: dict[int, tuple[Hook, Hook]] = {}

    def of(self, module: nn.Module) -> dict[int, Hook]:
        """Return what replicas are to call for each hook, by the hook's id."""
        self._known = {
            id(hook): self._known.get(id(hook)) or (hook, _uncompiled(hook))
            for hook in _torch.forward_hooks(module)
        }
        return {key: call for key, (_, call) in self._known.items()}


def replicate(module: nn.Module, devices: Sequence[torch.device], hooks: Hooks) -> list[nn.Module]:
    """Return a replica for each device, through which gradients flow back to the module.

    Parameters are views in the first replica, and copies in the others; autograd sums what comes
    back. Buffers are the module's own in the first replica, so that what it writes in place stays,
    and copies in the others. All else is shared by reference.
    """
    has_grad = torch.is_grad_enabled()
    calls = hooks.of(module)
    # Inference tensors, views and parameters each have graphs of their own: all replicas have
    # the same kind, so that they share one graph.
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        return [
            _torch.replica(module, _copy_tensors(module, device, index == 0), calls)
            for index, device in enumerate(devices)
        ]


def _copy_tensors(
    module: nn.Module, device: torch.device, is_first: bool
) -> dict[torch.Tensor, torch.Tensor]:
    if is_first:
        has_grad = torch.is_grad_enabled()
        return {p: p.view_as(p) if has_grad else p.detach() for p in module.parameters()}
    return {own: own.to(device, copy=True) for own in (*module.parameters(), *module.buffers())}


def _uncompiled(hook: Hook) -> Hook:
    if str(getattr(hook, "__module__", "")).startswith("torch."):
        return hook

    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    return _torch.uncompiled(call)
