"""Starts the processes of one peer on this machine's ranks, and sends them requests."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness.cluster import Cluster
from benchmarks.harness.protocol import Facts, FirstSteps, StepTimes, Task, Timeline

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 1200
_LOG_LINES = 25


class TeamError(RuntimeError):
    """A rank raised, died or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is equal for all teams of a run; `num_threads` is None to leave cores and threads.

    `worker` is the module that each process runs.
    """

    inner: str
    num_threads: int | None
    folder: Path
    worker: str = "benchmarks.harness.worker"
    device: str = "cpu"


class Team:
    """One process a rank, of one peer, model and cap. See `open_team`.

    Requests are those of `worker.Worker`; the answer is that of the first rank here.
    """

    def __init__(self, name: str, processes: Mapping[int, _Process]) -> None:
        self.name = name
        self._processes = processes

    def wait_until_ready(self) -> None:
        """Wait until the model is built."""
        self._answers()

    def first_steps(self) -> FirstSteps:
        """Compile; see `Worker.first_steps`."""
        answer: FirstSteps = self.ask("first_steps")
        return answer

    def steps(self, num_untimed: int, num_timed: int, *, is_alone: bool = False) -> list[StepTimes]:
        """Train, if `is_alone` without communication."""
        name = "lone_steps" if is_alone else "steps"
        answer: list[StepTimes] = self.ask(name, num_untimed, num_timed)
        return answer

    def bucket_bytes(self) -> tuple[int, ...]:
        """Return the sizes of DDP's buckets."""
        answer: tuple[int, ...] = self.ask("bucket_bytes")
        return answer

    def reduce_alone(self, num_times: int) -> list[float]:
        """Communicate without computing."""
        answer: list[float] = self.ask("reduce_alone", num_times)
        return answer

    def tune(self) -> str:
        """Find the best buckets; see `Worker.tune`."""
        answer: str = self.ask("tune")
        return answer

    def use_caps(self, caps_bytes: Sequence[int]) -> str:
        """Change buckets; see `Worker.use_caps`."""
        answer: str = self.ask("use_caps", caps_bytes)
        return answer

    def facts(self) -> Facts:
        """Count graphs, sections and so on; see `Facts`."""
        answer: Facts = self.ask("facts")
        return answer

    def forget_peak(self) -> None:
        """Watch the memory in use from now on."""
        self.ask("forget_peak")

    def peak_mb(self) -> float:
        """Return the most memory that was resident since `forget_peak`."""
        answer: float = self.ask("peak_mb")
        return answer

    def timeline(self) -> Timeline | None:
        """Record one backward; steps are slower ever after."""
        answer: Timeline | None = self.ask("timeline")
        return answer

    def stop(self) -> None:
        """Kill all ranks."""
        for process in self._processes.values():
            process.popen.kill()
        for process in self._processes.values():
            process.popen.wait()
            process.connection.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Send a request to all ranks, and return the first one's answer."""
        for process in self._processes.values():
            with contextlib.suppress(BrokenPipeError):  # the answer says why
                process.connection.send((name, arguments))
        return self._answers()[0]

    def _answers(self) -> list[Any]:
        answers = []
        for rank, process in self._processes.items():
            if not process.connection.poll(_TIMEOUT_S):
                raise TeamError(f"rank {rank} of {self.name} did not answer in {_TIMEOUT_S} s")
            try:
                is_good, answer = process.connection.recv()
            except (EOFError, ConnectionResetError):
                is_good, answer = False, process.last_words()
            if not is_good:
                raise TeamError(f"rank {rank} of {self.name} failed:\n{answer}")
            answers.append(answer)
        return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
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
    processes: dict[int, _Process] = {}
    team = Team(f"{peer} ({model}, cap {cap_mb or 'default'})", processes)
    try:
        for rank in cluster.local_ranks:
            task = Task(
                peer=peer,
                model=model,
                cap_mb=cap_mb,
                inner=setting.inner,
                rank=rank,
                num_ranks=cluster.num_ranks,
                num_threads=setting.num_threads,
                store="" if cluster.is_torchrun else str(place / "store"),
                meeting=f"{caches.name}-{place.name}",
                socket=-1,
                device=setting.device,
            )
            cache = caches / f"rank{rank}"
            processes[rank] = _start(
                cluster, setting.worker, task, cache, place / f"rank{rank}.log"
            )
        yield team
    finally:
        team.stop()
        shutil.rmtree(place, ignore_errors=True)


def _start(cluster: Cluster, worker: str, task: Task, cache: Path, log: Path) -> _Process:
    ours, theirs = socket.socketpair()
    task = dataclasses.replace(task, socket=theirs.fileno())
    environment = {
        **os.environ,
        **cluster.environment(),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if task.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(task.num_threads)
    command = [sys.executable, "-m", worker, json.dumps(dataclasses.asdict(task))]
    with log.open("wb") as output, _pinned(task):
        popen = subprocess.Popen(
            [*cluster.command_prefix(task.rank), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is for us; we end them
        )
    theirs.close()
    return _Process(popen=popen, connection=Connection(ours.detach()), log=log)


@contextlib.contextmanager
def _pinned(task: Task) -> Iterator[None]:
    """Give what is started here as many cores as it has threads, and ranks different ones."""
    if task.num_threads is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    first, listed = task.rank * task.num_threads, sorted(cores)
    own = {listed[(first + index) % len(listed)] for index in range(task.num_threads)}
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
