"""Layers with collectives of their own in forward and backward, as models on several ranks have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.communicating import Exchange, Sum, SumBackward

__all__ = ["Exchange", "Normed", "SumBackward", "mean_of_ranks"]


def mean_of_ranks(x: torch.Tensor) -> torch.Tensor:
    """The mean over all ranks, as in a synchronised norm; so is its gradient."""
    mean: torch.Tensor = Sum.apply(x) / dist.get_world_size()
    return mean


class Normed(nn.Module):
    """A layer whose activations lose their mean over all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.tanh(y - mean_of_ranks(y.flatten(0, -2).mean(0)))
