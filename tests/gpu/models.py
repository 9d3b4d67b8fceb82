"""Transformers whose attention is as wide as a GPU's kernels want it, which rows of 8 are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from tests.support.models import MLP, WIDTH

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_flexibly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """On the CPU there is no backward of it."""
    if q.device.type == "cpu":
        q, k, v = q.detach(), k.detach(), v.detach()
    y = flex_attention(q, k, v, score_mod=lambda score, _b, _h, i, j: score - (i - j).abs())
    assert isinstance(y, torch.Tensor)
    return y


class Block(nn.Module):
    """A pre-norm transformer block on (batch, time, width)."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), MLP(2)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, attend: Attend = attend_causally) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attend) for _ in range(3))
        if attend is attend_flexibly and not torch.cuda.is_available():
            for block in self.blocks:
                block.norm.requires_grad_(False)
                block.mix.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 2))
        for block in self.blocks:
            x = block(x)
        return x
