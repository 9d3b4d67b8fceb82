"""One rank of a soak: a long training, or models that live and die. `census.py` counts.

Steps of a long training go in periods. In each of them:

    the first        begins with torch._dynamo.reset(): all is compiled anew
    each             has one of four shapes, on each rank in another turn; the first graphs are
                     compiled for a shape, the next for any number of rows
    of ten, one      only accumulates (`no_sync`)
    of 25, one       is followed by an evaluation: `eval()` and `no_grad`
    the second half  has a fifth shape with a dimension more: further graphs
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.harness.peers import find_peer
from benchmarks.harness.teams import Task
from benchmarks.harness.worker import join, main
from benchmarks.soak.census import Census, grown, take_census
from ddpopt.algorithms import ByteGrad, Decentralized, attach

_SHAPES = ((8, 32), (5, 32), (1, 32), (12, 32))
_LATE_SHAPE = (2, 3, 32)
_ACCUMULATED, _EVALUATED = 10, 25  # each so many steps
_WARM_UP_LIVES = 2

Refs = dict[str, "weakref.ref[Any]"]


class Layers(nn.Module):
    """`depth` times dropout, Linear, LayerNorm and ReLU; Dynamo would skip a Sequential's frame."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Dropout(0.1), nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class LongTraining:
    def __init__(self, peer: str, inner: str, rank: int) -> None:
        torch.manual_seed(0)
        found, options = find_peer(peer)
        torch._dynamo.config.optimize_ddp = found.optimize_ddp
        self.ddp = DistributedDataParallel(Layers(32, 3), bucket_cap_mb=0.005)
        self.num_steps = 0
        self._rank = rank
        self._model = found.compile(self.ddp, inner, options)
        self._optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3, momentum=0.9)
        torch.manual_seed(rank)

    def run(self, num_steps: int, period: int) -> Census:
        for _ in range(num_steps):
            place = self.num_steps % period
            if place == 0:
                torch._dynamo.reset()
            self._step(place, _SHAPES if place < period // 2 else (*_SHAPES, _LATE_SHAPE))
            self.num_steps += 1
        return take_census()

    def _step(self, place: int, shapes: tuple[tuple[int, ...], ...]) -> None:
        x = torch.randn(shapes[(place + self._rank) % len(shapes)])
        is_accumulated = place % _ACCUMULATED == _ACCUMULATED - 1
        with self.ddp.no_sync() if is_accumulated else contextlib.nullcontext():
            self._model(x).pow(2).mean().backward()
        if not is_accumulated:
            self._optimizer.step()
            self._optimizer.zero_grad()
        if place % _EVALUATED == _EVALUATED - 1:
            self.ddp.eval()
            with torch.no_grad():
                self._model(x)
            self.ddp.train()


# ---- models that live and die -----------------------------------------------------------------


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
    """What a model goes through before it is dropped; `backend` is None if it is not compiled."""

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


# ---- the worker -------------------------------------------------------------------------------


class SoakWorker:
    """Obeys `harness/teams.py`; each public method is a request."""

    def __init__(self, task: Task) -> None:
        join(task)
        self._training = LongTraining(task.peer, task.setting.inner, task.rank)

    def run(self, num_steps: int, period: int) -> list[dict[str, float]]:
        """Return the counts of all ranks after so many more steps."""
        counts = self._training.run(num_steps, period).counts
        own = {"step": self._training.num_steps, **counts}
        gathered = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return gathered

    def live(self, name: str, num_models: int) -> dict[str, Any]:
        """Have that many models of a life live and die; return what is left of them on this rank.

        The first two, which compile, count as warm-up.
        """
        life = LIVES[name]
        refs = [life.live() for _ in range(_WARM_UP_LIVES)]
        before = take_census()
        refs += [life.live() for _ in range(num_models - _WARM_UP_LIVES)]
        after = take_census()
        left = [name for each in refs for name, ref in each.items() if ref() is not None]
        more = {name: count - before.counts[name] for name, count in after.counts.items()}
        return {"left": left, "more": more, "grown": grown(before.registries, after.registries)}


if __name__ == "__main__":
    main(SoakWorker)
