"""Functions whose backward writes or reads a buffer, as FP8's delayed scaling does."""

from __future__ import annotations

from typing import Any

import torch

Gradients = tuple[torch.Tensor, torch.Tensor, None]


class NotesSize(torch.autograd.Function):
    """The identity; its backward notes how large the gradient is, as FP8's delayed scaling does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(size)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (size,) = ctx.saved_tensors
        size.copy_(gradient.abs().max())
        return gradient, None


class NotesOfWeight(NotesSize):
    """The identity on a weight; its backward notes the gradient's size and returns the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(size)
        return weight.view_as(weight)


class _Linear(torch.autograd.Function):
    """A linear layer whose backward finds a buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, size: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight, size)
        return x @ weight.t()


class NotesOwnSizeOfWeight(_Linear):
    """Its backward notes how large the weight's gradient is, when it has that."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, size = ctx.saved_tensors
        of_weight = gradient.t() @ x
        size.copy_(of_weight.abs().max())
        return gradient @ weight, of_weight, None


class NotesAfterGradient(_Linear):
    """Its backward makes the weight's gradient first, then notes what it got."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, size = ctx.saved_tensors
        of_weight = gradient.t() @ x
        of_input = gradient @ weight
        size.copy_(gradient.abs().max())
        return of_input, of_weight, None


class ReadsAfterGradient(_Linear):
    """Its backward reads a buffer when the weight's gradient is there."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, size = ctx.saved_tensors
        return (gradient @ weight) * torch.cos(size), gradient.t() @ x, None
