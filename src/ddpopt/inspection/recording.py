"""Recorded steps as data: made by `ddpopt.record`, shown by `explain` and in traces.

Times are in seconds after `Recording.origin_unix_ns`, by the clock of one rank's machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpopt._text import count, format_ms, write_text
from ddpopt.planning.timeline import BucketTimes, bucket_table

TRACE_FORMAT = "ddpopt trace 1"


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

    It is filled in when the block of `ddpopt.record` ends. Ranks with the same `machine` share a
    clock.
    """

    rank: int
    world_size: int
    host: str
    machine: str
    origin_unix_ns: int
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

    def save(self, path: str | Path) -> None:
        """Write the steps as a trace that Chrome (chrome://tracing) and Perfetto open.

        `ddpopt.inspection.merge_traces` merges the traces of several ranks. An existing file or
        link of that name is replaced.

        Raises:
            OSError: the file cannot be written, or a folder or a device has that name.
        """
        write_text(path, json.dumps(self.trace()))

    def trace(self) -> dict[str, Any]:
        """Return what `save` writes: Chrome's trace format, times in microseconds."""
        tracks: tuple[tuple[str, dict[str, Any]], ...] = (
            ("process_name", {"name": f"rank {self.rank} ({self.host})"}),
            ("process_sort_index", {"sort_index": self.rank}),
            ("thread_name", {"name": "computation"}),
        )
        events = [self._event("M", name, 0.0, args=args) for name, args in tracks]
        for number, step in enumerate(self.steps):
            events += self._step_events(number, step)
        names = ("rank", "world_size", "host", "machine", "origin_unix_ns")
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "format": TRACE_FORMAT,
                **{name: getattr(self, name) for name in names},
                "notes": list(self.notes),
                "allreduces": [
                    [number, bucket.index, bucket.launched_s, bucket.finished_s]
                    for number, step in enumerate(self.steps)
                    for bucket in step.buckets
                ],
            },
        }

    def _step_events(self, number: int, step: RecordedStep) -> Iterator[dict[str, Any]]:
        """Yield a step's events; ranges of the computation are nested or disjoint."""
        start_s, stop_s, end_s = step.forward_start_s, step.forward_stop_s, step.backward_stop_s
        yield self._range(f"forward, step {number}", start_s, stop_s)
        yield self._range(f"backward, step {number}", stop_s, end_s)
        for s in step.sections:
            yield self._range(f"{s.graph} section {s.section} {s.kind}", s.start_s, s.stop_s)
        for bucket in step.buckets:
            details = {
                "step": number,
                "bucket": bucket.index,
                "bytes": bucket.num_bytes,
                "ready_ms": (bucket.ready_s - stop_s) * 1e3,
                "launched_ms": (bucket.launched_s - stop_s) * 1e3,
            }
            name = f"bucket {bucket.index} ready"
            yield self._event("i", name, bucket.ready_s, s="t", args=details)
            yield from self._allreduce(bucket, details)

    def _allreduce(self, bucket: BucketTimes, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a bucket's allreduce, from launch to end, on the bucket's own track.

        Buckets overlap, so one thread's track could not hold them; where the end is unknown, the
        launch is shown as an instant.
        """
        track = {
            "cat": "allreduce",
            # A number, as Perfetto wants, that no other rank's track has.
            "id": (self.rank << 40) + bucket.index,
            "scope": "ddpopt",
        }
        name = f"allreduce bucket {bucket.index}"
        if bucket.finished_s is None:
            yield self._event("n", f"{name} launched", bucket.launched_s, args=args, **track)
            return
        yield self._event("b", name, bucket.launched_s, args=args, **track)
        yield self._event("e", name, bucket.finished_s, **track)

    def _range(self, name: str, start_s: float, stop_s: float, **more: Any) -> dict[str, Any]:
        duration_us = (_nanoseconds(stop_s) - _nanoseconds(start_s)) / 1e3
        return self._event("X", name, start_s, dur=duration_us, **more)

    def _event(self, phase: str, name: str, at_s: float, **more: Any) -> dict[str, Any]:
        """Return an event: M names a track, X is a range, i a mark; b, e and n those of an `id`."""
        return {
            "ph": phase,
            "name": name,
            "ts": _nanoseconds(at_s) / 1e3,
            "pid": self.rank,
            "tid": self.rank + 1,  # Perfetto takes threads with equal numbers for one thread
            **more,
        }


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


def _nanoseconds(time_s: float) -> int:
    """Return a time as Perfetto reads it, so that adjacent ranges do not overlap there."""
    return round(time_s * 1e9)
