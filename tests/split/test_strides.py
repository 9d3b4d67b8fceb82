"""What reads memory by strides finds in sections what it finds in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt.errors import Reason
from tests.support.beside import Beside
from tests.support.cuts import only_cut

WIDTH, HALF = 64, 32


class Slices(nn.Module):
    """The second half of the columns crosses to a later layer, is written there, and read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(HALF, HALF)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)[:, HALF:]
        z = self.last(torch.sigmoid(y))
        y.mul_(2)
        return torch.cat([z.flatten(), self.read(y, z).flatten()])

    def read(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """By strides alone, within the slice."""
        return y.as_strided((2, 8), (WIDTH, 1))


class ReadsBefore(Slices):
    def read(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """In front of the slice."""
        return y.as_strided((2, 8), (WIDTH, 1), 0)


class Reshapes(Slices):
    def read(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """A copy of a slice; of what lies in one piece it would be a view."""
        y.reshape(-1).add_(z.detach().flatten())
        return y


class Checkpoints(nn.Module):
    """Reads slices of buffers, and what is in front of these, which backward does once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for k in range(4):
            scale = torch.linspace(0.5, 1.5, 4 * WIDTH)[WIDTH : 3 * WIDTH : 2]
            self.register_buffer(f"scale{k}", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(k: int, x: torch.Tensor) -> torch.Tensor:
            scale = self.get_buffer(f"scale{k}").as_strided((WIDTH,), (1,), 8)
            return torch.relu(self.layers[k](x) * torch.sigmoid(scale))

        for k in range(4):
            x = checkpoint(run, k, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("split", ["backward", "forward"])
@pytest.mark.parametrize("kind", [Slices, ReadsBefore, Reshapes, Checkpoints])
def test_what_is_read_by_strides_is_as_in_eager(one_rank: None, kind: Any, split: str) -> None:
    """A copy of a tensor may have other strides, and has not the memory around it."""
    torch.manual_seed(0)
    beside = Beside(kind(), ddp_options={"bucket_cap_mb": 0.0005}, split=split)
    for _ in range(3):
        beside.step(torch.randn(4, WIDTH))
    cut = only_cut(beside.ddp)
    is_read_by_strides = split == "forward" and kind in (Slices, ReadsBefore)
    assert (cut.fallback is Reason.NO_LEGAL_CUT) is is_read_by_strides
    assert cut.backward_fallback is None


def test_a_backward_reads_by_strides_in_its_first_section(one_rank: None) -> None:
    """No hook runs before it that might write to the memory, of which there is no snapshot."""
    beside = Beside(Checkpoints(), ddp_options={"bucket_cap_mb": 0.0005}, split="backward")
    beside.step(torch.randn(4, WIDTH))
    (graph,) = ddpopt.explain(beside.ddp).to_dict()["graphs"]
    assert len(graph["sections"]) == 4
    readers = [
        number
        for number, section in enumerate(graph["sections"])
        for node in section["nodes"]
        if node["target"].startswith("aten.as_strided")
    ]
    assert readers == [0] * 4
