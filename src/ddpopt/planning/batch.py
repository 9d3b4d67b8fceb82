"""A model's inputs, and the loss of its output, whether or not the user gives one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch

from ddpopt._text import quote
from ddpopt.errors import DDPOptError, PlanError

LossFn = Callable[[Any], torch.Tensor]

# In an output these are not searched for tensors: their attributes are code, or a module's state.
_MODULES_AND_CODE = (torch.nn.Module, type, types.FunctionType, types.ModuleType)


class Batch(NamedTuple):
    """The arguments of one forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_batch(batch: Any) -> Batch:
    """A mapping of keyword arguments, a tuple or list of positional ones, or the only one."""
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        return Batch((), dict(batch))
    return Batch(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """The model's output for arguments as `as_batch` takes them."""
    args, kwargs = as_batch(batch)
    return model(*args, **kwargs)


def find_loss(
    output: Any,
    loss_fn: LossFn | None = None,
    *,
    of_tensor: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
    error: type[DDPOptError] = PlanError,
) -> torch.Tensor:
    """The loss of a model's output: a tensor of one element that requires grad.

    Without `loss_fn` it is the output's own `loss` (an attribute or a key) if that is such a
    tensor, or else the sum of what `of_tensor` returns for each floating point tensor in the output
    that requires grad. Checks, which compare gradients, give an `of_tensor` of their own: the sum
    of a normalized output's elements does not depend on the parameters.

    Raises:
        error: there is no such tensor, or `loss_fn` returns no such scalar.
    """
    check_loss_fn(loss_fn, error)
    loss = _own_loss(output) if loss_fn is None else loss_fn(output)
    if _is_loss(loss):
        return loss
    if loss_fn is not None:
        raise error(
            f"the loss is {_describe(loss)}; it must be a tensor of one element that depends on a "
            "parameter"
        )
    differentiable = (t for t in tensors_of(output) if t.is_floating_point() and t.requires_grad)
    losses = [of_tensor(t) for t in differentiable]
    if not losses:
        raise error(
            f"the model's output ({_describe(output)}) has no floating point tensor that depends "
            "on a parameter; give a loss function, which makes a scalar of the output"
        )
    return functools.reduce(torch.add, losses)


def check_loss_fn(loss_fn: object, error: type[DDPOptError]) -> None:
    """Raise `error` unless `loss_fn` is None or can be called with a model's output.

    Often a second input of the model is given in its place, so the error says where that belongs.
    """
    if loss_fn is None or callable(loss_fn):
        return
    what = f"loss_fn is {quote(loss_fn)}, a {type(loss_fn).__name__}"
    if isinstance(loss_fn, torch.Tensor):
        what = f"loss_fn is {_describe(loss_fn)}"
    raise error(
        f"{what}; give a function of the model's output that returns a scalar, and if the model "
        "has several inputs, give them as one batch, a tuple or a dict: (x, y)"
    )


def has_loss(output: Any) -> bool:
    """Whether an output has a `loss` of its own, which `find_loss` takes."""
    return _is_loss(_own_loss(output))


def _own_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _is_loss(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and objects with attributes, each once.

    They come in the order in which `value` has them. No module, class or function is opened.
    """
    left = [value]
    # Objects may refer to each other. Each is held: the id of one that is gone may be another's.
    seen: dict[int, Any] = {}
    while left:
        item = left.pop(0)
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            left[:0] = item.values()
        elif isinstance(item, list | tuple):
            left[:0] = item
        elif hasattr(item, "__dict__") and not isinstance(item, _MODULES_AND_CODE):
            left[:0] = vars(item).values()
