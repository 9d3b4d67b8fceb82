"""One peer's process on a device, one rank, its buckets on an emulated network (`harness/network.py`).

As `harness/worker.py`, but a step does not wait for the one before: on a GPU its work is queued
while that is computed, as in training, and an iteration is from the end of a step to that of the
next.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.network import Rate, connect, connect_exchange, open_network
from benchmarks.harness.protocol import FirstSteps, StepTimes, Task
from benchmarks.harness.trace import Trace, summarise
from benchmarks.harness.worker import Worker, main
from ddpopt.algorithms import ShardedUpdateHandle
from ddpopt.bucketing import rebucket
from ddpopt.bucketing.costs import ALLREDUCE, SHARDED, Profile
from ddpopt.bucketing.estimate import estimate, scale
from ddpopt.bucketing.plan import plan_buckets
from ddpopt.split import state

_NUM_CPU_STEPS = 3


class EmulatedWorker(Worker):
    """Trains; each public method is a request."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._network = open_network(task.device)
        if isinstance(self._handle, ShardedUpdateHandle):
            connect_exchange(self._handle.exchange, self._network)
        else:
            connect(self._ddp, self._network)
        self._estimated: Profile | None = None  # for peers that are tuned
        self._profile: Profile | None = None  # with measured times
        if self._peer.is_tuned:  # as its tuner does, where there is more than one rank
            state.of(self._ddp).begin_search(is_trial=False)
            with self._autocast():
                loss = self._model.loss
                self._estimated = estimate(self._ddp.module, self._batch, loss=loss)

    def first_steps(self) -> FirstSteps:
        """Compile, and train until DDP has rebuilt its buckets; its time is that of the first."""
        start_s = time.perf_counter()
        self._launch_step()
        self._clock.finish()
        first_s, loss = time.perf_counter() - start_s, float(self._loss)
        step_s = statistics.median(step.iteration_s for step in self.steps(2, 3))
        return FirstSteps(compile_s=max(0.0, first_s - step_s), step_s=step_s, loss=loss)

    def steps(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        """Train on the network as it is."""
        moments = [self._launch_step() for _ in range(max(1, num_untimed) + num_timed)]
        self._clock.finish()
        seconds = self._clock.seconds
        pairs = list(itertools.pairwise(moments))[max(1, num_untimed) - 1 :]
        return [
            StepTimes(
                forward_s=seconds(start, forward),
                backward_s=seconds(forward, backward),
                optimizer_s=seconds(backward, stop),
                iteration_s=seconds(before[-1], stop),
            )
            for before, (start, forward, backward, stop) in pairs
        ]

    def use_rate(self, gbit: float, num_ranks: int) -> int:
        """Give the network a rate; return how many buckets DDP has then.

        A peer that is tuned gets the best buckets for it: its tuner would measure one rank's
        network, which is none, so the plan is made from what is known of the emulated one.
        """
        self._network.rate = rate = Rate(gbit=gbit, num_ranks=num_ranks)
        if self._peer.is_tuned:
            self._plan(rate)
        return len(self.bucket_bytes())

    def communication_s(self) -> float:
        """Return how long the buckets take on the network, with nothing to compute."""
        assert self._network.rate is not None
        return sum(self._network.rate.cost.seconds(size) for size in self.bucket_bytes())

    def cpu_s(self) -> float:
        """Return the processor's time of this process for a step: what launching costs."""
        self.steps(1, 1)
        start_s = time.process_time()
        for _ in range(_NUM_CPU_STEPS):
            self._launch_step()
        used_s = time.process_time() - start_s
        self._clock.finish()
        return used_s / _NUM_CPU_STEPS

    def profile(self, path: str) -> dict[str, Any]:
        """Profile two steps and return their `trace.Summary`; a path gets the trace."""
        self.steps(1, 1)
        self._network.intervals.clear()
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            for _ in range(2):
                self._launch_step()
            self._clock.finish()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(path or f"{folder}/trace.json")
            profiler.export_chrome_trace(str(place))
            trace = Trace.load(place)
        return summarise(trace, self._network.intervals)._asdict()

    def _plan(self, rate: Rate) -> None:
        """Give DDP the best buckets; what is compiled was cut finely, and stays as it is."""
        if self._profile is None:
            assert self._estimated is not None
            alone = self.lone_steps(2, 3)
            self._profile = scale(
                self._estimated,
                statistics.median(step.forward_s for step in alone),
                statistics.median(step.backward_s for step in alone),
            )
        communication = ALLREDUCE if self._handle is None else SHARDED
        best = plan_buckets(self._profile, rate.cost, rate.num_ranks, communication)
        rebucket.apply(self._ddp, best)
        self.steps(3, 1)

    def _autocast(self) -> torch.autocast:
        """What models are trained with on a GPU."""
        return torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda")

    def _launch_step(self) -> tuple[Any, Any, Any, Any]:
        now = self._clock.moment
        start = now()
        with self._autocast():
            loss = self._model.loss(self._compiled(**self._batch))
        forward = now()
        loss.backward()
        backward = now()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._loss = loss.detach()  # type: ignore[assignment]  # it is read when there is time
        return start, forward, backward, now()


if __name__ == "__main__":
    main(EmulatedWorker)
