"""One rank of `benchmarks.faults`: trains a DDP model, and ends itself where it is asked to."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.teams import Task
from benchmarks.harness.worker import main

FORWARD, SECTIONS = "forward", "between sections of backward"
ALLREDUCE, OPTIMIZER, COMPILE = "inside an allreduce", "optimizer step", "compile"
_WIDTH, _DEPTH, _BATCH = 512, 6, 8  # a layer has 1 MiB of weights
_CAP_MB = 1.0
_IN_ALLREDUCE_S = 0.3  # 1 MiB takes 0.5 s and more at 20 Mbit/s


class _Fault:
    where = ""  # in the next step


def _strike() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reach(where: str) -> None:
    if where == _Fault.where:
        _strike()


@torch.library.custom_op("ddpopt_faults::reach_forward", mutates_args=())
def reach_forward(x: Tensor) -> Tensor:
    """Be a place in the middle of a compiled forward."""
    _reach(FORWARD)
    return x.clone()


reach_forward.register_fake(torch.empty_like)
reach_forward.register_autograd(lambda _, gradient: gradient)


class Model(nn.Module):
    """Layers of equal size, so that backward has one section for each but the first bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).relu()
            if index == _DEPTH // 2:
                x = reach_forward(x)
        return x


class Trained(NamedTuple):
    """All parameters as bytes; or an error, in which call of the step, and when it came."""

    parameters: bytes = b""
    error: str = ""
    place: str = ""
    time_s: float = 0.0


class FaultWorker:
    """Trains; each public method is a request."""

    def __init__(self, task: Task) -> None:
        self._rank, self._split = task.rank, task.peer
        self._generator = torch.Generator().manual_seed(task.rank)
        torch.set_num_threads(1)

    def start(self, timeout_s: float) -> None:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
        torch.manual_seed(0)
        model = Model()
        self._ddp = DistributedDataParallel(model, bucket_cap_mb=_CAP_MB)
        options = {"split": self._split}
        self._forward: Any = torch.compile(self._ddp, backend="ddpopt", options=options)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01)
        last = model.layers[-1].weight  # in the first bucket that backward completes
        last.register_post_accumulate_grad_hook(_reach_first_bucket)
        self._optimizer.register_step_pre_hook(lambda *_: _reach(OPTIMIZER))

    def train(self, num_steps: int, victim: int, where: str, pause_s: float) -> Trained:
        """Train; the victim ends in the first step, where it says."""
        _Fault.where = where if self._rank == victim else ""
        if _Fault.where == COMPILE:
            threading.Thread(target=_strike_while_inductor_writes, daemon=True).start()
        try:
            for _ in range(num_steps):
                x = torch.randn(_BATCH, _WIDTH, generator=self._generator)
                self._forward(x).square().mean().backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                time.sleep(pause_s)
        except RuntimeError as error:
            frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
            place = next((name for name in ("backward", "step", "forward") if name in frames), "?")
            return Trained(error=str(error), place=place, time_s=time.monotonic())
        values = [parameter.detach().numpy().tobytes() for parameter in self._ddp.parameters()]
        return Trained(parameters=b"".join(values))

    def end(self) -> None:
        """End as a program does that got an error, with all that is still open."""
        raise SystemExit


def _reach_first_bucket(_: Tensor) -> None:
    _reach(SECTIONS)
    if _Fault.where == ALLREDUCE:
        threading.Timer(_IN_ALLREDUCE_S, _strike).start()


def _strike_while_inductor_writes() -> None:
    """Wait for the first source that Inductor hands to a C++ compiler."""
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    while not any(folder.glob("*/*.cpp")):
        time.sleep(0.005)
    _strike()


if __name__ == "__main__":
    main(FaultWorker)
