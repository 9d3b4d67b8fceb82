"""Write a run as Markdown tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.peers import find_peer
from benchmarks.harness.tables import Spread, table
from benchmarks.overlap.results import Cell, Compilation, Run

_MB = 1e6


def markdown(run: Run, figures: Sequence[str] = ()) -> str:
    """Return the tables; `figures` are paths of pictures to show."""
    lines = [
        "# Overlap",
        "",
        f"    {run.command}",
        "",
        f"{run.date}; {run.versions}; {run.machine}; inner compiler {run.inner}.",
        f"Network: {run.network}.",
        "",
    ]
    names = dict.fromkeys(compilation.peer for compilation in run.compilations)
    lines += [f"- {name}: {find_peer(name)[0].description}" for name in names]
    by_model = itertools.groupby(run.compilations, key=lambda c: (c.model, c.cap))
    for (model, cap), compilations in by_model:
        lines += ["", f"## {model}, cap {cap}", "", *_compilation_table(list(compilations))]
        for cell in run.cells:
            if (cell.model, cell.cap) == (model, cap):
                lines += ["", f"### {model}, cap {cap}, {cell.rate}", "", *_cell_table(cell)]
    if figures:
        lines += ["", *(f"![{Path(path).stem}]({path})" for path in figures)]
    if run.failures:
        lines += ["", "## Not measured", ""]
        lines += [f"- {_failure(f.model, f.cap, f.peer, f.error)}" for f in run.failures]
    return "\n".join(lines) + "\n"


def _failure(model: str, cap: str, peer: str, error: str) -> str:
    last = [line for line in error.splitlines() if line.strip()][-1]
    return f"{model}, cap {cap}, {peer}: `{last.strip()}`"


def _compilation_table(compilations: Sequence[Compilation]) -> list[str]:
    header = (
        "peer", "graphs", "sections", "kernels", "kernel calls", "buckets", "recompiles",
        "compile s, cold", "warm", "peak memory MB", "first loss",
    )  # fmt: skip
    rows = [
        (
            c.peer,
            str(c.num_graphs),
            "-" if c.num_sections is None else str(c.num_sections),
            str(c.num_kernels),
            str(c.num_kernel_calls),
            str(c.num_buckets or "-"),
            str(c.num_recompiles),
            f"{c.cold_s:.1f}",
            f"{c.warm_s:.1f}",
            f"{c.peak_mb:.0f}",
            f"{c.loss:.5f}",
        )
        for c in compilations
    ]
    return table(header, rows)


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
            _milliseconds(peer.iteration_s, with_spread=True),
            _milliseconds(peer.forward_s),
            _milliseconds(peer.backward_s, with_spread=True),
            _milliseconds(peer.optimizer_s),
            _ratio(peer.throughput_of_eager),
            _ratio(peer.throughput_of_intree),
            _ratio(peer.backward_of_intree),
            _milliseconds(peer.alone_s),
            _milliseconds(peer.exposed_s),
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


def _milliseconds(value: Spread, *, with_spread: bool = False) -> str:
    median, low, high = (number * 1e3 for number in value)
    digits = 0 if median >= 20 else 1
    text = f"{median:.{digits}f}"
    return f"{text} ({low:.{digits}f}-{high:.{digits}f})" if with_spread else text


def _ratio(value: Spread | None) -> str:
    return "-" if value is None else f"{value.median:.3f}"
