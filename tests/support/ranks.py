"""Worker processes with a real gloo group between them, which run functions for tests.

Starting a process and importing torch takes seconds, so a test session starts them once and sends
them work. After a failure they are stopped and started anew, since a rank that raised may have
left the other inside a collective.
"""

from __future__ import annotations

import queue
import tempfile
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 300


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """Runs `function(rank, *args)` on every rank and returns the results in rank order."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks
        self._processes: list[Any] = []

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
        self._processes = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(self.num_ranks)]
        store = str(Path(tempfile.mkdtemp()) / "store")
        self._processes = [
            context.Process(
                target=_work, args=(rank, self.num_ranks, store, inbox, self._outbox), daemon=True
            )
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()


def _work(rank: int, num_ranks: int, store: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
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
