"""Ranks that are threads of a few processes, and a store in a process of its own."""

from __future__ import annotations

import collections
import functools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing as mp

from ddpopt import _torch
from ddpopt.errors import PeerError
from ddpopt.ranks.meetings import JointDecision, monitored_block

_LIMIT_S = 600.0
_RANKS_A_PROCESS = 256
_MEETINGS = ("first block", "block", "decision", "one fails", "one falls silent")
_SILENCE_S = 5.0


class FakeGroup:
    """A group of ranks that communicate nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class CountingStore:
    """A rank's store, which counts its requests by name; looks for an answer apart.

    A look is repeated for as long as a rank waits. `connect` gives the store that is counted.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store: Any = None
        self.num: collections.Counter[str] = collections.Counter()

    def clone(self) -> CountingStore:
        """Connect, as a meeting asks for it."""
        self._store = self._connect()
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            is_look = name == "check" and args[0][0].endswith("/answer")
            self.num["look" if is_look else name] += 1
            return method(*args)

        return call


@dataclass(frozen=True, slots=True)
class _Stay:
    """When a rank came to a meeting and left it, by the machine's clock, and its requests."""

    came_s: float
    left_s: float
    requests: int
    looks: int
    error: str


def _meet(kind: str, group: Any, late_s: float, collective: Any) -> tuple[float, str]:
    """Take part in a meeting; return when this rank was done, and the error, "" for none."""
    came_s = time.monotonic()
    silence_s = _SILENCE_S if kind == "one falls silent" else _LIMIT_S
    is_odd = group.rank() == group.size() - 1
    try:
        if kind == "decision":
            decision = JointDecision(group, kind, f"benchmark/{kind}", _LIMIT_S)
            collective.wait()  # one lies between the two
            time.sleep(late_s)
            came_s = time.monotonic()
            return came_s, str(decision.decide() or "")
        with monitored_block(group, kind, "working", silence_s=silence_s):
            time.sleep(late_s)
            came_s = time.monotonic()
            if is_odd and kind == "one fails":
                raise KeyError("no such batch")
            if is_odd and kind == "one falls silent":
                _fall_silent(group)
    except (KeyError, PeerError) as error:
        return came_s, f"{type(error).__name__}: {error}"
    return came_s, ""


def _fall_silent(group: Any) -> None:
    """Write no more signs of life, and come back when the others have given up."""
    from ddpopt.ranks import store  # noqa: PLC0415  # its own table of connections

    store._connections[group].signs.clear()
    time.sleep(3 * _SILENCE_S)


def _work(  # noqa: PLR0913, PLR0917  # what a process has to know
    first: int, count: int, size: int, port: int, late_s: float, collective: Any, pipe: Any
) -> None:
    """Be some of the ranks: answer for each kind of meeting how long each stayed."""
    groups = [FakeGroup(first + i, size) for i in range(count)]
    connect = functools.partial(dist.TCPStore, "127.0.0.1", port, is_master=False)
    connections = {group: CountingStore(connect) for group in groups}
    stays: list[_Stay | None] = [None] * count

    def stay(index: int, kind: str) -> None:
        group, num = groups[index], connections[groups[index]].num
        num.clear()
        own_late_s = late_s if group.rank() == size // 2 and kind != "first block" else 0.0
        came_s, error = _meet(kind, group, own_late_s, collective)
        left_s = time.monotonic()
        looks = num.pop("look", 0)
        stays[index] = _Stay(came_s, left_s, sum(num.values()), looks, error)

    with mock.patch.object(_torch, "store_of", connections.__getitem__):
        while (kind := pipe.recv()) is not None:
            threads = [threading.Thread(target=stay, args=(i, kind)) for i in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pipe.send(stays)


def _serve(pipe: Any) -> None:
    """Hold the store, and tell the processor time of this process when asked."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv() is not None:
        pipe.send(time.process_time())


def measure(size: int, late_s: float) -> list[str]:
    """The rows of a table for this many ranks; each is printed as soon as it is known."""
    context = mp.get_context("spawn")
    store_pipe, other_end = context.Pipe()
    server = context.Process(target=_serve, args=(other_end,), daemon=True)
    server.start()
    port = store_pipe.recv()
    workers = []
    collective = context.Barrier(size)
    for first in range(0, size, _RANKS_A_PROCESS):
        pipe, end = context.Pipe()
        count = min(_RANKS_A_PROCESS, size - first)
        arguments = (first, count, size, port, late_s, collective, end)
        worker = context.Process(target=_work, args=arguments, daemon=True)
        worker.start()
        workers.append((worker, pipe))
    rows = []
    for kind in _MEETINGS:
        store_pipe.send("time")
        cpu_before_s = store_pipe.recv()
        for _, pipe in workers:
            pipe.send(kind)
        stays: list[_Stay] = [stay for _, pipe in workers for stay in pipe.recv()]
        store_pipe.send("time")
        cpu_s = store_pipe.recv() - cpu_before_s
        waiting = stays[:-1] if kind == "one falls silent" else stays
        last_s = max(each.left_s for each in waiting) - max(each.came_s for each in waiting)
        requests = [stay.requests for stay in stays]
        errors = len({stay.error for stay in stays if stay.error.startswith("PeerError")})
        rows.append(
            f"| {size} | {kind} | {last_s:.2f} | {statistics.median(requests):.0f} "
            f"| {max(requests)} | {statistics.median(stay.looks for stay in stays):.0f} "
            f"| {cpu_s:.2f} | {errors} |"
        )
        print(rows[-1], flush=True)
    for worker, pipe in workers:
        pipe.send(None)
        worker.join()
    server.kill()
    return rows
