"""One rank of a soak: trains with all that a long run brings, and counts what the process holds.

It obeys `harness/teams.py`, as `harness/worker.py` does. Steps go in periods. In each of them:

    the first        begins with torch._dynamo.reset(): all is compiled anew
    each             has one of four shapes, on each rank in another turn; the first graphs are
                     compiled for a shape, the next for any number of rows
    of ten, one      only accumulates (`no_sync`)
    of 25, one       is followed by an evaluation: `eval()` and `no_grad`
    the second half  has a fifth shape with a dimension more: further graphs
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.peers import find_peer
from benchmarks.harness.teams import Task
from benchmarks.harness.worker import join, main
from benchmarks.soak.census import MEASURES, Census, grown_registries, take_census
from benchmarks.soak.models import LIVES, Layers

_WIDTH, _DEPTH = 32, 3
_CAP_MB = 0.005  # a bucket a layer
_SHAPES = ((8, _WIDTH), (5, _WIDTH), (1, _WIDTH), (12, _WIDTH))
_LATE_SHAPE = (2, 3, _WIDTH)
_WARM_UP_LIVES = 2
_ACCUMULATED, _EVALUATED = 10, 25  # each so many steps


class Training:
    def __init__(self, peer: str, inner: str, rank: int) -> None:
        torch.manual_seed(0)
        found, options = find_peer(peer)
        torch._dynamo.config.optimize_ddp = found.optimize_ddp
        self.num_steps = 0
        self.ddp = DistributedDataParallel(Layers(_WIDTH, _DEPTH), bucket_cap_mb=_CAP_MB)
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
        return take_census(self.num_steps)

    def _step(self, place: int, shapes: Sequence[tuple[int, ...]]) -> None:
        x = torch.randn(shapes[(place + self._rank) % len(shapes)])
        is_accumulated = place % _ACCUMULATED == _ACCUMULATED - 1
        with self.ddp.no_sync() if is_accumulated else contextlib.nullcontext():
            self._model(x).pow(2).mean().backward()
        if not is_accumulated:
            self._optimizer.step()
            self._optimizer.zero_grad()
        if place % _EVALUATED == _EVALUATED - 1:
            with self._evaluating():
                self._model(x)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.ddp.eval()
        with torch.no_grad():
            yield
        self.ddp.train()


class SoakWorker:
    """One rank; each public method is a request."""

    def __init__(self, task: Task) -> None:
        join(task)
        self._training = Training(task.peer, task.setting.inner, task.rank)

    def run(self, num_steps: int, period: int) -> list[dict[str, float]]:
        own = self._training.run(num_steps, period).measures()
        gathered = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return gathered

    def live(self, name: str, num_models: int) -> dict[str, Any]:
        """Have that many models of a life live and die; return what is left of them on this rank.

        The first two, which compile, count as warm-up.
        """
        life = LIVES[name]
        refs = [life.live() for _ in range(_WARM_UP_LIVES)]
        before = take_census(0)
        refs += [life.live() for _ in range(num_models - _WARM_UP_LIVES)]
        after = take_census(num_models)
        left = [name for each in refs for name, ref in each.items() if ref() is not None]
        del refs
        grown = {name: after.measures()[name] - before.measures()[name] for name in MEASURES}
        return {"left": left, "grown": grown, "registries": grown_registries(before, after)}


if __name__ == "__main__":
    main(SoakWorker)
