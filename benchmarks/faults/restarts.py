r"""What becomes of training when it goes on with another number of ranks, or with other processes.

    python -m benchmarks.faults.restarts [--only 'auto|ByteGrad']

Ranks are processes of this machine that train a small model with momentum, save what each needs to
go on, and train again. An elastic restart has new processes, as torchrun makes them. In an
in-process restart those that remain keep their model, and make a process group anew, with a new
store; a spare rank comes in new, with what rank 0 has saved. A rank is also replaced before the
first meeting of a search for buckets, and between the two.

Without an algorithm, gradients and weights are compared with those of eager DDP, which goes on from
the same; with one, the weights of all ranks are equal when it is detached, and the loss has
decreased. What an algorithm refuses to load has to name its remedy, which is then done. A row fails
if ranks hang, differ, or raise another error.
"""
# test: skip, it takes a quarter of an hour

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.harness.report import table
from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    attach,
)
from ddpopt.errors import OptionError
from ddpopt.planning import Network

_WIDTH, _DEPTH, _BATCH = 64, 4, 16
_CAP_MB = 0.03
_LR = 1.0  # of SGD with momentum; gradients are those of a mean
_LIMIT_S = 240.0  # for a phase of one rank
_TIMEOUT = datetime.timedelta(seconds=_LIMIT_S / 2)  # of a process group
_BEFORE_FIRST_MEETING, _BETWEEN_MEETINGS = 5, 12  # steps of a search
_NUM_STEPS = 24  # in which a search ends, and the comparison after it
_NUM_ALGORITHMS_STEPS = 12

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "ByteGrad": functools.partial(ByteGrad, hierarchical=False),
    "QAdam": functools.partial(QAdam, hierarchical=False),
    "Decentralized, all": functools.partial(Decentralized, hierarchical=False),
    "Decentralized, shift_one": functools.partial(
        Decentralized, hierarchical=False, peer_selection="shift_one"
    ),
    "LowPrecisionDecentralized": functools.partial(LowPrecisionDecentralized, hierarchical=False),
    "AsyncModelAverage": functools.partial(AsyncModelAverage, sync_interval_ms=20),
}
PLAIN = ("warmup", "plan", "auto")


@dataclass(frozen=True, slots=True)
class Restart:
    """How many ranks there are before and after, and whether processes live on."""

    num_before: int
    num_after: int
    is_in_process: bool
    num_steps_before: int = _NUM_STEPS
    is_spare: bool = False  # the last rank is another process, although the number is the same

    @property
    def title(self) -> str:
        """The first cell of its rows."""
        kind = "in-process" if self.is_in_process else "elastic"
        spare = ", of which one is new" if self.is_spare else ""
        after = f", after {self.num_steps_before} steps"
        return f"{kind}, {self.num_before} to {self.num_after} ranks{spare}{after}"


RESTARTS = (
    Restart(4, 2, is_in_process=False),
    Restart(2, 4, is_in_process=False),
    Restart(2, 16, is_in_process=False),
    Restart(4, 2, is_in_process=True),
    Restart(2, 4, is_in_process=True),
    Restart(2, 2, True, _BEFORE_FIRST_MEETING, is_spare=True),
    Restart(2, 2, True, _BETWEEN_MEETINGS, is_spare=True),
)


class Model(nn.Module):
    """Layers of equal size, one a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@dataclass(frozen=True, slots=True)
class Phase:
    """One training: `what`, by how many ranks, from what was saved in the folder if it resumes."""

    what: str
    size: int
    port: int
    folder: str
    num_steps: int
    resumes: bool


class Trained(NamedTuple):
    """What a rank says: "" or how it trained, its weights, or an error."""

    outcome: str
    weights: bytes = b""
    error: str = ""


# ---- A rank --------------------------------------------------------------------------------------


class _Rank:
    """A process, which trains in one phase or more, each time in another process group."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None  # None in a new process
        self._optimizer: torch.optim.Optimizer | None = None

    def train(self, rank: int, phase: Phase) -> Trained:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", phase.port, is_master=False)
        options = {"rank": rank, "world_size": phase.size, "timeout": _TIMEOUT}
        dist.init_process_group("gloo", store=store, **options)
        saved: dict[str, Any] = {}
        if phase.resumes:
            own = Path(phase.folder, f"{rank}.pt")
            path = own if own.exists() else own.with_name("0.pt")
            saved = torch.load(path, weights_only=False)
        module, optimizer = self._take(phase, saved)
        if phase.what in ALGORITHMS:
            trained, state = _train_with_algorithm(rank, phase, module, optimizer, saved)
        else:
            trained, state = _train_beside_eager(rank, phase, module, optimizer), None
        dist.barrier()  # all have read what was saved
        if trained.error:
            return trained
        values = [parameter.detach().numpy().tobytes() for parameter in module.parameters()]
        own_state = {
            "model": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "algorithm": state,
        }
        torch.save(own_state, Path(phase.folder, f"{rank}.pt"))
        return trained._replace(weights=b"".join(values))

    def _take(self, phase: Phase, saved: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and optimizer that live on, or those that were saved, or new ones."""
        if self._module is not None and self._optimizer is not None:
            return self._module, self._optimizer
        torch.manual_seed(0)
        self._module = Model()
        parameters = list(self._module.parameters())
        if phase.what == "QAdam":
            self._optimizer = QAdamOptimizer(parameters, lr=1e-3, warmup_steps=4)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=_LR, momentum=0.9)
        if saved:
            self._module.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])
        return self._module, self._optimizer


def _batch(rank: int) -> torch.Tensor:
    """The one that a rank trains on again and again, so that its loss decreases."""
    return torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(rank))


def _step(model: Callable[..., Any], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _train_beside_eager(
    rank: int, phase: Phase, module: nn.Module, optimizer: torch.optim.Optimizer
) -> Trained:
    """Train compiled, and a copy of all with eager DDP; both have the same weights all along."""
    expected = copy.deepcopy(module)
    of_copy = torch.optim.SGD(expected.parameters(), lr=_LR, momentum=0.9)
    of_copy.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    eager = DistributedDataParallel(expected, bucket_cap_mb=_CAP_MB)
    ddp = DistributedDataParallel(module, bucket_cap_mb=_CAP_MB)
    plan = Path(phase.folder, "plan.json")
    buckets = {"plan": str(plan), "auto": "auto"}.get(phase.what, "ddp")
    x = _batch(rank)
    if phase.what == "plan" and not plan.exists():  # the first phase
        if rank == 0:
            network = Network(latency_s=1e-4, bytes_per_s=1e8)
            ddpopt.plan(module, (x,), network=network, backend=None).save(plan)
        dist.barrier()
    options = {"inner": "aot_eager", "buckets": buckets}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    if phase.what == "warmup":
        ddpopt.warmup(compiled, x)
    for number in range(phase.num_steps):
        ours, theirs = _step(compiled, optimizer, x), _step(eager, of_copy, x)
        pairs = zip(module.parameters(), expected.parameters(), strict=True)
        if not all(torch.allclose(own, other, rtol=1e-5, atol=1e-6) for own, other in pairs):
            return Trained("", error=f"step {number}: loss {ours} instead of {theirs}")
    tuning = ddpopt.explain(ddp).tuning.partition("\n")[0]
    return Trained(tuning or "as eager DDP")


def _train_with_algorithm(
    rank: int,
    phase: Phase,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
) -> tuple[Trained, dict[str, Any]]:
    """Train with an algorithm, whose state is loaded if it lets us."""
    ddp = DistributedDataParallel(module, bucket_cap_mb=_CAP_MB)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    handle: Any = attach(compiled, optimizer, ALGORITHMS[phase.what]())
    outcome = "trains"
    if state := saved.get("algorithm"):
        try:
            handle.load_state_dict(state)
            outcome = "loads its state, and trains"
        except OptionError as error:
            if "resync" not in str(error):
                raise
            handle.resync()
            outcome = f"after the remedy trains; it refused: {error}"
    x = _batch(rank)
    losses = [_step(compiled, optimizer, x) for _ in range(_NUM_ALGORITHMS_STEPS)]
    state = handle.state_dict()
    handle.detach()
    if not losses[-1] < losses[0]:
        return Trained("", error=f"the loss did not decrease: {losses}"), state
    return Trained(outcome), state


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    own = _Rank()
    while (request := pipe.recv()) is not None:
        try:
            answer = own.train(*request)
        except Exception:
            # Whatever it is, it belongs into the table.
            answer = Trained("", error=traceback.format_exc()[-1500:])
        pipe.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- All ranks -----------------------------------------------------------------------------------


class _Process:
    """A rank's process, and a pipe to it."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end,), daemon=True)
        self._process.start()

    def answer(self) -> Trained:
        if not self.pipe.poll(_LIMIT_S):
            return Trained("", error=f"hangs: no answer in {_LIMIT_S:g} s")
        try:
            answer: Trained = self.pipe.recv()
        except EOFError:
            return Trained("", error="it has ended")
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def run_case(what: str, restart: Restart) -> tuple[str, bool]:
    """Train, restart and train on; return what came of it, and whether that is right."""
    with tempfile.TemporaryDirectory(prefix="ddpopt-restart-") as folder:
        before = [_Process() for _ in range(restart.num_before)]
        trained = _train(before, what, folder, restart.num_steps_before, resumes=False)
        if problem := _find_problem(trained):
            return f"FAILED before the restart: {problem}", False
        num_kept = 0
        if restart.is_in_process:
            num_kept = min(restart.num_before - restart.is_spare, restart.num_after)
        for process in before[num_kept:]:
            process.kill()
        new = [_Process() for _ in range(restart.num_after - num_kept)]
        after = [*before[:num_kept], *new]
        trained = _train(after, what, folder, _NUM_STEPS, resumes=True)
        for process in after:
            process.kill()
        if problem := _find_problem(trained):
            return f"FAILED: {problem}", False
        return trained[0].outcome, True


def _train(
    ranks: list[_Process], what: str, folder: str, num_steps: int, *, resumes: bool
) -> list[Trained]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    phase = Phase(what, len(ranks), store.port, folder, num_steps, resumes)
    for rank, process in enumerate(ranks):
        process.pipe.send((rank, phase))
    return [process.answer() for process in ranks]


def _find_problem(trained: list[Trained]) -> str:
    errors = [f"rank {rank}: {own.error}" for rank, own in enumerate(trained) if own.error]
    if errors:
        return errors[0]
    return "" if len({own.weights for own in trained}) == 1 else "the ranks' weights differ"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.restarts",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--only", default="", help="a regular expression, as 'auto|ByteGrad'")
    arguments = parser.parse_args()
    rows, are_good = [], True
    for restart in RESTARTS:
        for what in ("auto",) if restart.is_spare else (*PLAIN, *ALGORITHMS):
            if not re.search(arguments.only, f"{what} | {restart.title}"):
                continue
            outcome, is_good = run_case(what, restart)
            rows.append([restart.title, what, " ".join(outcome.split()).replace("|", "/")])
            are_good &= is_good
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join(table(("restart", "with", "outcome"), rows)))
    return 0 if are_good else 1


if __name__ == "__main__":
    sys.exit(main())
