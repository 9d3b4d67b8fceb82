"""`record`: measure real steps, section by section and bucket by bucket.

[Note: recording]
Sections report themselves (`steps/sections.py`), and gradients are timed as in [Note: times of a
step]. After the first step, hooks stay only on the gradients that completed a bucket in that step,
and on one gradient of each backward, whose end would be missed otherwise: autograd's order is the
same in each step of the same graphs, and hooks on hundreds of gradients would cost time.

Only the process group knows when an allreduce has finished; torch's profiler records it. The
profiler cannot be on twice. If the user has turned it on, the time at which an allreduce finishes
is not recorded, and sections and buckets appear as named ranges in the user's profile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ddpopt import _torch
from ddpopt._indices import ParameterIndex
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._text import count, format_bytes
from ddpopt._torch import Forward
from ddpopt.inspection.recording import RecordedSection, RecordedStep, Recording
from ddpopt.planning.timeline import BucketTimes
from ddpopt.split import state
from ddpopt.steps.clock import Clock, device_of
from ddpopt.steps.forwards import (
    Subscriber,
    subscribe,
    unsubscribe,
    watch_forwards,
    will_communicate,
)
from ddpopt.steps.sections import Label, listen, show_range
from ddpopt.steps.timer import Step, StepTimer

# The names of process groups' allreduces in a profile; on a GPU the kernel gives the finish.
_ALLREDUCE = re.compile(r"(gloo|mpi|ucc|xccl):all_?reduce$|nccl\w*Kernel.*AllReduce")

_NO_STEPS = (
    "steps: this block had no forward of this DDP module that communicates (with gradients, not "
    "under no_sync) and whose backward ended"
)


# The last one of each module.
_recordings: ModuleSlot[Recording | None] = ModuleSlot(lambda: None, Lifetime.CODE)


def recording_of(ddp: DistributedDataParallel) -> Recording | None:
    """The last recording of a module, None without one."""
    return _recordings.get(ddp)


@contextlib.contextmanager
def record(model: torch.nn.Module) -> Iterator[Recording]:
    """Record the training steps in this block.

    For each step: when sections ran, when each bucket's gradients were ready, when its allreduce
    was launched and when it finished; see [Note: recording]. `explain` shows the medians. Not a
    collective: any ranks may record, each by itself. Steps that do not communicate (`no_sync`) are
    left out. Buckets are known after the first four steps of training.

    Args:
        model: A DistributedDataParallel module, or what `torch.compile` returned for one, with any
            backend or none; sections are those of ddpopt.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
        RuntimeError: another `record` block is open, for whichever model.
    """
    ddp = state.ddp_of(model)
    recording = Recording(rank=ddp.process_group.rank())
    clock = Clock(device_of(ddp))
    clock.finish()  # so that the device has caught up with the CPU
    # The same moment by both clocks, since events of the profiler have Unix time.
    start_unix_ns, start_s = time.time_ns(), clock.now()
    has_cuda = any(parameter.is_cuda for parameter in ddp.parameters())
    is_users_profile = _torch.shows_ranges()  # torch's profiler cannot be on twice
    profile = contextlib.nullcontext() if is_users_profile else _torch.profile_ranges(has_cuda)
    recorder = _Recorder(ddp, clock)
    with recorder.watching(ddp), profile as events:
        yield recording
        clock.finish()  # before the profiler, which would miss kernels that are still to run
    reader = _Reader(ddp, clock, start_s, start_unix_ns, events)
    steps = []
    for step, sections in zip(recorder.timer.steps, recorder.sections, strict=True):
        if step.backward_ended:  # not of a last step that the block did not finish
            steps.append(reader.read(step, sections))
    recording.steps = tuple(steps)
    notes = reader.notes if steps else [_NO_STEPS, *reader.notes]
    recording.notes = tuple(dict.fromkeys(notes))  # each once, however many steps had it
    _recordings.set(ddp, recording)


class _Recorder(Subscriber):
    """Notes times while a recording runs."""

    def __init__(self, ddp: DistributedDataParallel, clock: Clock) -> None:
        self.sections: list[list[RecordedSection]] = []  # of each of the timer's steps
        self._clock = clock
        self._is_skipped = False  # in a forward that does not communicate
        # The profiler's range from a bucket's last gradient to its launch, if one is open. The
        # timer closes it behind DDP's hook on each gradient, of which one has launched the bucket.
        self._range = contextlib.ExitStack()
        self._buckets = state.get(ddp).buckets or ()
        self._bucket_of = {index: k for k, bucket in enumerate(self._buckets) for index in bucket}
        self._num_watched = [len(bucket) for bucket in self._buckets]  # gradients of each bucket
        # How many gradients of each bucket have not arrived yet in this step.
        self._missing: list[int] = []
        num_bytes = {p.index: p.num_bytes for p in _torch.reducer_parameters(ddp).values()}
        self._names = [
            f"ddpopt: bucket {k} ready ({format_bytes(sum(num_bytes[i] for i in bucket))})"
            for k, bucket in enumerate(self._buckets)
        ]
        self.timer = StepTimer(ddp, clock, on_ready=self._show_range, on_launched=self._range.close)

    @contextlib.contextmanager
    def watching(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Watch forwards and sections in this block, at whose end the timer stops."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.timer.stop)
            stack.enter_context(listen(self._run_section))
            watch_forwards()
            subscribe(ddp, self)
            stack.callback(unsubscribe, ddp, _Recorder)
            yield

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        self._is_skipped = not will_communicate(ddp)
        if self._is_skipped:
            self.timer.skip_forward()
        elif self.timer.begin_forward():  # the first forward of a step
            self._watch_less()
            self._missing = list(self._num_watched)
            self.sections.append([])

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        self.timer.end_forward()
        self._is_skipped = False

    @contextlib.contextmanager
    def _run_section(self, label: Label, kind: str) -> Iterator[None]:
        """The context in which a section runs, see `steps.sections.Listener`."""
        if self.timer.step is None or self._is_skipped:
            yield
            return
        sections = self.sections[-1]  # of the step in which this one begins
        with show_range(label, kind):
            start_s = self._clock.now()
            yield
            sections.append(RecordedSection(*label, kind, start_s, self._clock.now()))

    def _show_range(self, index: ParameterIndex) -> None:
        """Begin a range of the profiler with a bucket's last gradient; it ends with the launch."""
        bucket = self._bucket_of.get(index)
        if bucket is not None:  # else the buckets were not known
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._range.enter_context(record_function(self._names[bucket]))

    def _watch_less(self) -> None:
        """Remove all hooks but those of [Note: recording], once a step has shown which they are.

        Called at the start of each step; it looks at the step before.
        """
        if not self._buckets or len(self.timer.steps) < 2:
            return
        last_step = self.timer.steps[-2]  # `steps[-1]` is the one that has just begun
        # Not if a gradient was left out, nor once hooks are removed.
        if last_step.ready.keys() >= self._bucket_of.keys():
            needed = {max(bucket, key=last_step.launched.__getitem__) for bucket in self._buckets}
            needed.update(last_step.gradient_of_backward.values())
            self.timer.watch_only(needed)
            self._num_watched = [len(needed.intersection(bucket)) for bucket in self._buckets]


class Allreduce(NamedTuple):
    """An allreduce that the profiler saw; one seen as a kernel has no size."""

    start_s: float
    stop_s: float
    num_elements: int


def in_order_of_launch(started: Sequence[Allreduce], sizes: Sequence[int]) -> list[Allreduce]:
    """Allreduces, given in the order of their starts, in the order of their launches.

    gloo's threads take what is launched one by one, but may start the second of two before the
    first. Sizes tell them apart; among equal sizes, and where sizes are unknown, the order of the
    starts is kept.

    Args:
        started: As many as there are buckets.
        sizes: In elements, of the buckets, in the order of their launches.
    """
    if sorted(sizes) != sorted(allreduce.num_elements for allreduce in started):
        return list(started)
    of_size = {size: iter([x for x in started if x.num_elements == size]) for size in sizes}
    return [next(of_size[size]) for size in sizes]


class _Reader:
    """Turns the times that were noted into recorded steps.

    `notes` collects what could not be found out.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        clock: Clock,
        start_s: float,
        start_unix_ns: int,
        events: Sequence[Any] | None,
    ) -> None:
        """Read the times of `clock`, and `events` of the profiler, None if it was not ours.

        The recording began at `start_s`, which is `start_unix_ns` in Unix time.
        """
        self._clock = clock
        self._start_s = start_s
        self.notes: list[str] = []
        allreduces = []
        for event in events or ():
            if _ALLREDUCE.match(event.name()):
                allreduce = Allreduce(
                    start_s + (event.start_ns() - start_unix_ns) / 1e9,
                    start_s + (event.end_ns() - start_unix_ns) / 1e9,
                    num_elements=math.prod(next(iter(event.shapes()), ())),
                )
                allreduces.append(allreduce)
        # In the order of their starts.
        self._allreduces = None if events is None else sorted(allreduces)
        parameters = _torch.reducer_parameters(ddp)
        self._num_bytes = {p.index: p.num_bytes for p in parameters.values()}
        self._num_elements = {p.index: tensor.numel() for tensor, p in parameters.items()}
        # DDP is asked for those of a model that is not compiled by ddpopt.
        self._buckets = state.get(ddp).buckets or _torch.final_buckets(ddp) or ()
        if not self._buckets:
            note = "buckets: DDP has not reported its own; record after the first four steps"
            self.notes.append(note)

    def read(self, step: Step, sections: Sequence[RecordedSection]) -> RecordedStep:
        """A step, given the sections that ran in it."""
        read_sections = []
        for section in sections:
            start_s = self._time_on_device(section.start_s)
            stop_s = self._time_on_device(section.stop_s)
            read_sections.append(dataclasses.replace(section, start_s=start_s, stop_s=stop_s))
        forward_stop_s = self._time_on_device(step.forward_ended)
        backward_stop_s = self._time_on_device(step.backward_ended)
        return RecordedStep(
            forward_start_s=self._time_on_device(step.began),
            forward_stop_s=forward_stop_s,
            backward_stop_s=backward_stop_s,
            sections=tuple(read_sections),
            buckets=tuple(self._read_buckets(step, forward_stop_s, backward_stop_s)),
        )

    def _time_on_device(self, time_s: float) -> float:
        """When the device reached what the clock queued at that time; 0 (unknown) for 0."""
        return self._start_s + self._clock.seconds(self._start_s, time_s) if time_s else 0.0

    def _read_buckets(
        self, step: Step, forward_stop_s: float, backward_stop_s: float
    ) -> Iterator[BucketTimes]:
        """The times of each bucket in a step; none if one got no gradient, or none is known."""
        if not self._buckets:
            return  # a note says so, and nothing is known of allreduces without buckets
        arrived = [[index for index in bucket if index in step.ready] for bucket in self._buckets]
        if not all(arrived):
            self.notes.append("buckets: not all of them got a gradient in each step")
            return
        allreduces = self._allreduces_between(forward_stop_s, backward_stop_s)
        after_s = 0.0  # DDP's hook that launched the bucket had returned by then
        for k, bucket in enumerate(self._buckets):
            last = max(arrived[k], key=step.ready.__getitem__)
            ready_s = self._time_on_device(step.ready[last])
            # Buckets are launched in order. A launch that was not noted counts as that before it.
            after_s = max(after_s, self._time_on_device(step.launched.get(last, 0.0)))
            launched_s, finished_s = after_s, None
            if allreduces:
                # Our hook comes after DDP's, which launches: the allreduce may have begun by then.
                launched_s = min(allreduces[k].start_s, after_s)
                # DDP waits for all allreduces; the profiler may note their end a little later.
                finished_s = min(allreduces[k].stop_s, backward_stop_s)
            yield BucketTimes(
                index=k,
                num_bytes=sum(self._num_bytes[index] for index in bucket),
                ready_s=ready_s,
                # gloo is called before a GPU has computed the gradients, and waits for them.
                launched_s=max(ready_s, launched_s),
                finished_s=finished_s,
            )

    def _allreduces_between(self, start_s: float, stop_s: float) -> list[Allreduce]:
        """The allreduce of each bucket of a backward; none of them if one is unknown."""
        if self._allreduces is None:
            note = "finish: torch.profiler was on already; its profile has the allreduces"
            self.notes.append(note)
            return []
        started = [each for each in self._allreduces if start_s <= each.start_s <= stop_s]
        if len(started) == len(self._buckets):
            sizes = [sum(self._num_elements[index] for index in bucket) for bucket in self._buckets]
            return in_order_of_launch(started, sizes)
        self.notes.append(
            f"finish: the profiler saw {count(len(started), 'allreduce')} in a backward of "
            f"{count(len(self._buckets), 'bucket')}, so it is not known which is which (a comm "
            "hook or a layer communicates too)"
        )
        return []
