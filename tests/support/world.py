"""All that a call could change, as a flat dictionary, to be compared before and after the call."""

from __future__ import annotations

import os
import random
import threading
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_THREADS = "threads"
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)


def world_of(**roots: Any) -> dict[str, Any]:
    """What is reached from these objects, and the process's own state, by its path.

    Modules and plain objects are read through their `__dict__`, functions through their closures,
    tensors with gradients and hooks, generators by their state, and a DDP module's Reducer by what
    its logger says. Values are such that they can be compared by `==`.
    """
    threads = {thread.name for thread in threading.enumerate()}
    found: dict[str, Any] = {
        "environment": dict(os.environ),
        _THREADS: threads - {"ddpopt store"},  # a group's first meeting makes that one
        "torch's numbers": torch.get_rng_state().tolist(),
        "Python's numbers": random.getstate(),
        "gradient mode": torch.is_grad_enabled(),
    }
    seen: set[int] = set()
    for name, root in roots.items():
        _read(name, root, found, seen)
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The paths at which two worlds differ, and the threads that were started in between."""
    paths = dict.fromkeys([*before, *after])
    changed = [path for path in paths if before.get(path) != after.get(path) and path != _THREADS]
    # One that has ended was another test's.
    return changed + [f"{_THREADS}: {name}" for name in after[_THREADS] - before[_THREADS]]


def _read(path: str, value: Any, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(value, _ATOMS):
        found[path] = repr(value)  # a NaN is equal to itself in it
        return
    found[path] = (type(value).__name__, id(value))
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, part in _parts_of(value).items():
        _read(f"{path}{name}", part, found, seen)


def _parts_of(value: Any) -> dict[str, Any]:
    """What an object consists of, by names that follow its own in a path."""
    parts: dict[str, Any] = {}
    if isinstance(value, torch.Tensor):
        parts[" bytes"] = bytes(value.detach().contiguous().flatten().view(torch.uint8).tolist())
        parts[".grad"] = value.grad if value.is_leaf else None
        parts[".requires_grad"] = value.requires_grad
        parts[" hooks"] = value._backward_hooks
        parts[" accumulated hooks"] = getattr(value, "_post_accumulate_grad_hooks", None)
    elif isinstance(value, torch.Generator):
        parts[" state"] = bytes(value.get_state().tolist())
    elif isinstance(value, types.FunctionType):
        parts.update(
            {f" cell {i}": cell.cell_contents for i, cell in enumerate(value.__closure__ or ())}
        )
    elif isinstance(value, types.MethodType):
        parts[".__self__"] = value.__self__
    elif isinstance(value, Mapping):
        for key, item in value.items():
            name = key if isinstance(key, _ATOMS) else f"{type(key).__name__} at {id(key)}"
            parts[f"[{name!r}]"] = item
    elif isinstance(value, list | tuple | set | frozenset):
        parts.update({f"[{index}]": item for index, item in enumerate(value)})
    elif isinstance(value, nn.Module | torch.optim.Optimizer) or _is_of_tests(value):
        parts.update({f".{name}": item for name, item in vars(value).items()})
    if isinstance(value, DistributedDataParallel):
        parts[" logged iterations"] = value._get_ddp_logging_data().get("iteration", 0)
    return parts


def _is_of_tests(value: Any) -> bool:
    return type(value).__module__.startswith("tests.") and hasattr(value, "__dict__")
