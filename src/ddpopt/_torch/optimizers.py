"""Optimizers: whether a step calls hooks, what a state is made of, if weights were written."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ddpopt._torch import names


def calls_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a call of `optimizer.step` runs the hooks that are registered on it.

    torch's constructor makes the hooks' dictionaries, and wraps the `step` of the optimizer's class
    in a function that runs them. An optimizer that wraps another one may not call torch's
    constructor, and may still make the dictionaries itself. A `step` that was set on the optimizer
    object is not looked at: learning rate schedulers set one, which calls the class's `step`.
    """
    plain = torch.optim.SGD([torch.empty(0)])
    if not (names.STEP_HOOKS.is_in(plain) and names.IS_HOOKED.is_in(type(plain).step)):
        return True  # this torch calls hooks some other way, and is trusted to call them
    return names.STEP_HOOKS.is_in(optimizer) and names.IS_HOOKED.is_in(type(optimizer).step)


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of nested containers by their path, such as `['a'][0]`, and their structure.

    What is no container that torch knows is a leaf. `unflatten` makes containers like these of the
    leaves and the structure. (To send a structure to another process, send containers that have
    it: torch 2.13 warns where a structure itself is unpickled.)
    """
    leaves, structure = names.FLATTEN.get()(tree)
    text_of = names.PATH_TEXT.get()
    return {text_of(path): leaf for path, leaf in leaves}, structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    return names.UNFLATTEN.get()(leaves, structure)


_version = operator.attrgetter(names.TENSOR_VERSION.name)  # one call a tensor, in each backward


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each of these was written to in place, as autograd counts it; 0 if it does not."""
    tensors = list(tensors)
    try:  # all at once: most often each has a count
        return list(map(_version, tensors))
    except (AttributeError, RuntimeError):  # some tensor has no count, as in inference mode
        return [_version(tensor) if _is_counted(tensor) else 0 for tensor in tensors]


def _is_counted(tensor: torch.Tensor) -> bool:
    """Whether autograd counts the writes to a tensor."""
    return not tensor.is_inference() and names.TENSOR_VERSION.is_in(tensor)
