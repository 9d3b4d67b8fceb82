"""One rank that trains with one algorithm: a process that obeys what `__main__.py` sends it.

As `harness/worker.py`, but steps do not start at a barrier, which asynchronous ranks would not
have: a turn is a number of steps in a row, and each rank has a time of its own for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.algorithms.peers import PEERS
from benchmarks.algorithms.report import Turn
from benchmarks.harness.teams import Task
from benchmarks.harness.worker import Worker, main

_FIRST_STEPS = 6  # until DDP has rebuilt its buckets and warm-ups are over
_WASTED_SIZE = 128


class AlgorithmWorker(Worker):
    """Trains; `first_loss` and `turn` are its requests."""

    peers = PEERS

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._idle = contextlib.ExitStack()
        self._backward_s = 0.0
        self._waste = torch.randn(_WASTED_SIZE, _WASTED_SIZE)

    def first_loss(self) -> float:
        """Compile, and train until steps are as all that follow; return the first loss."""
        self._train(is_slow=False)
        loss = self._loss.item()
        for _ in range(_FIRST_STEPS):
            self._train(is_slow=False)
        self._rest()
        return loss

    def turn(self, num_steps: int, slow_rank: int | None) -> Turn:
        """Train; `slow_rank` computes twice as long as it would."""
        self._idle.close()
        is_slow = slow_rank == dist.get_rank()
        num_exchanges = self._count_exchanges()
        dist.barrier()
        sent_bytes, start_s = _sent_bytes(), time.perf_counter()
        for _ in range(num_steps):
            self._train(is_slow=is_slow)
        time_s = time.perf_counter() - start_s
        num_exchanges = self._count_exchanges() - num_exchanges
        dist.barrier()  # what is sent until all ranks are done belongs to these steps
        sent_bytes = _sent_bytes() - sent_bytes
        self._rest()
        of_rank = (time_s, sent_bytes, num_exchanges)
        of_ranks = [of_rank] * dist.get_world_size()
        dist.all_gather_object(of_ranks, of_rank)
        times_s, sent, exchanges = zip(*of_ranks, strict=True)
        return Turn(
            num_steps=num_steps,
            times_s=times_s,
            sent_bytes=sent if _interface() else (),
            num_exchanges=max(exchanges),
        )

    def _rest(self) -> None:
        """Let nothing communicate in the background until the next turn."""
        if self._handle is not None:
            self._idle.enter_context(self._handle.paused())

    def _count_exchanges(self) -> int:
        return 0 if self._handle is None else self._handle.num_communications

    def _train(self, *, is_slow: bool) -> None:
        start_s = time.thread_time()
        loss = self._model.loss(self._compiled(**self._batch))
        if is_slow:
            # As much CPU time again as this forward and the last backward took.
            now_s = time.thread_time()
            end_s = now_s + (now_s - start_s) + self._backward_s
            while time.thread_time() < end_s:
                torch.mm(self._waste, self._waste)
        start_s = time.thread_time()
        loss.backward()
        self._backward_s = time.thread_time() - start_s
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._loss = loss.detach()


def _interface() -> str:
    """Return the interface whose bytes are this rank's alone, nothing if there is none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return "" if name == "lo" else name


def _sent_bytes() -> int:
    if not _interface():
        return 0
    return int(Path(f"/sys/class/net/{_interface()}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main(AlgorithmWorker)
