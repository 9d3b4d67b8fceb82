"""A thread that communicates in order, while the thread that computes goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Task = tuple[Callable[[], Any], "torch.futures.Future[Any]", Any]


class Worker:
    """Runs tasks one after the other, in the order in which they were submitted.

    All ranks have to submit the same collectives in the same order, on a process group that
    nobody else uses. On an accelerator tasks run on a stream of their own: behind what had been
    queued when they were submitted, and whoever waits for a result has its stream wait for it.
    The thread ends with `close`, or when `owner` is collected: tasks may refer to the owner, but
    the thread keeps none that it has run.
    """

    def __init__(self, owner: object, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._tasks, device), name="ddpopt-worker", daemon=True
        )
        self._thread.start()
        weakref.finalize(owner, self._tasks.put, None)

    def submit(self, task: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Return the future result of a task; its exception is raised by `wait`."""
        is_cpu = self._device.type == "cpu"
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=None if is_cpu else [self._device]
        )
        queued = None
        if not is_cpu:
            queued = torch.Event(self._device)
            queued.record()
        self._tasks.put((task, future, queued))
        return future

    def close(self) -> None:
        """End the thread after the tasks that are queued; does not wait for it."""
        self._tasks.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()


def _run(tasks: queue.SimpleQueue[_Task | None], device: torch.device) -> None:
    with own_stream(device) as stream:
        while (item := tasks.get()) is not None:
            task, future, queued = item
            try:
                if queued is not None:
                    stream.wait_event(queued)
                with torch.no_grad():
                    future.set_result(task())
            except Exception as error:
                future.set_exception(error)
            del item, task, future, queued  # they keep their owner alive


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[Any]:
    """Have this thread queue on a stream of its own in this block; None on the CPU."""
    if device.type == "cpu":
        yield None
        return
    torch.accelerator.set_device_index(device)
    stream = torch.Stream(device)
    with stream:
        yield stream
