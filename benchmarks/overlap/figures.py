"""Draw: each bucket's life in one backward (a picture and text), and a plot of each model's cells.

Pictures need matplotlib, and are left out without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.peers import PEERS, label
from benchmarks.harness.report import draw_bars, label_of_rate, pyplot, save
from benchmarks.overlap.rounds import Cell
from ddpopt.inspection.recording import RecordedStep
from ddpopt.planning.timeline import BucketTimes

_WIDE = 10  # times the fastest, from where on the axis is logarithmic
_COLUMNS = 72
_MB = 1e6
_WAITING, _REDUCING, _READY, _END = "#d9a441", "#3b75af", "#222222", "#b03a2e"

_BARS = "Bars: medians over rounds. Lines on top of them: quartiles. Shorter is better."


def label_of_cap(cap: str) -> str:
    return "DDP's default buckets" if cap == "default" else f"buckets of {cap} MiB"


def write_timelines(cell: Cell, stem: Path) -> Path | None:
    """Write the timelines of a cell as `stem.txt`, and as `stem.png`, which is returned."""
    timelines = {name: peer.timeline for name, peer in cell.peers.items() if peer.timeline}
    if not timelines:
        return None
    title = ", ".join([cell.model, label_of_cap(cell.cap), label_of_rate(cell.rate)])
    stem.with_suffix(".txt").write_text("\n".join([title, *_text(timelines)]) + "\n")
    plots = pyplot()
    if plots is None:
        return None
    num_rows = sum(len(timeline.buckets) for timeline in timelines.values())
    figure, panels = plots.subplots(
        len(timelines),
        1,
        sharex=True,
        squeeze=False,
        figsize=(9, 1.4 + 0.45 * len(timelines) + 0.16 * num_rows),
        height_ratios=[2 + len(timeline.buckets) for timeline in timelines.values()],
    )
    for panel, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        _draw_timeline(panel, label(name, PEERS), timeline)
    panels[0, 0].set_xlim(0, 1.02e3 * _end_s(timelines))
    panels[-1, 0].set_xlabel("ms from the start of backward")
    figure.suptitle(f"Each bucket of one backward: {title}", fontsize=11)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, fontsize=8, frameon=False)
    save(figure, stem.with_suffix(".png"), bottom=0.05)
    return stem.with_suffix(".png")


def _draw_timeline(panel: Any, title: str, timeline: RecordedStep) -> None:
    rows = range(len(timeline.buckets))
    lives = [[1e3 * time_s for time_s in _life(bucket)] for bucket in timeline.buckets]
    ready, launched, finished = zip(*lives, strict=True)
    waits = [b - a for a, b in zip(ready, launched, strict=True)]
    reductions = [b - a for a, b in zip(launched, finished, strict=True)]
    panel.barh(rows, waits, 0.4, left=ready, color=_WAITING, label="waiting to be launched")
    panel.barh(rows, reductions, 0.8, left=launched, color=_REDUCING, label="reducing")
    panel.plot(ready, rows, "|", color=_READY, markersize=8, label="gradients ready")
    panel.axvline(1e3 * timeline.backward_s, color=_END, linewidth=1.2, label="backward ends")
    sizes = [f"{bucket.index}: {bucket.num_bytes / _MB:.1f} MB" for bucket in timeline.buckets]
    panel.set_yticks(rows, sizes, fontsize=6)
    panel.invert_yaxis()
    panel.set_title(f"{title}: {timeline.backward_s * 1e3:.0f} ms", fontsize=9, loc="left")


def _end_s(timelines: dict[str, RecordedStep]) -> float:
    ends = [t.backward_s for t in timelines.values()]
    ends += [max(_life(bucket)) for t in timelines.values() for bucket in t.buckets]
    return max(ends)


def _text(timelines: dict[str, RecordedStep]) -> Iterator[str]:
    yield "each bucket: . until its gradients are ready, - until launched, = until reduced; ms"
    scale = (_COLUMNS - 1) / _end_s(timelines)
    for name, timeline in timelines.items():
        yield f"\n{name}: backward took {timeline.backward_s * 1e3:.0f}"
        for bucket in timeline.buckets:
            ready, launched, finished = (round(time_s * scale) for time_s in _life(bucket))
            bar = "." * ready + "-" * (launched - ready) + "=" * (finished - launched)
            yield f"{_line(bucket)} |{bar.ljust(_COLUMNS)}|"


def _life(bucket: BucketTimes) -> tuple[float, float, float]:
    finished_s = bucket.launched_s if bucket.finished_s is None else bucket.finished_s
    return bucket.ready_s, bucket.launched_s, finished_s


def _line(bucket: BucketTimes) -> str:
    ready, launched, finished = (f"{time_s * 1e3:6.0f}" for time_s in _life(bucket))
    return f"{bucket.index:3} {bucket.num_bytes / _MB:5.1f} MB {ready}{launched}{finished}"


def write_plot(model: str, cells: Sequence[Cell], path: Path) -> bool:
    """Plot the iterations of all cells of a model; False where matplotlib is not installed."""
    plots = pyplot()
    if plots is None:
        return False
    caps = list(dict.fromkeys(cell.cap for cell in cells))
    figure, panels = plots.subplots(
        1, len(caps), figsize=(max(6.5, 5.5 * len(caps)), 4.6), squeeze=False, sharey=True
    )
    for panel, cap in zip(panels[0], caps, strict=True):
        _plot_cells(panel, [cell for cell in cells if cell.cap == cap])
        panel.set_title(f"{model}, {label_of_cap(cap)}")
        if _is_wide(cells):
            panel.set_yscale("log")
    panels[0][0].set_ylabel("iteration, ms")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.05),
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    figure.text(0.5, 0.02, _BARS, ha="center", fontsize=8)
    save(figure, path, bottom=0.22)
    return True


def _is_wide(cells: Sequence[Cell]) -> bool:
    """Whether bars from zero on would hide the fast cells; otherwise they show true ratios."""
    times = [peer.times["iteration_s"].median for cell in cells for peer in cell.peers.values()]
    return max(times) > _WIDE * min(times)


def _plot_cells(panel: Any, cells: Sequence[Cell]) -> None:
    peers = dict.fromkeys(name for cell in cells for name in cell.peers)
    groups = [
        {name: peer.times["iteration_s"].times(1e3) for name, peer in cell.peers.items()}
        for cell in cells
    ]
    draw_bars(panel, groups, {name: label(name, PEERS) for name in peers})
    for place, cell in enumerate(cells):
        bound_ms = cell.bounds.bound_s * 1e3
        named = {"label": "bound: perfect overlap"} if place == 0 else {}
        panel.hlines(bound_ms, place - 0.45, place + 0.45, "black", **named)
    panel.set_xticks(range(len(cells)), [label_of_rate(cell.rate) for cell in cells])
