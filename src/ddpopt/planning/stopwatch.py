"""Note when a training step's gradients arrive, with hooks on autograd's nodes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import statistics
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, _waits
from ddpopt.split import state

_LEAST_COMPLETE = 2  # of the measured steps, with one forward and one backward each

_Moment = Any  # in seconds, or an event on a device's stream


@dataclass(slots=True)
class _Step:
    """What was noted about one step."""

    began: _Moment
    waited_s: float  # until the step began; during it, once it has ended
    forward_ended: _Moment = None
    backward_ended: _Moment = None
    num_forwards: int = 1
    ended: _Moment = None
    ready: dict[int, _Moment] = field(default_factory=dict)  # by parameter index
    is_over: bool = False  # later gradients are of another backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's medians in seconds; `ready_s` and `backward_s` count from the end of forward.

    `ready_s` is in the order of `buckets`, which hold parameter indices. `waited_s` is how long
    sharded updates waited, which no other time contains. `problem` says why there are no times.
    """

    problem: str = ""
    buckets: tuple[tuple[int, ...], ...] = ()
    ready_s: tuple[float, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    between_s: float = 0.0
    waited_s: float = 0.0

    @property
    def iteration_s(self) -> float:
        """From one forward to the next."""
        return self.forward_s + self.backward_s + self.between_s + self.waited_s


class Stopwatch:
    """Notes when gradients arrive, with hooks on autograd's nodes that accumulate them.

    The first `num_untimed` steps do not count. `key` is set by the first backward: it is the same
    on all ranks, and belongs to no other stopwatch.
    """

    def __init__(self, ddp: DistributedDataParallel, num_untimed: int) -> None:
        self.key = ""
        self._num_untimed = num_untimed
        self._ddp = weakref.ref(ddp)  # holding this must not keep its module alive
        parameters = _torch.reducer_parameters(ddp)
        self._parameters = tuple(parameters)
        self._device = device_of(ddp)
        self._steps: list[_Step] = []
        self._ends = _torch.BackwardEnds(self._end_backward)
        self._hooks = []
        for tensor, parameter in parameters.items():
            node = _torch.accumulate_node(tensor)  # it lives as long as we hold it
            note = functools.partial(self._note_arrival, parameter.index)
            self._hooks.append((node, node.register_prehook(note)))

    @property
    def num_backwards(self) -> int:
        """How many backwards have reduced gradients."""
        return sum(bool(step.backward_ended) for step in self._steps)

    def begin_step(self) -> None:
        """Note that a forward begins, and with it that the previous step ends.

        A forward with all parameters frozen, such as of a GAN's discriminator, is in no step.
        """
        if not any(parameter.requires_grad for parameter in self._parameters):
            return
        now, waited_s = self._now(), self._waited_s()
        if self._steps and not self._steps[-1].backward_ended:
            self._steps[-1].num_forwards += 1
            return
        if self._steps:
            self._steps[-1].ended = now
            self._steps[-1].waited_s = waited_s - self._steps[-1].waited_s
        self._steps.append(_Step(began=now, waited_s=waited_s))

    def end_step(self) -> None:
        """Note that a forward begins that does not communicate: a backward of it is in no step."""
        if self._steps and self._steps[-1].backward_ended:
            self._steps[-1].is_over = True

    def end_forward(self) -> None:
        """Note that a forward has ended, unless it belongs to no measured step."""
        if self._steps and not self._steps[-1].forward_ended:
            self._steps[-1].forward_ended = self._now()

    def remove(self) -> None:
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = []

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
        complete = [
            step
            for step in self._steps[self._num_untimed :]
            if step.ended and step.num_forwards == 1 and step.ready.keys() >= needed
        ]
        if len(complete) < _LEAST_COMPLETE:
            return Measured(
                problem="too few steps of one forward and one backward that used all parameters "
                "could be measured"
            )

        def median_s(starts: Iterable[_Moment], stops: Iterable[_Moment]) -> float:
            return statistics.median(map(_seconds, starts, stops))

        forward_ended = [step.forward_ended for step in complete]
        backward_ended = [step.backward_ended for step in complete]
        return Measured(
            buckets=tuple(map(tuple, buckets)),
            ready_s=tuple(
                median_s(forward_ended, [s.ready.get(k, s.forward_ended) for s in complete])
                for k in arrival
            ),
            forward_s=median_s([step.began for step in complete], forward_ended),
            backward_s=median_s(forward_ended, backward_ended),
            between_s=median_s(backward_ended, [step.ended for step in complete]),
            waited_s=statistics.median(step.waited_s for step in complete),
        )

    def _note_arrival(self, index: int, _gradients: object) -> None:
        if not self._steps:
            return
        step = self._steps[-1]
        # A backward within the step's own may have ended; what comes twice after one is another's.
        step.is_over |= (
            bool(step.backward_ended) and index in step.ready and not self._ends.is_pending
        )
        if not step.is_over:
            self._ends.watch()
            step.ready[index] = self._now()

    def _end_backward(self) -> None:
        if self._steps[-1].is_over:
            return
        self._steps[-1].backward_ended = self._now()
        ddp = self._ddp()
        if self.num_backwards == 1 and ddp is not None:
            parameters = [(p.name, p.num_bytes) for p in _torch.reducer_parameters(ddp).values()]
            digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]
            # The number of earlier collectives tells in which backward a search was requested.
            self.key = f"ddpopt/buckets/{digest}/{_torch.num_collectives(ddp.process_group)}"

    def _waited_s(self) -> float:
        ddp = self._ddp()
        return 0.0 if ddp is None else _waits.waited_s(ddp)

    def _now(self) -> _Moment:
        """Return the time on a clock that stops while sharded updates wait on the CPU."""
        if self._device.type == "cpu":
            return time.perf_counter() - self._waited_s()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def device_of(ddp: DistributedDataParallel) -> torch.device:
    """Return the device of the first parameter that is reduced."""
    return next(iter(_torch.reducer_parameters(ddp))).device


def _seconds(start: _Moment, stop: _Moment) -> float:
    if not isinstance(stop, torch.Event):
        return float(stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
