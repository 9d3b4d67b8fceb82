"""Layers whose operators do more than compute: they count, draw, check and communicate.

What they did is in `calls`, in order: a compiler may neither leave them out nor exchange them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch._library.effects import EffectType
from torch.distributed.nn import functional

from tests.system.fuzzing.blocks import WIDTH, Part

calls: list[str] = []
_group: dist.ProcessGroup | None = None
_WHERE = (("forward",), ("backward",), ("forward", "backward"))


def begin(group: dist.ProcessGroup) -> None:
    """Forget all calls; have layers communicate in a group, which is DDP's own."""
    global _group  # noqa: PLW0603  # a rank is a process
    _group = group
    calls.clear()


@torch.library.custom_op("fuzzing::counted", mutates_args=())
def _counted(x: torch.Tensor, name: str) -> torch.Tensor:
    calls.append(name)
    return x.clone()


@torch.library.custom_op("fuzzing::noisy", mutates_args=())
def _noisy(x: torch.Tensor, name: str) -> torch.Tensor:
    calls.append(name)
    return x + torch.rand(x.shape).to(x)


@torch.library.custom_op("fuzzing::ordered", mutates_args=())
def _ordered(x: torch.Tensor, name: str) -> torch.Tensor:
    calls.append(name)
    return x.clone()


@torch.library.custom_op("fuzzing::told", mutates_args=())
def _told(x: torch.Tensor, name: str) -> None:
    calls.append(name)


for operator in (_counted, _noisy, _ordered):
    operator.register_fake(lambda x, _name: torch.empty_like(x))
_told.register_fake(lambda _x, _name: None)
for operator in (_ordered, _told):
    operator.register_effect(EffectType.ORDERED)


def _run(kind: str, x: torch.Tensor, name: str) -> torch.Tensor:
    if kind == "counted":
        return torch.ops.fuzzing.counted(x, name)
    if kind == "noisy":
        return torch.ops.fuzzing.noisy(x, name)
    if kind == "ordered":
        return torch.ops.fuzzing.ordered(x, name)
    if kind == "told":
        torch.ops.fuzzing.told(x, name)
        return x * 2
    wide = x.float()  # torch checks what it inverts, and has registered that as an effect
    eye = torch.eye(WIDTH, device=x.device)
    return (wide @ torch.linalg.inv(wide.t() @ wide + eye)).to(x.dtype)


class _Effect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, name: str, choice: int) -> torch.Tensor:
        ctx.kind, ctx.name, ctx.choice = kind, name, choice
        return _run(kind, x, f"{name} forward") if choice % 3 != 1 else x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.choice % 3 != 0:
            gradient = _run(ctx.kind, gradient, f"{ctx.name} backward")
        return gradient, None, None, None


class Effect(Part):
    """An operator with an effect, or one of which torch knows none: in forward, backward, both."""

    def __init__(self, block: Any, inner: Any, earlier: list[nn.Linear]) -> None:
        super().__init__(block, inner, earlier)
        self.kind = self.name = block.kind

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Effect.apply(torch.tanh(self.layer(x)), self.kind, self.name, self.choice)


class Linalg(Part):
    """Operators that raise if a matrix is singular, with the derivatives of torch."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.weight.float()
        matrix = wide @ wide.t() + torch.eye(WIDTH, device=x.device)
        if self.choice % 3 == 0:
            y = x.float() @ torch.linalg.inv(matrix)
        elif self.choice % 3 == 1:
            y = x.float() @ torch.linalg.cholesky(matrix)
        else:
            y = torch.linalg.solve(matrix, x.float().t()).t()
        return y.to(x.dtype)


def _total(x: torch.Tensor) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", _group))


class _Total(torch.autograd.Function):
    """Adds over ranks: in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, choice: int) -> torch.Tensor:
        ctx.choice = choice
        return _total(x) if choice != 1 else x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _total(gradient) if ctx.choice != 0 else gradient * 2, None


class Collective(Part):
    """Communicates in DDP's group, of what has one size on all ranks: the mean over the rows."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        mean = y.float().mean(0)
        if self.choice < 3:
            mean = _Total.apply(mean, self.choice)
        elif self.choice == 3:  # as contrastive losses do
            rows = collectives.all_gather_tensor_autograd(mean.unsqueeze(0), 0, _group)
            mean = torch.softmax(rows @ mean, 0) @ rows
        elif self.choice == 4:
            mean = functional.all_reduce(mean, group=_group)
        else:
            total = mean.detach().clone()
            dist.all_reduce(total, group=_group)
            mean = mean * total
        return y + torch.tanh(mean).to(y.dtype)


class Statistics(Part):
    """Communicates what takes more bytes than a few rows, and is made of less; so do gradients.

    So the cheapest place to cut a backward is before it on a rank with few rows, else after it.
    """

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x)).float()
        products = y[:, : WIDTH // 2].t() @ y / len(y)
        total = _Total.apply(torch.cat([products, products]), self.choice % 3)
        return (x.detach().float() @ total).to(x.dtype)


EFFECTS = ("counted", "noisy", "ordered", "told", "checked")
