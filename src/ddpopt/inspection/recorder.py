"""`record`: measure real steps, section by section and bucket by bucket.

[Note: recording]
Sections report themselves (`_events.py`). Hooks on the autograd nodes that accumulate gradients
note when each gradient arrives. DDP's own hook runs between our two on the same node, and launches
the allreduces of the buckets that are complete, so our second hook gives the time of the launch.
After the first step, hooks stay only on the gradients that completed a bucket in it, and on one of
each backward, whose end would be missed otherwise: reentrant checkpoints run backwards within the
backward. Autograd's order is the same in each step of the same graphs, and hooks on hundreds of
gradients would cost time. A step's backward ends with the last that got one of its gradients; one
that arrives once more after an end is of another backward. Only the process group knows when an
allreduce has finished; torch's profiler records it. The profiler cannot be on twice: where it is on
already, that time is left out, and sections and buckets appear as named ranges in the profile of
whoever turned it on.

Sharded updates have exchanges of their own in place of allreduces, and report them: sums in
backward, and gathers in forward, which belong to the step whose forward comes next. See
exchanges.py.

A GPU gets to its queued work later than the CPU that queues it, and the profiler's allreduces are
kernels. So each time on a GPU is that of an event in its queue, and is known only at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ddpopt import _torch, _waits
from ddpopt._events import (
    Label,
    Observer,
    Turn,
    ignore,
    listen,
    observe,
    watch_forwards,
    will_communicate,
)
from ddpopt._files import check_can_write
from ddpopt._ranges import range_name, watch_backward
from ddpopt._text import format_bytes
from ddpopt.inspection.exchanges import FollowedExchange, Follower
from ddpopt.inspection.recording import (
    RecordedBucket,
    RecordedGather,
    RecordedSection,
    RecordedStep,
    Recording,
)
from ddpopt.planning.device import now
from ddpopt.split import state

# What process groups call their allreduces in a profile; on a GPU the kernel gives the finish.
_ALLREDUCE = re.compile(r"(gloo|mpi|ucc|xccl):all_?reduce$|nccl\w*Kernel.*AllReduce")

_NO_STEPS = (
    "steps: this block had no forward of this DDP module that communicates (with gradients, not "
    "under no_sync) and whose backward ended"
)


@contextlib.contextmanager
def record(model: torch.nn.Module, folder: str | Path | None = None) -> Iterator[Recording]:
    """Record the training steps in this block.

    For each step: when sections ran, when each bucket's gradients were ready, when its allreduce
    was launched and when it finished; see [Note: recording]. `explain` shows the medians, and
    `Recording.save` writes a trace. Not a collective: any ranks may record, each by itself. Steps
    that do not communicate (`no_sync`) are left out. Buckets are known from the fourth step of
    training on.

    Args:
        model: A DistributedDataParallel module, or what `torch.compile` returned for one, with any
            backend or none; sections are those of ddpopt.
        folder: Where to write this rank's trace, as `rank0.json`; it is created if missing. An
            existing file or link of that name is replaced.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
        RuntimeError: another `record` block is open.
        OSError: the trace cannot be written.
    """
    ddp = state.ddp_of(model)
    rank, path = dist.get_rank(ddp.process_group), None
    if folder is not None:  # find out that it cannot be written before training steps are spent
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"rank{rank}.json"
        check_can_write(path)
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    recording = Recording(
        rank=rank,
        world_size=dist.get_world_size(ddp.process_group),
        host=socket.gethostname(),
        machine=boot_id.read_text().strip() if boot_id.exists() else socket.gethostname(),
        origin_unix_ns=time.time_ns(),
    )
    clock = _Clock(_device_of(ddp), recording.origin_unix_ns)
    recorder = _Recorder(ddp, clock)
    has_cuda = any(parameter.is_cuda for parameter in ddp.parameters())
    # It would see nothing of sharded updates, and torch warns of works that another thread ends.
    is_unneeded = _torch.is_profiling() or _waits.is_sharded(ddp)
    profile = contextlib.nullcontext() if is_unneeded else _torch.profile_ranges(has_cuda)
    with listen(recorder), recorder.watching(ddp), profile as events:
        yield recording
        clock.stop()  # before the profiler, which would miss kernels that are still to run
    reader = _Reader(ddp, recording.origin_unix_ns, events)
    steps = [step.at(clock.computed_s) for step in recorder.steps if step.backward_stop_s]
    recording.steps = tuple(map(reader.read, steps))
    if not steps:
        reader.notes.insert(0, _NO_STEPS)
    recording.notes = tuple(dict.fromkeys(reader.notes))
    state.get(ddp).recording = recording
    if path is not None:
        recording.save(path)


def recording_of(ddp: DistributedDataParallel) -> Recording | None:
    """Return the last recording of a module, None if there is none."""
    recording: Recording | None = state.get(ddp).recording
    return recording


def _device_of(ddp: DistributedDataParallel) -> torch.device:
    return next(iter(_torch.reducer_parameters(ddp))).device


class _Clock:
    """Gives times since the recording's origin, by the system's clock, as the profiler does."""

    def __init__(self, device: torch.device, origin_ns: int) -> None:
        self._device = device
        self._origin_ns = origin_ns
        self._events: dict[float, torch.Event] = {}  # on a GPU, by the time they were queued
        now(device)  # so that the GPU has caught up with the CPU
        self._first_s = self.now_s()

    def wall_s(self) -> float:
        return (time.time_ns() - self._origin_ns) / 1e9

    def now_s(self) -> float:
        """Return the current time, and mark this place in the device's queue with it."""
        time_s = self.wall_s()
        if self._device.type != "cpu":
            event = self._events[time_s] = torch.Event(self._device, enable_timing=True)
            event.record()
        return time_s

    def stop(self) -> None:
        """Wait until the device has reached all marked places."""
        now(self._device)

    def computed_s(self, time_s: float) -> float:
        """Return when the device reached the place for which `now_s` returned `time_s`."""
        event = self._events.get(time_s)
        if event is None:
            return time_s
        return self._first_s + self._events[self._first_s].elapsed_time(event) / 1e3


@dataclass(slots=True)
class _Step:
    """Times as `_Clock` gives them; 0 is unknown."""

    forward_start_s: float
    forward_stop_s: float = 0.0
    backward_stop_s: float = 0.0
    arrivals: dict[int, tuple[float, float]] = field(default_factory=dict)  # around DDP's hook
    backwards: dict[int, int] = field(default_factory=dict)  # and a gradient that arrived in each
    sections: list[RecordedSection] = field(default_factory=list)
    sums: dict[int, FollowedExchange] = field(default_factory=dict)  # by bucket
    gathers: list[FollowedExchange] = field(default_factory=list)

    def at(self, computed_s: Callable[[float], float]) -> _Step:
        """Return this step with the times at which the device reached its places."""

        def moved(exchange: FollowedExchange) -> FollowedExchange:
            return dataclasses.replace(
                exchange,
                begun_s=computed_s(exchange.begun_s),
                asked_s=computed_s(exchange.asked_s),
                got_s=computed_s(exchange.got_s),
            )

        return _Step(
            forward_start_s=computed_s(self.forward_start_s),
            forward_stop_s=computed_s(self.forward_stop_s),
            backward_stop_s=computed_s(self.backward_stop_s),
            arrivals={i: (computed_s(a), computed_s(b)) for i, (a, b) in self.arrivals.items()},
            sections=[
                dataclasses.replace(
                    section,
                    start_s=computed_s(section.start_s),
                    stop_s=computed_s(section.stop_s),
                )
                for section in self.sections
            ],
            sums={bucket: moved(exchange) for bucket, exchange in self.sums.items()},
            gathers=[moved(exchange) for exchange in self.gathers],
        )


class _Recorder(Observer):
    """Notes times while a recording runs; see `_events.Listener`."""

    def __init__(self, ddp: DistributedDataParallel, clock: _Clock) -> None:
        self.steps: list[_Step] = []
        self._ddp = weakref.ref(ddp)
        self._now_s = clock.now_s
        self._follower = Follower(_device_of(ddp), clock.now_s, clock.wall_s)
        self._gathers: list[FollowedExchange] = []  # of the next step
        self._step: _Step | None = None  # the one whose backward is running or still to come
        self._hooks: dict[int, tuple[Any, Any]] = {}  # by parameter
        self._ends = _torch.BackwardEnds(self._end_backward)
        self._kept: list[Any] = []  # autograd nodes live only as long as somebody holds them
        self._range = contextlib.ExitStack()  # of the profiler, while a bucket becomes ready
        self._missing: list[int] = []  # how many gradients of each bucket have not arrived
        self._buckets = state.get(ddp).buckets or ()
        self._bucket_of = {index: k for k, bucket in enumerate(self._buckets) for index in bucket}
        self._sizes = [len(bucket) for bucket in self._buckets]  # how many gradients have hooks
        num_bytes = {p.index: p.num_bytes for p in _torch.reducer_parameters(ddp).values()}
        self._names = [
            f"ddpopt: bucket {k} ready ({format_bytes(sum(num_bytes[i] for i in bucket))})"
            for k, bucket in enumerate(self._buckets)
        ]

    @contextlib.contextmanager
    def watching(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Watch forwards and gradients in this block."""
        for tensor, parameter in _torch.reducer_parameters(ddp).items():
            node = _torch.accumulate_node(tensor)
            self._kept.append(node)
            self._watch_arrival(node, parameter.index)
        watch_forwards()
        observe(ddp, Turn.RECORDER, self)
        try:
            yield
        finally:
            ignore(ddp, Turn.RECORDER)
            self._remove_hooks(self._hooks.keys())
            self._kept.clear()
            self._follower.close()

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Begin a step, unless this forward belongs to the current one, or to none."""
        if not will_communicate(ddp):
            self._step = None
            self._gathers = []
        elif self._step is None or self._step.arrivals:
            self._drop_needless_hooks()
            self._step = _Step(self._now_s(), gathers=self._gathers)
            self._gathers = []
            self.steps.append(self._step)

    def after_forward(self, ddp: DistributedDataParallel, is_ours: bool) -> None:
        if self._step is not None:
            self._step.forward_stop_s = self._now_s()

    @contextlib.contextmanager
    def section(self, label: Label, kind: str) -> Iterator[None]:
        step = self._step
        if step is None:
            yield
            return
        with record_function(range_name(label, kind)):
            start_s = self._now_s()
            yield
            step.sections.append(RecordedSection(*label, kind, start_s, self._now_s()))

    def watch(self, label: Label, outputs: Any) -> None:
        """Note the backward that AOTAutograd's node for these outputs will run."""
        if self._step is not None:
            watch_backward(outputs, lambda: self.section(label, "backward"))

    def follow(
        self,
        ddp: DistributedDataParallel | None,
        what: str,
        bucket: int,
        num_bytes: int,
        works: list[Any],
    ) -> list[Any]:
        """Follow an exchange if it belongs to the module being recorded."""
        if ddp is None or ddp is not self._ddp():
            return works
        exchange = FollowedExchange(bucket, num_bytes, self._now_s())
        if what == "gather":
            self._gathers.append(exchange)
        elif self._step is not None:
            self._step.sums[bucket] = exchange
        return self._follower.follow(exchange, works)

    def _watch_arrival(self, node: Any, index: int) -> None:
        """Note when a gradient arrives, and when DDP's own hook on its node is done."""
        bucket = self._bucket_of.get(index)

        def before(_gradients: object) -> None:
            step = self._step
            if step is None:
                return
            if step.backward_stop_s and index in step.arrivals and not self._ends.is_pending:
                self._step = None
                return
            if not step.arrivals:
                self._missing = list(self._sizes)
            self._ends.watch()
            step.backwards[_torch.running_backward()] = index
            step.arrivals[index] = (self._now_s(), 0.0)
            if bucket is not None:
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._range.enter_context(record_function(self._names[bucket]))

        def after(_inputs: object, _outputs: object) -> None:
            self._range.close()
            if self._step is not None:
                self._step.arrivals[index] = (self._step.arrivals[index][0], self._now_s())

        self._hooks[index] = (node.register_prehook(before), node.register_hook(after))

    def _end_backward(self) -> None:
        if self._step is not None:
            self._step.backward_stop_s = self._now_s()

    def _drop_needless_hooks(self) -> None:
        arrivals = self.steps[-1].arrivals if self.steps else {}
        if self._buckets and arrivals.keys() >= self._bucket_of.keys():
            needed = {max(bucket, key=lambda i: arrivals[i][1]) for bucket in self._buckets}
            needed.update(self.steps[-1].backwards.values())
            self._remove_hooks(self._hooks.keys() - needed)
            self._sizes = [len(needed.intersection(bucket)) for bucket in self._buckets]

    def _remove_hooks(self, indices: Iterable[int]) -> None:
        for index in tuple(indices):
            for hook in self._hooks.pop(index):
                hook.remove()


class Allreduce(NamedTuple):
    """An allreduce that the profiler saw; one seen as a kernel has no size."""

    start_s: float
    stop_s: float
    num_elements: int


def in_order_of_launch(started: Sequence[Allreduce], sizes: Sequence[int]) -> list[Allreduce]:
    """Return allreduces, given in the order of their starts, in the order of their launches.

    gloo's threads take what is launched one by one, but may start the second of two before the
    first. Sizes tell them apart; among equal sizes, and where sizes are unknown, the order of the
    starts is kept.

    Args:
        started: As many as there are buckets.
        sizes: In elements, of the buckets.
    """
    if sorted(sizes) != sorted(each.num_elements for each in started):
        return list(started)
    of_size = {size: iter([x for x in started if x.num_elements == size]) for size in sizes}
    return [next(of_size[size]) for size in sizes]


class _Reader:
    """Turns raw times into steps; `notes` collects what could not be found out."""

    def __init__(
        self, ddp: DistributedDataParallel, origin_ns: int, events: Sequence[Any] | None
    ) -> None:
        self.notes: list[str] = []
        found = [
            Allreduce(
                (event.start_ns() - origin_ns) / 1e9,
                (event.end_ns() - origin_ns) / 1e9,
                math.prod(next(iter(event.shapes()), ())),
            )
            for event in events or ()
            if _ALLREDUCE.match(event.name())
        ]
        self._allreduces = None if events is None else sorted(found)
        parameters = _torch.reducer_parameters(ddp)
        self._num_bytes = {p.index: p.num_bytes for p in parameters.values()}
        self._num_elements = {p.index: tensor.numel() for tensor, p in parameters.items()}
        self._buckets = state.get(ddp).buckets or _torch.final_buckets(ddp) or ()
        if not self._buckets:
            note = "buckets: DDP has not told its own; record after the first four steps"
            self.notes.append(note)

    def read(self, step: _Step) -> RecordedStep:
        return RecordedStep(
            forward_start_s=step.forward_start_s,
            forward_stop_s=step.forward_stop_s,
            backward_stop_s=step.backward_stop_s,
            sections=tuple(step.sections),
            buckets=tuple(self._read_buckets(step)),
            is_sharded=bool(step.sums),
            gathers=tuple(
                RecordedGather(
                    g.bucket, g.num_bytes, g.begun_s, g.ended_s, g.asked_s, max(g.asked_s, g.got_s)
                )
                for g in step.gathers
                if g.ended_s and g.asked_s
            ),
        )

    def _read_buckets(self, step: _Step) -> Iterator[RecordedBucket]:
        arrivals = [[step.arrivals[i] for i in b if i in step.arrivals] for b in self._buckets]
        if not all(arrivals):
            self.notes.append("buckets: not all of them got a gradient in each step")
            return
        allreduces = self._sums_of(step) if step.sums else self._allreduces_of(step)
        after_s, end_s = 0.0, step.backward_stop_s
        for k, bucket in enumerate(self._buckets):
            ready_s, hooked_s = max(arrivals[k])
            after_s = max(after_s, hooked_s)  # buckets are launched in order
            start_s, stop_s = allreduces[k] if allreduces else (after_s, None)
            yield RecordedBucket(
                index=k,
                num_bytes=sum(self._num_bytes[index] for index in bucket),
                ready_s=ready_s,
                # gloo is called before a GPU has computed the gradients, and waits for them.
                launched_s=max(ready_s, min(start_s, after_s)),
                # The profiler hears of it a little later than DDP, which waits for all allreduces.
                finished_s=stop_s if step.sums or stop_s is None else min(stop_s, end_s),
            )

    def _sums_of(self, step: _Step) -> list[tuple[float, float]]:
        """As `_allreduces_of`, for sharded updates."""
        sums = [step.sums.get(index) for index in range(len(self._buckets))]
        known = [(each.begun_s, each.ended_s) for each in sums if each is not None]
        return known if len(known) == len(sums) and all(stop_s for _, stop_s in known) else []

    def _allreduces_of(self, step: _Step) -> list[tuple[float, float]]:
        """Return when each bucket's allreduce started and finished, nothing if that is unknown."""
        if self._allreduces is None:
            note = "finish: torch.profiler was on already; its profile has the allreduces"
            self.notes.append(note)
            return []
        start_s, stop_s = step.forward_stop_s, step.backward_stop_s
        own = [each for each in self._allreduces if start_s <= each.start_s <= stop_s]
        if len(own) == len(self._buckets):
            sizes = [sum(map(self._num_elements.__getitem__, bucket)) for bucket in self._buckets]
            return [(each.start_s, each.stop_s) for each in in_order_of_launch(own, sizes)]
        self.notes.append(
            f"finish: the profiler saw {len(own)} allreduces in a backward of {len(self._buckets)} "
            "buckets, so it is not known which is which (a comm hook or a layer communicates too)"
        )
        return []
