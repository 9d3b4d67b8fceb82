"""Merge the traces of several ranks into one, with their clocks aligned.

[Note: clock offsets]
Machines' clocks differ by more than an allreduce takes. No rank can finish an allreduce before all
have launched it, which bounds the offset of two clocks from both sides, for each allreduce that
both recorded. And all ranks finish it within one message of each other: the median difference of
finishes is the offset, unless a bound says otherwise. Ranks on one machine share a clock.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddpopt._text import count
from ddpopt.errors import TraceError
from ddpopt.inspection.recording import TRACE_FORMAT

_MOST_BYTES = 256 * 2**20  # of one rank's file: a few thousand steps
_SHOWN = 60  # characters of a value in a message


def printable(text: str) -> str:
    """Return text with control characters escaped, so that no name can control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(value: object) -> str:
    """Return a value as text for a message: short, and without control characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {count(len(value), 'item')}" if value else "an empty list"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class MalformedError(ValueError):
    """What is wrong in a document, and where; raised and caught inside ddpopt."""


def parse(source: str | Path, most_bytes: int) -> Any:
    """Return what a file, or a text, says in JSON; MalformedError if it is none or too large."""
    content: str | bytes = source if isinstance(source, str) else b""
    if isinstance(source, Path):
        with source.open("rb") as file:
            content = file.read(most_bytes + 1)  # a device may have no end
    if len(content) > most_bytes:
        raise MalformedError(f"it is over the limit of {most_bytes} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"it is not JSON ({error})") from error


def build(kind: Any, value: Any, place: str = "", *, is_open: bool = False) -> Any:
    """Return a value of `parse` as one of this type, or raise MalformedError with its place.

    `kind` is str, int, float, one of these or None, a tuple of such types, or a dataclass, whose
    fields are an object's keys and whose own checks apply. If `is_open`, objects may have other
    keys too. `true` and `1.0` are not ints. A place reads like `cost.startup_s`.
    """
    if dataclasses.is_dataclass(kind):
        return _build_object(kind, value, place, is_open=is_open)
    options = typing.get_args(kind)
    if type(None) in options:
        return None if value is None else build(options[0], value, place, is_open=is_open)
    if options:  # of a tuple
        is_endless = options[-1] is ...
        expected = "a list" if is_endless else f"a list of {count(len(options), 'item')}"
        if isinstance(value, list) and (is_endless or len(value) == len(options)):
            kinds = options[:1] * len(value) if is_endless else options
            return tuple(
                build(each, item, f"{place}[{index}]", is_open=is_open)
                for index, (each, item) in enumerate(zip(kinds, value, strict=True))
            )
    elif kind is str:
        expected = "text"
        if isinstance(value, str):
            return value
    else:
        expected = f"a {'whole ' if kind is int else ''}number below 2**63"
        if type(value) in (int, kind) and abs(value) < 2**63:  # so that sums stay finite
            return value
    raise MalformedError(f"{place or 'it'} is {show(value)}; it must be {expected}")


def _build_object(kind: Any, value: Any, place: str, *, is_open: bool) -> Any:
    hints = _hints(kind)
    needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    if not isinstance(value, dict):
        expected = f"an object with {', '.join(needed)}"
        raise MalformedError(f"{place or 'it'} is {show(value)}; it must be {expected}")
    for name in needed:
        if name not in value:
            raise MalformedError(f"{place or 'it'} has no {name!r}")
    found = {}
    for name, item in value.items():
        if name in hints:
            below = f"{place}.{name}" if place else name
            found[name] = build(hints[name], item, below, is_open=is_open)
        elif not is_open:
            raise MalformedError(f"{place or 'it'} has a key {show(name)} that is unknown here")
    try:
        return kind(**found)
    except ValueError as error:
        raise MalformedError(f"{place}: {error}" if place else f"{error}") from error


_hints = functools.cache(typing.get_type_hints)


@dataclass(frozen=True, slots=True)
class _Header:
    """What a file has about its rank; an allreduce is its step, bucket, launch and finish."""

    format: str
    rank: int
    machine: str
    origin_unix_ns: int
    allreduces: tuple[tuple[int, int, float, float | None], ...]

    def __post_init__(self) -> None:
        if self.format != TRACE_FORMAT:
            raise MalformedError(f"format is {show(self.format)}, not {TRACE_FORMAT!r}")
        if self.rank < 0:
            raise MalformedError(f"rank is {self.rank}; it must be 0 or more")

    def finished(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Return launch and finish of the allreduces whose finish is known, by step and bucket."""
        return {
            (step, bucket): (launched_s, finished_s)
            for step, bucket, launched_s, finished_s in self.allreduces
            if finished_s is not None
        }


@dataclass(frozen=True, slots=True)
class _Event:
    """The parts of an event that are needed to move it in time."""

    ph: str
    ts: float


@dataclass(frozen=True, slots=True)
class _File:
    """What every trace of ours has."""

    otherData: _Header  # noqa: N815  # as Chrome's format has it
    traceEvents: tuple[_Event, ...]  # noqa: N815


class _Trace(NamedTuple):
    """One rank's file, by its name."""

    name: str
    header: _Header
    events: Sequence[dict[str, Any]]


def merge_traces(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Merge several ranks' files, or the folders that hold them as `rank*.json`, into one trace.

    Times are those of the lowest rank's clock. `otherData["clock_offsets_s"]` holds what was
    subtracted from each rank's times; it is None for a rank that recorded no finish of an
    allreduce, whose clock was taken as it is; see [Note: clock offsets].

    Raises:
        TraceError: there is no file, one is not a trace of `ddpopt.record`, two are from one rank,
            or the traces are not of the same steps.
        OSError: a file cannot be read.
    """
    traces = sorted(map(_read, trace_files(paths)), key=lambda trace: trace.header.rank)
    if not traces:
        raise TraceError(f"there is no trace in {[str(path) for path in paths]}")
    for trace, following in itertools.pairwise(traces):
        if trace.header.rank == following.header.rank:
            raise TraceError(
                f"{trace.name} and {following.name} are both of rank {trace.header.rank}; give one "
                "file a rank"
            )
    first = traces[0]
    offsets = {trace.header.rank: _offset_s(first, trace) for trace in traces}
    # When each rank began to record, by the first one's clock; the trace begins with the earliest.
    began_ns = [
        trace.header.origin_unix_ns - round((offset_s or 0.0) * 1e9)
        for trace, offset_s in zip(traces, offsets.values(), strict=True)
    ]
    events = []
    for trace, own_ns in zip(traces, began_ns, strict=True):
        by_ns = own_ns - min(began_ns)
        events += [
            # What describes a process or a thread has no time.
            event
            if event["ph"] == "M"
            else {**event, "ts": (round(event["ts"] * 1e3) + by_ns) / 1e3}
            for event in trace.events
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": "ddpopt traces 1",
            "ranks": list(offsets),
            "clock_offsets_s": {str(rank): offset for rank, offset in offsets.items()},
        },
    }


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files that `merge_traces` reads."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("rank*.json")) if path.is_dir() else [path]
    return files


def _read(path: Path) -> _Trace:
    name = printable(str(path))
    try:
        content = parse(path, _MOST_BYTES)
        file: _File = build(_File, content, is_open=True)
    except MalformedError as error:
        raise TraceError(
            f"{name} is no trace that ddpopt.record wrote: {error}; give the files that it wrote, "
            "one for each rank"
        ) from error
    return _Trace(name, file.otherData, content["traceEvents"])


def _offset_s(first: _Trace, trace: _Trace) -> float | None:
    """Return how far a rank's clock is ahead of the first one's; None if it is unknown."""
    if trace.header.machine == first.header.machine:
        return 0.0
    ahead_s = (trace.header.origin_unix_ns - first.header.origin_unix_ns) / 1e9
    here, there = first.header.finished(), trace.header.finished()
    pairs = [(here[key], there[key]) for key in sorted(here.keys() & there.keys())]
    if not pairs:
        return None
    least = max(launched - finished for (_, finished), (launched, _) in pairs)
    most = min(finished - launched for (launched, _), (_, finished) in pairs)
    if least > most:
        raise TraceError(
            f"{first.name} and {trace.name} do not fit together: by every offset of their clocks a "
            "rank would have finished an allreduce before the other launched it; record the same "
            "steps on all ranks"
        )
    median = statistics.median(b - a for (_, a), (_, b) in pairs)
    return ahead_s + min(max(median, least), most)
