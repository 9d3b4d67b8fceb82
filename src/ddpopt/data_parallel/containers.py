"""What may hold tensors in arguments and outputs: tuples, lists, dicts, named tuples, dataclasses.

Everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def children(value: Any) -> dict[str, Any] | None:
    """Return what a container holds, by the text that selects it: `[0]`, `['mask']`, `.mask`.

    None for a leaf. Fields that a dataclass fills in by itself are left out.
    """
    if isinstance(value, dict):
        return {f"[{key!r}]": child for key, child in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{i}]": child for i, child in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in _own_fields(value)}
    return None


def rebuild(value: Any, new: Sequence[Any]) -> Any:
    """Return a container like `value` with other children, in the order of `children`."""
    if isinstance(value, dict):
        return type(value)(zip(value, new, strict=True))
    if not isinstance(value, list | tuple):
        names = [field.name for field in _own_fields(value)]
        return dataclasses.replace(value, **dict(zip(names, new, strict=True)))
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value`, each with the expression that leads to it from `name`."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for selector, child in (children(value) or {}).items():
        yield from tensors(child, name + selector)


def _own_fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(value) if field.init]
