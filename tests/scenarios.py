"""Models and ways of training them on two ranks: one row each, shared by the tests of a mode.

A row is a function that returns a `Scenario`; rows are looked up by name, so that worker
processes can be told which one to run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from models import MLP, WIDTH
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Scenario:
    """What to train: `steps` gives for each step the shapes of its (micro-)batches."""

    model: nn.Module
    steps: tuple[tuple[tuple[int, ...], ...], ...] = (((4, WIDTH),),) * 4
    ddp_options: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 0.03})
    dtype: torch.dtype = torch.float32
    num_graphs: int = 1


class Block(nn.Module):
    """A pre-norm transformer block on (batch, time, width)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP(2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.dropout(self.mlp(x))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.run = run or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 2))
        for block in self.blocks:
            x = self.run(block, x)
        return x


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (4, 4, 4))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)), inplace=True)
        return self.head(x.flatten(1))


class Tied(MLP):
    """The last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight = self.layers[0].weight


class TwoTypes(MLP):
    """Layers of float32 and float64 in turn."""

    def __init__(self) -> None:
        super().__init__()
        for layer in list(self.layers)[::2]:
            layer.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).relu()
        return x


class Broken(MLP):
    """A graph break in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x).relu()
        torch._dynamo.graph_break()
        for layer in self.layers[3:]:
            x = layer(x).relu()
        return x


class Regions(MLP):
    """Autocast around a part, and a stretch without gradients in another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in list(self.layers)[:4]:
                x = layer(x).relu()
        with torch.no_grad():
            scale = x.abs().mean() + 1
        for layer in list(self.layers)[4:]:
            x = layer(x.float() / scale).relu()
        return x


class Parts(MLP):
    """Tuples, sizes and views made early and used late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.layers[0](x).chunk(2, dim=1)
        half, top = left.shape[1], right.max(dim=1)
        for layer in self.layers[1:]:
            x = layer(x).relu_()
        return torch.cat([x[:, :half] * left, right], dim=1) + top.values[:, None]


class Shapes(MLP):
    """Sizes that tracing finds to be numbers only after they were used."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 3))
        batch, time, width = x.shape
        for layer in self.layers[:3]:
            x = layer(x.reshape(batch * time, width)).relu().view(batch, time, width)
        x = x + self.position
        for layer in self.layers[3:]:
            x = layer(x.reshape(batch * time, width)).relu().view(batch, time, width)
        return x


class Sparse(MLP):
    """An embedding with sparse gradients in front."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, 0].abs() * 3).long().clamp(max=9)))


class SharedAcrossBreak(MLP):
    """A weight that is used before and after a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x).relu()
        torch._dynamo.graph_break()
        for layer in (*self.layers[3:], self.layers[0]):
            x = layer(x).relu()
        return x


class Counting(MLP):
    """A buffer that is written to in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            self.seen += x.detach().mean()
        return x * self.seen


def _frozen() -> MLP:
    model = MLP()
    model.layers[1].requires_grad_(False)
    model.layers[4].weight.requires_grad_(False)
    return model


def _checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


_MICRO_BATCHES = (((4, WIDTH), (4, WIDTH), (4, WIDTH)),) * 3
_GROWING = tuple((((n, WIDTH)),) for n in (4, 6, 8, 3, 5))

SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "mlp": lambda: Scenario(MLP()),
    "transformer": lambda: Scenario(Transformer()),
    "conv and batch norm": lambda: Scenario(ConvNet(), ddp_options={"bucket_cap_mb": 0.001}),
    "dropout": lambda: Scenario(Transformer(dropout=0.5)),
    "tied weights": lambda: Scenario(Tied()),
    "frozen parameters": lambda: Scenario(_frozen()),
    "two dtypes": lambda: Scenario(TwoTypes()),
    "bfloat16": lambda: Scenario(MLP().bfloat16(), dtype=torch.bfloat16),
    "dynamic batch": lambda: Scenario(
        Transformer(), steps=tuple(((2 * n, WIDTH),) for n in (2, 3, 4, 1, 5))
    ),
    "graph break": lambda: Scenario(Broken(), num_graphs=2),
    "no_sync": lambda: Scenario(MLP(), steps=_MICRO_BATCHES),
    "checkpointed blocks": lambda: Scenario(Transformer(run=_checkpointed)),
    "autocast and no_grad regions": lambda: Scenario(Regions()),
    "tuples, sizes and views": lambda: Scenario(Parts()),
    "sizes found to be constant": lambda: Scenario(
        Shapes(), steps=tuple(((3 * n, WIDTH),) for n in (2, 3, 4, 1, 5))
    ),
    "sparse embedding": lambda: Scenario(Sparse()),
    "weight shared across a graph break": lambda: Scenario(SharedAcrossBreak(), num_graphs=2),
    "mutated buffer": lambda: Scenario(Counting()),
    "static graph": lambda: Scenario(
        MLP(), ddp_options={"bucket_cap_mb": 0.03, "static_graph": True}
    ),
    "find unused parameters": lambda: Scenario(
        MLP(), ddp_options={"bucket_cap_mb": 0.03, "find_unused_parameters": True}
    ),
    "gradients as bucket views": lambda: Scenario(
        MLP(), ddp_options={"bucket_cap_mb": 0.03, "gradient_as_bucket_view": True}
    ),
    "list of caps": lambda: Scenario(MLP(), ddp_options={"bucket_cap_mb_list": [0.01, 0.02, 0.05]}),
}


def train_steps(
    ddp: DistributedDataParallel, forward: Callable[..., Any], scenario: Scenario, rank: int
) -> dict[str, torch.Tensor]:
    """Train with SGD and momentum, accumulating micro-batches; return the state by name.

    Gradients are those of the last step, before clipping; data differs between ranks.
    """
    generator = torch.Generator().manual_seed(100 + rank)
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    losses = []
    torch.manual_seed(rank)  # dropout
    for shapes in scenario.steps:
        optimizer.zero_grad()
        for i, shape in enumerate(shapes):
            is_last = i == len(shapes) - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                x = torch.randn(shape, generator=generator).to(scenario.dtype)
                loss = forward(x).float().pow(2).mean()
                loss.backward()
                losses.append(loss.detach())
        gradients = {f"grad {n}": _dense(p.grad) for n, p in ddp.named_parameters()}
        if not any(p.grad.is_sparse for p in trained):  # torch cannot take their norm
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    gradients = {name: g for name, g in gradients.items() if g is not None}
    state = {n: v.detach().clone() for n, v in ddp.state_dict().items()}
    return {"losses": torch.stack(losses), **gradients, **state}


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone().to_dense()
