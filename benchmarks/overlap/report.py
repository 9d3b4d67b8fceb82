"""A run of `benchmarks.overlap` as Markdown tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness.peers import find_peer
from benchmarks.harness.report import Spread, table
from benchmarks.harness.teams import Facts
from benchmarks.overlap.rounds import Cell

_MB = 1e6


class Compilation(NamedTuple):
    """What compiling one model for one cap did: fresh processes, with empty and filled caches.

    On an emulated network peers compile beside each other, once, and nothing is counted.
    """

    model: str
    cap: str
    peer: str
    loss: float
    num_buckets: int
    cold_s: float
    warm_s: float | None = None
    peak_mb: float = 0.0
    facts: Facts | None = None


class Cost(NamedTuple):
    """What a step of a peer costs on a device, beside its time; of the profile of two steps, ms."""

    cpu_ms: float
    gaps_ms: float
    communication_ms: float
    hidden_ms: float
    peak_mb: float


def lines(
    compilations: Sequence[Compilation],
    cells: Sequence[Cell],
    costs: Mapping[str, Mapping[str, Cost]],
    pictures: Sequence[str],
) -> Iterator[str]:
    """Yield the lines under the heading; costs are by model and cap, and by peer."""
    yield ""
    for name in dict.fromkeys(compilation.peer for compilation in compilations):
        yield f"- {name}: {find_peer(name)[0].description}"
    for (model, cap), group in itertools.groupby(compilations, key=lambda c: (c.model, c.cap)):
        title = f"{model}, cap {cap}"
        yield from ("", f"## {title}", "", *_compilation_table(list(group)))
        for cell in (cell for cell in cells if (cell.model, cell.cap) == (model, cap)):
            yield from ("", f"### {title}, {cell.rate}", "", *_cell_table(cell))
        if title in costs:
            yield from ("", f"### {title}, costs", "", *_cost_table(costs[title]))
    if pictures:
        yield ""
        yield from (f"![{path.removesuffix('.png')}]({path})" for path in pictures)


def _compilation_table(compilations: Sequence[Compilation]) -> list[str]:
    if any(c.facts is None for c in compilations):
        header = ("peer", "buckets", "first step s, beside the others'", "first loss")
        rows = [(c.peer, str(c.num_buckets), f"{c.cold_s:.1f}", f"{c.loss:.5f}")
                for c in compilations]  # fmt: skip
        return table(header, rows)
    header = (
        "peer", "graphs", "sections", "kernels", "kernel calls", "buckets", "recompiles",
        "compile s, cold", "warm", "peak memory MB", "first loss",
    )  # fmt: skip
    return table(header, [_row(c, c.facts) for c in compilations if c.facts is not None])


def _row(own: Compilation, facts: Facts) -> Sequence[str]:
    return (
        own.peer,
        str(facts.num_graphs),
        str(facts.num_sections or "-"),
        str(facts.num_kernels),
        str(facts.num_kernel_calls),
        str(own.num_buckets or "-"),
        str(facts.num_recompiles),
        f"{own.cold_s:.1f}",
        "-" if own.warm_s is None else f"{own.warm_s:.1f}",
        f"{own.peak_mb:.0f}",
        f"{own.loss:.5f}",
    )


def _cell_table(cell: Cell) -> list[str]:
    bounds = cell.bounds
    header = (
        "peer", "iteration ms", "forward", "backward", "optimizer",
        "throughput of eager's", "of in-tree's", "backward of in-tree's",
        "alone ms", "exposed ms", "over bound",
    )  # fmt: skip
    rows = [
        (
            name,
            _milliseconds(peer.times["iteration_s"], with_spread=True),
            _milliseconds(peer.times["forward_s"]),
            _milliseconds(peer.times["backward_s"], with_spread=True),
            _milliseconds(peer.times["optimizer_s"]),
            _ratio(peer.throughput_of_eager),
            _ratio(peer.throughput_of_intree),
            _ratio(peer.backward_of_intree),
            _milliseconds(peer.times["alone_s"]),
            _milliseconds(peer.times["exposed_s"]),
            f"{peer.over_bound:+.0%}",
        )
        for name, peer in cell.peers.items()
    ]
    return [
        f"Compute alone {bounds.compute_s * 1e3:.0f} ms ({bounds.compute_peer}), communication "
        f"alone {bounds.communication_s * 1e3:.0f} ms ({bounds.num_buckets} buckets of "
        f"{bounds.num_bytes / _MB:.1f} MB in all, {bounds.megabits_per_s:.0f} Mbit/s), bound "
        f"{bounds.bound_s * 1e3:.0f} ms. {cell.num_rounds} rounds of {cell.num_steps} steps.",
        "",
        *table(header, rows),
    ]


def _cost_table(costs: Mapping[str, Cost]) -> list[str]:
    header = ("peer", "CPU ms a step", "gaps ms", "communication ms", "hidden ms", "peak MB")
    rows = [[name, *(f"{value:.1f}" for value in cost)] for name, cost in costs.items()]
    return table(header, rows)


def _milliseconds(value: Spread, *, with_spread: bool = False) -> str:
    median, low, high = value.times(1e3)
    digits = 0 if median >= 20 else 1
    text = f"{median:.{digits}f}"
    return f"{text} ({low:.{digits}f}-{high:.{digits}f})" if with_spread else text


def _ratio(value: Spread | None) -> str:
    return "-" if value is None else f"{value.median:.3f}"
