"""One rank of one peer: a process that obeys what `teams.py` sends it.

It takes its `Task`, and then requests (a method's name and arguments), from a socket that it has
inherited. The times of steps are the slowest rank's, on all ranks; other answers (`facts`,
`peak_mib`, `tensors_mib`, `cpu_s`, `timeline`) are each rank's own. What a peer sets for all of its
process stays there: nothing is undone.

On an emulated network a step does not wait for the one before: on a GPU its work is queued while
that is computed, as in training, and an iteration is from the end of a step to that of the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.profiler import ProfilerActivity, profile

import ddpopt
from benchmarks.harness import device, trace
from benchmarks.harness.models import find_model
from benchmarks.harness.network import Rate, connect, open_network
from benchmarks.harness.peers import PEERS, Peer, find_peer
from benchmarks.harness.teams import PROFILED_STEPS, Facts, FirstSteps, StepTimes, Task, Tuned
from ddpopt.algorithms import attach
from ddpopt.inspection.recording import RecordedStep
from ddpopt.planning import rebucket
from ddpopt.planning import tuner as tuner_module
from ddpopt.planning.decision import STAY
from ddpopt.planning.estimates import estimate, scale
from ddpopt.planning.merging import buckets_of_caps
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, BucketPlan, plan_buckets
from ddpopt.split import state
from ddpopt.steps.clock import Clock

_PR_SET_PDEATHSIG = 1
_LEARNING_RATE = 1e-4
_MAX_TUNING_STEPS = 40
_NUM_CPU_STEPS = 3
_KERNEL = re.compile(r"^\w+ = async_compile\.(cpp_pybinding|triton)\(", re.MULTILINE)
_MIB = 1024 * 1024


class Moments(NamedTuple):
    """When a step began and when its parts ended, as marks of a `Clock`.

    On a GPU they are places in its queue: `Clock.seconds` alone makes durations of them.
    """

    start: float
    forward: float
    backward: float
    stop: float


class Worker:
    """Trains as one of `peers`; each public method is a request."""

    peers: Mapping[str, Peer] = PEERS

    def __init__(self, task: Task) -> None:
        self._peer, options = find_peer(task.peer, self.peers)
        torch._dynamo.config.optimize_ddp = self._peer.optimize_ddp
        join(task)
        self._device = task.setting.device
        self._model = find_model(task.model)
        torch.manual_seed(0)
        self._module = self._model.build().to(self._device)
        torch.manual_seed(task.rank)
        self._batch = {name: value.to(self._device) for name, value in self._model.batch().items()}
        self._clock = Clock(torch.device(self._device))
        self._inner = task.setting.inner
        cap = {} if task.cap_mb is None else {"bucket_cap_mb": task.cap_mb}
        self._caps_bytes = DDP_DEFAULT_CAPS if task.cap_mb is None else (int(task.cap_mb * _MIB),)
        self._ddp: Any = self._peer.wrap(self._module, **cap)
        with contextlib.suppress(ImportError):
            # Half a second to a second, which some peers would pay here and some in the first step.
            importlib.import_module("torch._inductor.compile_fx")
        algorithm = self._peer.algorithm
        self._compiled = self._peer.compile(self._ddp, self._inner, {} if algorithm else options)
        self._optimizer = self._peer.optimizer(self._module.parameters(), lr=_LEARNING_RATE)
        self._handle: Any = None
        if algorithm is not None:
            self._handle = attach(self._ddp, self._optimizer, algorithm(**options))
        self._update: Callable[[], object] = self._optimizer.step
        self._loss = torch.zeros(())
        self._emulated = None
        if task.setting.emulated_ranks:
            self._emulated = _EmulatedTraining(self, self._peer, task.setting.emulated_ranks)

    # ---- training -----------------------------------------------------------------------------

    def first_steps(self) -> FirstSteps:
        """Run the first step, in which compilation happens, and three more."""
        start_s = time.perf_counter()
        self._step()
        self._clock.finish()
        first_s, loss = time.perf_counter() - start_s, float(self._loss)
        later_s = statistics.median(step.iteration_s for step in self.steps(0, 3))
        (first_s,) = self._slowest([first_s])
        return FirstSteps(max(0.0, first_s - later_s), loss, later_loss=float(self._loss))

    def steps(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        moments: list[Moments] = []
        for _ in range(num_untimed + num_timed):
            start = None
            if self._emulated is not None and moments:
                start = moments[-1].stop  # it is queued behind the step before
            moments.append(self._step(start))
        self._clock.finish()
        return self._slowest_steps([self._times(m) for m in moments[num_untimed:]])

    def lone_steps(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        with self._alone():
            return self.steps(num_untimed, num_timed)

    def bucket_bytes(self) -> tuple[int, ...]:
        """Return the sizes of DDP's buckets, none for a peer that has no use for them."""
        if not self._peer.has_reducer:
            return ()
        buckets = self._ddp.reducer._get_zeros_like_grad_buckets()
        return tuple(bucket.buffer().nbytes for bucket in buckets)

    def reduce_alone(self, num_times: int) -> list[float]:
        """Reduce buckets of the same sizes, all launched at once, with nothing to compute."""
        if self._emulated is not None:
            return [sum(map(self._emulated.seconds, self.bucket_bytes()))] * num_times
        buckets = [torch.zeros(size // 4, device=self._device) for size in self.bucket_bytes()]
        times = []
        for _ in range(num_times):
            dist.barrier()
            start = self._clock.now()
            for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
                work.wait()
            times.append(self._clock.seconds(start, self._clock.now()))
        return self._slowest(times)

    # ---- buckets ------------------------------------------------------------------------------

    def use_rate(self, gbit: float | None) -> None:
        """Give the emulated network a rate, None for no limit."""
        assert self._emulated is not None
        self._emulated.use_rate(gbit)

    def tune(self) -> Tuned:
        """Find the best buckets again while training.

        How many steps that takes depends on the buckets: a change is compared with before.
        """
        if self._emulated is not None:
            return Tuned(outcome=self._emulated.tune(), keeps_buckets=False)
        tuner = tuner_module.find_tuner(self._ddp)
        if tuner is not None:  # steps so far may have been without communication
            self._finish_search(tuner)
            if tuner.best is not None:
                self.take_buckets_back(tuner.best)
            tuner_module.search_again(self._ddp)
        self._step()  # compiles, the first time, and makes what looks for buckets
        tuner = tuner_module.find_tuner(self._ddp)
        assert tuner is not None
        self._finish_search(tuner)
        return Tuned(
            outcome=tuner.outcome,
            keeps_buckets=tuner.outcome.startswith(STAY),
            plan="" if tuner.best is None else tuner.best.to_json(),
        )

    def take_buckets_back(self, plan: BucketPlan) -> None:
        """Give DDP the buckets that it would have made, in the arrival that a plan knows."""
        plan = _with_caps(plan, self._caps_bytes)
        rebucket.take_back(self._ddp, rebucket.indices_of(self._ddp, plan), plan.caps_bytes)
        self.steps(2, 0)

    def _finish_search(self, tuner: Any) -> None:
        """Train until a search is over."""
        for _ in range(_MAX_TUNING_STEPS):
            if tuner.is_done:
                return
            self._step()
        assert tuner.is_done, f"not done after {_MAX_TUNING_STEPS} steps: {tuner.outcome}"

    def use_caps(self, caps_bytes: Sequence[int]) -> str:
        """Give DDP the buckets of these caps, of the best plan if there are none; return the plan.

        What is compiled stays as it is: it was cut finely. Then trains until DDP has rebuilt them.
        """
        tuner = tuner_module.find_tuner(self._ddp)
        assert tuner is not None
        assert tuner.best is not None, tuner.outcome
        plan = _with_caps(tuner.best, caps_bytes) if caps_bytes else tuner.best
        rebucket.apply(self._ddp, plan)
        self.steps(2, 0)
        return plan.to_json()

    # ---- what else there is to know -----------------------------------------------------------

    def facts(self) -> Facts:
        frames = {
            str(m.compile_id)
            for m in get_compilation_metrics()
            if m.compile_id is not None and m.graph_op_count
        }
        sources = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).glob("*/*.py")
        return Facts(
            num_graphs=counters["stats"]["unique_graphs"],
            num_sections=self._count_sections(),
            num_kernels=sum(len(_KERNEL.findall(source.read_text())) for source in sources),
            num_kernel_calls=self._count_kernel_calls(),
            # `1/2`, or `1/2_0` after a restart, is not the first compile of its frame, 1.
            num_recompiles=sum(not re.search(r"/0(_|$)", frame) for frame in frames),
        )

    def peak_mib(self) -> float:
        """Return the most memory that three steps used; see `device.peak_mib`."""
        device.forget_peak(self._device)
        self.steps(1, 2)
        return device.peak_mib(self._device)

    def tensors_mib(self) -> float:
        """Return the most memory that a step's tensors take on the CPU.

        That is all but parameters, optimizer states and batches: activations, gradients, and
        DDP's buckets, which it keeps from step to step unless they are lazy.
        """
        self.steps(1, 0)
        kept_mib = 0.0
        if self._peer.has_reducer and not getattr(self._ddp, "lazy_bucket_allocation", False):
            kept_mib = sum(self.bucket_bytes()) / _MIB
        return kept_mib + device.allocated_mib(lambda: self.steps(0, 2))

    def cpu_s(self) -> float:
        """Return the processor's time of this process for a step: what launching costs."""
        self.steps(1, 1)
        start_s = time.process_time()
        for _ in range(_NUM_CPU_STEPS):
            self._step()
        used_s = time.process_time() - start_s
        self._clock.finish()
        return used_s / _NUM_CPU_STEPS

    def profile(self, path: str = "") -> trace.Summary:
        """Profile `PROFILED_STEPS` steps on the emulated network; a path gets the trace."""
        assert self._emulated is not None
        self.steps(1, 1)
        intervals = self._emulated.network.intervals
        intervals.clear()
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                self._step()
            self._clock.finish()
        with tempfile.TemporaryDirectory() as folder:
            place = path or f"{folder}/trace.json"
            profiler.export_chrome_trace(place)
            return trace.summarise(Path(place), intervals)

    def timeline(self) -> RecordedStep | None:
        """Record a step, with times after the end of its forward; every later step is slower."""
        if not self._peer.has_reducer:
            return None
        with ddpopt.record(self._ddp) as recording:
            self.steps(1, 1)
        return recording.steps[-1].since_forward()

    # ---- one step -----------------------------------------------------------------------------

    def _step(self, start: float | None = None) -> Moments:
        if self._emulated is None:
            dist.barrier()
        now = self._clock.now
        start = now() if start is None else start
        with self._autocast():
            loss = self._model.loss(self._compiled(**self._batch))
        forward = now()
        with self._peer.around_backward(self._inner):
            loss.backward()
        backward = now()
        self._update()
        self._optimizer.zero_grad()
        self._loss = loss.detach()
        return Moments(start, forward, backward, now())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Have no step of this block communicate."""
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            self._update = self._optimizer.optim.step  # it sends what it has updated, this does not
        try:
            with (
                _without_exchanges(self._ddp, self._optimizer)
                if isinstance(self._ddp, FSDPModule)
                else self._ddp.no_sync()
            ):
                yield
        finally:
            self._update = self._optimizer.step

    def _times(self, moments: Moments) -> StepTimes:
        start, forward, backward, stop = moments
        seconds = self._clock.seconds
        return StepTimes(
            forward_s=seconds(start, forward),
            backward_s=seconds(forward, backward),
            optimizer_s=seconds(backward, stop),
            iteration_s=seconds(start, stop),
        )

    def _slowest(self, times: Sequence[float]) -> list[float]:
        if dist.get_world_size() == 1:
            return list(times)
        slowest = torch.tensor(times, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        values: list[float] = slowest.tolist()
        return values

    def _slowest_steps(self, steps: Sequence[StepTimes]) -> list[StepTimes]:
        slowest = self._slowest([time_s for step in steps for time_s in step])
        width = len(StepTimes._fields)
        return [StepTimes(*slowest[k : k + width]) for k in range(0, len(slowest), width)]

    def _count_sections(self) -> int | None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self._step()
        pieces = ("CompiledFunctionBackward", "GateBackward")
        return sum(event.name in pieces for event in profiler.events()) or None

    def _count_kernel_calls(self) -> int:
        """Count calls of C++ kernels; each is the function `kernel` of a module of its own."""
        calls = []

        def note(_frame: object, event: str, called: object) -> None:
            if event == "c_call" and getattr(called, "__name__", "") == "kernel":
                calls.append(called)

        sys.setprofile(note)
        try:
            self._step()
        finally:
            sys.setprofile(None)
        return len(calls)


def _with_caps(plan: BucketPlan, caps_bytes: Sequence[int]) -> BucketPlan:
    """The plan with the buckets that DDP forms with these caps."""
    return dataclasses.replace(plan, sizes=buckets_of_caps(plan.profile, caps_bytes))


class _EmulatedTraining:
    """The emulated network of a worker, and the best buckets for it."""

    def __init__(self, worker: Worker, peer: Peer, num_ranks: int) -> None:
        self.network = open_network(worker._device)
        self._worker = worker
        self._num_ranks = num_ranks
        self._profile: Any = None
        self._plan: BucketPlan | None = None
        connect(worker._ddp, self.network)
        if peer.is_tuned:  # as its tuner does, where there is more than one rank
            state.get(worker._ddp).begin_search(is_provisional=False)
            with worker._autocast():
                loss = worker._model.loss
                self._estimated = estimate(worker._ddp.module, worker._batch, loss_fn=loss)

    def use_rate(self, gbit: float | None) -> None:
        self.network.rate = None if gbit is None else Rate(gbit=gbit, num_ranks=self._num_ranks)

    def seconds(self, num_bytes: int) -> float:
        return 0.0 if self.network.rate is None else self.network.rate.cost.seconds(num_bytes)

    def tune(self) -> str:
        """Give DDP the best buckets for the rate; what is compiled was cut finely, and stays.

        A tuner would measure one rank's network, which is none, so the plan is made from what is
        known of the emulated one.
        """
        worker, rate = self._worker, self.network.rate
        if rate is None:
            if self._plan is not None:
                worker.take_buckets_back(self._plan)
            return "no limit, nothing to tune"
        if self._profile is None:
            alone = worker.lone_steps(3, 3)
            self._profile = scale(
                self._estimated,
                statistics.median(step.forward_s for step in alone),
                statistics.median(step.backward_s for step in alone),
            )
        self._plan = plan_buckets(self._profile, rate.cost, rate.num_ranks)
        rebucket.apply(worker._ddp, self._plan)
        worker.steps(3, 1)
        return f"planned for the emulated network: {len(self._plan.buckets)} buckets"


@contextlib.contextmanager
def _without_exchanges(module: FSDPModule, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have FSDP2 exchange nothing in this block.

    Parameters stay gathered, and gradients are not reduced. The optimizer would skip parameters
    that have none, so it gets zeros, and does its usual work.
    """
    zeros = [(p, torch.zeros_like(p)) for group in optimizer.param_groups for p in group["params"]]

    def give_gradients(*_: object) -> None:
        for parameter, zero in zeros:
            parameter.grad = zero

    hook = optimizer.register_step_pre_hook(give_gradients)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False)
    try:
        yield
    finally:
        hook.remove()
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)


def join(task: Task) -> None:
    """Make the process group of a team; see where its ranks meet in `Task`."""
    if task.setting.num_threads is not None:
        torch.set_num_threads(task.setting.num_threads)
    store: dist.Store
    if task.store:
        store = dist.FileStore(task.store, task.num_ranks)
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(task.meeting, dist.TCPStore(address, port, is_master=False))
    backend = "nccl" if task.setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.num_ranks)


def main(make: Callable[[Task], Any]) -> None:
    """Make a worker, and obey until the other side is gone."""
    if sys.platform.startswith("linux"):  # has the kernel end this when what started it is gone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        worker = make(connection.recv())
        connection.send((True, None))
        while True:
            name, arguments = connection.recv()
            connection.send((True, getattr(worker, name)(*arguments)))
    except EOFError:
        pass
    except Exception:
        connection.send((False, traceback.format_exc()))
    # Without closing the process group: other ranks may be gone, and nobody waits for us.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Worker)
