"""Whether a call may have to be compiled: is it like the previous one?

[Note: new calls]
Compiling is not safe while replicas run (Dynamo and FX keep state that all threads share), so
replicas run concurrently only if no compile is to be expected. What graphs are guarded on is
approximated, too finely rather than too coarsely: shapes and types of arguments, plain values
in them and in the attributes of the module's parts, and the modes of torch. A call that differs in
one of these from the previous one costs one forward without concurrency. That includes a call that
repeats an earlier one: Dynamo moves the graph that it finds to the front of its list, and a thread
that searches the list meanwhile may miss its own graph, and compile. Not seen are globals,
closures, and the contents of objects of other classes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from ddpopt.data_parallel.scatter import PLAIN, children


def signature_of(value: Any) -> Hashable:
    """Return what graphs may be guarded on in an argument; equal for similar arguments."""
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        kind = (type(value), value.dtype, value.device)
        return (*kind, tuple(value.shape), layout, value.requires_grad)
    if isinstance(value, PLAIN):
        return (type(value), value)
    held = children(value)
    if held is None:
        return (type(value),)
    return (type(value), *((name, signature_of(child)) for name, child in held.items()))


def state_of(module: nn.Module) -> Hashable:
    """Return what graphs may be guarded on in a module: its parts and their plain attributes."""
    attributes = tuple(
        _attribute(value) for part in module.modules() for value in vars(part).values()
    )
    tensors = (*module.parameters(), *module.buffers())
    return (attributes, tuple((t.dtype, t.shape, t.requires_grad) for t in tensors))


def _attribute(value: Any) -> Hashable:
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, dict):  # hooks too: by the ids of their handles
        return tuple(value)
    return (type(value), len(value) if isinstance(value, list | tuple) else None)
