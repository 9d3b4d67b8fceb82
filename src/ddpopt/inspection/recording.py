"""What was recorded of real steps, as data: made by `ddpopt.record`, shown by `explain` and traces.

Times are in seconds after `Recording.origin_unix_ns`, by the clock of one rank's machine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpopt._files import write_text
from ddpopt._text import format_bytes, table

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

        Of steps like the last: buckets may have changed, and graphs been compiled, in between.
        """
        if not self.steps:
            return None
        alike = [step for step in self.steps if _shape(step) == _shape(self.steps[-1])]

        def median(of: Callable[[RecordedStep], float]) -> float:
            return statistics.median(of(step) - step.forward_stop_s for step in alike)

        last = alike[-1]
        return RecordedStep(
            forward_start_s=median(lambda step: step.forward_start_s),
            forward_stop_s=0.0,
            backward_stop_s=median(lambda step: step.backward_stop_s),
            sections=tuple(
                RecordedSection(
                    section.graph,
                    section.section,
                    section.kind,
                    median(lambda step, k=k: step.sections[k].start_s),  # type: ignore[misc]
                    median(lambda step, k=k: step.sections[k].stop_s),  # type: ignore[misc]
                )
                for k, section in enumerate(last.sections)
            ),
            buckets=tuple(
                _median_bucket([step.buckets[k] for step in alike], alike)
                for k in range(len(last.buckets))
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
        lines = [f"rank {self.rank}, medians of {len(self.steps)} steps: {summary_of(step)}"]
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


def summary_of(step: RecordedStep) -> str:
    """Return the times of a step in a sentence."""
    text = f"backward {format_ms(step.backward_s)} ms"
    if step.exposed_s is not None:
        text += (
            f", {format_ms(step.exposed_s)} of it waiting for communication, which takes "
            f"{format_ms(step.communication_s)} in all"
        )
    return text


def format_ms(time_s: float | None) -> str:
    """Return a time in milliseconds, `-` where there is none."""
    return "-" if time_s is None else f"{time_s * 1e3:.1f}"


def _shape(step: RecordedStep) -> object:
    sections = [(section.graph, section.section, section.kind) for section in step.sections]
    return sections, [(bucket.index, bucket.num_bytes) for bucket in step.buckets]


def _median_bucket(
    buckets: Sequence[RecordedBucket], steps: Sequence[RecordedStep]
) -> RecordedBucket:
    starts = [step.forward_stop_s for step in steps]
    finished = [
        bucket.finished_s - start
        for bucket, start in zip(buckets, starts, strict=True)
        if bucket.finished_s is not None
    ]
    return RecordedBucket(
        index=buckets[-1].index,
        num_bytes=buckets[-1].num_bytes,
        ready_s=statistics.median(b.ready_s - s for b, s in zip(buckets, starts, strict=True)),
        launched_s=statistics.median(
            b.launched_s - s for b, s in zip(buckets, starts, strict=True)
        ),
        finished_s=statistics.median(finished) if finished else None,
    )


def _step_events(number: int, step: RecordedStep, rank: int) -> list[dict[str, Any]]:
    """Return a step as events of a trace; ranges of a thread lie in or beside each other."""
    stages = (
        (f"forward, step {number}", step.forward_start_s, step.forward_stop_s),
        (f"backward, step {number}", step.forward_stop_s, step.backward_stop_s),
    )
    events = [_complete(name, start, stop, rank, _COMPUTATION) for name, start, stop in stages]
    events += [
        _complete(
            f"{s.graph} section {s.section} {s.kind}", s.start_s, s.stop_s, rank, _COMPUTATION
        )
        for s in step.sections
    ]
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
        events.append(_event("i", f"{name} ready", bucket.ready_s, rank, _COMPUTATION, args, s="t"))
        start_s = max(bucket.launched_s, end_s)
        if bucket.finished_s is None:
            events.append(
                _event("i", f"{name} launched", start_s, rank, _COMMUNICATION, args, s="t")
            )
            continue
        end_s = max(start_s, bucket.finished_s)
        events.append(_complete(f"allreduce {name}", start_s, end_s, rank, _COMMUNICATION, args))
        arrow: dict[str, Any] = {"cat": "launch", "id": _arrow_id(rank, number, bucket.index)}
        events.append(_event("s", name, bucket.ready_s, rank, _COMPUTATION, **arrow))
        events.append(_event("f", name, start_s, rank, _COMMUNICATION, bp="e", **arrow))
    return events


def _complete(  # the fields of an event
    name: str,
    start_s: float,
    stop_s: float,
    rank: int,
    thread: int,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    duration_us = (_nanoseconds(stop_s) - _nanoseconds(start_s)) / 1e3
    return _event("X", name, start_s, rank, thread, args, dur=duration_us)


def _event(  # the fields of an event
    phase: str,
    name: str,
    at_s: float,
    rank: int,
    thread: int,
    args: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    event = {
        "ph": phase,
        "name": name,
        "ts": _nanoseconds(at_s) / 1e3,
        "pid": rank,
        "tid": 2 * rank + thread,  # Perfetto takes threads of one number for one thread
        **more,
    }
    return {**event, "args": args} if args else event


def _nanoseconds(time_s: float) -> int:
    """Return a time as Perfetto reads it, so that ranges that touch do not overlap there."""
    return round(time_s * 1e9)


def _arrow_id(rank: int, step: int, bucket: int) -> int:
    """Return a number that no other arrow has, in no trace of this training run."""
    return (rank << 40) + (step << 16) + bucket
