"""DDP models that are made, compiled, trained for two steps and dropped, one after the other.

Their process group stays. Nothing is counted here: `census.py` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.algorithms import ByteGrad, Decentralized, attach
from ddpopt.checks.verify import verify
from ddpopt.checks.warmup import warmup

_CAP_MB = 0.02  # a bucket a layer
_WIDTH, _DEPTH, _ROWS = 64, 4, 8
_STEPS_OF_TUNING = 10  # the buckets are decided on in the ninth

Refs = dict[str, "weakref.ref[Any]"]


class Layers(nn.Module):
    """`depth` times Linear, LayerNorm and ReLU, with dropout in front of the last."""

    def __init__(self, width: int = _WIDTH, depth: int = _DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.layers, self.norms, strict=True):
            x = norm(linear(self.dropout(x))).relu()
        return x


@dataclass(slots=True)
class Trial:
    """A model at work; `more` are objects that have to go with it."""

    ddp: DistributedDataParallel
    model: Any
    optimizer: torch.optim.Optimizer
    batch: torch.Tensor
    more: dict[str, Any]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).pow(2).mean().backward()
        self.optimizer.step()

    def refs(self) -> Refs:
        """Return weak references to all that has to be gone when this is dropped."""
        held: dict[str, Any] = {
            "DDP module": self.ddp,
            "module": self.ddp.module,
            "compiled module": self.model,
            "Reducer": self.ddp.reducer,
            "optimizer": self.optimizer,
            **{f"parameter {name}": p for name, p in self.ddp.module.named_parameters()},
            **self.more,
        }
        return {name: weakref.ref(value) for name, value in held.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a model goes through before it is dropped.

    `backend` is None for one that is not compiled; `use` trains.
    """

    name: str
    backend: str | None = "ddpopt"
    options: dict[str, Any] | None = None
    use: Callable[[Trial], None]

    def live(self) -> Refs:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Layers(), bucket_cap_mb=_CAP_MB)
        options = None if self.options is None else {"inner": "aot_eager", **self.options}
        model = ddp
        if self.backend is not None:
            model = torch.compile(ddp, backend=self.backend, options=options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        trial = Trial(ddp, model, optimizer, torch.randn(_ROWS, _WIDTH), {})
        self.use(trial)
        return trial.refs()


def _train(trial: Trial) -> None:
    for _ in range(2):
        trial.step()


def _train_after_warmup(trial: Trial) -> None:
    warmup(trial.model, trial.batch)
    _train(trial)


def _train_after_verify(trial: Trial) -> None:
    assert verify(trial.model, trial.batch).passed
    _train(trial)


def _train_recorded(trial: Trial) -> None:
    _train(trial)
    with ddpopt.record(trial.model):
        _train(trial)
    str(ddpopt.explain(trial.model))


def _train_tuned(trial: Trial) -> None:
    for _ in range(_STEPS_OF_TUNING):
        trial.step()


def _train_rebucketed(trial: Trial) -> None:
    cost = ddpopt.planning.AllreduceCost(startup_s=1e-4, s_per_byte=1e-8)
    plan = ddpopt.plan(Layers(), trial.batch, network=cost, device=_DEVICE)
    _train(trial)
    ddpopt.rebucket(trial.model, plan)
    _train(trial)


# As given, so that nothing is measured, and ranks make the same plan.
_DEVICE = ddpopt.planning.Device(flops_per_s={torch.float32: 1e10}, bytes_per_s=1e10)


def _train_attached(algorithm: Any, *, is_detached: bool) -> Callable[[Trial], None]:
    def use(trial: Trial) -> None:
        handle = attach(trial.model, trial.optimizer, algorithm)
        trial.more["handle"] = handle
        _train(trial)
        if is_detached:
            handle.detach()

    return use


_FLAT, _CODED = Decentralized(hierarchical=False), ByteGrad(hierarchical=False)
_ALL = (
    Life(name="eager", backend=None, use=_train),
    Life(name="aot_eager", backend="aot_eager", use=_train),
    Life(name="forward", options={"split": "forward"}, use=_train),
    Life(name="backward", options={"split": "backward"}, use=_train),
    Life(name="warmed up", options={}, use=_train_after_warmup),
    Life(name="verified", options={}, use=_train_after_verify),
    Life(name="recorded", options={}, use=_train_recorded),
    Life(name="tuned", options={"buckets": "auto"}, use=_train_tuned),
    Life(name="rebucketed", options={}, use=_train_rebucketed),
    Life(name="attached", options={}, use=_train_attached(_FLAT, is_detached=True)),
    Life(name="attached with a thread", options={}, use=_train_attached(_CODED, is_detached=True)),
    Life(name="left attached", options={}, use=_train_attached(_FLAT, is_detached=False)),
)
LIVES = {life.name: life for life in _ALL}
