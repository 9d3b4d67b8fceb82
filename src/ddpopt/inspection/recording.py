"""What was recorded of real steps, as data: made by `ddpopt.record`, shown by `explain` and traces.

Times are in seconds after `Recording.origin_unix_ns`, by the clock of one rank's machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpopt._files import write_text
from ddpopt._text import format_bytes, format_ms, table

TRACE_FORMAT = "ddpopt trace 1"
_COMPUTATION, _COMMUNICATION = 1, 2  # the trace's threads of each rank


@dataclass(frozen=True, slots=True)
class RecordedSection:
    """One run of a section; `kind` is "forward" or "backward"."""

    graph: str
    section: int
    kind: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """A bucket's last gradient was ready, its allreduce was launched, and has finished.

    `finished_s` is None where the profiler did not tell; see `Recording.notes`.
    """

    index: int
    num_bytes: int
    ready_s: float
    launched_s: float
    finished_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One forward, or several, and the backward whose gradients were reduced.

    `backward_stop_s` is when DDP was done, all allreduces included; buckets are in launch order.
    """

    forward_start_s: float
    forward_stop_s: float
    backward_stop_s: float
    sections: tuple[RecordedSection, ...]
    buckets: tuple[RecordedBucket, ...]

    @property
    def backward_s(self) -> float:
        """From the end of forward, so that the loss counts as part of backward."""
        return self.backward_stop_s - self.forward_stop_s

    @property
    def exposed_s(self) -> float | None:
        """How long allreduces ran when no gradient was left to be computed."""
        finished = [bucket.finished_s for bucket in self.buckets]
        if not finished or None in finished:
            return None
        last_s = max(time_s for time_s in finished if time_s is not None)
        return max(0.0, last_s - max(bucket.ready_s for bucket in self.buckets))

    @property
    def communication_s(self) -> float | None:
        """The sum of all allreduces, without what one waited for the one before it."""
        sum_s = end_s = 0.0
        for bucket in self.buckets:
            if bucket.finished_s is None:
                return None
            sum_s += max(0.0, bucket.finished_s - max(bucket.launched_s, end_s))
            end_s = max(end_s, bucket.finished_s)
        return sum_s if self.buckets else None

    @property
    def forward_s(self) -> float:
        """From the start of the first forward to the end of the last."""
        return self.forward_stop_s - self.forward_start_s

    @property
    def shape(self) -> object:
        """What is equal of steps that ran the same sections and buckets."""
        sections = [(section.graph, section.section, section.kind) for section in self.sections]
        return sections, [(bucket.index, bucket.num_bytes) for bucket in self.buckets]

    def times_s(self) -> list[float | None]:
        """Return all times after the end of forward, in the order of the fields."""
        times: list[float | None] = [
            *(self.forward_start_s, self.forward_stop_s, self.backward_stop_s),
            *itertools.chain.from_iterable((s.start_s, s.stop_s) for s in self.sections),
            *itertools.chain.from_iterable(
                (b.ready_s, b.launched_s, b.finished_s) for b in self.buckets
            ),
        ]
        return [None if time_s is None else time_s - self.forward_stop_s for time_s in times]

    def summary(self) -> str:
        """Return the times in a sentence."""
        text = f"backward {format_ms(self.backward_s)} ms"
        if self.exposed_s is None:
            return text
        return (
            f"{text}, {format_ms(self.exposed_s)} of it waiting for communication, which takes "
            f"{format_ms(self.communication_s)} in all"
        )

    def num_started(self, time_s: float) -> int:
        """Return how many backward sections had started by then."""
        return sum(s.kind == "backward" and s.start_s <= time_s for s in self.sections)


@dataclass(slots=True, kw_only=True)
class Recording:
    """The steps that one rank recorded. `notes` say what could not be, and what to do.

    It is filled in when the block of `ddpopt.record` ends. Ranks with the same `machine` have the
    same clock.
    """

    rank: int
    world_size: int
    host: str
    machine: str
    origin_unix_ns: int
    steps: tuple[RecordedStep, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def median_step(self) -> RecordedStep | None:
        """Return a step of medians, which begins when forward ends; None without steps.

        Only steps like the last one count: earlier ones may have had other buckets, or compiled.
        """
        if not self.steps:
            return None
        last = self.steps[-1]
        rows = [step.times_s() for step in self.steps if step.shape == last.shape]
        medians: Iterator[Any] = map(_median, zip(*rows, strict=True))
        return RecordedStep(
            forward_start_s=next(medians),
            forward_stop_s=next(medians),
            backward_stop_s=next(medians),
            sections=tuple(
                dataclasses.replace(section, start_s=next(medians), stop_s=next(medians))
                for section in last.sections
            ),
            buckets=tuple(
                dataclasses.replace(
                    bucket,
                    ready_s=next(medians),
                    launched_s=next(medians),
                    finished_s=next(medians),
                )
                for bucket in last.buckets
            ),
        )

    def save(self, path: str | Path) -> None:
        """Write the steps as a trace that Chrome (chrome://tracing) and Perfetto open.

        The rank is a process, computation and communication are threads of it. Traces of several
        ranks become one by `ddpopt.merge_traces`. A file of yours is replaced, a link is not
        followed.

        Raises:
            OSError: it cannot be written, or something else has that name.
        """
        write_text(path, json.dumps(self.trace()))

    def trace(self) -> dict[str, Any]:
        """Return what `save` writes: Chrome's trace format, times in microseconds."""
        events = [
            _event("M", name, 0, self.rank, thread, args=args)
            for name, thread, args in (
                ("process_name", 0, {"name": f"rank {self.rank} ({self.host})"}),
                ("process_sort_index", 0, {"sort_index": self.rank}),
                ("thread_name", _COMPUTATION, {"name": "computation"}),
                ("thread_name", _COMMUNICATION, {"name": "communication"}),
            )
        ]
        for number, step in enumerate(self.steps):
            events += _step_events(number, step, self.rank)
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "format": TRACE_FORMAT,
                "rank": self.rank,
                "world_size": self.world_size,
                "host": self.host,
                "machine": self.machine,
                "origin_unix_ns": self.origin_unix_ns,
                "notes": list(self.notes),
                "allreduces": [
                    [number, bucket.index, bucket.launched_s, bucket.finished_s]
                    for number, step in enumerate(self.steps)
                    for bucket in step.buckets
                ],
            },
        }

    def __str__(self) -> str:
        step = self.median_step()
        if step is None:
            return "\n".join(["no complete step was recorded", *self.notes])
        lines = [f"rank {self.rank}, medians of {len(self.steps)} steps: {step.summary()}"]
        if step.buckets:
            header = ("bucket", "size", "ready ms", "launch", "finish", "sections begun")
            rows = [
                (
                    f"{bucket.index}",
                    format_bytes(bucket.num_bytes),
                    format_ms(bucket.ready_s),
                    format_ms(bucket.launched_s),
                    format_ms(bucket.finished_s),
                    f"{step.num_started(bucket.launched_s)}",
                )
                for bucket in step.buckets
            ]
            lines += ["", *table(header, rows)]
        return "\n".join([*lines, *self.notes])


def _median(times_s: Sequence[float | None]) -> float | None:
    known = [time_s for time_s in times_s if time_s is not None]
    return statistics.median(known) if known else None


def _step_events(number: int, step: RecordedStep, rank: int) -> list[dict[str, Any]]:
    """Return a step as events of a trace; ranges of a thread lie in or beside each other."""
    events: list[dict[str, Any]] = []

    def happened(phase: str, name: str, at_s: float, thread: int, **more: Any) -> None:
        events.append(_event(phase, name, at_s, rank, thread, **more))

    def ran(name: str, start_s: float, stop_s: float, thread: int, **more: Any) -> None:
        duration_us = (_nanoseconds(stop_s) - _nanoseconds(start_s)) / 1e3
        happened("X", name, start_s, thread, dur=duration_us, **more)

    ran(f"forward, step {number}", step.forward_start_s, step.forward_stop_s, _COMPUTATION)
    ran(f"backward, step {number}", step.forward_stop_s, step.backward_stop_s, _COMPUTATION)
    for s in step.sections:
        ran(f"{s.graph} section {s.section} {s.kind}", s.start_s, s.stop_s, _COMPUTATION)
    end_s = 0.0
    for bucket in step.buckets:
        name = f"bucket {bucket.index}"
        args = {
            "step": number,
            "bucket": bucket.index,
            "bytes": bucket.num_bytes,
            "ready_ms": (bucket.ready_s - step.forward_stop_s) * 1e3,
            "launched_ms": (bucket.launched_s - step.forward_stop_s) * 1e3,
        }
        happened("i", f"{name} ready", bucket.ready_s, _COMPUTATION, s="t", args=args)
        start_s = max(bucket.launched_s, end_s)
        if bucket.finished_s is None:
            happened("i", f"{name} launched", start_s, _COMMUNICATION, s="t", args=args)
            continue
        end_s = max(start_s, bucket.finished_s)
        ran(f"allreduce {name}", start_s, end_s, _COMMUNICATION, args=args)
        # A number that no other arrow has, in no trace of this training run.
        arrow = {"cat": "launch", "id": (rank << 40) + (number << 16) + bucket.index}
        happened("s", name, bucket.ready_s, _COMPUTATION, **arrow)
        happened("f", name, start_s, _COMMUNICATION, bp="e", **arrow)
    return events


def _event(
    phase: str, name: str, at_s: float, rank: int, thread: int, **more: Any
) -> dict[str, Any]:
    return {
        "ph": phase,
        "name": name,
        "ts": _nanoseconds(at_s) / 1e3,
        "pid": rank,
        "tid": 2 * rank + thread,  # Perfetto takes threads of one number for one thread
        **more,
    }


def _nanoseconds(time_s: float) -> int:
    """Return a time as Perfetto reads it, so that ranges that touch do not overlap there."""
    return round(time_s * 1e9)
