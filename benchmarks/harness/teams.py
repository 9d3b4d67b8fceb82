"""Starts the processes of one peer on this machine's ranks, and sends them requests."""

from __future__ import annotations

import collections
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.cluster import Cluster

PROFILED_STEPS = 2  # in a request for a profile
_TIMEOUT_S = 1200
_LOG_LINES = 25
_num_opened: collections.Counter[str] = collections.Counter()  # teams of this process, by name


class TeamError(RuntimeError):
    """A rank raised, died or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is equal for all teams of a run.

    `worker` is the module that each process runs. `num_threads` is None to leave cores and threads.
    With `emulated_ranks` there is one rank on a device, and its network is made up for that many;
    see [Note: the emulated network].
    """

    inner: str
    num_threads: int | None
    folder: Path
    worker: str = "benchmarks.harness.worker"
    device: str = "cpu"
    emulated_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process is to be.

    `cap_mb` is DDP's `bucket_cap_mb`, None for its default. Ranks meet in the file `store`, or if
    that is empty at torchrun's address, under the name `meeting`.
    """

    setting: Setting
    peer: str
    model: str
    cap_mb: float | None
    rank: int
    num_ranks: int
    store: str
    meeting: str


class StepTimes(NamedTuple):
    """Seconds of one step, each of the rank that took longest for it.

    So `iteration_s` is the slowest rank's sum, and may be less than the sum of the other three.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    iteration_s: float


class FirstSteps(NamedTuple):
    """What the first steps cost.

    `compile_s` is how much longer the first took than later ones: with an empty cache of the
    compiler's or with a filled one, as the process found it. `loss` is the first step's,
    `later_loss` that of the fourth, after three updates.
    """

    compile_s: float
    loss: float
    later_loss: float


class Tuned(NamedTuple):
    """What a search for buckets came to, in words, and whether DDP keeps the buckets it had.

    `plan` is the best one as JSON, empty if there is none, as on an emulated network.
    """

    outcome: str
    keeps_buckets: bool
    plan: str = ""


class Facts(NamedTuple):
    """What a process can tell of its model after some steps.

    `num_sections` counts the compiled pieces of backward that ran in a step, None where autograd
    ran operator by operator or was compiled itself. `num_kernels` counts the definitions of kernels
    in what Inductor wrote: one that two pieces need is in both. `num_kernel_calls` counts the calls
    of those in C++ in a step.
    """

    num_graphs: int
    num_sections: int | None
    num_kernels: int
    num_kernel_calls: int
    num_recompiles: int


class Team:
    """One process a rank, of one peer, model and cap. See `open_team`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.processes: dict[int, Process] = {}

    def wait_until_ready(self) -> None:
        self._answers()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Send a request, a method of the worker, to all ranks; return the first one's answer."""
        self.send(name, *arguments)
        return self._answers()[0]

    def send(self, name: str, *arguments: Any) -> None:
        """Send a request to all ranks, for whose answers somebody has to wait."""
        for process in self.processes.values():
            with contextlib.suppress(BrokenPipeError):  # the answer says why
                process.connection.send((name, arguments))

    def answer_of(self, rank: int, timeout_s: float = _TIMEOUT_S) -> Any:
        """Wait for a rank's answer to the last request.

        Raises:
            TeamError: it raised, has ended, or gave none in time.
        """
        process = self.processes[rank]
        if not process.connection.poll(timeout_s):
            raise TeamError(f"rank {rank} of {self.name} did not answer in {timeout_s} s")
        try:
            is_good, answer = process.connection.recv()
        except (EOFError, ConnectionResetError):
            is_good, answer = False, process.last_words()
        if not is_good:
            raise TeamError(f"rank {rank} of {self.name} failed:\n{answer}")
        return answer

    def stop(self) -> None:
        for process in self.processes.values():
            process.popen.kill()
        for process in self.processes.values():
            process.popen.wait()
            process.connection.close()

    def _answers(self) -> list[Any]:
        return [self.answer_of(rank) for rank in self.processes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    popen: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    log: Path

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([f"exit status {self.popen.wait()}", *lines])


@contextlib.contextmanager
def open_team(
    cluster: Cluster, setting: Setting, peer: str, model: str, cap_mb: float | None, caches: Path
) -> Iterator[Team]:
    """Start a team, and kill it in the end.

    Each rank has a compiler's cache of its own, as on machines of their own, in `caches`.
    """
    place = Path(tempfile.mkdtemp(dir=setting.folder))
    team = Team(f"{peer} ({model}, cap {cap_mb or 'default'})")
    _num_opened[team.name] += 1
    try:
        for rank in cluster.local_ranks:
            task = Task(
                setting=setting,
                peer=peer,
                model=model,
                cap_mb=cap_mb,
                rank=rank,
                num_ranks=cluster.num_ranks,
                store="" if cluster.is_torchrun else str(place / "store"),
                # Under torchrun each rank is started by a program of its own: a name of temporary
                # folders would be another one for each.
                meeting=f"{team.name}, {_num_opened[team.name]}",
            )
            cache, log = caches / f"rank{rank}", place / f"rank{rank}.log"
            team.processes[rank] = _start(cluster, task, cache, log)
        yield team
    finally:
        team.stop()
        shutil.rmtree(place, ignore_errors=True)


def _start(cluster: Cluster, task: Task, cache: Path, log: Path) -> Process:
    """Start a worker, which takes its task and then requests from a socket that it inherits."""
    ours, theirs = socket.socketpair()
    with log.open("wb") as output:
        popen = cluster.start(
            task.rank,
            [sys.executable, "-m", task.setting.worker, str(theirs.fileno())],
            num_threads=task.setting.num_threads,
            environment={"TORCHINDUCTOR_CACHE_DIR": str(cache)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is for us; we end them
        )
    connection: Connection[Any, Any] = Connection(ours.detach())
    connection.send(task)
    theirs.close()
    return Process(popen=popen, connection=connection, log=log)
