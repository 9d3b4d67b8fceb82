"""Replicas of a module: new in each forward, sharing the module's Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ddpopt import _torch

Hook = Callable[..., Any]


class Hooks:
    """The forward hooks of a module as its replicas call them: uncompiled.

    If compiled, a hook that appends to a list would be recompiled in each forward, and replicas
    that run concurrently would overwrite each other's entries. torch's own hooks (`spectral_norm`,
    pruning) only compute, and stay in the graph.
    """

    def __init__(self) -> None:
        # By id; each hook is kept alive beside its caller, so that no other hook gets its id. The
        # caller stays the same, because graphs are guarded on it.
        self._known: dict[int, tuple[Hook, Hook]] = {}

    def of(self, module: nn.Module) -> dict[int, Hook]:
        """Return what replicas call in place of each hook, by the hook's id."""
        self._known = {
            id(hook): self._known.get(id(hook)) or (hook, _uncompiled(hook))
            for hook in _torch.forward_hooks(module)
        }
        return {key: call for key, (_, call) in self._known.items()}


def replicate(module: nn.Module, devices: Sequence[torch.device], hooks: Hooks) -> list[nn.Module]:
    """Return a replica for each device, through which gradients flow back to the module.

    The first one has views of the parameters and the module's own buffers, so that what it writes
    in place persists; the others have copies. All else is shared by reference.
    """
    has_grad = torch.is_grad_enabled()
    calls = hooks.of(module)
    tensors = [*module.parameters(), *module.buffers()]
    # Inference tensors, views and parameters each get their own graphs: all replicas have the same
    # kind, so that they share one graph.
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        copies: list[dict[torch.Tensor, torch.Tensor]] = [
            {p: p.view_as(p) if has_grad else p.detach() for p in module.parameters()},
            *({own: own.to(d, copy=True) for own in tensors} for d in devices[1:]),
        ]
        return [_torch.replica(module, copied, calls) for copied in copies]


def _uncompiled(hook: Hook) -> Hook:
    if str(getattr(hook, "__module__", "")).startswith("torch."):
        return hook

    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    return _torch.uncompiled(call)
