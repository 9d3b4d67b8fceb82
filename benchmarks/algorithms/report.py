"""What a run of `benchmarks.algorithms` found out: as data, as tables, and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.algorithms.peers import PEERS
from benchmarks.harness.peers import label
from benchmarks.harness.report import (
    Spread,
    draw_bars,
    label_of_rate,
    pyplot,
    ratios,
    save,
    spread,
    table_of,
)

_MB = 1e6


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


class Measured(NamedTuple):
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


class Cell(NamedTuple):
    rate: str
    num_rounds: int
    peers: dict[str, Measured]


class Straggler(NamedTuple):
    """One algorithm with a rank that computes twice as long.

    `fast` is of all other ranks together, `slow` of that rank: samples/s with a slow rank over
    samples/s in the turn before, without one.
    """

    peer: str
    rate: str
    num_rounds: int
    undisturbed_per_s: float
    fast: Spread
    slow: Spread


def measured(turns: dict[str, list[Turn]], name: str, num_samples: int) -> Measured:
    samples_per_s = {
        peer: [turn.samples_per_s(num_samples) for turn in of_peer]
        for peer, of_peer in turns.items()
    }
    eager, of_name = samples_per_s.get("eager"), turns[name]
    num_steps = sum(turn.num_steps for turn in of_name)
    times_s = [max(turn.times_s) for turn in of_name]
    sent = [sum(turn.sent_bytes) / len(turn.sent_bytes) for turn in of_name if turn.sent_bytes]
    return Measured(
        samples_per_s=spread(samples_per_s[name]),
        of_eager=ratios(samples_per_s[name], eager) if eager else None,
        step_s=spread([s / turn.num_steps for s, turn in zip(times_s, of_name, strict=True)]),
        num_steps=of_name[0].num_steps,
        sent_bytes=sum(sent) / num_steps if sent else None,
        exchanges_per_s=sum(turn.num_exchanges for turn in of_name) / sum(times_s),
    )


def straggler(
    name: str, rate: str, pairs: Sequence[tuple[Turn, Turn]], num_samples: int
) -> Straggler:
    """Compare turns without and with a slow rank, the last one, in pairs."""
    *fast, slow = range(len(pairs[0][0].times_s))

    def ratio(ranks: Sequence[int]) -> Spread:
        undisturbed, disturbed = [], []
        for without, with_slow_rank in pairs:
            undisturbed.append(without.samples_per_s(num_samples, ranks))
            disturbed.append(with_slow_rank.samples_per_s(num_samples, ranks))
        return ratios(disturbed, undisturbed)

    undisturbed = spread([without.samples_per_s(num_samples) for without, _ in pairs])
    return Straggler(
        peer=name,
        rate=rate,
        num_rounds=len(pairs),
        undisturbed_per_s=undisturbed.median,
        fast=ratio(fast),
        slow=ratio([slow]),
    )


# ---- tables -----------------------------------------------------------------------------------


def lines(
    model: str, cells: Sequence[Cell], stragglers: Sequence[Straggler], *, is_counted: bool
) -> Iterator[str]:
    yield f"Model: {model}."
    if is_counted:
        yield "Bytes were counted at each rank's interface, with all headers."
    else:
        yield "Bytes were NOT counted: ranks have no interface of their own."
    yield ""
    for name in dict.fromkeys(name for cell in cells for name in cell.peers):
        yield f"- {name}: {label(name, PEERS)}"
    for cell in cells:
        times = table_of("algorithm", cell.peers, _TIMES)
        yield from ("", f"## {cell.rate}", "", f"{cell.num_rounds} rounds.", "", *times)
    if stragglers:
        by_peer = {item.peer: item for item in stragglers}
        yield from ("", "## With a straggler", "", *table_of("algorithm", by_peer, _STRAGGLERS))


_TIMES: dict[str, Callable[[Measured], str]] = {
    "samples/s": lambda peer: peer.samples_per_s.shown(
        ".0f" if peer.samples_per_s.median >= 100 else ".1f"
    ),
    "of eager's": lambda peer: "-" if peer.of_eager is None else f"{peer.of_eager.median:.2f}",
    "step ms": lambda peer: f"{peer.step_s.median * 1e3:.0f}",
    "sent MB a step and rank": lambda peer: (
        "not counted" if peer.sent_bytes is None else f"{peer.sent_bytes / _MB:.3f}"
    ),
    "exchanges/s": lambda peer: f"{peer.exchanges_per_s:.2g}" if peer.exchanges_per_s else "-",
    "steps a turn": lambda peer: str(peer.num_steps),
}
_STRAGGLERS: dict[str, Callable[[Straggler], str]] = {
    "rate": lambda item: item.rate,
    "samples/s, no straggler": lambda item: f"{item.undisturbed_per_s:.0f}",
    "fast ranks' with one, of theirs without": lambda item: item.fast.shown(".3f"),
    "straggler's": lambda item: item.slow.shown(".3f"),
    "rounds": lambda item: str(item.num_rounds),
}


def write_plot(cells: Sequence[Cell], path: Path) -> bool:
    """Plot samples/s of eager's at each rate; False where matplotlib is not installed."""
    plots = pyplot()
    if plots is None:
        return False
    figure, panel = plots.subplots(figsize=(9, 4))
    names = dict.fromkeys(name for cell in cells for name in cell.peers)
    groups = [
        {name: peer.of_eager for name, peer in cell.peers.items() if peer.of_eager is not None}
        for cell in cells
    ]
    draw_bars(panel, groups, {name: label(name, PEERS) for name in names})
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xticks(range(len(cells)), [label_of_rate(cell.rate) for cell in cells])
    panel.set_ylabel("samples/s, of uncompiled DDP's")
    panel.set_title(
        "Bars: medians over rounds. Lines on top of them: quartiles. Higher is better.", fontsize=9
    )
    save(figure, path, panel, num_columns=3, bottom=0.16)
    return True
