"""Models and training loops that tests share; real ones, small."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune

from tests.support.device import DEVICE

WIDTH = 64


class MLP(nn.Module):
    """`depth` blocks of Linear and ReLU; with width 64 a layer holds 16,640 bytes.

    Without `bias` 16,384, so that the order in which a layer's gradients arrive does not matter.
    """

    def __init__(self, depth: int = 6, width: int = WIDTH, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
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


def tie(model: MLP) -> None:
    """Make the module lose a weight, which the Reducer of a DDP module around it keeps."""
    model.layers[2].weight = model.layers[0].weight


def prune_all(model: MLP) -> None:
    """Give weights other names and places; they stay the same parameters."""
    for layer in model.layers:
        prune.l1_unstructured(layer, "weight", 0.3)


def reorder(model: MLP) -> None:
    """Register the first layer anew, as the last."""
    layers = list(model.layers)
    model.layers = nn.ModuleList([*layers[1:], layers[0]])


def parametrize_all(model: MLP) -> None:
    """Compute weights from new parameters, which an existing Reducer does not have."""
    for layer in model.layers:
        parametrize.register_parametrization(layer, "weight", nn.Tanh())


CHANGES: list[Callable[[MLP], None]] = [tie, prune_all, reorder, parametrize_all]
"""What users do to a model once DDP was made: it changes names and order of its parameters."""


class Blocks(nn.Module):
    """Two MLPs that are called by a method and by a function, which may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(3), MLP(3)
        self.call = call

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.second, self.start(x))


def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def _outside(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    return torch.compile(DistributedDataParallel(model, **ddp_options), **options())


def _inside(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    return DistributedDataParallel(torch.compile(model, **options()), **ddp_options)


def _outside_in_place(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    ddp = DistributedDataParallel(model, **ddp_options)
    ddp.compile(**options())
    return ddp


def _inside_in_place(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    model.compile(**options())
    return DistributedDataParallel(model, **ddp_options)


def _parts_in_place(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    for part in model.children():
        part.compile(**options())
    return DistributedDataParallel(model, **ddp_options)


def _parts_replaced(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    for name, part in model.named_children():
        setattr(model, name, torch.compile(part, **options()))
    return DistributedDataParallel(model, **ddp_options)


def _forward_replaced(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    model.forward = torch.compile(model.forward, **options())
    return DistributedDataParallel(model, **ddp_options)


def _functions(model: nn.Module, options: Any, ddp_options: Any) -> Any:
    model.start, model.call = (torch.compile(f, **options()) for f in (model.start, model.call))
    return DistributedDataParallel(model, **ddp_options)


WAYS: dict[str, Callable[..., Any]] = {
    "torch.compile(DDP(m))": _outside,
    "DDP(torch.compile(m))": _inside,
    "DDP(m).compile()": _outside_in_place,
    "DDP(m) after m.compile()": _inside_in_place,
    "parts in place": _parts_in_place,
    "parts replaced": _parts_replaced,
    "forward replaced": _forward_replaced,
    "functions": _functions,
}
"""Ways to compile `Blocks` under DDP: (model, what makes the options, DDP's options) -> model."""


def batches(rank: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return one input a step, different on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


def train(
    ddp: DistributedDataParallel,
    inputs: Sequence[torch.Tensor],
    forward: Callable[..., Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Train with SGD; return losses, and the last step's gradients, parameters and buffers."""
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        loss = (ddp if forward is None else forward)(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **state_of(ddp)}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of gradients, parameters and buffers by the names of an uncompiled module."""
    state = {f"grad {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    state |= {f"param {n}": p for n, p in module.named_parameters()}
    state |= {f"buffer {n}": b for n, b in module.named_buffers()}
    return {n.replace("_orig_mod.", ""): value.detach().clone() for n, value in state.items()}


def assert_equal_states(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, bitwise: bool = False
) -> None:
    """Compare what `train` returned."""
    assert actual.keys() == expected.keys()
    tolerance = {"rtol": 0, "atol": 0} if bitwise else {}
    for name, value in actual.items():
        if value.dtype == expected[name].dtype and torch.equal(value, expected[name]):
            continue  # most are, and `assert_close` takes forty times as long
        torch.testing.assert_close(
            value, expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def twins(model: nn.Module, **ddp_options: Any) -> tuple[Any, Any]:
    """Return two DDP modules with equal weights."""
    model = model.to(DEVICE)
    return (
        DistributedDataParallel(copy.deepcopy(model), **ddp_options),
        DistributedDataParallel(copy.deepcopy(model), **ddp_options),
    )
