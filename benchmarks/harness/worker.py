"""One rank of one peer: a process that obeys what `teams.py` sends it.

It is started with its `Task` as JSON, and answers requests (a method's name and arguments) on an
inherited socket. All times are the slowest rank's, so that every rank's answer is the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import re
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import device
from benchmarks.harness.models import find_model
from benchmarks.harness.peers import find_peer
from benchmarks.harness.protocol import BucketTimes, Facts, FirstSteps, StepTimes, Task, Timeline
from ddpopt.algorithms import ShardedUpdateHandle, attach
from ddpopt.bucketing import rebucket
from ddpopt.bucketing import tuner as tuning
from ddpopt.bucketing.merging import buckets_of_caps
from ddpopt.bucketing.plan import DDP_DEFAULT_CAPS

_PR_SET_PDEATHSIG = 1
_LEARNING_RATE = 1e-4
_MAX_TUNING_STEPS = 40


class Worker:
    """Trains; each public method is a request."""

    def __init__(self, task: Task) -> None:
        if task.num_threads is not None:
            torch.set_num_threads(task.num_threads)
        dist.init_process_group(
            device.backend_of(task.device),
            store=meet(task),
            rank=task.rank,
            world_size=task.num_ranks,
        )
        torch.manual_seed(0)
        self._device = task.device
        self._clock = device.Clock(task.device)
        self._peer, options = find_peer(task.peer)
        self._inner = task.inner
        torch._dynamo.config.optimize_ddp = self._peer.optimize_ddp
        self._model = find_model(task.model)
        module = self._model.build().to(task.device)
        torch.manual_seed(task.rank)
        self._batch = {name: value.to(task.device) for name, value in self._model.batch().items()}
        cap = {} if task.cap_mb is None else {"bucket_cap_mb": task.cap_mb}
        self._ddp: Any = self._peer.wrap(module, **cap)
        with contextlib.suppress(ImportError):
            # Half a second to a second, which some peers would pay here and some in the first step.
            importlib.import_module("torch._inductor.compile_fx")
        self._compiled = self._peer.compile(self._ddp, task.inner, options)
        self._optimizer = self._peer.optimizer(module.parameters(), lr=_LEARNING_RATE, fused=True)
        self._handle: Any = None
        if self._peer.algorithm is not None:
            self._handle = attach(self._ddp, self._optimizer, self._peer.algorithm)
        self._loss = 0.0
        self._recorder: _Recorder | None = None

    def first_steps(self) -> FirstSteps:
        """Run the first step, in which compilation happens, and three more."""
        start = time.perf_counter()
        self._step()
        first_s, loss = time.perf_counter() - start, self._loss
        later_s = statistics.median(self._step().iteration_s for _ in range(3))
        first_s, later_s = self._slowest([first_s, later_s])
        return FirstSteps(compile_s=max(0.0, first_s - later_s), step_s=later_s, loss=loss)

    def steps(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        """Train."""
        for _ in range(num_untimed):
            self._step()
        return self._slowest_steps([self._step() for _ in range(num_timed)])

    def lone_steps(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        """Train without any communication."""
        with self._alone():
            return self.steps(num_untimed, num_timed)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._handle, ShardedUpdateHandle):
            return _silent(self._handle)
        if isinstance(self._ddp, FSDPModule):
            return _whole(self._ddp, self._optimizer)
        alone: contextlib.AbstractContextManager[None] = self._ddp.no_sync()
        return alone

    def bucket_bytes(self) -> tuple[int, ...]:
        """Return the sizes of DDP's buckets, none for a peer that has no use for them."""
        if not self._peer.has_buckets:
            return ()
        buffers = [bucket.buffer() for bucket in self._ddp.reducer._get_zeros_like_grad_buckets()]
        return tuple(buffer.numel() * buffer.element_size() for buffer in buffers)

    def tune(self) -> str:
        """Find the best buckets again while training; return the plan as JSON, with `outcome`.

        How many steps that takes depends on what is found: a change is compared with before.
        """
        tuner = tuning.of(self._ddp)
        if tuner is not None:  # steps so far may have been without communication
            if tuner.best is not None:
                self.use_caps(DDP_DEFAULT_CAPS)
            tuning.restart(self._ddp)
        self._step()  # compiles, the first time, and makes what looks for buckets
        num_steps = 1
        tuner = tuning.of(self._ddp)
        assert tuner is not None
        while not tuner.is_done:
            assert num_steps < _MAX_TUNING_STEPS, (
                f"not done after {num_steps} steps: {tuner.outcome}"
            )
            self._step()
            num_steps += 1
        if tuner.best is None:
            return json.dumps({"outcome": tuner.outcome})
        return json.dumps({"outcome": tuner.outcome, "plan": tuner.best.to_json()})

    def use_caps(self, caps_bytes: Sequence[int]) -> str:
        """Give DDP the buckets of these caps, of the best plan if there are none; return the plan.

        What is compiled stays as it is: it was cut finely. Then trains until DDP has rebuilt them.
        """
        tuner = tuning.of(self._ddp)
        assert tuner is not None
        assert tuner.best is not None, tuner.outcome
        plan = tuner.best
        if caps_bytes:
            plan = dataclasses.replace(plan, sizes=buckets_of_caps(plan.profile, caps_bytes))
        rebucket.apply(self._ddp, plan)
        for _ in range(2):
            self._step()
        return plan.to_json()

    def reduce_alone(self, num_times: int) -> list[float]:
        """Reduce buckets of the same sizes, all launched at once, with nothing to compute."""
        sizes = self.bucket_bytes()
        buckets = [torch.zeros(size // 4, device=self._device) for size in sizes]
        times = []
        for _ in range(num_times):
            dist.barrier()
            start = self._clock.moment()
            for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
                work.wait()
            times.append(self._clock.seconds(start, self._clock.moment()))
        return self._slowest(times)

    def facts(self) -> Facts:
        """Count; runs two steps under profilers."""
        frames = {
            str(m.compile_id)
            for m in get_compilation_metrics()
            if m.compile_id is not None and m.graph_op_count
        }
        return Facts(
            num_graphs=counters["stats"]["unique_graphs"],
            num_sections=self._count_sections(),
            num_kernels=_num_kernels(),
            num_kernel_calls=self._count_kernel_calls(),
            num_recompiles=sum(_is_recompile(frame) for frame in frames),
        )

    def forget_peak(self) -> None:
        """Watch the memory in use from now on; see `device.forget_peak`."""
        device.forget_peak(self._device)

    def peak_mb(self) -> float:
        """Return the most memory that was in use since `forget_peak`; see `device.peak_mb`."""
        return device.peak_mb(self._device)

    def timeline(self) -> Timeline | None:
        """Run a step with a hook on each bucket; every later step has it too."""
        if not self._peer.has_buckets or self._handle is not None:  # whose hook is the only one
            return None
        if self._recorder is None:
            self._recorder = _Recorder(self._ddp)
            self._step()
        times = self._step(self._recorder.begin)
        return self._recorder.read(times.backward_s)

    def _step(self, before_backward: Callable[[], None] = lambda: None) -> StepTimes:
        dist.barrier()
        now, seconds = self._clock.moment, self._clock.seconds
        start = now()
        loss = self._model.loss(self._compiled(**self._batch))
        forward = now()
        before_backward()
        with self._peer.around_backward(self._inner):
            loss.backward()
        backward = now()
        self._optimizer.step()
        self._optimizer.zero_grad()
        stop = now()
        self._loss = loss.item()
        return StepTimes(
            forward_s=seconds(start, forward),
            backward_s=seconds(forward, backward),
            optimizer_s=seconds(backward, stop),
            iteration_s=seconds(start, stop),
        )

    def _slowest(self, times: list[float]) -> list[float]:
        slowest = torch.tensor(times, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        values: list[float] = slowest.tolist()
        return values

    def _slowest_steps(self, steps: list[StepTimes]) -> list[StepTimes]:
        names = [field.name for field in dataclasses.fields(StepTimes)]
        slowest = iter(self._slowest([getattr(step, name) for step in steps for name in names]))
        return [StepTimes(**{name: next(slowest) for name in names}) for _ in steps]

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


class _Recorder:
    """Notes when each gradient arrived and when each bucket was launched and finished."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._start_s = 0.0
        self._arrived_s: dict[int, float] = {}
        self._launched: dict[int, tuple[float, int, list[int]]] = {}
        self._finished_s: dict[int, float] = {}
        self._nodes = []  # of autograd, which lives as long as somebody holds it
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                (node, _), *_ = parameter.view_as(parameter).grad_fn.next_functions
                node.register_prehook(self._note_arrival(id(parameter)))
                self._nodes.append(node)
        ddp.register_comm_hook(None, self._reduce)

    def begin(self) -> None:
        self._arrived_s, self._launched, self._finished_s = {}, {}, {}
        self._start_s = time.perf_counter()

    def read(self, backward_s: float) -> Timeline:
        buckets = []
        for bucket, (launched_s, num_bytes, parameters) in sorted(self._launched.items()):
            arrived = [self._arrived_s[key] for key in parameters if key in self._arrived_s]
            buckets.append(
                BucketTimes(
                    bucket=bucket,
                    num_bytes=num_bytes,
                    ready_s=max(arrived, default=launched_s) - self._start_s,
                    launched_s=launched_s - self._start_s,
                    finished_s=self._finished_s[bucket] - self._start_s,
                )
            )
        return Timeline(backward_s=backward_s, buckets=tuple(buckets))

    def _note_arrival(self, key: int) -> Any:
        def note(_gradients: Any) -> None:
            self._arrived_s[key] = time.perf_counter()

        return note

    def _reduce(self, _state, bucket):  # type: ignore[no-untyped-def]
        """Do as DDP does without a hook: the mean over the ranks.

        DDP compares the types in a hook's signature with its own, and they are strings here.
        """
        index, buffer = bucket.index(), bucket.buffer()
        keys = [id(parameter) for parameter in bucket.parameters()]
        num_bytes = buffer.numel() * buffer.element_size()
        self._launched[index] = (time.perf_counter(), num_bytes, keys)
        work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)

        def finish(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._finished_s[index] = time.perf_counter()
            return reduced.value()[0]

        return work.get_future().then(finish)


@contextlib.contextmanager
def _silent(handle: ShardedUpdateHandle) -> Iterator[None]:
    """Have ranks exchange nothing but one flag in this block, and compute as ever."""
    with mock.patch.multiple(
        handle.exchange,
        mean_scatter=lambda values, part: ([], lambda: part.add_(values[0]).div_(2)),
        all_gather=lambda _values: [],
    ):
        yield


@contextlib.contextmanager
def _whole(module: FSDPModule, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have FSDP2 exchange nothing in this block: parameters stay whole, updates are by zeros."""
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


def meet(task: Task) -> dist.Store:
    """Return where the ranks of a team find each other."""
    if task.store:
        return dist.FileStore(task.store, task.num_ranks)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(task.meeting, dist.TCPStore(address, port, is_master=False))


_KERNEL = re.compile(r"^\w+ = async_compile\.(cpp_pybinding|triton)\(", re.MULTILINE)


def _num_kernels() -> int:
    """Return how many kernels the code defines that Inductor wrote to the cache."""
    sources = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).glob("*/*.py")
    return sum(len(_KERNEL.findall(source.read_text())) for source in sources)


def _is_recompile(frame: str) -> bool:
    """Whether `1/2`, or `1/2_0` after a restart, is not the first compile of its frame."""
    return frame.rpartition("/")[2].partition("_")[0] != "0"


def _die_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(make: Callable[[Task], Any] = Worker) -> None:
    """Make a worker, and obey until the other side is gone."""
    _die_with_parent()
    task = Task(**json.loads(sys.argv[1]))
    connection: Connection[Any, Any] = Connection(task.socket)
    try:
        worker = make(task)
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
    main()
