"""Models with collectives of their own, between which DDP's allreduces have to find their place.

Their groups are all ranks, since two ranks are what one machine emulates. So what a tensor-parallel
block sums comes of different batches here, which changes nothing about the time that it takes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn


def _sum(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


class Sum(torch.autograd.Function):
    """A sum over ranks, whose gradient is summed as well."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient.contiguous())


class SumForward(torch.autograd.Function):
    """Where a tensor-parallel block ends: its parts are summed."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SumBackward(torch.autograd.Function):
    """Where a tensor-parallel block begins: the gradients of its parts are summed."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient.contiguous())


class Exchange(torch.autograd.Function):
    """An all-to-all of rows, as to experts; backward sends the rows' gradients back."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return _exchange(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return _exchange(gradient)


def _exchange(x: Tensor) -> Tensor:
    sent = functional.all_to_all_single(x.contiguous(), None, None, dist.group.WORLD)
    return functional.wait_tensor(sent)


class ExpertLayer(nn.Module):
    """A dense layer, then an expert of this rank alone, which half of the rows come to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )
        self.expert = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(F.layer_norm(x, x.shape[-1:]))
        rows = F.layer_norm(x, x.shape[-1:]).flatten(0, 1)
        return x + Exchange.apply(self.expert(Exchange.apply(rows))).view_as(x)


class ParallelLayer(nn.Module):
    """A tensor-parallel block of attention's and one of the feed-forward part's size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, size), nn.GELU(), nn.Linear(size, width, bias=False))
            for size in (2 * width, 3 * width)
        )
        self.biases = nn.ParameterList(torch.zeros(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block, bias in zip(self.blocks, self.biases, strict=True):
            part = block(SumBackward.apply(F.layer_norm(x, x.shape[-1:])))
            x = x + SumForward.apply(part) / 2 + bias
        return x


class SyncedConvLayer(nn.Module):
    """A convolution, then a batch norm with the statistics of all ranks."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.weight = nn.Parameter(torch.ones(num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        sums = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, square = (Sum.apply(sums) / dist.get_world_size()).unbind()
        scale = self.weight * torch.rsqrt(square - mean.square() + 1e-5)
        return F.relu((x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None])
