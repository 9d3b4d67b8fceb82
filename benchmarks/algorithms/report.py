"""What a run of `benchmarks.algorithms` found out: as data, as tables, and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.algorithms.peers import find_peer
from benchmarks.harness.tables import Spread, spread, table
from benchmarks.overlap.figures import label_of_rate

_MB = 1e6
_EAGER = "eager"


class Turn(NamedTuple):
    """Some steps in a row; times and bytes are each rank's, bytes none where nobody counts them."""

    num_steps: int
    times_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    num_exchanges: int

    def samples_per_s(self, num_samples: int, ranks: Iterable[int] | None = None) -> float:
        """Return the sum over these ranks, over all if not given, of what each did in its time."""
        chosen = range(len(self.times_s)) if ranks is None else ranks
        return sum(self.num_steps * num_samples / self.times_s[rank] for rank in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One algorithm at one rate; spreads are over the rounds, the other figures means of them.

    `sent_bytes` are those of a step and rank, None where they were not counted. `exchanges_per_s`
    is how often weights were averaged or a bucket of gradients reduced, 0 for DDP itself.
    """

    samples_per_s: Spread
    of_eager: Spread | None
    step_s: Spread
    num_steps: int
    sent_bytes: float | None
    exchanges_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One rate."""

    rate: str
    num_rounds: int
    peers: dict[str, Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One algorithm with a rank that computes twice as long: rates of samples of undisturbed ones.

    `fast` is of all other ranks together, `slow` of that rank.
    """

    peer: str
    rate: str
    num_rounds: int
    undisturbed_per_s: float
    fast: Spread
    slow: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An algorithm that could not be measured (any further)."""

    peer: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All of it."""

    command: str
    date: str
    versions: str
    machine: str
    network: str
    model: str
    inner: str
    is_counted: bool
    cells: list[Cell] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def measured(turns: dict[str, list[Turn]], name: str, num_samples: int) -> Measured:
    """Return what the turns of one algorithm mean."""
    own = turns[name]
    rates = [turn.samples_per_s(num_samples) for turn in own]
    of_eager = None
    if _EAGER in turns:
        base = [turn.samples_per_s(num_samples) for turn in turns[_EAGER]]
        of_eager = spread([mine / theirs for mine, theirs in zip(rates, base, strict=True)])
    num_steps = sum(turn.num_steps for turn in own)
    sent = [sum(turn.sent_bytes) / len(turn.sent_bytes) for turn in own if turn.sent_bytes]
    exchanges = sum(turn.num_exchanges for turn in own)
    return Measured(
        samples_per_s=spread(rates),
        of_eager=of_eager,
        step_s=spread([max(turn.times_s) / turn.num_steps for turn in own]),
        num_steps=own[0].num_steps,
        sent_bytes=sum(sent) / num_steps if sent else None,
        exchanges_per_s=exchanges / sum(max(turn.times_s) for turn in own),
    )


def straggler(
    name: str, rate: str, undisturbed: Sequence[Turn], disturbed: Sequence[Turn], num_samples: int
) -> Straggler:
    """Compare turns in pairs; the last rank was slow in the disturbed ones."""
    *fast, slow = range(len(undisturbed[0].times_s))

    def ratio(ranks: Sequence[int]) -> Spread:
        pairs = zip(disturbed, undisturbed, strict=True)
        return spread(
            [
                with_it.samples_per_s(num_samples, ranks)
                / without.samples_per_s(num_samples, ranks)
                for with_it, without in pairs
            ]
        )

    return Straggler(
        peer=name,
        rate=rate,
        num_rounds=len(undisturbed),
        undisturbed_per_s=spread([t.samples_per_s(num_samples) for t in undisturbed]).median,
        fast=ratio(fast),
        slow=ratio([slow]),
    )


# ---- tables -----------------------------------------------------------------------------------


def markdown(run: Run, picture: str = "") -> str:
    """Return the tables."""
    names = dict.fromkeys(name for cell in run.cells for name in cell.peers)
    lines = [
        "# Algorithms",
        "",
        f"    {run.command}",
        "",
        f"{run.date}; {run.versions}; {run.machine}; inner compiler {run.inner}.",
        f"Network: {run.network}.",
        f"Model: {run.model}.",
        "Bytes were counted at each rank's interface, with all headers."
        if run.is_counted
        else "Bytes were NOT counted: ranks have no interface of their own.",
        "",
        *(f"- {name}: {find_peer(name)[0].description}" for name in names),
    ]
    for cell in run.cells:
        lines += ["", f"## {cell.rate}", "", f"{cell.num_rounds} rounds.", "", *_cell_table(cell)]
    if run.stragglers:
        lines += ["", "## With a straggler", "", *_straggler_table(run.stragglers)]
    if picture:
        lines += ["", f"![samples/s of eager's]({picture})"]
    if run.failures:
        lines += ["", "## Not measured", ""]
        lines += [f"- {failure.peer}: `{_last_line(failure.error)}`" for failure in run.failures]
    return "\n".join(lines) + "\n"


def _last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip()][-1].strip()


def _cell_table(cell: Cell) -> list[str]:
    header = (
        "algorithm", "samples/s", "of eager's", "step ms", "sent MB a step and rank",
        "exchanges/s", "steps a turn",
    )  # fmt: skip
    rows = [
        (
            name,
            _shown(peer.samples_per_s, ".0f" if peer.samples_per_s.median >= 100 else ".1f"),
            "-" if peer.of_eager is None else f"{peer.of_eager.median:.2f}",
            f"{peer.step_s.median * 1e3:.0f}",
            "not counted" if peer.sent_bytes is None else f"{peer.sent_bytes / _MB:.3f}",
            f"{peer.exchanges_per_s:.2g}" if peer.exchanges_per_s else "-",
            str(peer.num_steps),
        )
        for name, peer in cell.peers.items()
    ]
    return table(header, rows)


def _straggler_table(stragglers: Sequence[Straggler]) -> list[str]:
    header = (
        "algorithm", "rate", "samples/s, no straggler", "fast ranks' with one, of theirs without",
        "straggler's", "rounds",
    )  # fmt: skip
    rows = [
        (
            item.peer,
            item.rate,
            f"{item.undisturbed_per_s:.0f}",
            _shown(item.fast, ".3f"),
            _shown(item.slow, ".3f"),
            str(item.num_rounds),
        )
        for item in stragglers
    ]
    return table(header, rows)


def _shown(value: Spread, layout: str) -> str:
    median, low, high = (format(number, layout) for number in value)
    return f"{median} ({low} to {high})"


# What readers call the peers of `benchmarks.algorithms.peers`.
_LABELS = {
    "eager": "DDP, not compiled",
    "ddpopt": "ddpopt, DDP's allreduce",
    "decentralized": 'Decentralized("all")',
    "shift_one": 'Decentralized("shift_one")',
    "low_precision": "LowPrecisionDecentralized",
    "async": "AsyncModelAverage",
    "bytegrad": "ByteGrad",
    "qadam": "QAdam",
    "ddpopt_adam": "ddpopt, DDP's allreduce, with Adam",
    "fp16": "torch's fp16 hook",
    "powersgd": "torch's PowerSGD",
    "post_local_sgd": "torch's post-local SGD",
}


def label(peer: str) -> str:
    """Return what a plot calls a peer, with the options that it was given."""
    name, _, options = peer.partition(":")
    return _LABELS.get(name, name) + (f" ({options})" if options else "")


def write_plot(cells: Sequence[Cell], path: Path) -> bool:
    """Plot samples/s of eager's at each rate; False where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: PLC0415  # optional
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    names = list(dict.fromkeys(name for cell in cells for name in cell.peers))
    figure, panel = pyplot.subplots(figsize=(9, 4))
    width = 0.85 / len(names)
    for index, name in enumerate(names):
        found = [(place, cell.peers[name].of_eager) for place, cell in enumerate(cells)
                 if name in cell.peers]  # fmt: skip
        bars: list[Any] = [(place, ratio) for place, ratio in found if ratio is not None]
        places = [place + (index - (len(names) - 1) / 2) * width for place, _ in bars]
        errors = [[r.median - r.low for _, r in bars], [r.high - r.median for _, r in bars]]
        heights = [ratio.median for _, ratio in bars]
        panel.bar(places, heights, width, yerr=errors, label=label(name))
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xticks(range(len(cells)), [label_of_rate(cell.rate) for cell in cells])
    panel.set_ylabel("samples/s, of uncompiled DDP's")
    panel.set_title(
        "Bars: medians over rounds. Lines on top of them: quartiles. Higher is better.", fontsize=9
    )
    figure.legend(loc="lower center", fontsize=8, ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
