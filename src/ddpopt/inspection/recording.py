"""Recorded steps as data: made by `ddpopt.record`, shown by `explain`.

Times are in seconds, as this rank's `time.perf_counter` has them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpopt._text import count, format_ms
from ddpopt.planning.timeline import BucketTimes, bucket_table


@dataclass(frozen=True, slots=True)
class RecordedSection:
    """One run of a section; `kind` is "forward" or "backward"."""

    graph: str
    section: int
    kind: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One or more forwards, and the backward whose gradients were reduced.

    `backward_stop_s` is when DDP was done, all allreduces included; buckets are in launch order,
    and the finish is known for all of them or for none. Every float in it is a time, as `map_times`
    assumes.
    """

    forward_start_s: float
    forward_stop_s: float
    backward_stop_s: float
    sections: tuple[RecordedSection, ...]
    buckets: tuple[BucketTimes, ...]

    @property
    def forward_s(self) -> float:
        """From the start of the first forward to the end of the last."""
        return self.forward_stop_s - self.forward_start_s

    @property
    def backward_s(self) -> float:
        """From the end of forward, so that the loss counts as part of backward."""
        return self.backward_stop_s - self.forward_stop_s

    @property
    def exposed_s(self) -> float | None:
        """How long allreduces ran when no gradient was left to be computed."""
        finished = [bucket.finished_s for bucket in self.buckets if bucket.finished_s is not None]
        if not finished:
            return None
        return max(0.0, max(finished) - max(bucket.ready_s for bucket in self.buckets))

    @property
    def communication_s(self) -> float | None:
        """The sum of all allreduces, without the time that one waited for the one before it."""
        total_s, end_s = 0.0, -math.inf
        for bucket in self.buckets:
            if bucket.finished_s is None:
                return None
            start_s = max(bucket.launched_s, end_s)
            end_s = max(start_s, bucket.finished_s)
            total_s += end_s - start_s
        return total_s if self.buckets else None

    @property
    def shape(self) -> object:
        """What is equal for steps that ran the same sections and buckets."""
        return map_times(lambda _: None, self)

    def since_forward(self) -> RecordedStep:
        """Return this step with times that count from the end of forward."""
        moved: RecordedStep = map_times(lambda times_s: times_s[0] - self.forward_stop_s, self)
        return moved

    def num_started(self, time_s: float) -> int:
        """Return how many backward sections had started by `time_s`."""
        return sum(s.kind == "backward" and s.start_s <= time_s for s in self.sections)

    def summary(self) -> str:
        """Return the times in a sentence."""
        text = f"backward {format_ms(self.backward_s)} ms"
        if self.exposed_s is not None:
            text += (
                f", {format_ms(self.exposed_s)} of it waiting for communication, which takes "
                f"{format_ms(self.communication_s)} in all"
            )
        return text


@dataclass(slots=True, kw_only=True)
class Recording:
    """The steps that one rank recorded. `notes` say what could not be recorded, and what to do.

    It is filled in when the block of `ddpopt.record` ends.
    """

    rank: int
    steps: tuple[RecordedStep, ...] = ()
    notes: tuple[str, ...] = ()

    def median_step(self) -> RecordedStep | None:
        """Return a step of medians, with times since the end of forward; None without steps.

        Only steps like the last one count: earlier ones may have had other buckets, or compiled.
        """
        if not self.steps:
            return None
        shape = self.steps[-1].shape
        alike = [step.since_forward() for step in self.steps if step.shape == shape]
        median: RecordedStep = map_times(statistics.median, *alike)
        return median

    def __str__(self) -> str:
        step = self.median_step()
        if step is None:
            return "\n".join(["no complete step was recorded", *self.notes])
        lines = [f"rank {self.rank}, medians of {count(len(self.steps), 'step')}: {step.summary()}"]
        if step.buckets:
            begun = (f"{step.num_started(bucket.launched_s)}" for bucket in step.buckets)
            lines += ["", *bucket_table(step.buckets, "sections begun", begun)]
        return "\n".join([*lines, *self.notes])


def map_times(function: Callable[[list[float]], float | None], *values: Any) -> Any:
    """Merge values of equal structure into one, with `function` applied to each place's times.

    Every float or None in such a structure of dataclasses and tuples is a time.
    """
    first = values[0]
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        merged = {name: map_times(function, *(getattr(v, name) for v in values)) for name in names}
        return dataclasses.replace(values[0], **merged)
    if isinstance(first, tuple):
        return tuple(map_times(function, *items) for items in zip(*values, strict=True))
    if not isinstance(first, float | None):
        return first
    known = [time_s for time_s in values if time_s is not None]
    return function(known) if known else None
