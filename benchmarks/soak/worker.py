"""One rank of a soak: a long training. `census.py` counts.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.peers import find_peer
from benchmarks.harness.teams import Task
from benchmarks.harness.worker import join, main
from benchmarks.soak.census import Census, take_census

_SHAPES = ((8, 32), (5, 32), (1, 32), (12, 32))
_LATE_SHAPE = (2, 3, 32)
_ACCUMULATED, _EVALUATED = 10, 25  # each so many steps


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
    def __init__(self, peer_text: str, inner: str, rank: int) -> None:
        torch.manual_seed(0)
        self._peer, options = find_peer(peer_text)
        torch._dynamo.config.optimize_ddp = self._peer.optimize_ddp
        self.ddp: Any = self._peer.wrap(Layers(32, 3), bucket_cap_mb=0.005)
        self.num_steps = 0
        self._rank = rank
        self._inner = inner
        self._model = self._peer.compile(self.ddp, inner, options)
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
            loss = self._model(x).pow(2).mean()
            with self._peer.around_backward(self._inner):
                loss.backward()
        if not is_accumulated:
            self._optimizer.step()
            self._optimizer.zero_grad()
        if place % _EVALUATED == _EVALUATED - 1:
            self.ddp.eval()
            with torch.no_grad():
                self._model(x)
            self.ddp.train()


class SoakWorker:
    """Obeys `harness/teams.py`; each public method is a request."""

    def __init__(self, task: Task) -> None:
        join(task)
        self._training = LongTraining(task.peer, task.setting.inner, task.rank)

    def run(self, num_steps: int, period: int) -> list[dict[str, float]]:
        """Return the counts of all ranks after so many more steps."""
        counts = self._training.run(num_steps, period).counts
        counts_of_rank = {"step": self._training.num_steps, **counts}
        gathered = [counts_of_rank] * dist.get_world_size()
        dist.all_gather_object(gathered, counts_of_rank)
        return gathered


if __name__ == "__main__":
    main(SoakWorker)
