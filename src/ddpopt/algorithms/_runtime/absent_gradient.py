"""`AbsentGradient`: takes the place of a gradient, and raises when it is used.

Between backward and update no rank has the averaged gradients of whole parameters. Code that reads
`.grad` then, such as `torch.nn.utils.clip_grad_norm_`, must not get one rank's part, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ddpopt import _torch
from ddpopt.errors import AbsentGradientError

_ZERO = ("zero_", "_foreach_zero_")
_IGNORED = ("detach_", "requires_grad_")  # what zero_grad calls first
# What Dynamo asks of a parameter's gradient when it compiles code with the parameter; "__get__" is
# for properties, such as shape.
_KNOWN = (
    "__get__",
    "_is_view",
    "dim",
    "is_conj",
    "is_neg",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # GradScaler's


class GradientOwner(Protocol):
    """Has the averaged gradients of this rank's pieces."""

    def zero(self, index: int) -> None:
        """Make the gradient of a parameter zero."""

    def unscale(self, indices: Sequence[int], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
        """Multiply the gradients of parameters; tell all ranks if any rank's is not finite."""


class AbsentGradient(torch.Tensor):
    """A parameter's gradient that no rank has as a whole; it has no memory.

    It has the parameter's shape, dtype and device. `zero_grad` and `GradScaler` may use it, and
    Dynamo may inspect it; all else raises AbsentGradientError.
    """

    owner: Callable[[], GradientOwner | None]
    parameter_index: int

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, index: int, owner: Callable[[], GradientOwner | None]
    ) -> AbsentGradient:
        """Return one to replace the gradient of `like`; `owner` is a weak reference."""
        made = _torch.without_memory(cls, like)
        made.parameter_index, made.owner = index, owner
        return made

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what zero_grad, GradScaler and Dynamo ask; raise for all else."""
        name = getattr(function, "__name__", "")
        if name in _IGNORED:
            return args[0]
        if name in _KNOWN:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name in _ZERO or name == _UNSCALE:
            values = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            absent = [value for value in values if isinstance(value, AbsentGradient)]
            others = [value for value in values if not isinstance(value, AbsentGradient)]
            owner = absent[0].owner()
            if owner is not None:
                if others:
                    function(others, *args[1:], **kwargs or {})
                if name == _UNSCALE:
                    owner.unscale([value.parameter_index for value in absent], *args[1:])
                    return None
                for value in absent:
                    owner.zero(value.parameter_index)
                return args[0]
        raise AbsentGradientError(_text(name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no types
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: such a call did not come through Python."""
        raise AbsentGradientError(_text(str(function)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _text(what: str) -> str:
    return (
        f"{what} was called on the gradient of a parameter, of which with ShardedUpdate each rank "
        "has only its part; to clip call handle.clip_grad_norm_(max_norm), to read gradients "
        "handle.full_gradients(), with the handle that attach returned; and step() after no_sync() "
        "needs a backward outside of it"
    )
