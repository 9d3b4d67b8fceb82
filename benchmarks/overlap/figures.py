"""Draw: each bucket's life in one backward (SVG and text), and a plot of each model's cells."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.protocol import BucketTimes, Timeline
from benchmarks.overlap.results import Cell

_WIDE = 10  # times the fastest, from where on the axis is logarithmic
_COLUMNS = 72
_MB = 1e6

# Of the SVG, in pixels.
_LABEL_WIDTH, _PLOT_WIDTH, _ROW_HEIGHT, _TITLE_HEIGHT = 230, 640, 12, 22
_WAITING, _REDUCING, _READY, _END = "#d9a441", "#3b75af", "#222222", "#b03a2e"


def write_timelines(cell: Cell, stem: Path) -> Path | None:
    """Write the timelines of a cell as `stem.svg`, which is returned, and as `stem.txt`."""
    timelines = {name: peer.timeline for name, peer in cell.peers.items() if peer.timeline}
    if not timelines:
        return None
    title = f"{cell.model}, cap {cell.cap}, {cell.rate}"
    stem.with_suffix(".txt").write_text("\n".join([title, *_text(timelines)]) + "\n")
    picture = stem.with_suffix(".svg")
    picture.write_text("\n".join(_svg(title, timelines)) + "\n")
    return picture


def _end_s(timelines: dict[str, Timeline]) -> float:
    ends = [t.backward_s for t in timelines.values()]
    ends += [bucket.finished_s for t in timelines.values() for bucket in t.buckets]
    return max(ends)


def _text(timelines: dict[str, Timeline]) -> Iterator[str]:
    yield "each bucket: . until its gradients are ready, - until launched, = until reduced; ms"
    scale = (_COLUMNS - 1) / _end_s(timelines)
    for name, timeline in timelines.items():
        yield f"\n{name}: backward took {timeline.backward_s * 1e3:.0f}"
        for bucket in timeline.buckets:
            ready, launched, finished = (
                round(time_s * scale)
                for time_s in (bucket.ready_s, bucket.launched_s, bucket.finished_s)
            )
            bar = "." * ready + "-" * (launched - ready) + "=" * (finished - launched)
            yield f"{_label(bucket)} |{bar.ljust(_COLUMNS)}|"


def _label(bucket: BucketTimes) -> str:
    times = (bucket.ready_s, bucket.launched_s, bucket.finished_s)
    ready, launched, finished = (f"{time_s * 1e3:6.0f}" for time_s in times)
    return f"{bucket.bucket:3} {bucket.num_bytes / _MB:5.1f} MB {ready}{launched}{finished}"


def _svg(title: str, timelines: dict[str, Timeline]) -> Iterator[str]:
    num_rows = sum(len(timeline.buckets) for timeline in timelines.values())
    height = 3 * _TITLE_HEIGHT + len(timelines) * _TITLE_HEIGHT + num_rows * _ROW_HEIGHT
    width = _LABEL_WIDTH + _PLOT_WIDTH + 20
    scale = _PLOT_WIDTH / _end_s(timelines)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="10">'
    )
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    yield _svg_text(8, 16, html.escape(title), size=13)
    legend = (
        (_READY, "gradients ready"),
        (_WAITING, "waiting"),
        (_REDUCING, "reducing"),
        (_END, "backward ends"),
    )
    for place, (colour, meaning) in enumerate(legend):
        x = _LABEL_WIDTH + place * 120
        yield _svg_bar(x, 8, 10, 10, colour)
        yield _svg_text(x + 14, 17, meaning)
    y = 2 * _TITLE_HEIGHT
    for name, timeline in timelines.items():
        top = y
        text = f"{name}: {timeline.backward_s * 1e3:.0f} ms"
        yield _svg_text(8, y + 13, html.escape(text), size=12)
        y += _TITLE_HEIGHT
        for bucket in timeline.buckets:
            ready, launched, finished = (
                _LABEL_WIDTH + time_s * scale
                for time_s in (bucket.ready_s, bucket.launched_s, bucket.finished_s)
            )
            yield _svg_text(20, y + 9, f"bucket {bucket.bucket}, {bucket.num_bytes / _MB:.1f} MB")
            yield _svg_bar(ready, y + 4, launched - ready, 4, _WAITING)
            yield _svg_bar(launched, y + 2, finished - launched, 8, _REDUCING)
            yield _svg_bar(ready, y + 1, 1.5, 10, _READY)
            y += _ROW_HEIGHT
        end = _LABEL_WIDTH + timeline.backward_s * scale
        yield _svg_bar(end, top + 4, 1.5, y - top, _END)
    yield "</svg>"


def _svg_text(x: float, y: float, text: str, size: int = 10) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{text}</text>'


def _svg_bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def write_plot(model: str, cells: Sequence[Cell], path: Path) -> bool:
    """Plot the iterations of all cells of a model; False where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: PLC0415  # optional
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    caps = list(dict.fromkeys(cell.cap for cell in cells))
    figure, panels = pyplot.subplots(
        1, len(caps), figsize=(6 * len(caps), 4), squeeze=False, sharey=True
    )
    for panel, cap in zip(panels[0], caps, strict=True):
        own = [cell for cell in cells if cell.cap == cap]
        _plot_cells(panel, own)
        panel.set_title(f"{model}, cap {cap}")
        if _is_wide(cells):
            panel.set_yscale("log")
        panel.set_ylabel("iteration, ms")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _is_wide(cells: Sequence[Cell]) -> bool:
    """Whether bars from zero on would hide the fast cells; otherwise they show true ratios."""
    times = [peer.iteration_s.median for cell in cells for peer in cell.peers.values()]
    return max(times) > _WIDE * min(times)


def _plot_cells(panel: object, cells: Sequence[Cell]) -> None:
    """Draw bars with quartiles for each peer, and the bound, for each rate."""
    peers = list(dict.fromkeys(name for cell in cells for name in cell.peers))
    width = 0.8 / len(peers)
    for index, name in enumerate(peers):
        places, heights, errors = [], [], []
        for place, cell in enumerate(cells):
            if name in cell.peers:
                median, low, high = (1e3 * value for value in cell.peers[name].iteration_s)
                places.append(place + (index - (len(peers) - 1) / 2) * width)
                heights.append(median)
                errors.append((median - low, high - median))
        yerr = list(zip(*errors, strict=True))
        panel.bar(places, heights, width, yerr=yerr, label=name)  # type: ignore[attr-defined]
    for place, cell in enumerate(cells):
        bound_ms = cell.bounds.bound_s * 1e3
        label = {"label": "bound"} if place == 0 else {}
        panel.hlines(bound_ms, place - 0.45, place + 0.45, "black", **label)  # type: ignore[attr-defined]
    panel.set_xticks(range(len(cells)), [cell.rate for cell in cells])  # type: ignore[attr-defined]
