"""Worker processes with a real gloo group between them, which run functions for tests.

Starting a process and importing torch takes seconds, so a test session starts them once and sends
them work. After a failure they are stopped and started anew, since a rank that raised may have
left the other inside a collective. Each set of ranks meets in a file of its own, at ports that the
system chooses: several sets, and several sessions, run beside each other.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.device import compute_exactly
from tests.support.speed import speed_up_compiles

TIMEOUT_S = 600  # that a machine is busy is no failure
_PRELOADED = ["torch", "torch._dynamo", "ddpopt.backend"]


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """Runs `function(rank, *args)` on every rank and returns the results in rank order.

    Forked ranks start in no time, since their parent has imported torch. They share its hash seed,
    so sets of strings have one order on all of them; spawned ranks have several, as real ones do.
    """

    def __init__(self, num_ranks: int = 2, *, is_forked: bool = False) -> None:
        self.num_ranks = num_ranks
        self._context = mp.get_context("forkserver" if is_forked else "spawn")
        if is_forked:
            self._context.set_forkserver_preload(_PRELOADED)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        results = self.run_survivors(range(self.num_ranks), function, *args)
        return [results[rank] for rank in range(self.num_ranks)]

    def run_survivors(
        self, survivors: Collection[int], function: Callable[..., Any], *args: Any
    ) -> dict[int, Any]:
        """As `run`, for a function that ends the other ranks: they are not waited for."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            return dict(self._answers({self._pipes[rank]: rank for rank in survivors}))
        except OSError as error:
            self.stop()
            raise RankError(f"a rank has ended: {error}") from None
        except RankError:
            self.stop()
            raise

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes = [], []

    def _answers(self, waiting: dict[Connection, int]) -> Iterator[tuple[int, Any]]:
        """Give ranks with what they returned, whoever is first."""
        while waiting:
            ready = wait(list(waiting), TIMEOUT_S)
            if not ready:
                raise RankError(f"ranks {sorted(waiting.values())} gave no answer in {TIMEOUT_S} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    result, error = pipe.recv()
                except EOFError:
                    raise RankError(f"rank {rank} has ended") from None
                if error is not None:
                    raise RankError(f"rank {rank}:\n{error}")
                yield rank, result

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp()
        common = (self.num_ranks, f"{self._folder}/store", dict(os.environ))
        for rank in range(self.num_ranks):
            # One for each rank: in a queue for all, a rank that is killed may leave a lock behind.
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(rank, theirs, *common), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


class MakeRanks(Protocol):
    """The type of the fixture `make_ranks`."""

    def __call__(self, num_ranks: int = 2) -> Ranks: ...


def _work(
    rank: int, pipe: Connection, num_ranks: int, store: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # a forked rank has that of the first one's start
    speed_up_compiles()
    compute_exactly()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the tests have ended
            return
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            pipe.send((function(rank, *args), None))
        except (Exception, pytest.fail.Exception):
            pipe.send((None, traceback.format_exc()))


def error_of(call: Callable[[], object]) -> str:
    """Return the error that a call raises, as text, "nothing" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
