"""Models that live and die: what each goes through before it is dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.soak.worker import Layers
from ddpopt.algorithms import ByteGrad, Decentralized, attach

Refs = dict[str, "weakref.ref[Any]"]


class Trial:
    """A model at work, with a bucket a layer; `more` are objects that have to go with it."""

    def __init__(self, backend: str | None, options: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(Layers(), bucket_cap_mb=0.02)
        self.model: Any = self.ddp
        if backend is not None:
            given = {"inner": "aot_eager", **options} if backend == "ddpopt" else None
            self.model = torch.compile(self.ddp, backend=backend, options=given)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.batch = torch.randn(8, 64)
        self.more: dict[str, Any] = {}

    def train(self, num_steps: int = 2) -> None:
        for _ in range(num_steps):
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


class Life(NamedTuple):
    """The uses of a model before it is dropped; `backend` is None if it is not compiled."""

    use: Callable[[Trial], None]
    options: Mapping[str, Any] = MappingProxyType({})
    backend: str | None = "ddpopt"

    def live(self) -> Refs:
        trial = Trial(self.backend, self.options)
        self.use(trial)
        return trial.refs()


def _train_checked(trial: Trial) -> None:
    ddpopt.warmup(trial.model, trial.batch)
    assert ddpopt.verify(trial.model, trial.batch).passed
    trial.train()


def _train_recorded(trial: Trial) -> None:
    trial.train()
    with ddpopt.record(trial.model):
        trial.train()
    str(ddpopt.explain(trial.model))


def _train_rebucketed(trial: Trial) -> None:
    cost = ddpopt.planning.AllreduceCost(startup_s=1e-4, s_per_byte=1e-8)
    # As given, so that nothing is measured, and ranks make the same plan.
    device = ddpopt.planning.Device(flops_per_s={torch.float32: 1e10}, bytes_per_s=1e10)
    plan = ddpopt.plan(Layers(), trial.batch, network=cost, device=device)
    trial.train()
    ddpopt.rebucket(trial.model, plan)
    trial.train()


def _train_attached(trial: Trial, *, algorithm: Any, is_detached: bool = True) -> None:
    trial.more["handle"] = handle = attach(trial.model, trial.optimizer, algorithm)
    trial.train()
    if is_detached:
        handle.detach()


_FLAT, _CODED = Decentralized(hierarchical=False), ByteGrad(hierarchical=False)
LIVES = {
    "eager": Life(Trial.train, backend=None),
    "aot_eager": Life(Trial.train, backend="aot_eager"),
    "forward": Life(Trial.train, {"split": "forward"}),
    "backward": Life(Trial.train, {"split": "backward"}),
    "warmed up, verified": Life(_train_checked),
    "recorded": Life(_train_recorded),
    # The buckets are decided on in the ninth step.
    "tuned": Life(lambda trial: trial.train(10), {"buckets": "auto"}),
    "rebucketed": Life(_train_rebucketed),
    "attached": Life(partial(_train_attached, algorithm=_FLAT)),
    "attached with a thread": Life(partial(_train_attached, algorithm=_CODED)),
    "left attached": Life(partial(_train_attached, algorithm=_FLAT, is_detached=False)),
}
