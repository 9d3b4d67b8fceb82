"""Measure how well communication overlaps computation, beside every peer.

    python -m benchmarks.overlap --models gpt,bert --rates 1gbit,free --caps default,4
    python -m benchmarks.overlap --device cuda --emulated-ranks 64 --rates 100gbit,400gbit

Each peer has processes of its own, one a rank, on an emulated cluster (harness/cluster.py) or, when
this runs under torchrun, on a real one. With `--emulated-ranks` each has one process on a device,
and a comm hook in place of the network (harness/network.py). See benchmarks/README.md.
"""
# test: skip, minutes; tests/system/test_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness.cluster import FREE
from benchmarks.harness.models import find_model
from benchmarks.harness.peers import PEERS, find_peer
from benchmarks.harness.session import (
    Session,
    make_parser,
    open_session,
    parse_budgeted,
    split_names,
)
from benchmarks.harness.teams import Team
from benchmarks.overlap import figures, report, rounds
from benchmarks.overlap.report import Compilation, Cost
from benchmarks.overlap.rounds import Cell

_QUICK: dict[str, Any] = {
    "models": ["tiny"],
    "rates": ["1gbit"],
    "caps": ["1"],
    "peers": ["eager", "intree", "backward"],
    "rounds": 3,
    "budget_s": 5.0,
    "inner": "aot_eager",
}
_LOSS_TOLERANCES = {"cpu": 1e-3, "cuda": 0.02}  # on a GPU losses are bfloat16's

_Open = Callable[[str], contextlib.AbstractContextManager[Team]]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Run:
    """Measures one model and cap after the other, and keeps what was measured."""

    session: Session
    compilations: list[Compilation] = dataclasses.field(default_factory=list)
    cells: list[Cell] = dataclasses.field(default_factory=list)
    costs: dict[str, dict[str, Cost]] = dataclasses.field(default_factory=dict)

    def measure_model(self, model: str, cap: str) -> None:
        session = self.session
        session.where = f"{model}, cap {cap}"
        cap_mb = None if cap == "default" else float(cap)
        with contextlib.ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(dir=session.setting.folder)
            caches = Path(stack.enter_context(folder))

            def open_(peer: str) -> contextlib.AbstractContextManager[Team]:
                own = caches / str(session.args.peers.index(peer))
                return session.open(peer, model, cap_mb, own)

            session.set_rate(FREE)
            is_emulated = bool(session.setting.emulated_ranks)
            start = _start_at_once if is_emulated else _start_cold_then_warm
            compilations = start(session, open_, stack, model, cap)
            cells = []
            for rate in session.args.rates:
                cell = _measure_cell(session, model, cap, rate) if session.teams else None
                if cell is not None:  # None if all peers have failed
                    cells.append(cell)
            compilations = {
                peer: _after_all_rates(session, compilation)
                for peer, compilation in compilations.items()
            }
            if is_emulated:
                self.costs[session.where] = dict(_measure_costs(session))
            else:
                # Last, because what they record with slows later steps.
                cells = [_add_timelines(session, cell) for cell in cells]
            session.teams.clear()
        self.compilations.extend(compilations.values())
        self.cells.extend(cells)

    def write(self) -> None:
        if not self.session.is_first:
            return
        output = self.session.args.output
        pictures = figures.draw(self.cells, output)
        measured = {"cells": self.cells, "compilations": self.compilations, "costs": self.costs}
        lines = report.lines(self.compilations, self.cells, self.costs, pictures)
        self.session.write(measured, list(lines))

    def losses(self) -> dict[str, dict[str, float]]:
        """Return losses, which are equal for all peers of a model and cap.

        Those of the fourth step tell whether gradients were reduced.
        """
        losses: dict[str, dict[str, float]] = {}
        for compilation in self.compilations:
            where, peer = f"{compilation.model}, cap {compilation.cap}", compilation.peer
            losses.setdefault(f"{where}, first step", {})[peer] = compilation.loss
            losses.setdefault(f"{where}, fourth step", {})[peer] = compilation.later_loss
        return losses


# ---- starting: all peers, to stay; those that fail are left out -------------------------------


def _start_cold_then_warm(
    session: Session, open_: _Open, stack: contextlib.ExitStack, model: str, cap: str
) -> dict[str, Compilation]:
    """Compile each peer twice, and keep the second processes.

    The first have an empty cache, and are stopped; the second have what those left in it.
    """
    compilations = {}
    for peer in session.args.peers:
        with session.failing(peer), open_(peer) as team:
            compilation = _compile_first(team, model, cap, peer)
            compilations[peer] = compilation._replace(facts=team.ask("facts"))
            session.say(f"{session.where}, {peer}: compiled in {compilation.cold_s:.1f} s")
    for peer in compilations:
        session.teams[peer] = stack.enter_context(open_(peer))
    for peer in compilations:
        with session.failing(peer):
            session.teams[peer].wait_until_ready()
    for peer, team in list(session.teams.items()):  # each compiles while the others wait
        with session.failing(peer):
            warm_s = team.ask("first_steps").compile_s
            compilations[peer] = compilations[peer]._replace(warm_s=warm_s)
            team.ask("lone_steps", 2, 0)
    return compilations


def _start_at_once(
    session: Session, open_: _Open, stack: contextlib.ExitStack, model: str, cap: str
) -> dict[str, Compilation]:
    """Have all compile beside each other: there is one process for each, and none is timed."""
    for peer in session.args.peers:
        session.teams[peer] = stack.enter_context(open_(peer))

    compilations = {}
    with ThreadPoolExecutor(len(session.teams)) as pool:
        futures = {
            peer: pool.submit(_compile_first, team, model, cap, peer)
            for peer, team in session.teams.items()
        }
    for peer, future in futures.items():
        with session.failing(peer):
            compilations[peer] = future.result()
    return compilations


def _compile_first(team: Team, model: str, cap: str, peer: str) -> Compilation:
    """Have a team take its first steps, with what is in its cache."""
    team.wait_until_ready()
    first = team.ask("first_steps")
    return Compilation(
        model=model,
        cap=cap,
        peer=peer,
        loss=first.loss,
        later_loss=first.later_loss,
        cold_s=first.compile_s,
    )


# ---- measuring --------------------------------------------------------------------------------


def _measure_cell(session: Session, model: str, cap: str, rate: str) -> Cell | None:
    session.set_rate(rate)
    for name, team in list(session.teams.items()):
        if find_peer(name)[0].is_tuned:
            with session.failing(name):
                session.say(f"{session.where}, {rate}, {name}: {team.ask('tune').outcome}")
    cell = rounds.measure(session, model, cap, rate)
    if cell is not None:
        medians = {name: peer.times["iteration_s"].median for name, peer in cell.peers.items()}
        shown = ", ".join(f"{name} {median_s * 1e3:.0f}" for name, median_s in medians.items())
        session.say(f"{session.where}, {rate}: {shown} ms")
    return cell


def _measure_costs(session: Session) -> Iterator[tuple[str, Cost]]:
    for name, team in list(session.teams.items()):
        with session.failing(name):
            profiled, cpu_s, peak_mib = (
                team.ask(what) for what in ("profile", "cpu_s", "peak_mib")
            )
            rate = session.args.rates[-1]  # that of the network now
            yield name, Cost(rate, cpu_s * 1e3, profiled, peak_mib)


def _after_all_rates(session: Session, compilation: Compilation) -> Compilation:
    """Add what holds of a peer in the end: its buckets, memory, and the whole run's recompiles.

    Tuned buckets are those of the last rate. A peer that has failed by now has none of these.
    """
    team = session.teams.get(compilation.peer)
    if team is None:
        return compilation
    with session.failing(compilation.peer):
        compilation = compilation._replace(num_buckets=len(team.ask("bucket_bytes")))
        if compilation.facts is not None:
            num_recompiles = team.ask("facts").num_recompiles
            facts = compilation.facts._replace(num_recompiles=num_recompiles)
            peak_mib, tensors_mib = team.ask("peak_mib"), team.ask("tensors_mib")
            compilation = compilation._replace(
                facts=facts, peak_mib=peak_mib, tensors_mib=tensors_mib
            )
    return compilation


def _add_timelines(session: Session, cell: Cell) -> Cell:
    session.set_rate(cell.rate)
    peers = dict(cell.peers)
    for name, team in list(session.teams.items()):
        with session.failing(name):
            if find_peer(name)[0].is_tuned:
                team.ask("tune")  # its buckets are those of another rate
            peers[name] = dataclasses.replace(peers[name], timeline=team.ask("timeline"))
    return dataclasses.replace(cell, peers=peers)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    rates = ["100mbit", "1gbit", "10gbit", FREE]
    defaults = {"rates": rates, "ranks": 2, "rounds": 15, "budget_s": 50.0}
    parser = make_parser("benchmarks.overlap", __doc__, **defaults)
    add = parser.add_argument
    add(
        "--models",
        type=split_names,
        default=["gpt"],
        help="see `python -m benchmarks.harness.models`",
    )
    add("--caps", type=split_names, default=["default"], help="DDP's bucket_cap_mb")
    add("--peers", type=split_names, help="NAME or NAME:option=value; most, if none is named")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: with --emulated-ranks")
    add("--emulated-ranks", type=int, default=0, help="of a ring, for one rank on a device")
    args = parse_budgeted(parser, arguments, _QUICK)
    if args.device == "cuda" and not args.emulated_ranks:
        parser.error("a GPU has an emulated network: give --emulated-ranks")
    for model in args.models:
        find_model(model)
    if args.peers is None:
        args.peers = [
            peer.name
            for peer in PEERS.values()
            if peer.is_default and (peer.has_reducer or not args.emulated_ranks)
        ]
    if args.emulated_ranks:
        for peer in args.peers:
            found = find_peer(peer)[0]
            if not found.has_reducer or found.has_hook:
                parser.error(
                    f"the peer {peer} has no Reducer of DDP's, or a comm hook of its own, and a "
                    "comm hook of the Reducer's is the emulated network"
                )
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return 1 if some peer could not be measured or computed something else."""
    args = _parse(arguments)
    with open_session("overlap", args, arguments) as session:
        run = _Run(session=session)
        for model in args.models:
            for cap in args.caps:
                run.measure_model(model, cap)
                run.write()
        return session.end(run.losses(), _LOSS_TOLERANCES[args.device])


if __name__ == "__main__":
    sys.exit(main())
