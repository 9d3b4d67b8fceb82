r"""Draws an iteration as `torch.compile` makes it by itself, and one with ddpopt's tuned buckets.

    sudo python -m benchmarks.overlap --models gpt70 --rates 1gbit --caps default \
        --peers nosplit,intree,backward,auto,replicate,simplefsdp,simplefsdp:gbit=1,bylayer \
        --rounds 4 --budget-s 40 --output build/step
    python docs/figures/step.py build/step/overlap.json

The times above the bars are the benchmark's medians; the bars are one step that it recorded, and
the median of the optimizer. The medians come from the run that README's table is taken from; so
did the step, until other work fell into it on 2026-11-27: that one is of a run an hour later. Needs
matplotlib.

docs/images/page.png is the page with which `make demo` ends:

    chromium --headless --hide-scrollbars --window-size=1400,1240 --virtual-time-budget=5000 \
        --screenshot=docs/images/page.png "file://$PWD/build/overlap.html#select=bucket-7"
"""
# test: skip, it needs root and a quiet machine; tests/system/test_figures.py draws a small run

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

IMAGE = Path(__file__).parents[1] / "images" / "step.png"
TITLES = {
    "intree": "torch.compile(ddp)",
    "auto": 'torch.compile(ddp, backend="ddpopt", options={"buckets": "auto"})',
}
FORWARD, BACKWARD, OPTIMIZER = "#8c959f", "#57606a", "#d0d7de"
HIDDEN, EXPOSED = "#0969da", "#cf222e"


class Span(NamedTuple):
    """From when to when, in ms from the start of forward."""

    start: float
    stop: float


class Iteration(NamedTuple):
    """One iteration; `total` and `exposed` are medians of many, in ms."""

    total: float
    exposed: float
    forward: Span
    backward: Span  # until the last gradient is there
    allreduces: tuple[Span, ...]
    optimizer: Span


def read(path: Path) -> dict[str, Iteration]:
    """Return the iterations of the first cell of a run of the benchmark, by peer."""
    peers = json.loads(path.read_text())["cells"][0]["peers"]
    return {name: _iteration(**peers[name]) for name in TITLES}


def _iteration(times: Any, timeline: Any, **_others: Any) -> Iteration:
    origin_s = timeline["forward_start_s"]

    def ms(time_s: float) -> float:
        return (time_s - origin_s) * 1e3

    buckets, forward_stop = timeline["buckets"], ms(timeline["forward_stop_s"])
    end = ms(timeline["backward_stop_s"])
    return Iteration(
        total=times["iteration_s"]["median"] * 1e3,
        exposed=times["exposed_s"]["median"] * 1e3,
        forward=Span(0, forward_stop),
        backward=Span(forward_stop, ms(max(bucket["ready_s"] for bucket in buckets))),
        allreduces=tuple(_one_by_one((ms(b["launched_s"]), ms(b["finished_s"])) for b in buckets)),
        optimizer=Span(end, end + times["optimizer_s"]["median"] * 1e3),
    )


def _one_by_one(times: Iterable[tuple[float, float]]) -> Iterable[Span]:
    """An allreduce begins when it is launched, or when the one that ends before it has ended."""
    before = 0.0
    for launched, finished in sorted(times, key=lambda each: each[1]):  # gloo lets some overtake
        yield Span(max(launched, before), finished)
        before = finished


def draw(iterations: dict[str, Iteration], path: Path) -> None:
    """Draw a panel for each on one axis of time: computation above, allreduces below."""
    import matplotlib as mpl  # noqa: PLC0415  # optional

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure, panels = pyplot.subplots(len(iterations), 1, sharex=True, figsize=(9, 4.6))
    for panel, (name, iteration) in zip(panels, iterations.items(), strict=True):
        _draw_one(panel, TITLES[name], iteration)
    panels[0].set_xlim(0, 1.04 * max(each.optimizer.stop for each in iterations.values()))
    panels[-1].set_xlabel("ms from the start of forward")
    kinds = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "optimizer": OPTIMIZER,
        "allreduce beside backward": HIDDEN,
        "allreduce after backward": EXPOSED,
    }
    patches = [Patch(color=colour, label=label) for label, colour in kinds.items()]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_one(panel: Any, title: str, iteration: Iteration) -> None:
    ready = iteration.backward.stop
    bars = [
        (iteration.forward, 1.1, FORWARD),
        (iteration.backward, 1.1, BACKWARD),
        (iteration.optimizer, 1.1, OPTIMIZER),
    ]
    for each in iteration.allreduces:
        middle = min(each.stop, max(each.start, ready))
        bars += [(Span(each.start, middle), 0.1, HIDDEN), (Span(middle, each.stop), 0.1, EXPOSED)]
    for span, bottom, colour in bars:
        panel.broken_barh(
            [(span.start, span.stop - span.start)],
            (bottom, 0.8),
            color=colour,
            edgecolor="white",
            linewidth=0.8,
        )
    panel.vlines(ready, 0, 2, color=EXPOSED, linewidth=1, linestyles="dashed")
    panel.set_yticks([1.5, 0.5], ["computation", "allreduces"])
    panel.set_ylim(0, 2)
    panel.set_title(
        f"{title}: {iteration.total:.0f} ms, {iteration.exposed:.0f} of them for communication",
        fontsize=10,
        loc="left",
    )
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)


def main(arguments: list[str] | None = None) -> None:
    """Draw what a run of the benchmark has found."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("run", type=Path, help="overlap.json")
    parser.add_argument("--image", type=Path, default=IMAGE)
    args = parser.parse_args(arguments)
    draw(read(args.run), args.image)


if __name__ == "__main__":
    main()
