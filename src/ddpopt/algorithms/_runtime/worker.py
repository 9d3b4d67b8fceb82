"""`Worker`: a thread that communicates while another computes; `BackgroundHandle` has one."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddpopt.algorithms._runtime.handle import Algorithm, Bucket, GradientFuture, Handle, Training
from ddpopt.ranks.agreement import communicating

_Task = tuple[Callable[[], Any], "torch.futures.Future[Any]", "torch.Event | None"]


class Worker:
    """Runs tasks in the order of submission, which has to be the same on all ranks.

    On an accelerator they run on a stream of their own, after what had been queued when they were
    submitted; waiting for a result makes the waiting thread's stream wait too. `close` ends the
    thread after the queued tasks, and so does the end of `owner`: tasks may refer to it, but the
    thread keeps none that it has run.
    """

    def __init__(self, owner: object, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._tasks, device), name="ddpopt-worker", daemon=True
        )
        self._thread.start()
        self.close = weakref.finalize(owner, self._tasks.put, None)

    def submit(self, task: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Return the future result of a task; its exception is raised by `wait`."""
        queued: torch.Event | None = None
        devices: list[int | str | torch.device] = []
        if self._device.type != "cpu":
            devices, queued = [self._device], torch.Event(self._device)
            queued.record()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self._tasks.put((task, future, queued))
        return future


def _run(tasks: queue.SimpleQueue[_Task | None], device: torch.device) -> None:
    with own_stream(device) as stream, torch.no_grad():
        while (item := tasks.get()) is not None:
            task, future, queued = item
            try:
                if queued is not None:
                    stream.wait_event(queued)
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
            del item, task, future, queued  # they would keep their owner alive


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[Any]:
    """Make this thread queue on a stream of its own in this block; None on the CPU."""
    if device.type == "cpu":
        yield None
        return
    torch.accelerator.set_device_index(device)
    stream = torch.Stream(device)
    with stream:
        yield stream


class BackgroundHandle(Handle):
    """A handle with a worker; backward raises what went wrong in the background."""

    def __init__(self, training: Training, algorithm: Algorithm[Any]) -> None:
        super().__init__(training, algorithm)
        self.worker = Worker(self, training.device)
        self._failure: Exception | None = None

    def run_behind_backward(
        self, bucket: Bucket, task: Callable[[torch.Tensor], None]
    ) -> GradientFuture:
        """Let the worker run a task that changes a bucket's flat values in place.

        DDP would show its exception without its type, so it is raised after DDP's part has ended.
        """
        self.num_communications += 1
        values: torch.Tensor = bucket.buffer()
        step = self.num_steps

        def run() -> torch.Tensor:
            if self._failure is None:  # with a broken connection each task would wait long
                try:
                    with communicating(f"reducing gradients in step {step}"):
                        task(values)
                except Exception as error:
                    self._failure = error
            return values

        return self.worker.submit(run)

    def close(self) -> None:
        """End the thread."""
        self.worker.close()

    def end_backward(self) -> None:
        """Raise what went wrong in the background."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
