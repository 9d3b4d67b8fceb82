"""Copies of a compiled DDP model that share nothing with it, or what they would share.

`_torch` makes the copy; `dry_run.py` makes steps on it.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import OptionError


def copy_model(
    model: torch.nn.Module, *, is_apart: bool
) -> tuple[torch.nn.Module, DistributedDataParallel]:
    """Return a copy of a compiled DDP model, and the DDP module in it; see `_torch.copy_compiled`.

    Raises:
        OptionError: the copy would share state with the model.
    """
    made = _torch.copy_compiled(model, deep_copy, is_apart=is_apart)
    for part, copied in made.copies.items():
        _refuse_foreign_forward(part, copied)
    original = _torch.unwrap_compiled(model)
    _refuse_shared_tensors(original, made.ddp)
    return made.model, made.ddp


class _CopyingResults(torch.overrides.TorchFunctionMode):
    """Lets `copy.deepcopy` take tensors that autograd computed, which it refuses as such.

    The copy is the result of a leaf with equal values, so that it may be written to as well.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            with torch.enable_grad():
                return copy.deepcopy(tensor.detach(), memo).requires_grad_().clone()
        return func(*args, **(kwargs or {}))


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """As `copy.deepcopy`, but it takes tensors that are no leaves too."""
    with _CopyingResults():
        return copy.deepcopy(value, memo)


def _refuse_foreign_forward(module: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Raise where a forward of the instance's own would run the original module."""
    cells = getattr(vars(copied).get("forward"), "__closure__", None) or ()
    held: list[Any] = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    if any(value is module or getattr(value, "__self__", None) is module for value in held):
        raise OptionError(
            f"the forward of this {type(module).__name__} is replaced by a function that holds the "
            "module, so a copy would run the original; call it where the forward is the module's "
            "own"
        )


def _refuse_shared_tensors(ddp: torch.nn.Module, twin: DistributedDataParallel) -> None:
    assert isinstance(ddp, DistributedDataParallel)
    own = {id(tensor) for tensor in (*ddp.parameters(), *ddp.buffers())}
    for name, tensor in (*twin.module.named_parameters(), *twin.module.named_buffers()):
        if id(tensor) in own:
            raise OptionError(
                f"a copy of this {type(ddp.module).__name__} would have the same {name}; a "
                "__deepcopy__ in it has to copy parameters and buffers"
            )
