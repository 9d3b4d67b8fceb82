"""The one clock: when forwards run, gradients arrive, and backwards end.

The tuner, `ddpopt.record` and the benchmarks time steps with it.

[Note: times of a step]
Hooks on the autograd nodes that accumulate gradients note when each gradient arrives. DDP's own
hook runs between our two on the same node, and launches the allreduces of the buckets that are
complete, so our second hook gives the time of the launch. A step's backward ends with the last that
got one of its gradients, since reentrant checkpoints run backwards within the backward; a gradient
that arrives once more after an end is of another backward.

A GPU gets to its queued work later than the CPU that queues it. So each time on a GPU is that of an
event in its queue, and is known only when the GPU has got there.

[Note: keys of meetings]
Ranks that meet for a module have to write to the same place of the store, to which no meeting
for another module, or an earlier one for this, has written. Collectives of one group run in one
order on all ranks, DDP's allreduces as well. So modules are numbered in the order in which they
first reduce gradients, whether anybody looks for their buckets or not. What else could be
counted is not the same on all ranks: forwards, of which one rank may run more; and what a
process group counts, where ranks send to each other, or wait in a `monitored_barrier`.

Ranks that began to look for a module's buckets in different steps have the same key, and
meet nowhere: no backward of the later one ends while the earlier one waits before the next.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._events import Observer, Priority, ignore, will_communicate
from ddpopt._text import shorten
from ddpopt.errors import TorchDriftError
from ddpopt.split import state

_LEAST_COMPLETE = 2  # of the measured steps, with one forward and one backward each


def read_host() -> float:
    """Return the time in seconds by the clock that all times of steps and exchanges are of."""
    return time.perf_counter()


class _Queued(float):
    """When the CPU was at a place in a device's queue, with the event that marks the place."""

    __slots__ = ("event",)
    event: torch.Event


class Clock:
    """Gives times in seconds, on a GPU those of events in its queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_on_cpu = device.type == "cpu"

    def now(self) -> float:
        """Return the time, and mark the place in the device's queue with it."""
        if self.is_on_cpu:
            return read_host()
        moment = _Queued(read_host())
        moment.event = torch.Event(self._device, enable_timing=True)
        moment.event.record()
        return moment

    def seconds(self, start: float, stop: float) -> float:
        """Return how long the device took from one time that `now` returned to another."""
        if isinstance(start, _Queued) and isinstance(stop, _Queued):
            stop.event.synchronize()
            return float(start.event.elapsed_time(stop.event)) / 1e3
        return stop - start

    def finish(self) -> float:
        """Wait until the device has done all of its queued work; return the CPU's time."""
        if not self.is_on_cpu:
            torch.accelerator.synchronize(self._device)
        return read_host()

    def finish_stream(self) -> float:
        """As `finish`, for the current stream: others, which may communicate, can be busy."""
        if not self.is_on_cpu:
            torch.accelerator.current_stream(self._device).synchronize()
        return read_host()


def device_of(ddp: DistributedDataParallel) -> torch.device:
    """Return the device of the first parameter that is reduced."""
    return next(iter(_torch.reducer_parameters(ddp))).device


@dataclass(slots=True)
class Step:
    """The times of one step, as a `Clock` has them; 0 is unknown.

    `ready` and `launched` are by parameter index: around DDP's own hook, see [Note: times of a
    step]. `backwards` are autograd's numbers of those that ran, with a gradient that arrived in
    each.
    """

    began: float
    num_forwards: int = 1
    forward_ended: float = 0.0  # of the last one
    backward_ended: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    launched: dict[int, float] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)


class StepTimer:
    """Notes the steps of a DDP module, for somebody who tells it of forwards.

    `on_ready` gets the index of each gradient that arrives in a step. With `on_launched`, which is
    called after DDP's own hook on it, launches are noted too. `has_unreduced` says that a gradient
    has arrived outside of any step since the last step's backward ended: DDP has yet to reduce it.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        clock: Clock,
        *,
        on_ready: Callable[[int], None] = lambda _: None,
        on_launched: Callable[[], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps: list[Step] = []
        self.has_unreduced = False
        self._ddp = weakref.ref(ddp)  # holding this must not keep its module alive
        self._clock = clock
        self._on_ready, self._on_launched, self._on_end = on_ready, on_launched, on_end
        self._is_in_forward = self._is_over = False
        self._ends = _torch.BackwardEnds(self._end_backward)
        parameters = _torch.reducer_parameters(ddp)
        self._parameters = tuple(parameters)
        self._looks_for_unused = not _torch.follows_arrival_order(ddp)
        # Autograd's nodes live only as long as somebody holds them.
        self._nodes = {p.index: _torch.accumulate_node(tensor) for tensor, p in parameters.items()}
        self._hooks: dict[int, list[Any]] = {}
        for index, node in self._nodes.items():
            self._hooks[index] = [node.register_prehook(functools.partial(self._arrive, index))]
            if on_launched is not None:
                launch = functools.partial(self._launch, index)
                self._hooks[index].append(node.register_hook(launch))

    @property
    def step(self) -> Step | None:
        """The step that a gradient would belong to, None between steps."""
        return self.steps[-1] if self.steps and not self._is_over else None

    @property
    def num_backwards(self) -> int:
        """How many steps' backwards have ended."""
        return sum(bool(step.backward_ended) for step in self.steps)

    def begin_forward(self) -> bool:
        """Note that a forward that communicates begins; return whether a step begins with it.

        A forward with all parameters frozen, such as of a GAN's discriminator, is in no step.
        """
        ddp = self._ddp()
        if ddp is None or not any(parameter.requires_grad for parameter in self._parameters):
            return False
        self._is_in_forward = True
        if self.step is not None and not self.step.ready:
            self.step.num_forwards += 1
            return False
        self.steps.append(Step(began=self._clock.now()))
        self._is_over = False
        return True

    def end_forward(self) -> None:
        """Note that a forward has ended, unless it is in no step."""
        if self._is_in_forward:
            self._is_in_forward = False
            self.steps[-1].forward_ended = self._clock.now()

    def skip_forward(self) -> None:
        """Note that a forward begins that does not communicate: a backward of it is in no step."""
        if self.steps and self.steps[-1].backward_ended:
            self._is_over = True

    def watch_only(self, indices: Collection[int]) -> None:
        """Note no other gradients from here on: hooks on hundreds of them cost time."""
        for index in self._hooks.keys() - indices:
            for hook in self._hooks.pop(index):
                hook.remove()

    def stop(self) -> None:
        self.watch_only(())
        self._nodes.clear()
        self._parameters = ()

    def _arrive(self, index: int, _gradients: object) -> None:
        step = self.step
        if step is None:
            self.has_unreduced = True
            return
        # A backward within the step's own may have ended; what comes twice after one is another's.
        # Where DDP looks for unused parameters it allows no backward within another.
        is_another = index in step.ready or self._looks_for_unused
        if step.backward_ended and is_another and not self._ends.is_pending:
            self._is_over = self.has_unreduced = True
            return
        # With Lightning's manual optimization forward runs the backward, and goes on after it.
        self.end_forward()
        self._ends.watch()
        step.backwards[_torch.running_backward()] = index
        step.ready[index] = self._clock.now()
        self._on_ready(index)

    def _launch(self, index: int, _inputs: object, _outputs: object) -> None:
        if self._on_launched is not None:
            self._on_launched()
        if self.step is not None:
            self.step.launched[index] = self._clock.now()

    def _end_backward(self) -> None:
        if self.step is not None:
            self.step.backward_ended = self._clock.now()
            self.has_unreduced = False
            self._on_end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's medians in seconds; `ready_s` and `backward_s` count from the end of forward.

    `ready_s` is in the order of `buckets`, which hold parameter indices. `problem` says why there
    are no times.
    """

    problem: str = ""
    buckets: tuple[tuple[int, ...], ...] = ()
    ready_s: tuple[float, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    between_s: float = 0.0

    @property
    def iteration_s(self) -> float:
        """From one forward to the next."""
        return self.forward_s + self.backward_s + self.between_s


class Stopwatch(StepTimer):
    """Measures a rank's steps for the tuner.

    The first `num_untimed` steps do not count. `key` is set by the first backward, see [Note: keys
    of meetings]: it is the same on all ranks, and belongs to no other stopwatch.
    """

    def __init__(self, ddp: DistributedDataParallel, num_untimed: int) -> None:
        self.key = ""
        self._num_untimed = num_untimed
        super().__init__(ddp, Clock(device_of(ddp)), on_end=self._name)

    def _name(self) -> None:
        ddp = self._ddp()
        if self.num_backwards == 1 and ddp is not None:
            parameters = [(p.name, p.num_bytes) for p in _torch.reducer_parameters(ddp).values()]
            digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]
            _num_measured[ddp] = _num_measured.get(ddp, 0) + 1
            self.key = f"ddpopt/buckets/{digest}/{_numbers.get(ddp, 0)}/{_num_measured[ddp]}"

    def measured(self) -> Measured:
        """Return the medians over the complete steps."""
        ddp = self._ddp()
        assert ddp is not None
        buckets = state.get(ddp).buckets or _torch.final_buckets(ddp)
        if not buckets:
            return Measured(problem="DDP did not tell its buckets")
        arrival = list(itertools.chain.from_iterable(buckets))
        # A Reducer that looks for unused parameters treats them as ready before all others.
        needed = set(arrival) if _torch.follows_arrival_order(ddp) else set()
        timed = self.steps[self._num_untimed :]
        ended = [step for step in timed if step.backward_ended]
        complete = [
            (step, following)
            for step, following in itertools.pairwise(timed)
            if step.backward_ended and step.num_forwards == 1 and step.ready.keys() >= needed
        ]
        if len(complete) < _LEAST_COMPLETE:
            return Measured(
                problem="too few steps of one forward and one backward that used all parameters "
                f"could be measured ({self._describe_incomplete(ddp, ended, needed)})"
            )
        seconds = self._clock.seconds

        def ready_s(index: int) -> float:
            return statistics.median(
                seconds(step.forward_ended, step.ready.get(index, step.forward_ended))
                for step, _ in complete
            )

        return Measured(
            buckets=tuple(map(tuple, buckets)),
            ready_s=tuple(map(ready_s, arrival)),
            forward_s=statistics.median(seconds(s.began, s.forward_ended) for s, _ in complete),
            backward_s=statistics.median(
                seconds(s.forward_ended, s.backward_ended) for s, _ in complete
            ),
            between_s=statistics.median(seconds(s.backward_ended, t.began) for s, t in complete),
        )

    def _describe_incomplete(
        self, ddp: DistributedDataParallel, steps: Sequence[Step], needed: AbstractSet[int]
    ) -> str:
        """Say what kept steps whose backward has ended from being measured."""
        several = [step for step in steps if step.num_forwards > 1]
        if several:
            return f"{len(several)} of {len(steps)} had several forwards"
        partial = [step for step in steps if needed - step.ready.keys()]
        if partial:
            names = [p.name for p in _torch.reducer_parameters(ddp).values()]
            unused = shorten([names[index] for index in sorted(needed - partial[-1].ready.keys())])
            return f"{unused} had no gradient in {len(partial)} of {len(steps)}"
        return f"{len(steps)} ended"


# ---- Numbers of modules -------------------------------------------------------------------------

_numbers: weakref.WeakKeyDictionary[DistributedDataParallel, int]
_numbers = weakref.WeakKeyDictionary()
_num_measured: weakref.WeakKeyDictionary[DistributedDataParallel, int]  # by how many stopwatches
_num_measured = weakref.WeakKeyDictionary()
_num_modules: collections.Counter[str] = collections.Counter()  # that have one, by group's name


class Numbering(Observer):
    """Gives a module its number among all of its process group, in its first reducing backward.

    See [Note: keys of meetings].
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # autograd's nodes live only as long as somebody holds them

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Watch for the first gradient from here on, at the first forward that communicates."""
        if not will_communicate(ddp):
            return
        ignore(ddp, Priority.NUMBERING)
        if not isinstance(ddp.process_group, dist.ProcessGroup):
            return
        # Without a name that has moved, no search begins either.
        with contextlib.suppress(TorchDriftError):
            for tensor in _torch.reducer_parameters(ddp):
                if tensor.requires_grad:
                    self._nodes.append(_torch.accumulate_node(tensor))
        number = functools.partial(self._number, weakref.ref(ddp))
        self._hooks = [node.register_prehook(number) for node in self._nodes]

    def _number(self, ddp: Callable[[], DistributedDataParallel | None], _grads: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], []
        module = ddp()
        if module is not None and module not in _numbers:
            group = module.process_group.group_name
            _num_modules[group] += 1
            _numbers[module] = _num_modules[group]
