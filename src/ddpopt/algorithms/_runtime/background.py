"""`BackgroundHandle`: for algorithms that reduce DDP's buckets on a thread, behind backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddpopt import _torch
from ddpopt.algorithms._runtime.comm_hook import Bucket, GradientFuture
from ddpopt.algorithms._runtime.handle import Algorithm, Handle, Training
from ddpopt.algorithms._runtime.worker import Worker
from ddpopt.ranks.faults import communicating


class BackgroundHandle(Handle):
    """As `Handle`; backward raises what went wrong in the background, PeerError among others."""

    def __init__(
        self, training: Training, algorithm: Algorithm[Any], *, ranks_per_node: int = 1
    ) -> None:
        super().__init__(training, algorithm, ranks_per_node=ranks_per_node)
        self._worker = Worker(self, training.device)
        self._failure: Exception | None = None

    def run_behind_backward(self, bucket: Bucket, task: Callable[[], None]) -> GradientFuture:
        """Have the worker run a task that changes a bucket in place.

        DDP shows an exception of a future as one of its own, without type. So the future ends
        well, and what a task raised is raised when DDP has ended its part of backward.
        """
        self.num_communications += 1
        values: torch.Tensor = bucket.buffer()
        step = self.num_steps
        if bucket.is_last():
            _torch.at_end_of_backward(self._raise_failure)

        def run() -> torch.Tensor:
            if self._failure is None:  # on a broken connection each task would wait for long
                try:
                    with communicating(f"reducing gradients in step {step}"):
                        task()
                except Exception as error:
                    self._failure = error
            return values

        return self._worker.submit(run)

    def close(self) -> None:
        """End the thread."""
        self._worker.close()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self.note_failure()
            raise failure
