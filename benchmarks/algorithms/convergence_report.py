"""What a run of `convergence.py` found out for one task: as data, as a table, and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.algorithms.peers import PEERS
from benchmarks.harness.peers import label
from benchmarks.harness.report import pyplot, table, write_json

_BASE = "ddpopt"
_LAST = 0.05  # of the steps, whose losses are averaged
_SMOOTHED = 0.04
_HEADER = (
    "algorithm", "loss, last steps", "held out", f"less {_BASE}'s", "right, held out",
    "exchanges a step",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One training. `losses` are each step's, the mean over ranks, each with its own weights.

    `test_loss` and `accuracy` are of the mean of all ranks' weights on held-out data; there is no
    accuracy where nothing is classified.
    """

    peer: str
    seed: int
    losses: tuple[float, ...]
    test_loss: float
    accuracy: float | None
    num_exchanges: int

    @property
    def last_loss(self) -> float:
        """The mean over the last steps."""
        return statistics.mean(self.losses[-max(1, round(_LAST * len(self.losses))) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All trainings of a task."""

    command: str
    date: str
    versions: str
    task: str
    description: str
    num_ranks: int
    batch: int
    results: list[Result]

    def of(self, peer: str) -> list[Result]:
        """Return one algorithm's, by seed."""
        return [result for result in self.results if result.peer == peer]

    @property
    def peers(self) -> list[str]:
        """Return the algorithms' names."""
        return list(dict.fromkeys(result.peer for result in self.results))


def line(result: Result) -> str:
    """Return a result as it is shown while others are awaited."""
    accuracy = "" if result.accuracy is None else f", {result.accuracy:.1%} right"
    return (
        f"{result.peer}: loss {result.losses[0]:.3f} -> {result.last_loss:.3f}, "
        f"held out {result.test_loss:.3f}{accuracy}"
    )


def write(run: Run, folder: Path) -> None:
    """Write `convergence-<task>.json`, `.md`, and `.png` where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"convergence-{run.task}"
    write_json(run, stem.with_suffix(".json"))
    picture = stem.with_suffix(".png")
    is_drawn = _write_plot(run, picture)
    stem.with_suffix(".md").write_text(markdown(run, picture.name if is_drawn else ""))


def markdown(run: Run, picture: str = "") -> str:
    """Return the table."""
    num_steps, num_seeds = len(run.results[0].losses), len(run.of(run.peers[0]))
    seeds = "one seed." if num_seeds == 1 else f"{num_seeds} seeds: mean, lowest and highest."
    lines = [
        f"# Convergence, {run.task}",
        "",
        f"    {run.command}",
        "",
        f"{run.date}; {run.versions}; {run.num_ranks} ranks.",
        f"{run.description}.",
        f"{num_steps} steps, {num_steps * run.batch * run.num_ranks} samples in all; {seeds}",
        "",
        *(f"- {name}: {label(name, PEERS)}" for name in run.peers),
        "",
        *table(_HEADER, [_row(run, name) for name in run.peers]),
    ]
    if picture:
        lines += ["", f"![loss against samples]({picture})"]
    return "\n".join(lines) + "\n"


def _row(run: Run, name: str) -> Sequence[str]:
    own, base = run.of(name), run.of(_BASE)
    less = [a.test_loss - b.test_loss for a, b in zip(own, base, strict=False)]
    right = [100 * result.accuracy for result in own if result.accuracy is not None]
    exchanges = statistics.mean(r.num_exchanges / len(r.losses) for r in own)
    return (
        name,
        _shown([result.last_loss for result in own]),
        _shown([result.test_loss for result in own]),
        _shown(less, "+.3f") if less else "-",
        f"{_shown(right, '.1f')} %" if right else "-",
        f"{exchanges:.2g}" if exchanges else "-",
    )


def _shown(values: Sequence[float], layout: str = ".3f") -> str:
    text = format(statistics.mean(values), layout)
    if len(values) == 1:
        return text
    return f"{text} ({format(min(values), layout)} to {format(max(values), layout)})"


def _write_plot(run: Run, path: Path) -> bool:
    """Plot loss against samples, the mean over seeds, smoothed; False without matplotlib."""
    plots = pyplot()
    if plots is None:
        return False
    figure, panel = plots.subplots(figsize=(10.5, 5), layout="constrained")
    colours = plots.get_cmap("tab20").colors
    for index, name in enumerate(run.peers):
        by_step = zip(*(result.losses for result in run.of(name)), strict=True)
        losses = _smooth([statistics.mean(step) for step in by_step])
        samples = [(step + 1) * run.batch * run.num_ranks for step in range(len(losses))]
        style = {"color": "black", "linewidth": 2.0} if name == _BASE else {}
        given = {"color": colours[index % len(colours)], "linewidth": 1.1, **style}
        panel.plot(samples, losses, label=label(name, PEERS), **given)
    panel.set_xlabel("samples")
    num_seeds = len({result.seed for result in run.results})
    over_seeds = f", mean over {num_seeds} seeds" if num_seeds > 1 else ""
    panel.set_ylabel(f"loss, mean of the last {_SMOOTHED:.0%} of steps{over_seeds}")
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    if high < 10 * low:  # else there is a number at each power of ten
        panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_title(f"{run.task}, {run.num_ranks} ranks")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plots.close(figure)
    return True


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return means over the last few steps."""
    width = max(1, round(_SMOOTHED * len(losses)))
    return [statistics.mean(losses[max(0, end - width) : end]) for end in range(1, len(losses) + 1)]
