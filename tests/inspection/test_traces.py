"""Traces: what a recording becomes, and how ranks' clocks are brought together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ddpopt
from ddpopt.inspection.recording import RecordedSection, RecordedStep, Recording
from ddpopt.planning.timeline import BucketTimes

AHEAD_S = 0.5  # the second machine's clock


def _recording(rank: int, machine: str, delay_s: float = 0.0) -> Recording:
    """Two steps of two buckets; the rank is `delay_s` behind, its clock ahead of the first's."""
    ahead_s = rank * AHEAD_S
    steps = []
    for number in range(2):
        at_s = number + ahead_s

        def bucket(index: int, ready_s: float, finished_s: float, at_s: float = at_s) -> Any:
            ready_s = at_s + ready_s + delay_s
            return BucketTimes(index, 1000, ready_s, ready_s + 0.001, at_s + finished_s)

        steps.append(
            RecordedStep(
                forward_start_s=at_s,
                forward_stop_s=at_s + 0.1,
                backward_stop_s=at_s + 0.5,
                sections=(
                    RecordedSection("0/0", 0, "backward", at_s + 0.11, at_s + 0.2),
                    RecordedSection("0/0", 1, "backward", at_s + 0.21, at_s + 0.3),
                ),
                buckets=(bucket(0, 0.2, 0.35), bucket(1, 0.3, 0.45)),
            )
        )
    return Recording(
        rank=rank,
        world_size=2,
        host="a host",
        machine=machine,
        origin_unix_ns=10**18 + rank * 10**9,  # each began to record when it liked
        steps=tuple(steps),
    )


def _save(folder: Path, *recordings: Recording) -> list[Path]:
    paths = [folder / f"rank{recording.rank}.json" for recording in recordings]
    for recording, path in zip(recordings, paths, strict=True):
        recording.save(path)
    return paths


def _check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Hold a trace against the format: known phases, times, and ranges of a thread that nest."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    for event in trace["traceEvents"]:
        assert event["ph"] in {"M", "X", "i", "b", "e", "n"}
        assert isinstance(event["name"], str)
        assert {"ts", "pid", "tid"} <= event.keys()
        assert event["ts"] >= 0
    ranges = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads = {(event["pid"], event["tid"]) for event in ranges}
    assert len({tid for _, tid in threads}) == len(threads)
    for thread in threads:
        own = [e for e in ranges if (e["pid"], e["tid"]) == thread]
        open_until: list[int] = []
        for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            start_ns, taken_ns = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            while open_until and open_until[-1] <= start_ns:
                open_until.pop()
            assert taken_ns >= 0
            assert not open_until or start_ns + taken_ns <= open_until[-1], event
            open_until.append(start_ns + taken_ns)
    assert all(finished >= launched for launched, finished in _exchanges(trace).values())
    return ranges


def _exchanges(trace: dict[str, Any]) -> dict[tuple[int, int, str], tuple[float, float]]:
    """Return begin and end of what is communicated, by rank, step and name; they are pairs."""
    found: dict[tuple[int, int, str], tuple[float, float]] = {}
    begun: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] not in "be":
            continue
        assert isinstance(event["id"], int)  # Perfetto takes no other
        track = (event["cat"], event["scope"], event["id"], event["name"])
        if event["ph"] == "b":
            assert track not in begun
            begun[track] = event
        else:
            start = begun.pop(track)
            key = (event["pid"], start["args"]["step"], event["name"])
            assert start["pid"] == event["pid"]
            found[key] = (start["ts"], event["ts"])
    assert not begun
    return found


def test_a_rank_is_a_process_with_computation_and_a_track_for_each_bucket() -> None:
    trace = _recording(0, "a").trace()
    assert [event["name"] for event in _check(trace)[:4]] == [
        "forward, step 0",
        "backward, step 0",
        "0/0 section 0 backward",
        "0/0 section 1 backward",
    ]
    tracks = {event["id"]: event["name"] for event in trace["traceEvents"] if event["ph"] == "b"}
    assert sorted(tracks.values()) == ["allreduce bucket 0", "allreduce bucket 1"]


def test_an_allreduce_is_drawn_from_launch_to_end() -> None:
    """Also while the one before it runs, which it waits for."""
    exchanges = _exchanges(_recording(0, "a").trace())
    assert exchanges[0, 0, "allreduce bucket 0"] == pytest.approx((201e3, 350e3))
    assert exchanges[0, 0, "allreduce bucket 1"] == pytest.approx((301e3, 450e3))


def test_without_its_end_an_allreduce_is_the_moment_of_its_launch() -> None:
    """Which only the profiler knows, and did not tell."""
    recording = _recording(0, "a")
    steps = recording.steps
    recording.steps = tuple(
        replace(step, buckets=tuple(replace(b, finished_s=None) for b in step.buckets))
        for step in steps
    )
    trace = recording.trace()
    _check(trace)
    assert not _exchanges(trace)
    moments = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "n"]
    launched = [bucket.launched_s * 1e6 for step in steps for bucket in step.buckets]
    assert moments == pytest.approx(launched)


def test_ranks_have_tracks_of_their_own(tmp_path: Path) -> None:
    """In a merged trace, where their allreduces run at the same time."""
    merged = ddpopt.inspection.merge_traces(_save(tmp_path, _recording(0, "a"), _recording(1, "a")))
    assert len(_exchanges(merged)) == 8
    assert len({e["id"] for e in merged["traceEvents"] if e["ph"] == "b"}) == 4


def test_one_machine_has_one_clock(tmp_path: Path) -> None:
    first, second = _recording(0, "a"), _recording(1, "a")
    first.origin_unix_ns += 10**10  # the second began earlier
    merged = ddpopt.inspection.merge_traces(_save(tmp_path, first, second))
    assert merged["otherData"]["clock_offsets_s"] == {"0": 0.0, "1": 0.0}
    assert {event["pid"] for event in _check(merged)} == {0, 1}


def test_clocks_of_machines_are_brought_together(tmp_path: Path) -> None:
    """By the finishes of the same allreduces: the second rank's clock was 1.5 s ahead in all."""
    _save(tmp_path, _recording(0, "a"), _recording(1, "b", delay_s=0.01))
    merged = ddpopt.inspection.merge_traces([tmp_path])
    offset_s = merged["otherData"]["clock_offsets_s"]["1"]
    assert offset_s == pytest.approx(AHEAD_S + 1.0)
    ends = {
        rank: [stop for (of, *_), (_, stop) in _exchanges(merged).items() if of == rank]
        for rank in (0, 1)
    }
    assert len(ends[0]) == 4
    assert ends[0] == pytest.approx(ends[1])


def _of_allreduces(rank: int, *times: tuple[float, float]) -> Recording:
    """One step with these launches and finishes, each rank on a machine of its own."""
    step = RecordedStep(
        forward_start_s=0.0,
        forward_stop_s=0.0,
        backward_stop_s=9.0,
        sections=(),
        buckets=tuple(BucketTimes(k, 1, t[0], t[0], t[1]) for k, t in enumerate(times)),
    )
    return Recording(
        rank=rank, world_size=2, host="", machine=f"{rank}", origin_unix_ns=0, steps=(step,)
    )


def test_no_allreduce_finishes_before_all_have_launched_it(tmp_path: Path) -> None:
    """The median of finishes says 0 s; but the second was launched 0.2 s after its finish."""
    first = _of_allreduces(0, (0.0, 1.0), (2.0, 3.0), (4.0, 5.0))
    second = _of_allreduces(1, (0.9, 1.0), (3.2, 3.3), (4.0, 4.9))
    merged = ddpopt.inspection.merge_traces(_save(tmp_path, first, second))
    assert merged["otherData"]["clock_offsets_s"]["1"] == pytest.approx(0.2)


def test_traces_of_other_steps_are_refused(tmp_path: Path) -> None:
    """By no offset could their allreduces be the same."""
    paths = _save(
        tmp_path,
        _of_allreduces(0, (0.0, 1.0), (2.0, 3.0)),
        _of_allreduces(1, (0.0, 1.0), (7.0, 8.0)),
    )
    with pytest.raises(ddpopt.errors.TraceError, match="record the same steps on all ranks"):
        ddpopt.inspection.merge_traces(paths)


def test_a_clock_that_nothing_tells_of_is_taken_as_it_is(tmp_path: Path) -> None:
    """Where a rank recorded no finish, beside torch's profiler; the merged trace says None."""
    silent = _of_allreduces(1)
    merged = ddpopt.inspection.merge_traces(_save(tmp_path, _of_allreduces(0, (0.0, 1.0)), silent))
    assert merged["otherData"]["clock_offsets_s"] == {"0": 0.0, "1": None}


def test_two_files_of_a_rank_are_refused(tmp_path: Path) -> None:
    (path,) = _save(tmp_path, _recording(0, "a"))
    with pytest.raises(ddpopt.errors.TraceError, match="both of rank 0"):
        ddpopt.inspection.merge_traces([path, path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trace: "", "it is not JSON"),
        (lambda trace: [], "it is an empty list"),
        (lambda trace: {}, "it has no 'otherData'"),
        (lambda trace: {**trace, "traceEvents": 3}, "traceEvents is 3; it must be a list"),
        (lambda trace: {**trace, "traceEvents": [[]]}, r"traceEvents\[0\] is an empty list"),
        (lambda trace: {**trace, "traceEvents": [{"ph": "X"}]}, r"\[0\] has no 'ts'"),
        (lambda trace: {**trace, "traceEvents": [{"ph": "X", "ts": "0"}]}, r"\[0\]\.ts is '0'"),
        (lambda trace: _told(trace, format="another"), r"otherData: format is 'another', not 'ddp"),
        (lambda trace: _told(trace, format="\x1b[2J"), r"format is '\\x1b\[2J', not 'ddp"),
        (lambda trace: _told(trace, rank=True), "rank is true; it must be a whole number"),
        (lambda trace: _told(trace, rank=-1), "rank is -1"),
        (lambda trace: _told(trace, origin_unix_ns=10**30), "origin_unix_ns is 1000"),
        (
            lambda trace: _told(trace, allreduces=[[0, 0, 1.0]]),
            r"allreduces\[0\] is a list of 3 items",
        ),
        (lambda trace: _told(trace, allreduces=[[0, 0, 1.0, 1e300]]), r"allreduces\[0\]\[3\] is"),
        (lambda trace: _told(trace, allreduces=[[0, 0, math.nan, 1]]), r"\[0\]\[2\] is NaN"),
    ],
)
def test_a_file_that_is_no_trace_is_named(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    """With what is wrong, and where."""
    changed = change(_recording(0, "a").trace())
    path = tmp_path / "rank0.json"
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ddpopt.errors.TraceError, match=message) as raised:
        ddpopt.inspection.merge_traces([tmp_path])
    assert str(raised.value).startswith(f"{path} is no trace that ddpopt.record wrote: ")
    assert str(raised.value).isprintable()


def _told(trace: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**trace, "otherData": {**trace["otherData"], **changes}}


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """The limit of a rank's trace is 256 MiB."""
    with (tmp_path / "rank0.json").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(ddpopt.errors.TraceError, match="over the limit of 268435456"):
        ddpopt.inspection.merge_traces([tmp_path])


def test_a_name_that_no_terminal_should_see_is_shown_as_text(tmp_path: Path) -> None:
    """Of a file in a folder that is somebody else's."""
    (tmp_path / "rank\x1b[2J.json").write_text("{}")
    with pytest.raises(ddpopt.errors.TraceError, match=r"rank\\x1b\[2J\.json is no trace"):
        ddpopt.inspection.merge_traces([tmp_path])


def test_a_recording_replaces_an_earlier_one(tmp_path: Path) -> None:
    for machine in ("a", "b"):
        (path,) = _save(tmp_path, _recording(0, machine))
        assert json.loads(path.read_text())["otherData"]["machine"] == machine


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ddpopt.errors.TraceError, match="there is no trace in"):
        ddpopt.inspection.merge_traces([tmp_path])
