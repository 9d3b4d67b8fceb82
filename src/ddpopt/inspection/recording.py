"""Recorded steps as data: made by `ddpopt.record`, shown by `explain`.

Times are in seconds, as this rank's `time.perf_counter` has them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpopt._text import as_html, count, format_ms
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
    and the finish is known for all of them or for none.
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
        """How long backward waited for communication.

        From the last gradient to the end of the last allreduce; None if that is not known.
        """
        finished = [bucket.finished_s for bucket in self.buckets if bucket.finished_s is not None]
        if not finished:
            return None
        return max(0.0, max(finished) - max(bucket.ready_s for bucket in self.buckets))

    @property
    def communication_s(self) -> float | None:
        """The time in which an allreduce ran, without the time that launched ones were queued."""
        # Allreduces run one at a time: each begins when it is launched or when the last one ends.
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
        sections = [(section.graph, section.section, section.kind) for section in self.sections]
        buckets = [(bucket.index, bucket.num_bytes) for bucket in self.buckets]
        return sections, buckets

    def since_forward(self) -> RecordedStep:
        """This step with times that count from the end of forward."""
        zero_s = self.forward_stop_s
        sections = []
        for section in self.sections:
            start_s, stop_s = section.start_s - zero_s, section.stop_s - zero_s
            sections.append(dataclasses.replace(section, start_s=start_s, stop_s=stop_s))
        buckets = []
        for bucket in self.buckets:
            moved = dataclasses.replace(
                bucket,
                ready_s=bucket.ready_s - zero_s,
                launched_s=bucket.launched_s - zero_s,
                finished_s=None if bucket.finished_s is None else bucket.finished_s - zero_s,
            )
            buckets.append(moved)
        return RecordedStep(
            forward_start_s=self.forward_start_s - zero_s,
            forward_stop_s=0.0,
            backward_stop_s=self.backward_stop_s - zero_s,
            sections=tuple(sections),
            buckets=tuple(buckets),
        )

    def num_started(self, time_s: float) -> int:
        """The number of backward sections that had started by `time_s`."""
        return sum(s.kind == "backward" and s.start_s <= time_s for s in self.sections)

    def summary(self) -> str:
        """One line with the times of backward, of waiting and of communication."""
        text = f"backward {format_ms(self.backward_s)} ms"
        if self.exposed_s is not None:
            text += (
                f", of it {format_ms(self.exposed_s)} waiting for communication (last gradient to "
                f"last allreduce's end); all allreduces take {format_ms(self.communication_s)}"
            )
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianStep(RecordedStep):
    """The medians of several steps, each of its own: of the times, and of how long steps waited.

    The medians of two times are not as far apart as the two are in the median step. If last
    gradients come at 5, 1 and 9 ms, and last allreduces end at 6, 10 and 11, then steps wait 1, 9
    and 2: the median is 2, and 5 and 10, the medians of both times, are 5 apart.
    """

    median_exposed_s: float | None
    median_communication_s: float | None

    @property
    def exposed_s(self) -> float | None:
        return self.median_exposed_s

    @property
    def communication_s(self) -> float | None:
        return self.median_communication_s


@dataclass(slots=True, kw_only=True)
class Recording:
    """The steps that one rank recorded. `notes` say what could not be recorded, and what to do.

    It is filled in when the block of `ddpopt.record` ends, unless that raises.
    """

    rank: int
    steps: tuple[RecordedStep, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps_like_last(self) -> tuple[RecordedStep, ...]:
        """The steps that ran the last one's sections and buckets: others cannot be compared."""
        if not self.steps:
            return ()
        shape = self.steps[-1].shape
        return tuple(step for step in self.steps if step.shape == shape)

    def median_step(self) -> MedianStep | None:
        """The medians of `steps_like_last`, with times since the end of forward; None without any.

        Earlier steps may have had other buckets, or compiled.
        """
        alike = [step.since_forward() for step in self.steps_like_last]
        if not alike:
            return None
        # The k-th section, or bucket, is the same one in all of these steps.
        runs_by_section = zip(*(step.sections for step in alike), strict=True)
        times_by_bucket = zip(*(step.buckets for step in alike), strict=True)
        return MedianStep(
            forward_start_s=statistics.median(step.forward_start_s for step in alike),
            forward_stop_s=0.0,
            backward_stop_s=statistics.median(step.backward_stop_s for step in alike),
            sections=tuple(map(_median_section, runs_by_section)),
            buckets=tuple(map(_median_bucket, times_by_bucket)),
            # Medians of their own, see `MedianStep`.
            median_exposed_s=_median(step.exposed_s for step in alike),
            median_communication_s=_median(step.communication_s for step in alike),
        )

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        step = self.median_step()
        if step is None:
            return "\n".join(["no complete step was recorded", *self.notes])
        steps = describe_steps(len(self.steps_like_last), len(self.steps))
        lines = [f"rank {self.rank}, medians of {steps}: {step.summary()}"]
        if step.buckets:
            begun = (f"{step.num_started(bucket.launched_s)}" for bucket in step.buckets)
            lines += ["", *bucket_table(step.buckets, "sections begun", begun)]
        return "\n".join([*lines, *self.notes])


def describe_steps(num_measured: int, num_recorded: int) -> str:
    """Name the steps that medians are of, as in `8 of 10 steps`."""
    num_others = num_recorded - num_measured
    if not num_others:
        return count(num_recorded, "step")
    return f"{num_measured} of {num_recorded} steps ({num_others} ran other sections or buckets)"


def _median(times: Iterable[float | None]) -> float | None:
    """The median of the times that are known."""
    known = [time_s for time_s in times if time_s is not None]
    return statistics.median(known) if known else None


def _median_section(runs: Sequence[RecordedSection]) -> RecordedSection:
    """One section with the median times of its runs in several steps."""
    return dataclasses.replace(
        runs[0],
        start_s=statistics.median(run.start_s for run in runs),
        stop_s=statistics.median(run.stop_s for run in runs),
    )


def _median_bucket(times: Sequence[BucketTimes]) -> BucketTimes:
    """One bucket with the median of its times in several steps; unknown finishes are left out."""
    return dataclasses.replace(
        times[0],
        ready_s=statistics.median(each.ready_s for each in times),
        launched_s=statistics.median(each.launched_s for each in times),
        finished_s=_median(each.finished_s for each in times),
    )
