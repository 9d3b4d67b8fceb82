"""Measure how well communication overlaps computation, beside every peer.

    python -m benchmarks.overlap --models gpt,bert --rates 1gbit,free --caps default,4

Each peer has processes of its own, one a rank, on an emulated cluster (harness/cluster.py) or, when
this runs under torchrun, on a real one. See benchmarks/README.md for what is measured.
"""
# test: skip, minutes; tests/system/test_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cluster import FREE, Cluster, open_cluster, why_not_emulated
from benchmarks.harness.models import find_model
from benchmarks.harness.peers import PEERS, find_peer
from benchmarks.harness.tables import write_json
from benchmarks.harness.teams import Setting, Team, TeamError, open_team
from benchmarks.overlap import figures, report, rounds
from benchmarks.overlap.results import Cell, Compilation, Failure, Run

_QUICK: dict[str, Any] = {
    "models": ["tiny"],
    "rates": ["1gbit"],
    "caps": ["1"],
    "peers": ["eager", "intree", "backward"],
    "rounds": 3,
    "budget_s": 5.0,
    "inner": "aot_eager",
}
_LOSS_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """One run on a cluster; `run` is added to, and written to `output` after each cap."""

    run: Run
    cluster: Cluster
    setting: Setting
    output: Path
    args: argparse.Namespace

    def say(self, text: str) -> None:
        """Print on the first rank's machine."""
        if 0 in self.cluster.local_ranks:
            print(text, flush=True)

    def fail(self, model: str, cap: str, peer: str, error: TeamError) -> None:
        """Note that a peer cannot be measured."""
        self.say(f"  {error}")
        self.run.failures.append(Failure(model=model, cap=cap, peer=peer, error=str(error)))


def measure_model(session: _Session, model: str, cap: str) -> None:
    """Measure all peers at all rates, for one model and cap."""
    compilations: dict[str, Compilation] = {}
    with contextlib.ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=session.setting.folder)))
        session.cluster.set_rate(FREE)
        for peer in session.args.peers:
            with _failing(session, model, cap, peer):
                compilations[peer] = _compile_cold(session, model, cap, peer, caches)
        teams = _start_warm(session, model, cap, compilations, caches, stack)
        cells = [
            cell
            for rate in session.args.rates
            if teams and (cell := _measure_cell(session, model, cap, rate, teams))
        ]
        for name, team in list(teams.items()):
            with _failing(session, model, cap, name, teams):
                num_recompiles = team.facts().num_recompiles
                compilations[name] = dataclasses.replace(
                    compilations[name], num_recompiles=num_recompiles
                )
        # Last, because the hooks that they need stay.
        cells = [_add_timelines(session, cell, teams) for cell in cells]
    session.run.compilations.extend(compilations.values())
    session.run.cells.extend(cells)


@contextlib.contextmanager
def _failing(
    session: _Session, model: str, cap: str, name: str, teams: dict[str, Team] | None = None
) -> Iterator[None]:
    """Note it if a peer fails in this block, and take it out of `teams`."""
    try:
        yield
    except TeamError as error:
        if teams is not None:
            del teams[name]
        session.fail(model, cap, name, error)


def _open(
    session: _Session, model: str, cap: str, peer: str, caches: Path
) -> contextlib.AbstractContextManager[Team]:
    cap_mb = None if cap == "default" else float(cap)
    folder = caches / str(session.args.peers.index(peer))
    return open_team(session.cluster, session.setting, peer, model, cap_mb, folder)


def _compile_cold(session: _Session, model: str, cap: str, peer: str, caches: Path) -> Compilation:
    """Fill the caches of one peer."""
    with _open(session, model, cap, peer, caches) as team:
        team.wait_until_ready()
        first, facts, num_buckets = team.first_steps(), team.facts(), len(team.bucket_bytes())
    session.say(f"{model}, cap {cap}, {peer}: compiled in {first.compile_s:.1f} s")
    return Compilation(
        model=model,
        cap=cap,
        peer=peer,
        cold_s=first.compile_s,
        warm_s=0.0,
        num_graphs=facts.num_graphs,
        num_sections=facts.num_sections,
        num_kernels=facts.num_kernels,
        num_kernel_calls=facts.num_kernel_calls,
        num_recompiles=facts.num_recompiles,
        num_buckets=num_buckets,
        peak_mb=0.0,
        loss=first.loss,
    )


def _start_warm(
    session: _Session,
    model: str,
    cap: str,
    compilations: dict[str, Compilation],
    caches: Path,
    stack: contextlib.ExitStack,
) -> dict[str, Team]:
    """Start all peers, to stay; each compiles while the others wait."""
    teams = {
        peer: stack.enter_context(_open(session, model, cap, peer, caches)) for peer in compilations
    }
    for name, team in list(teams.items()):
        with _failing(session, model, cap, name, teams):
            team.wait_until_ready()
    for name, team in list(teams.items()):
        with _failing(session, model, cap, name, teams):
            first = team.first_steps()
            team.forget_peak()
            team.steps(1, 2)
            compilations[name] = dataclasses.replace(
                compilations[name], warm_s=first.compile_s, peak_mb=team.peak_mb()
            )
            team.steps(2, 0, is_alone=True)
    return teams


def _measure_cell(
    session: _Session, model: str, cap: str, rate: str, teams: dict[str, Team]
) -> Cell | None:
    session.cluster.set_rate(rate)
    args = session.args
    for name, team in list(teams.items()):
        if find_peer(name)[0].is_tuned:
            with _failing(session, model, cap, name, teams):
                outcome = json.loads(team.tune())["outcome"]
                session.say(f"{model}, cap {cap}, {rate}, {name}: {outcome}")
    times = rounds.take_turns(
        teams,
        args.budget_s,
        args.rounds,
        lambda peer, error: session.fail(model, cap, peer, error),
    )
    if not times.turns:
        return None
    bounds = rounds.bounds(times, session.cluster.num_ranks)
    peers = {name: rounds.measured(times, name, bounds.bound_s) for name in times.turns}
    shown = [f"{name} {peer.iteration_s.median * 1e3:.0f}" for name, peer in peers.items()]
    session.say(f"{model}, cap {cap}, {rate}: {', '.join(shown)} ms")
    return Cell(
        model=model,
        cap=cap,
        rate=rate if session.cluster.is_shaped else f"{rate} (not applied)",
        num_rounds=times.schedule.num_rounds,
        num_steps=times.schedule.num_timed,
        bounds=bounds,
        peers=peers,
    )


def _add_timelines(session: _Session, cell: Cell, teams: dict[str, Team]) -> Cell:
    session.cluster.set_rate(cell.rate.partition(" ")[0])
    peers = dict(cell.peers)
    for name, team in list(teams.items()):
        with _failing(session, cell.model, cell.cap, name, teams):
            peers[name] = dataclasses.replace(peers[name], timeline=team.timeline())
    return dataclasses.replace(cell, peers=peers)


# ---- output -----------------------------------------------------------------------------------


def _write(session: _Session) -> None:
    """Write what there is so far."""
    if 0 not in session.cluster.local_ranks:
        return
    run, output = session.run, session.output
    output.mkdir(parents=True, exist_ok=True)
    write_json(run, output / "overlap.json")
    pictures = []
    for cell in run.cells:
        stem = f"timeline-{cell.model}-{cell.cap}-{cell.rate.partition(' ')[0]}"
        figures.write_timelines(cell, output / stem.replace(":", "."))
    for model in dict.fromkeys(cell.model for cell in run.cells):
        path = output / f"{model.replace(':', '.')}.png"
        cells = [cell for cell in run.cells if cell.model == model]
        if figures.write_plot(model, cells, path):
            pictures.append(path.name)
    (output / "overlap.md").write_text(report.markdown(run, pictures))


def _find_different_losses(run: Run) -> list[str]:
    """Return a line for each peer that computes something else than the first one."""
    first: dict[tuple[str, str], Compilation] = {}
    lines = []
    for compilation in run.compilations:
        base = first.setdefault((compilation.model, compilation.cap), compilation)
        if not abs(compilation.loss - base.loss) <= _LOSS_TOLERANCE * abs(base.loss):
            lines.append(
                f"{compilation.model}, cap {compilation.cap}: {compilation.peer}'s first loss is "
                f"{compilation.loss}, {base.peer}'s {base.loss}"
            )
    return lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    add = parser.add_argument
    add("--models", type=names, default=["gpt"], help="see `python -m benchmarks.harness.models`")
    add("--rates", type=names, default=["100mbit", "1gbit", "10gbit", FREE], help="as tc has them")
    add("--caps", type=names, default=["default"], help="DDP's bucket_cap_mb")
    add("--peers", type=names, default=list(PEERS), help="NAME or NAME:option=value")
    add("--ranks", type=int, default=2, help="not under torchrun, which decides it")
    add("--threads", type=int, default=1, help="cores and threads a rank; 0: leave them alone")
    add("--inner", default="inductor", help="the backend that all compiling peers use")
    add("--rounds", type=int, default=15, help="at most")
    add("--budget-s", type=float, default=50.0, help="for the rounds of a cell; 3 are made anyway")
    add("--loopback", action="store_true", help="emulate no network")
    add("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    add("--quick", action="store_true", help="two minutes, to see that everything runs")
    args = parser.parse_args(arguments)
    if args.quick:
        vars(args).update(_QUICK)
    for model in args.models:
        find_model(model)
    for peer in args.peers:
        find_peer(peer)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return 1 if some peer could not be measured or computed something else."""
    args = _parse(arguments)
    shown = shlex.join(sys.argv[1:] if arguments is None else list(arguments))
    with (
        tempfile.TemporaryDirectory(prefix="ddpopt-benchmark-") as folder,
        open_cluster(args.ranks, is_emulated=not args.loopback) as cluster,
    ):
        num_threads = None if cluster.is_torchrun or not args.threads else args.threads
        session = _Session(
            run=Run(
                command=f"python -m benchmarks.overlap {shown}",
                date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                versions=f"torch {torch.__version__}, Python {platform.python_version()}",
                machine=f"{_processor()}, {os.cpu_count()} cores, {num_threads or 'all'} a rank",
                network=cluster.description,
                inner=args.inner,
            ),
            cluster=cluster,
            setting=Setting(inner=args.inner, num_threads=num_threads, folder=Path(folder)),
            output=args.output,
            args=args,
        )
        session.say(cluster.description)
        if not (cluster.is_shaped or cluster.is_torchrun or args.loopback):
            session.say(f"no network is emulated: {why_not_emulated()}")
        for model in args.models:
            for cap in args.caps:
                measure_model(session, model, cap)
                _write(session)
    differences = _find_different_losses(session.run)
    session.say("\n".join([*differences, f"written to {args.output}/overlap.md and overlap.json"]))
    return 1 if session.run.failures or differences else 0


def _processor() -> str:
    """Return the processor's name, as Linux has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
