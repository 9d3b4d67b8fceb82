"""Ranks that meet through a store, on a clock of their own: one thread runs at a time.

    world = World(seed=7)
    with world.simulated():
        world.run(lambda group: ...)  # to its end, on all ranks
        world.start(world.processes[0], lambda: ...)  # what rank 0 runs, with `world.group_of(0)`
        world.pass_time(2.5)  # all that happens in 2.5 s, in no time

What blocks in `ranks/meetings.py` and `ranks/store.py` is a sleep, a queue, or a call of the store.
Each of these lets another thread run, the earliest first, and those of one time in an order that
the seed gives. So the whole of both modules runs, with the thread that each connection has, and
equal seeds run equally.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.meetings.measuring import FakeGroup
from ddpopt import _torch
from ddpopt.errors import PeerError
from ddpopt.ranks import meetings, store
from tests.support.fake_clock import FakeClock

_MOST_WAITS = 20_000  # in one `pass_time`; more are a loop that lets no time pass


class _OverError(BaseException):
    """Ends a thread at the end of the simulation, wherever it waits."""


@dataclass(slots=True, eq=False)
class Process:
    """The process of a rank, whose threads run unless it `is_stopped`."""

    rank: int
    is_stopped: bool = False


@dataclass(slots=True, eq=False)
class _Task:
    """A thread, and what it waits for: a condition, or a time."""

    process: Process
    run: Callable[[], object]
    is_ready: Callable[[], object] = lambda: True
    until_s: float = float("inf")
    may_run: threading.Lock = field(default_factory=threading.Lock)


class World:
    """Processes of ranks, a store, and a clock."""

    def __init__(self, size: int = 3, seed: int = 0) -> None:
        self._clock = FakeClock(on_sleep=self.sleep)
        self.random = random.Random(seed)
        self.processes = [Process(rank) for rank in range(size)]
        self.store = Store(self)
        self._groups: list[Any] = [FakeGroup(rank, size) for rank in range(size)]
        self._tasks: list[_Task] = []
        self._running: _Task | None = None
        self._may_test = threading.Lock()  # held while a task runs, or nobody
        self._may_test.acquire()
        self._end_s = 0.0  # of the time that passes
        self._num_waits = 0
        self._error: BaseException | None = None
        self._is_over = False

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def group_of(self, rank: int) -> Any:
        return self._groups[rank]

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        """Have meetings use this world's store, clock, queues and threads."""
        queues = types.SimpleNamespace(SimpleQueue=lambda: _Queue(self), Empty=queue.Empty)
        with (
            self._clock.replacing_time_of(meetings, store),
            mock.patch.object(store, "queue", queues),
            mock.patch.object(store, "threading", types.SimpleNamespace(Thread=self._thread)),
            mock.patch.object(store, "_connections", weakref.WeakKeyDictionary()),
            mock.patch.object(_torch, "store_of", return_value=self.store),
        ):
            try:
                yield
            finally:
                self._end()

    def start(self, process: Process, run: Callable[[], object]) -> None:
        """Run something on a thread of a process, as soon as time passes."""
        task = _Task(process, run)
        task.may_run.acquire()
        self._tasks.append(task)
        threading.Thread(target=self._run_task, args=(task,), daemon=True).start()

    def run(
        self, function: Callable[[Any], Any], ranks: Iterable[int] = (), seconds: float = 3600.0
    ) -> list[Any]:
        """Call a function on some ranks (all by default) with the rank's group, and let time pass.

        Returns what each returned, or the PeerError that it raised; None if it has not ended.
        """
        processes = [self.processes[rank] for rank in ranks] or self.processes
        results: list[Any] = [None] * len(processes)

        def note(index: int, process: Process) -> None:
            try:
                results[index] = function(self.group_of(process.rank))
            except PeerError as error:
                results[index] = error

        for index, process in enumerate(processes):
            self.start(process, functools.partial(note, index, process))
        self.pass_time(seconds)
        return results

    def pass_time(self, seconds: float) -> None:
        """Let everything happen that does in this time; raise an error that nobody expected."""
        self._num_waits = 0
        self._end_s = self.now_s + seconds
        self._hand_over()
        self._may_test.acquire()
        self._raise_error()

    # ---- What threads of processes call --------------------------------------------------------

    @property
    def running_rank(self) -> int:
        assert self._running is not None
        return self._running.process.rank

    def wait(self, is_ready: Callable[[], object], seconds: float = float("inf")) -> None:
        """Let others run until a condition holds, or some time has passed."""
        task = self._running
        assert task is not None, "only what `start` runs can wait"
        task.is_ready, task.until_s = is_ready, self.now_s + seconds
        self._hand_over()
        task.may_run.acquire()
        if self._is_over:
            raise _OverError

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def _thread(self, *, target: Any, args: Any, name: str, daemon: bool) -> Any:
        """A thread of the process that makes it, in place of `threading.Thread`."""
        assert name
        assert daemon, "a program may end while a call hangs"
        assert self._running is not None
        process = self._running.process
        return types.SimpleNamespace(start=lambda: self.start(process, lambda: target(*args)))

    # ---- Switching: whoever waits, or ends, chooses who runs next, maybe itself ----------------

    def _hand_over(self) -> None:
        self._running = None if self._is_over else self._next_task()
        (self._running.may_run if self._running else self._may_test).release()

    def _next_task(self) -> _Task | None:
        """The thread whose turn it is; None if nothing happens any more in the time that passes."""
        self._num_waits += 1
        if self._num_waits > _MOST_WAITS:
            self._error = AssertionError(f"at {self.now_s} s a loop lets no time pass")
        if self._error is not None:
            return None
        running = [task for task in self._tasks if not task.process.is_stopped]
        ready = [task for task in running if task.until_s <= self.now_s or task.is_ready()]
        if not ready:
            next_s = min((task.until_s for task in running), default=float("inf"))
            if next_s > self._end_s:
                self._clock.now_s = self._end_s
                return None
            self._clock.now_s = next_s
            ready = [task for task in running if task.until_s <= next_s]
        return self.random.choice(ready)

    def _run_task(self, task: _Task) -> None:
        task.may_run.acquire()
        try:
            if not self._is_over:
                task.run()
        except _OverError:
            pass
        except BaseException as error:  # whoever lets time pass gets it
            self._error = error
        self._tasks.remove(task)
        self._hand_over()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _end(self) -> None:
        self._is_over = True
        while self._tasks:
            self._running = self._tasks[0]
            self._running.may_run.release()
            self._may_test.acquire()
        self._raise_error()


class _Queue:
    """Takes the place of `queue.SimpleQueue`."""

    def __init__(self, world: World) -> None:
        self._world, self._items = world, list[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        seconds = float("inf") if timeout is None else timeout
        self._world.wait(lambda: self._items, seconds)
        if not self._items:
            raise queue.Empty
        return self._items.pop(0)


class Request(NamedTuple):
    """A call of the store by a rank; of several keys the first."""

    rank: int
    name: str
    key: str


class Store:
    """A store as torch's are, which takes its time, and may hang.

    Half of `latency_s` passes before a call does anything, and half after that. Connections are
    made one after another, each in `connecting_s`.
    """

    def __init__(self, world: World) -> None:
        self.latency_s = 1e-3
        self.connecting_s = 0.0
        self.hangs = False
        self.num_connections = 0
        self.requests: list[Request] = []
        self._world = world
        self._free_s = 0.0  # when the next connection can be made
        self._values: dict[str, bytes] = {}

    def clone(self) -> Store:
        self.num_connections += 1
        self._free_s = max(self._free_s, self._world.now_s) + self.connecting_s
        self._travel(self._free_s - self._world.now_s)
        return self

    def set(self, key: str, value: str) -> None:
        self._call("set", key, lambda: self._values.__setitem__(key, value.encode()))

    def get(self, key: str) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        assert all(key in self._values for key in keys), f"waits for a value, one of {keys}"
        return self._call("get", keys[0], lambda: [self._values[key] for key in keys])

    def check(self, keys: list[str]) -> bool:
        return self._call("check", keys[0], lambda: all(key in self._values for key in keys))

    def add(self, key: str, amount: int) -> int:
        def add() -> int:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

        return self._call("add", key, add)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert not expected
        return self._call("set", key, lambda: self._values.setdefault(key, desired.encode()))

    def _call(self, name: str, key: str, work: Callable[[], Any]) -> Any:
        self.requests.append(Request(self._world.running_rank, name, key))
        seconds = self.latency_s * self._world.random.uniform(0.1, 1.0) / 2
        self._travel(seconds)
        answer = work()
        self._travel(seconds)
        return answer

    def _travel(self, seconds: float) -> None:
        self._world.sleep(seconds)
        if self.hangs:
            self._world.wait(lambda: False)
