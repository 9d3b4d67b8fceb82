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
from benchmarks.harness.session import Session, make_parser, names, open_session
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
# Those with other options of DDP's are asked for by name; one needs torch 2.15.
_PEERS = [name for name in PEERS if name not in ("views", "lazy")]
_LOSS_TOLERANCES = {"cpu": 1e-3, "cuda": 0.02}  # on a GPU losses are bfloat16's


_Open = Callable[[str], contextlib.AbstractContextManager[Team]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What is found for one model and cap after the other."""

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
            found = start(session, open_, stack)
            cells = [
                cell
                for rate in session.args.rates
                if session.teams and (cell := _measure_cell(session, model, cap, rate))
            ]
            if is_emulated:
                self.costs[session.where] = dict(_measure_costs(session))
            else:
                found = {name: _count_recompiles(session, name, own) for name, own in found.items()}
                # Last, because what they record with slows later steps.
                cells = [_add_timelines(session, cell) for cell in cells]
            session.teams.clear()
        self.compilations.extend(
            own._replace(model=model, cap=cap, peer=peer) for peer, own in found.items()
        )
        self.cells.extend(cells)

    def write(self) -> None:
        if not self.session.is_first:
            return
        output = self.session.args.output
        pictures = figures.draw(self.cells, output)
        found = {"cells": self.cells, "compilations": self.compilations, "costs": self.costs}
        lines = report.lines(self.compilations, self.cells, self.costs, pictures)
        self.session.write(found, list(lines))

    def losses(self) -> dict[str, dict[str, float]]:
        """Return losses, which are equal for all peers of a model and cap.

        Those of the fourth step tell whether gradients were reduced.
        """
        found: dict[str, dict[str, float]] = {}
        for own in self.compilations:
            where = f"{own.model}, cap {own.cap}"
            found.setdefault(f"{where}, first step", {})[own.peer] = own.loss
            found.setdefault(f"{where}, fourth step", {})[own.peer] = own.later_loss
        return found


# ---- starting: all peers, to stay; those that fail are left out -------------------------------


def _start_cold_then_warm(
    session: Session, open_: _Open, stack: contextlib.ExitStack
) -> dict[str, Compilation]:
    """Start each in processes that go, with an empty cache, and again with the filled one."""
    found = {}
    for peer in session.args.peers:
        with session.failing(peer), open_(peer) as team:
            team.wait_until_ready()
            first, facts = team.ask("first_steps"), team.ask("facts")
            num_buckets = len(team.ask("bucket_bytes"))
            losses = first.loss, first.later_loss
            found[peer] = Compilation(*losses, num_buckets, first.compile_s, facts=facts)
            session.say(f"{session.where}, {peer}: compiled in {first.compile_s:.1f} s")
    for peer in found:
        session.teams[peer] = stack.enter_context(open_(peer))
    for peer in found:
        with session.failing(peer):
            session.teams[peer].wait_until_ready()
    for peer, team in list(session.teams.items()):  # each compiles while the others wait
        with session.failing(peer):
            warm_s = team.ask("first_steps").compile_s
            found[peer] = found[peer]._replace(warm_s=warm_s, peak_mb=team.ask("peak_mb"))
            team.ask("lone_steps", 2, 0)
    return found


def _start_at_once(
    session: Session, open_: _Open, stack: contextlib.ExitStack
) -> dict[str, Compilation]:
    """Have all compile beside each other: there is one process for each, and none is timed."""
    for peer in session.args.peers:
        session.teams[peer] = stack.enter_context(open_(peer))

    def first_steps(team: Team) -> Compilation:
        team.wait_until_ready()
        first, buckets = team.ask("first_steps"), team.ask("bucket_bytes")
        return Compilation(first.loss, first.later_loss, len(buckets), first.compile_s)

    found = {}
    with ThreadPoolExecutor(len(session.teams)) as pool:
        asked = {name: pool.submit(first_steps, team) for name, team in session.teams.items()}
    for peer, future in asked.items():
        with session.failing(peer):
            found[peer] = future.result()
    return found


# ---- measuring --------------------------------------------------------------------------------


def _measure_cell(session: Session, model: str, cap: str, rate: str) -> Cell | None:
    shown_rate = session.set_rate(rate)
    for name, team in list(session.teams.items()):
        if find_peer(name)[0].is_tuned:
            with session.failing(name):
                session.say(f"{session.where}, {rate}, {name}: {team.ask('tune')['outcome']}")
    cell = rounds.measure(session, model, cap, shown_rate)
    if cell is not None:
        medians = {name: peer.times["iteration_s"].median for name, peer in cell.peers.items()}
        shown = ", ".join(f"{name} {median_s * 1e3:.0f}" for name, median_s in medians.items())
        session.say(f"{session.where}, {rate}: {shown} ms")
    return cell


def _measure_costs(session: Session) -> Iterator[tuple[str, Cost]]:
    for name, team in list(session.teams.items()):
        with session.failing(name):
            seen, cpu_s, peak_mb = (team.ask(what) for what in ("profile", "cpu_s", "peak_mb"))
            yield name, Cost(cpu_s * 1e3, seen, peak_mb)


def _count_recompiles(session: Session, name: str, own: Compilation) -> Compilation:
    """Return it with all of the run; a peer that has failed keeps those of its first steps."""
    if name in session.teams and own.facts is not None:
        with session.failing(name):
            num_recompiles = session.teams[name].ask("facts").num_recompiles
            return own._replace(facts=own.facts._replace(num_recompiles=num_recompiles))
    return own


def _add_timelines(session: Session, cell: Cell) -> Cell:
    session.set_rate(cell.rate.partition(" ")[0])
    peers = dict(cell.peers)
    for name, team in list(session.teams.items()):
        with session.failing(name):
            peers[name] = dataclasses.replace(peers[name], timeline=team.ask("timeline"))
    return dataclasses.replace(cell, peers=peers)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    rates = ["100mbit", "1gbit", "10gbit", FREE]
    defaults = {"rates": rates, "ranks": 2, "rounds": 15, "budget_s": 50.0}
    parser = make_parser("benchmarks.overlap", __doc__, **defaults)
    add = parser.add_argument
    add("--models", type=names, default=["gpt"], help="see `python -m benchmarks.harness.models`")
    add("--caps", type=names, default=["default"], help="DDP's bucket_cap_mb")
    add("--peers", type=names, default=_PEERS, help="NAME or NAME:option=value")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: with --emulated-ranks")
    add("--emulated-ranks", type=int, default=0, help="of a ring, for one rank on a device")
    args = parser.parse_args(arguments)
    if args.quick:
        vars(args).update(_QUICK)
    if args.device == "cuda" and not args.emulated_ranks:
        parser.error("a GPU has an emulated network: give --emulated-ranks")
    for model in args.models:
        find_model(model)
    for peer in args.peers:
        find_peer(peer)
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
