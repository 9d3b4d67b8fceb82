"""An algorithm at work on a small model, for the tests of algorithms."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    attach,
)
from tests.support.models import MLP, WIDTH, batches

FLAT = Decentralized(hierarchical=False)

ALGORITHMS: dict[str, Any] = {
    "Decentralized": FLAT,
    "LowPrecisionDecentralized": LowPrecisionDecentralized(hierarchical=False),
    "ByteGrad": ByteGrad(hierarchical=False),
    "QAdam": QAdam(hierarchical=False),
    "AsyncModelAverage": AsyncModelAverage(sync_interval_ms=1),
}

X = torch.ones(2, WIDTH)


class Trial:
    """A DDP module at whose training an algorithm works, alike on all ranks.

    `run` is called in its place, such as the compiled module. `make_optimizers` gets the model.
    """

    def __init__(
        self,
        algorithm: Any = FLAT,
        model: nn.Module | None = None,
        *,
        make_optimizers: Callable[[nn.Module], Any] | None = None,
        timeout_s: float | None = None,
        **ddp_options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = MLP(2) if model is None else model
        if timeout_s is not None:
            timeout = datetime.timedelta(seconds=timeout_s)
            ddp_options["process_group"] = dist.new_group(timeout=timeout)
        self.ddp = DistributedDataParallel(self.model, **ddp_options)
        self.run: Callable[..., Any] = self.ddp
        if make_optimizers is None:
            made: Any = optimizer_for(algorithm, self.model.parameters(), warmup_steps=2)
        else:
            made = make_optimizers(self.model)
        self.optimizers = list(made) if isinstance(made, list) else [made]
        self.optimizer = self.optimizers[0]
        self.handle: Any = attach(self.ddp, self.optimizers, algorithm)

    def backward(self, x: torch.Tensor = X) -> torch.Tensor:
        self.ddp.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss: torch.Tensor = self.run(x).float().square().mean()
        loss.backward()
        return loss.detach()

    def step(self, x: torch.Tensor = X) -> torch.Tensor:
        loss = self.backward(x)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def train(self, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Take a step with each, and return the weights after each."""
        found = []
        for x in inputs:
            self.step(x)
            found.append(self.weights)
        return found

    @property
    def weights(self) -> torch.Tensor:
        return flat_weights(self.model)

    @property
    def counts(self) -> tuple[int, int]:
        return self.handle.num_steps, self.handle.num_communications

    @torch.no_grad()
    def add(self, value: float) -> None:
        """Add to all weights, as nobody tells the algorithm."""
        for parameter in self.model.parameters():
            parameter.add_(value)


def inputs_of(rank: int, num_steps: int) -> list[torch.Tensor]:
    return batches(rank, [(4, WIDTH)] * num_steps)


def optimizer_for(algorithm: Any, parameters: Any, *, lr: float = 0.1, **of_qadam: Any) -> Any:
    """The optimizer that an algorithm needs: QAdam's own, with its options, or else SGD."""
    if isinstance(algorithm, QAdam):
        return QAdamOptimizer(parameters, lr=lr, **of_qadam)
    return torch.optim.SGD(parameters, lr=lr)


def flat_weights(module: nn.Module) -> torch.Tensor:
    """All of a module's parameters in one tensor."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])
