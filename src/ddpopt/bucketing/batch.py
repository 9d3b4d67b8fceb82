"""What a model is called with, and a loss of what it returns, where the user gives neither."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Batch(NamedTuple):
    """The arguments of one forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_batch(batch: Any) -> Batch:
    """Return a tensor, a tuple of positional or a mapping of keyword arguments as a Batch."""
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        return Batch((), dict(batch))
    return Batch(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})


def find_loss(output: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """Return the output's `loss` (attribute or key), if that is a scalar with a gradient.

    Otherwise return the sum of what `of` makes of each floating point tensor with a gradient; None
    if there is no such tensor.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        scalar: torch.Tensor = loss
        return scalar
    found = [t for t in tensors_of(output) if t.is_floating_point() and t.requires_grad]
    if not found:
        return None
    total = of(found[0])
    for tensor in found[1:]:
        total = total + of(tensor)
    return total


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested sequences, mappings and objects with attributes, each once."""
    seen: dict[int, Any] = {}  # objects may refer to each other

    def walk(item: Any) -> Iterator[torch.Tensor]:
        if id(item) in seen:
            return
        seen[id(item)] = item
        parts: Iterable[Any] = ()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            parts = item.values()
        elif isinstance(item, list | tuple):
            parts = item
        elif hasattr(item, "__dict__") and not isinstance(item, _WITHOUT_VALUES):
            parts = vars(item).values()
        for part in parts:
            yield from walk(part)

    return walk(value)


# Their attributes are code, or state that is no output.
_WITHOUT_VALUES = (torch.nn.Module, type, types.FunctionType, types.ModuleType)
