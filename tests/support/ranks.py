"""Worker processes with a real gloo group between them, which run functions for tests.

Starting a process and importing torch takes seconds, so a test session starts them once and sends
them work. After a failure they are stopped and started anew, since a rank that raised may have
left the other inside a collective. Each set of ranks meets in a file of its own, at ports that the
system chooses: several sets, and several sessions, run beside each other.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import traceback
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.haste import hurry

TIMEOUT_S = 600  # that a machine is busy is no failure
_PRELOADED = ["torch", "torch._dynamo", "ddpopt.backend"]


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """Runs `function(rank, *args)` on every rank and returns the results in rank order.

    Ranks that are forked start in no time, from one process that has imported torch; but their
    sets of strings have the same order, which those of real ranks have not.
    """

    def __init__(self, num_ranks: int = 2, *, is_forked: bool = False) -> None:
        self.num_ranks = num_ranks
        self._context = mp.get_context("forkserver" if is_forked else "spawn")
        if is_forked:
            self._context.set_forkserver_preload(_PRELOADED)
        self._processes: list[Any] = []
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
        for inbox in self._inboxes:
            inbox.put((function, args))
        results: dict[int, Any] = {}
        try:
            for _ in survivors:
                rank, result, error = self._outbox.get(timeout=TIMEOUT_S)
                if error is not None:
                    raise RankError(f"rank {rank}:\n{error}")
                results[rank] = result
        except queue.Empty:
            self.stop()
            raise RankError(f"no answer within {TIMEOUT_S} s") from None
        except RankError:
            self.stop()
            raise
        return results

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes = []

    def _start(self) -> None:
        make_queue = self._context.Queue
        self._outbox = make_queue()
        self._inboxes = [make_queue() for _ in range(self.num_ranks)]
        self._folder = tempfile.mkdtemp()
        common = (self.num_ranks, f"{self._folder}/store", dict(os.environ), self._outbox)
        self._processes = [
            self._context.Process(target=_work, args=(rank, inbox, *common), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()


class OwnRanks(Protocol):
    """What the fixture `own_ranks` is."""

    def __call__(self, num_ranks: int = 2) -> Ranks: ...


def _work(
    rank: int, inbox: Any, num_ranks: int, store: str, environment: dict[str, str], outbox: Any
) -> None:
    os.environ.update(environment)  # a forked rank has that of the first one's start
    torch.set_num_threads(1)
    hurry()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    while True:
        function, args = inbox.get()
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            outbox.put((rank, function(rank, *args), None))
        except Exception:
            outbox.put((rank, None, traceback.format_exc()))
