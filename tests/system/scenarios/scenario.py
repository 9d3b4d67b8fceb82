"""What a row is, and the default way of wrapping and training it.

A row says what to train and how; `running.py` runs it with one compiler or another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import Reason
from tests.support.device import DEVICE
from tests.support.models import WIDTH

CAP = 0.03  # MiB: two of the MLP's six layers
Compile = Callable[..., Any]  # as torch.compile, with the backend chosen already
Shape = tuple[int, ...]


class Wrapped(NamedTuple):
    """A module whose state is compared, and the callable that trains it."""

    module: nn.Module
    forward: Callable[..., Any]


def compile_outside(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    """Return `torch.compile(DDP(model))`."""
    ddp = DistributedDataParallel(model, **ddp_options)
    return Wrapped(ddp, compile_(ddp))


class Trainer:
    """Makes batches that differ between ranks, and keeps what is to be compared with eager DDP."""

    def __init__(self, scenario: Scenario, wrapped: Wrapped, rank: int) -> None:
        self.scenario = scenario
        self.module, self.forward = wrapped
        self.rank = rank
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = scenario.optimizer(self.trained)
        self._generator = torch.Generator().manual_seed(100 + rank)
        self._noted: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}

    def steps(self) -> Iterator[list[torch.Tensor]]:
        """Give for each step its micro-batches."""
        torch.manual_seed(self.rank)  # dropout
        for shapes in self.scenario.steps:
            yield [
                torch.randn(shape, generator=self._generator).to(DEVICE, self.scenario.dtype)
                for shape in shapes
            ]

    def loss(self, *inputs: Any) -> torch.Tensor:
        """Run forward; note and return the loss."""
        loss = self.scenario.loss(self.forward(*inputs))
        self.note("loss", loss)
        return loss

    def note(self, name: str, value: torch.Tensor) -> None:
        """Keep a value to compare."""
        self._noted[f"{name} {len(self._noted)}"] = value.detach().clone()

    def update(self, step: Callable[[], Any] | None = None) -> None:
        """Keep the gradients, clip them, and take an optimizer step (or call `step` instead)."""
        self._gradients = {
            f"grad {name}": parameter.grad.detach().clone().to_dense()
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }
        gradients = [p.grad for p in self.trained if p.grad is not None]
        if not any(g.is_sparse for g in gradients):  # torch cannot take their norm
            nn.utils.clip_grad_norm_(self.trained, 1.0)
        (step or self.optimizer.step)()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what was noted, the last step's gradients before clipping, and the model's state.

        Names are those without torch.compile: it puts `_orig_mod` in front of parameters.
        """
        named = {**self._noted, **self._gradients, **self.module.state_dict()}
        return {n.replace("_orig_mod.", ""): v.detach().clone() for n, v in named.items()}


def train(trainer: Trainer) -> None:
    """Accumulate all but the last micro-batch of each step under `no_sync`."""
    for batches in trainer.steps():
        for x in batches[:-1]:
            with trainer.module.no_sync():
                trainer.loss(x).backward()
        trainer.loss(batches[-1]).backward()
        trainer.update()


def square(output: torch.Tensor) -> torch.Tensor:
    """Return the default loss."""
    return output.float().pow(2).mean()


def momentum_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the default optimizer."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Scenario:
    """One row: `steps` gives for each step the shapes of its (micro-)batches.

    `prepare` is called with the wrapped module before training. `dynamo_config` is patched while
    training. `fallbacks` are the reasons for which graphs of this row are compiled whole.
    `eager_error` names the exception with which eager DDP refuses the row. Where the unsplit
    Inductor compile is not as eager DDP either, a row need not be (`is_exact_on_inductor`). `note`
    goes into docs/compatibility.md.
    """

    model: nn.Module
    steps: tuple[tuple[Shape, ...], ...] = (((4, WIDTH),),) * 4
    ddp_options: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": CAP})
    dtype: torch.dtype = torch.float32
    wrap: Callable[[nn.Module, Compile, dict[str, Any]], Wrapped] = compile_outside
    prepare: Callable[[nn.Module], None] = lambda _: None
    train: Callable[[Trainer], None] = train
    loss: Callable[[Any], torch.Tensor] = square
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = momentum_sgd
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    fallbacks: frozenset[Reason] = frozenset()
    eager_error: str | None = None
    is_exact_on_inductor: bool = True
    note: str = ""
