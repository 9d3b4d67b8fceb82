"""Inductor's code of sections with complex values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.beside import Beside
from tests.support.models import batches

WIDTH = 16


class Filters(nn.Module):
    """Layers that filter their input's spectrum, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        filters = (torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) / 3 for _ in range(3))
        self.filters = nn.ParameterList(map(nn.Parameter, filters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, weight in zip(self.layers, self.filters, strict=True):
            x = layer(torch.fft.irfft(torch.fft.rfft(x) * weight, n=WIDTH))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_a_model_with_complex_numbers_trains_as_unsplit(one_rank: None, split: str) -> None:
    """In backward to the bit.

    Inductor (torch 2.13, 2.15) has such sections read a tensor before it has written to a part of
    it, unless it is kept from writing in place: gradients were off by half.
    """
    beside = Beside(
        Filters(),
        ddp_options={"bucket_cap_mb": 0.001},
        inner="inductor",
        split=split,
        as_unsplit=split == "backward",
    )
    beside.train(batches(0, [(8, WIDTH)] * 2))
    assert beside.cut.split == split
    assert len(beside.cut.sections) > 2
