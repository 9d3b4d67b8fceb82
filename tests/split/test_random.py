"""A backward that draws random numbers draws what the unsplit compile draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import inductor_prims
from torch.nn.parallel import DistributedDataParallel

from ddpopt.split.nodes import is_pure, may_communicate
from tests.support.beside import compiled
from tests.support.cuts import only_cut

WIDTH = 16


class NoisyLinear(torch.autograd.Function):
    """A linear layer with noise on the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return (gradient @ weight) * (1 + 0.1 * torch.rand_like(x)), gradient.t() @ x


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(NoisyLinear.apply(x, weight))
        return x


@pytest.mark.quick("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_backward_that_draws_draws_as_unsplit(one_rank: None, inner: str) -> None:
    """Gradients are equal, and so is the next number after the step."""
    outcomes = []
    for is_enabled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Noisy(), bucket_cap_mb=0.0005)
        model = compiled(ddp, inner, enabled=is_enabled)
        for _ in range(2):
            ddp.zero_grad()
            model(torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)).square().mean().backward()
        outcomes.append([*(p.grad.clone() for p in ddp.parameters()), torch.rand(())])
        if is_enabled:
            assert only_cut(ddp).split == "backward"
            assert len(only_cut(ddp).sections) == 4
    assert all(map(torch.equal, *outcomes))


def test_what_is_random_by_its_tag_is_made_once() -> None:
    """Inductor draws all seeds of a graph in one call, of which torch says that it is pure.

    What comes of a seed may be made again, and random numbers are no collectives.
    """
    graph = fx.Graph()
    seeds = graph.call_function(inductor_prims.seeds, (3, torch.device("cpu")))
    seed = graph.call_function(inductor_prims.lookup_seed, (seeds, 1))
    drawn = graph.call_function(torch.ops.aten.rand.default, ([2],))
    graph.output((seed, drawn))
    assert not is_pure(seeds)
    assert is_pure(seed)
    assert not is_pure(drawn)
    assert not any(map(may_communicate, (seeds, seed, drawn)))
