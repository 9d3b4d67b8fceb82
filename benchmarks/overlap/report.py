"""A run of `benchmarks.overlap` as Markdown tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.peers import PEERS, label
from benchmarks.harness.report import Spread, table_of
from benchmarks.harness.teams import PROFILED_STEPS, Facts
from benchmarks.harness.trace import Summary
from benchmarks.overlap.rounds import Cell, Measured

_MB = 1e6


class Compilation(NamedTuple):
    """One peer's first steps with one model and cap, and what it is after all rates.

    `cold_s` is the time for compiling with an empty cache, `warm_s` with a filled one. On an
    emulated network peers compile beside each other, once, and have no `facts`. A peer that fails
    on the way has no buckets, no `peak_mib` and no `tensors_mib`.
    """

    model: str
    cap: str
    peer: str
    loss: float
    later_loss: float
    cold_s: float
    warm_s: float | None = None
    facts: Facts | None = None
    num_buckets: int | None = None
    peak_mib: float | None = None
    tensors_mib: float | None = None


class Cost(NamedTuple):
    """What a step of a peer costs on a device, beside its time, at one rate.

    `profiled` is of `PROFILED_STEPS` steps.
    """

    rate: str
    cpu_ms: float
    profiled: Summary
    peak_mib: float


def lines(
    compilations: Sequence[Compilation],
    cells: Sequence[Cell],
    costs: Mapping[str, Mapping[str, Cost]],
    pictures: Sequence[str],
) -> Iterator[str]:
    yield ""
    for name in dict.fromkeys(compilation.peer for compilation in compilations):
        yield f"- {name}: {label(name, PEERS)}"
    for (model, cap), group in itertools.groupby(compilations, key=lambda c: (c.model, c.cap)):
        title = f"{model}, cap {cap}"
        yield from ("", f"## {title}", "", *_compilation_table(list(group)))
        for cell in cells:
            if (cell.model, cell.cap) == (model, cap):
                yield from ("", f"### {title}, {cell.shown_rate}", "", *_cell_table(cell))
        by_peer = costs.get(title)
        if by_peer:
            rate = next(iter(by_peer.values())).rate  # the same for all peers
            table = table_of("peer", by_peer, _COSTS)
            yield from ("", f"### {title}, {rate}: costs of a step", "", *table)
    if pictures:
        yield ""
        yield from (f"![{path.removesuffix('.png')}]({path})" for path in pictures)


def _compilation_table(compilations: Sequence[Compilation]) -> list[str]:
    columns = _AT_ONCE if any(c.facts is None for c in compilations) else _COLD_AND_WARM
    return table_of("peer", {c.peer: c for c in compilations}, columns)


def _cell_table(cell: Cell) -> list[str]:
    bounds = cell.bounds
    return [
        f"Compute alone {bounds.compute_s * 1e3:.0f} ms ({bounds.compute_peer}), communication "
        f"alone {bounds.communication_s * 1e3:.0f} ms ({bounds.num_buckets} buckets of "
        f"{bounds.num_bytes / _MB:.1f} MB in all, {bounds.megabits_per_s:.0f} Mbit/s), bound "
        f"{bounds.bound_s * 1e3:.0f} ms. {cell.num_rounds} rounds of {cell.num_steps} steps.",
        "",
        *table_of("peer", cell.peers, _TIMES),
    ]


def _milliseconds(column: str, *, with_spread: bool = False) -> Callable[[Measured], str]:
    def show(peer: Measured) -> str:
        median, low, high = peer.times[column].times(1e3)
        digits = 0 if median >= 20 else 1
        text = f"{median:.{digits}f}"
        return f"{text} ({low:.{digits}f}-{high:.{digits}f})" if with_spread else text

    return show


def _ratio(value: Spread | None) -> str:
    return _number_or_dash(None if value is None else value.median, ".3f")


def _number_or_dash(number: float | None, layout: str) -> str:
    return "-" if number is None else format(number, layout)


def _a_step(profiled_ms: float) -> str:
    return f"{profiled_ms / PROFILED_STEPS:.1f}"


_AT_ONCE: dict[str, Callable[[Compilation], str]] = {
    "buckets": lambda compilation: str(compilation.num_buckets or "-"),
    "compile s, beside the others": lambda compilation: f"{compilation.cold_s:.1f}",
    "first loss": lambda compilation: f"{compilation.loss:.5f}",
}
_COLD_AND_WARM: dict[str, Callable[[Any], str]] = {
    "graphs": lambda compilation: str(compilation.facts.num_graphs),
    "sections": lambda compilation: str(compilation.facts.num_sections or "-"),
    "kernels": lambda compilation: str(compilation.facts.num_kernels),
    "kernel calls": lambda compilation: str(compilation.facts.num_kernel_calls),
    "buckets": lambda compilation: str(compilation.num_buckets or "-"),
    "recompiles": lambda compilation: str(compilation.facts.num_recompiles),
    "compile s, cold": lambda compilation: f"{compilation.cold_s:.1f}",
    "warm": lambda compilation: _number_or_dash(compilation.warm_s, ".1f"),
    "peak memory MiB": lambda compilation: _number_or_dash(compilation.peak_mib, ".0f"),
    "tensors MiB": lambda compilation: _number_or_dash(compilation.tensors_mib, ".0f"),
    "first loss": lambda compilation: f"{compilation.loss:.5f}",
}
_TIMES: dict[str, Callable[[Measured], str]] = {
    "iteration ms": _milliseconds("iteration_s", with_spread=True),
    "forward": _milliseconds("forward_s"),
    "backward": _milliseconds("backward_s", with_spread=True),
    "optimizer": _milliseconds("optimizer_s"),
    "throughput of eager's": lambda peer: _ratio(peer.throughput_of_eager),
    "of in-tree's": lambda peer: _ratio(peer.throughput_of_intree),
    "backward of in-tree's": lambda peer: _ratio(peer.backward_of_intree),
    "alone ms": _milliseconds("alone_s"),
    "exposed ms": _milliseconds("exposed_s"),
    "over bound": lambda peer: f"{peer.over_bound:+.0%}",
}
_COSTS: dict[str, Callable[[Cost], str]] = {
    "CPU ms": lambda cost: f"{cost.cpu_ms:.1f}",
    "gaps ms": lambda cost: _a_step(cost.profiled.gaps_ms),
    "communication ms": lambda cost: _a_step(cost.profiled.communication_ms),
    "hidden ms": lambda cost: _a_step(cost.profiled.hidden_ms),
    "peak MiB": lambda cost: f"{cost.peak_mib:.0f}",
}
