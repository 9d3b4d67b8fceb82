"""One rank of `benchmarks.faults`: trains a compiled DDP model, and ends where its task says.

What it does is told by lines of JSON on its output, with the machine's monotonic time.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults import cases

WIDTH, DEPTH, BATCH = 512, 6, 8  # a layer has 1 MiB of weights
_CAP_MB = 1.0
_PAUSE_S = 0.2
_IN_ALLREDUCE_S = 0.3  # 1 MiB takes 0.5 s and more at 20 Mbit/s
_PR_SET_PDEATHSIG = 1


def note(event: str, **more: object) -> None:
    print(json.dumps({"event": event, "time_s": time.monotonic(), **more}), flush=True)


class _Fault:
    """Ends this process where it is asked to, once training is there."""

    where = ""
    step = -1

    def reach(self, where: str) -> None:
        if where == self.where and self.step == cases.FAULT_STEP:
            self.strike()

    def strike(self) -> None:
        note("fault")
        os.kill(os.getpid(), signal.SIGKILL)


fault = _Fault()


@torch.library.custom_op("ddpopt_faults::reach_forward", mutates_args=())
def reach_forward(x: Tensor) -> Tensor:
    """Be a place in the middle of a compiled forward."""
    fault.reach(cases.FORWARD)
    return x.clone()


@reach_forward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


reach_forward.register_autograd(lambda _, gradient: gradient)


class Model(nn.Module):
    """Layers of equal size, so that backward has one section for each but the first bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).relu()
            if index == DEPTH // 2:
                x = reach_forward(x)
        return x


def _arm(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Have the places in a step reach for the fault."""
    last = model.layers[-1].weight  # in the first bucket that backward completes

    def after_first_bucket(_: Tensor) -> None:
        fault.reach(cases.SECTIONS)
        if fault.where == cases.ALLREDUCE and fault.step == cases.FAULT_STEP:
            threading.Timer(_IN_ALLREDUCE_S, fault.strike).start()

    last.register_post_accumulate_grad_hook(after_first_bucket)
    optimizer.register_step_pre_hook(lambda *_: fault.reach(cases.OPTIMIZER))


def _strike_while_inductor_writes() -> None:
    """Wait for the first source that Inductor hands to a C++ compiler."""
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    while not any(folder.glob("*/*.cpp")):
        time.sleep(0.005)
    fault.strike()


def _digest(model: nn.Module) -> str:
    state = [value for p in model.parameters() for value in (p.detach(), p.grad)]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state)).hexdigest()


def train(task: cases.Task) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=task.timeout_s))
    torch.manual_seed(0)
    model = Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=_CAP_MB)
    compiled = torch.compile(ddp, backend="ddpopt", options={"split": task.split})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    _arm(model, optimizer)
    fault.where = task.where
    if task.where == cases.COMPILE:
        threading.Thread(target=_strike_while_inductor_writes, daemon=True).start()
    generator = torch.Generator().manual_seed(task.rank)
    for step in range(task.num_steps):
        fault.step = step
        note("step", step=step)
        optimizer.zero_grad()
        compiled(torch.randn(BATCH, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        if task.is_slow:
            time.sleep(_PAUSE_S)
    note("done", digest=_digest(model))


def main() -> None:
    if sys.platform.startswith("linux"):  # be gone when the benchmark is
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    task = cases.Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    try:
        train(task)
    except RuntimeError as error:
        frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        place = next((name for name in ("backward", "step", "forward") if name in frames), "?")
        note("error", text=str(error), place=place)
        raise
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
