"""Divide a batch among devices, and join what the replicas return. Both are differentiable.

Tuples, lists, dicts, named tuples and dataclasses are containers whose tensors are divided and
joined. Everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# If equal in all replicas, these are returned as they are.
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


Share = tuple[tuple[Any, ...], dict[str, Any]]  # what one replica is called with


def scatter(
    args: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int
) -> list[Share]:
    """Return the shares of the first devices, as many as there are chunks.

    Tensors are divided along `dim` as by `torch.chunk`. 0-dimensional tensors go to each device;
    other objects are shared by reference. If there is no tensor to divide, there is one share.

    Raises:
        ValueError: a tensor has no rows, lacks `dim`, or does not have as many rows as the first.
    """
    num_rows = _count_rows([*_tensors(args, "args"), *_tensors(kwargs, "kwargs")], dim)
    chunk_size = -(-num_rows // len(devices))
    used = devices[: -(-num_rows // chunk_size)]
    return _divide((args, kwargs), used, chunk_size, dim)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`; a copy to the CPU is complete when this returns."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _count_rows(named: Sequence[tuple[str, torch.Tensor]], dim: int) -> int:
    """Return how many rows there are to divide; 1 if no tensor has rows."""
    first_name, num_rows = "", 1
    for name, tensor in named:
        if not tensor.dim():
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, so it cannot be divided along dim {dim}; "
                "choose another dim for DataParallel, or give this argument that dimension"
            )
        if not first_name:
            first_name, num_rows = name, tensor.size(dim)
        if tensor.size(dim) != num_rows:
            raise ValueError(
                f"along dim {dim} {first_name} has {num_rows} rows and {name} has "
                f"{tensor.size(dim)}; give both the batch as that dimension (expand what all rows "
                "share), or make it a buffer of the module"
            )
    if not num_rows:
        raise ValueError(
            f"{first_name} has no rows along dim {dim}, so there is nothing to divide; leave "
            "empty batches out"
        )
    return num_rows


def _divide(value: Any, devices: Sequence[torch.device], chunk_size: int, dim: int) -> list[Any]:
    if isinstance(value, torch.Tensor):
        chunks = torch.split(value, chunk_size, dim) if value.dim() else [value] * len(devices)
        return [move(chunk, device) for chunk, device in zip(chunks, devices, strict=True)]
    held = children(value)
    if not held:
        return [value] * len(devices)
    divided = [_divide(child, devices, chunk_size, dim) for child in held.values()]
    return [_rebuild(value, share) for share in zip(*divided, strict=True)]


def gather(outputs: Sequence[Any], device: torch.device, dim: int, name: str = "output") -> Any:
    """Return one output with the structure of the replicas', its tensors joined on `device`.

    Tensors are concatenated along `dim`; 0-dimensional ones become a vector. None, numbers and
    strings are returned if all replicas return the same.

    Raises:
        ValueError: the replicas' outputs differ in structure, or their tensors cannot be joined.
        TypeError: an output is neither a tensor, a container nor None.
    """
    first = outputs[0]
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _join([move(output, device) for output in outputs], dim, name)
    if any(type(output) is not type(first) for output in outputs):
        raise _differ(outputs, name)
    if first is None or isinstance(first, PLAIN):
        if any(output != first for output in outputs):
            raise _differ(outputs, name)
        return first
    held = [each for each in map(children, outputs) if each is not None]
    if not held:
        raise TypeError(
            f"{name} of the module is a {type(first).__name__}, which cannot be joined; return "
            "tensors, None, or tuples, lists, dicts and dataclasses of them"
        )
    if any(each.keys() != held[0].keys() for each in held):
        raise _differ(outputs, name)
    joined = [gather([each[key] for each in held], device, dim, name + key) for key in held[0]]
    return _rebuild(first, joined)


def _join(tensors: list[torch.Tensor], dim: int, name: str) -> torch.Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.cat(tensors, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"{name} has shapes {shapes} in the replicas, which cannot be concatenated along "
            f"dim {dim}; return tensors that have the batch there"
        ) from error


def _differ(outputs: Sequence[Any], name: str) -> ValueError:
    texts = [type(o).__name__ if isinstance(o, torch.Tensor) else repr(o) for o in outputs]
    return ValueError(
        f"{name} differs between replicas ({'; '.join(text[:60] for text in texts)}); return the "
        "same structure from each"
    )


def children(value: Any) -> dict[str, Any] | None:
    """Return what a container holds, by the text that selects it: `[0]`, `['mask']`, `.mask`.

    None for a leaf. Fields that a dataclass fills in itself are left out.
    """
    if isinstance(value, dict):
        return {f"[{key!r}]": child for key, child in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{i}]": child for i, child in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in _own_fields(value)}
    return None


def _rebuild(value: Any, new: Sequence[Any]) -> Any:
    """Return a container like `value` with other children, in the order of `children`."""
    if isinstance(value, dict):
        return type(value)(zip(value, new, strict=True))
    if not isinstance(value, list | tuple):
        names = [field.name for field in _own_fields(value)]
        return dataclasses.replace(value, **dict(zip(names, new, strict=True)))
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value`, each with the expression that leads to it from `name`."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for selector, child in (children(value) or {}).items():
        yield from _tensors(child, name + selector)


def _own_fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(value) if field.init]
