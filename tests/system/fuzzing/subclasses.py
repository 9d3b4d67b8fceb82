"""Tensors of other classes that models take and return, and what plain tensors they consist of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return TwoTensor(a, b)

    @staticmethod
    def backward(_ctx: Any, gradient: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient.a, gradient.b


class _Unpair(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return pair.a.clone(), pair.b.clone()

    @staticmethod
    def backward(_ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return TwoTensor(a, b)


@torch._dynamo.allow_in_graph
def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a tensor of two."""
    return _Pair.apply(a, b)


@torch._dynamo.allow_in_graph
def unpair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two."""
    return _Unpair.apply(x)


def jagged(x: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor of two: the first row, and the others."""
    offsets = torch.tensor([0, 1, x.shape[0]], device=x.device)
    return torch.nested.nested_tensor_from_jagged(x, offsets)


def beside(feed: str, x: torch.Tensor) -> torch.Tensor | None:
    """Return what is given to a model beside `x`."""
    x = x.float().clone()  # the model may write to its input
    if feed == "pair":
        return pair(x, x * 0.5)
    return jagged(x * 0.5) if feed == "jagged" else None


def used(layer: nn.Linear, given: torch.Tensor) -> torch.Tensor:
    """Return what a model makes of what it is given beside its input: one row, or as many."""
    if given.is_nested:
        return torch.tanh(layer(given)).values().mean(0)
    one, other = unpair(given * 2)
    return torch.tanh(layer(one) + other)


def parts(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain real tensors that a tensor consists of, from which it has its gradients."""
    if isinstance(value, TwoTensor):
        return dict(zip((".a", ".b"), unpair(value), strict=True))
    if value.is_nested:
        return {".values": value.values(), ".offsets": value.offsets()}
    if value.is_complex():
        return {"": torch.view_as_real(value)}
    return {"": value.as_subclass(torch.Tensor)}
