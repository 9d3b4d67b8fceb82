"""What a rank measures of its steps, for the search for better buckets."""

from __future__ import annotations

import hashlib
import itertools
import socket
import statistics
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._indices import ParameterIndex
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._text import shorten
from ddpopt.errors import TorchDriftError
from ddpopt.split import state
from ddpopt.steps.clock import Clock, device_of
from ddpopt.steps.numbers import number_of
from ddpopt.steps.timer import Step, StepTimer

_LEAST_COMPLETE = 2  # of the measured steps, with one forward and one backward each

# How many stopwatches each module has had whose first backward has ended. A module has one process
# group for life, so ranks count alike.
_num_measured: ModuleSlot[int] = ModuleSlot(int, Lifetime.MODULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The medians of one rank's steps."""

    host: str = field(default_factory=socket.gethostname)

    # Why there are no times.
    problem: str = ""
    # The Reducer's buckets in these steps.
    buckets: tuple[tuple[ParameterIndex, ...], ...] = ()
    # When each gradient arrived, from the end of forward, in the order of `buckets`.
    ready_s: tuple[float, ...] = ()
    forward_s: float = 0.0
    # The time from the end of forward to the end of backward.
    backward_s: float = 0.0
    # The time from the end of backward to the next forward.
    between_s: float = 0.0

    @property
    def iteration_s(self) -> float:
        """From one forward to the next."""
        return self.forward_s + self.backward_s + self.between_s


class Stopwatch(StepTimer):
    """Measures a rank's steps; the first `num_untimed` do not count."""

    def __init__(self, ddp: DistributedDataParallel, num_untimed: int) -> None:
        # Set by the first backward: the same on all ranks, and of no other stopwatch. See
        # [Note: keys of meetings] in steps/numbers.py.
        self.key = ""
        self._num_untimed = num_untimed
        super().__init__(ddp, Clock(device_of(ddp)), on_end=self._set_key)

    def _set_key(self) -> None:
        """Make the key when the first backward has ended: until then modules have no numbers."""
        ddp = self._ddp()
        if self.num_backwards == 1 and ddp is not None:
            parameters = [(p.name, p.num_bytes) for p in _torch.reducer_parameters(ddp).values()]
            # Of which module, by its parameters and its number, and which of its stopwatches.
            digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]
            _num_measured.set(ddp, _num_measured.get(ddp) + 1)
            self.key = f"ddpopt/buckets/{digest}/{number_of(ddp)}/{_num_measured.get(ddp)}"

    def finish(self) -> None:
        """Return when the device has run all that was queued."""
        self._clock.finish()

    def measured(self) -> Measured:
        """The medians over the complete steps."""
        ddp = self._ddp()
        assert ddp is not None
        try:
            # If they are not known by now, asking DDP may say why not.
            buckets = state.get(ddp).buckets or _torch.final_buckets(ddp)
        except TorchDriftError as error:  # the other ranks wait to be told
            return Measured(problem=str(error))
        if not buckets:
            return Measured(problem="DDP did not tell its buckets")
        arrival = list(itertools.chain.from_iterable(buckets))
        # A Reducer that looks for unused parameters does not need all gradients.
        needed = set(arrival) if _torch.follows_arrival_order(ddp) else set()
        timed = self.steps[self._num_untimed :]
        # Pairs of a step and the next one, since an iteration ends where the next one begins.
        complete = [
            (step, following)
            for step, following in itertools.pairwise(timed)
            if step.backward_ended and step.num_forwards == 1 and step.ready.keys() >= needed
        ]
        if len(complete) < _LEAST_COMPLETE:
            ended = [step for step in timed if step.backward_ended]
            return Measured(
                problem="too few steps of one forward and one backward that used all parameters "
                f"could be measured ({self._describe_incomplete(ddp, ended, needed)})"
            )

        seconds = self._clock.seconds
        ready_s = []
        for index in arrival:
            times_s = [
                # A gradient that did not arrive counts as ready at once.
                seconds(step.forward_ended, step.ready.get(index, step.forward_ended))
                for step, _ in complete
            ]
            # A GPU's events may be of two streams, and not in order; no time is to be below 0.
            ready_s.append(max(0.0, statistics.median(times_s)))
        forward_s = [seconds(step.began, step.forward_ended) for step, _ in complete]
        backward_s = [seconds(step.forward_ended, step.backward_ended) for step, _ in complete]
        between_s = [seconds(step.backward_ended, following.began) for step, following in complete]
        return Measured(
            buckets=tuple(map(tuple, buckets)),
            ready_s=tuple(ready_s),
            forward_s=statistics.median(forward_s),
            backward_s=statistics.median(backward_s),
            between_s=statistics.median(between_s),
        )

    def _describe_incomplete(
        self,
        ddp: DistributedDataParallel,
        steps: Sequence[Step],
        needed: AbstractSet[ParameterIndex],
    ) -> str:
        """Say why too few could be measured of these steps, whose backwards have ended.

        Either a step had several forwards; or gradients that are `needed` did not arrive in it, of
        which those are named that the last such step lacks; or there were few steps.
        """
        several = [step for step in steps if step.num_forwards > 1]
        if several:
            return f"{len(several)} of {len(steps)} had several forwards"
        partial = [step for step in steps if needed - step.ready.keys()]
        if partial:
            names = {p.index: p.name for p in _torch.reducer_parameters(ddp).values()}
            unused = shorten([names[index] for index in sorted(needed - partial[-1].ready.keys())])
            return f"{unused} had no gradient in {len(partial)} of {len(steps)}"
        return f"{len(steps)} ended"
