"""Draw each bucket's life in one backward, and a plot of each model's cells, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.peers import PEERS, label
from benchmarks.harness.report import draw_bars, label_of_rate, pyplot, save
from benchmarks.overlap.rounds import Cell
from ddpopt.inspection.recording import RecordedStep

_WIDE = 10  # times the fastest, from where on the axis is logarithmic
_MB = 1e6
_WAITING, _REDUCING, _READY, _END = "#d9a441", "#3b75af", "#222222", "#b03a2e"
_LABELS = ("waiting to be launched", "reducing", "gradients ready")

_BARS = "Bars: medians over rounds. Lines on top of them: quartiles. Shorter is better."


def label_of_cap(cap: str) -> str:
    return "DDP's default buckets" if cap == "default" else f"buckets of {cap} MiB"


def draw(cells: Sequence[Cell], folder: Path) -> list[str]:
    """Write each cell's timelines and a plot of each model; return the plots' names."""
    pictures: list[str] = []
    if pyplot() is None:
        return pictures
    for cell in cells:
        stem = f"timeline-{cell.model}-{cell.cap}-{cell.rate}"
        _draw_timelines(cell, folder / f"{stem.replace(':', '.')}.png")
    for model in dict.fromkeys(cell.model for cell in cells):
        pictures.append(f"{model.replace(':', '.')}.png")
        _plot_model(model, [c for c in cells if c.model == model], folder / pictures[-1])
    return pictures


def _draw_timelines(cell: Cell, path: Path) -> None:
    timelines = {name: peer.timeline for name, peer in cell.peers.items() if peer.timeline}
    if not timelines:
        return
    num_rows = sum(len(timeline.buckets) for timeline in timelines.values())
    figure, panels = pyplot().subplots(
        len(timelines),
        1,
        sharex=True,
        squeeze=False,
        figsize=(9, 1.4 + 0.45 * len(timelines) + 0.16 * num_rows),
        height_ratios=[2 + len(timeline.buckets) for timeline in timelines.values()],
    )
    for panel, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        _draw_timeline(panel, label(name, PEERS), timeline)
    panels[0, 0].set_xlim(left=0)
    panels[-1, 0].set_xlabel("ms from the start of backward")
    title = ", ".join([cell.model, label_of_cap(cell.cap), label_of_rate(cell.shown_rate)])
    figure.suptitle(f"Each bucket of one backward: {title}", fontsize=11)
    save(figure, path, panels[0, 0], num_columns=4, bottom=0.05)


def _draw_timeline(panel: Any, title: str, timeline: RecordedStep) -> None:
    for row, bucket in enumerate(timeline.buckets):
        ready_ms, launched_ms = 1e3 * bucket.ready_s, 1e3 * bucket.launched_s
        # Without an end it has no length: nobody saw its allreduce finish.
        finished_ms = launched_ms if bucket.finished_s is None else 1e3 * bucket.finished_s
        waiting_ms, reducing_ms = launched_ms - ready_ms, finished_ms - launched_ms
        waiting, reducing, ready = _LABELS if row == 0 else ("", "", "")  # once in the legend
        panel.barh(row, waiting_ms, 0.4, left=ready_ms, color=_WAITING, label=waiting)
        panel.barh(row, reducing_ms, 0.8, left=launched_ms, color=_REDUCING, label=reducing)
        panel.plot([ready_ms], [row], "|", color=_READY, markersize=8, label=ready)
    panel.axvline(1e3 * timeline.backward_s, color=_END, linewidth=1.2, label="backward ends")
    sizes = [f"{bucket.index}: {bucket.num_bytes / _MB:.1f} MB" for bucket in timeline.buckets]
    panel.set_yticks(range(len(sizes)), sizes, fontsize=6)
    panel.invert_yaxis()
    panel.set_title(f"{title}: {timeline.backward_s * 1e3:.0f} ms", fontsize=9, loc="left")


def _plot_model(model: str, cells: Sequence[Cell], path: Path) -> None:
    caps = list(dict.fromkeys(cell.cap for cell in cells))
    figure, panels = pyplot().subplots(
        1, len(caps), figsize=(max(6.5, 5.5 * len(caps)), 4.6), squeeze=False, sharey=True
    )
    times_s = [peer.times["iteration_s"].median for cell in cells for peer in cell.peers.values()]
    # Where bars from zero on would hide the fast cells; otherwise they show true ratios.
    is_wide = max(times_s) > _WIDE * min(times_s)
    for panel, cap in zip(panels[0], caps, strict=True):
        _plot_cells(panel, [cell for cell in cells if cell.cap == cap])
        panel.set_title(f"{model}, {label_of_cap(cap)}")
        if is_wide:
            panel.set_yscale("log")
    panels[0][0].set_ylabel("iteration, ms")
    figure.text(0.5, 0.01, _BARS, ha="center", fontsize=8)
    save(figure, path, panels[0][0], num_columns=3, bottom=0.22, legend=0.05)


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
    panel.set_xticks(range(len(cells)), [label_of_rate(cell.shown_rate) for cell in cells])
