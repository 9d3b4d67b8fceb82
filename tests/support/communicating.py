"""Layers with collectives of their own in forward and backward, as models on several ranks have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn


class MeanOfRanks(torch.autograd.Function):
    """The mean over all ranks, as in a synchronised norm; so is its backward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _mean(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _mean(gradient)


def _mean(x: torch.Tensor) -> torch.Tensor:
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    return functional.wait_tensor(total) / dist.get_world_size()


class SumInBackward(torch.autograd.Function):
    """The identity, whose backward sums over ranks: where a tensor-parallel block begins."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(gradient, "sum", dist.group.WORLD))


class Exchange(torch.autograd.Function):
    """Each rank gets a share of rows of every rank; so do experts, and backward sends them back."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _exchange(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _exchange(gradient)


def _exchange(x: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(
        functional.all_to_all_single(x.contiguous(), None, None, dist.group.WORLD)
    )


class Normed(nn.Module):
    """A layer whose activations lose their mean over all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.tanh(y - MeanOfRanks.apply(y.flatten(0, -2).mean(0)))
