"""Measure what communication algorithms save, and what a slow rank costs.

    python -m benchmarks.algorithms --rates 10mbit,100mbit,1gbit --ranks 4

Each algorithm has processes of its own, one a rank, on an emulated cluster (harness/cluster.py) or,
when this runs under torchrun, on a real one. See benchmarks/README.md.
"""
# test: skip, minutes; tests/system/test_algorithm_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import math
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.algorithms import report
from benchmarks.algorithms.peers import find_peer
from benchmarks.algorithms.report import Cell, Failure, Run, Turn
from benchmarks.harness.cluster import FREE, Cluster, open_cluster, why_not_emulated
from benchmarks.harness.models import find_model
from benchmarks.harness.tables import write_json
from benchmarks.harness.teams import Setting, Team, TeamError, open_team

_ALGORITHMS = (
    "eager", "ddpopt", "decentralized", "shift_one", "low_precision", "async",
    "bytegrad", "qadam",
)  # fmt: skip
_STRAGGLING = ("eager", "ddpopt", "decentralized", "async")
_QUICK: dict[str, Any] = {
    "model": "small",
    "ranks": 2,
    "rates": ["1gbit"],
    "straggler_rate": "1gbit",
    "rounds": 2,
    "budget_s": 2.0,
    "turn_s": 0.1,
    "inner": "aot_eager",
}
_MIN_ROUNDS = 2
_MAX_STEPS = 200
_EXCHANGES_A_TURN = 4
_LOSS_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """One run on a cluster; `run` and `teams` change, and `run` is written after each cell."""

    run: Run
    cluster: Cluster
    setting: Setting
    args: argparse.Namespace
    teams: dict[str, Team] = dataclasses.field(default_factory=dict)
    first_losses: dict[str, float] = dataclasses.field(default_factory=dict)

    def say(self, text: str) -> None:
        """Print on the first rank's machine."""
        if 0 in self.cluster.local_ranks:
            print(text, flush=True)

    @contextlib.contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """Note it if an algorithm fails in this block, and go on without it."""
        try:
            yield
        except TeamError as error:
            self.teams.pop(name, None)
            self.say(f"  {error}")
            self.run.failures.append(Failure(peer=name, error=str(error)))


def _start_teams(session: _Session, stack: contextlib.ExitStack) -> None:
    """Start all algorithms, to stay. Each compiles while the others wait, into the same cache."""
    caches = session.setting.folder / "caches"
    model = session.args.model
    for name in session.args.algorithms:
        opened = open_team(session.cluster, session.setting, name, model, None, caches)
        session.teams[name] = stack.enter_context(opened)
        with session.failing(name):
            session.teams[name].wait_until_ready()
            session.first_losses[name] = session.teams[name].ask("first_steps")
            session.say(f"{name}: ready")


def _schedule(session: _Session, names: Sequence[str]) -> tuple[dict[str, int], int]:
    """Return how many steps a turn of each has, and how many rounds fit the budget."""
    args = session.args
    steps_s: dict[str, float] = {}
    for name in names:
        with session.failing(name):
            steps_s[name] = max(_take(session, name, 1).times_s)
    # An asynchronous exchange takes about as long as the slowest of the others' steps.
    long_turn_s = max(args.turn_s, _EXCHANGES_A_TURN * max(steps_s.values(), default=0.0))
    num_steps, round_s = {}, 0.0
    for name, step_s in steps_s.items():
        turn_s = long_turn_s if find_peer(name)[0].is_asynchronous else args.turn_s
        num_steps[name] = min(_MAX_STEPS, max(1, math.ceil(turn_s / step_s)))
        round_s += num_steps[name] * step_s
    return num_steps, min(args.rounds, max(_MIN_ROUNDS, int(args.budget_s / max(round_s, 1e-3))))


def _take(session: _Session, name: str, num_steps: int, slow_rank: int | None = None) -> Turn:
    turn: Turn = session.teams[name].ask("turn", num_steps, slow_rank)
    return turn


def measure_cell(session: _Session, rate: str) -> Cell:
    """Measure all algorithms at one rate, in turns: A B C A B C."""
    session.cluster.set_rate(rate)
    num_steps, num_rounds = _schedule(session, list(session.teams))
    turns: dict[str, list[Turn]] = {name: [] for name in num_steps}
    for _ in range(num_rounds):
        for name in list(session.teams):
            with session.failing(name):
                turns[name].append(_take(session, name, num_steps[name]))
    complete = {name: taken for name, taken in turns.items() if name in session.teams}
    peers = {name: report.measured(complete, name, _num_samples(session)) for name in complete}
    shown = [f"{name} {peer.samples_per_s.median:.0f}" for name, peer in peers.items()]
    session.say(f"{rate}: {', '.join(shown)} samples/s")
    return Cell(rate=_shown_rate(session, rate), num_rounds=num_rounds, peers=peers)


def measure_stragglers(session: _Session) -> Iterator[report.Straggler]:
    """Measure turns without and with a slow rank, the last one, in turns."""
    rate, slow_rank = session.args.straggler_rate, session.cluster.num_ranks - 1
    session.cluster.set_rate(rate)
    names = [name for name in session.teams if name in session.args.straggling]
    num_steps, num_rounds = _schedule(session, names)
    without: dict[str, list[Turn]] = {name: [] for name in num_steps}
    with_one: dict[str, list[Turn]] = {name: [] for name in num_steps}
    for _ in range(max(_MIN_ROUNDS, num_rounds // 2)):  # a round is longer than the budget thinks
        for name in [name for name in num_steps if name in session.teams]:
            with session.failing(name):
                without[name].append(_take(session, name, num_steps[name]))
                with_one[name].append(_take(session, name, num_steps[name], slow_rank))
    for name in [name for name in num_steps if name in session.teams]:
        found = report.straggler(
            name, _shown_rate(session, rate), without[name], with_one[name], _num_samples(session)
        )
        session.say(f"straggler, {name}: fast ranks {found.fast.median:.3f} of undisturbed")
        yield found


def _shown_rate(session: _Session, rate: str) -> str:
    return rate if session.cluster.is_shaped else f"{rate} (not applied)"


def _num_samples(session: _Session) -> int:
    """Return how many samples a rank has in a step."""
    return len(next(iter(find_model(session.args.model).batch().values())))


def _find_different_losses(session: _Session) -> list[str]:
    """Return a line for each algorithm whose first loss, before any exchange, is another."""
    names, losses = list(session.first_losses), session.first_losses
    return [
        f"{name}'s first loss is {losses[name]}, {names[0]}'s {losses[names[0]]}"
        for name in names
        if not abs(losses[name] - losses[names[0]]) <= _LOSS_TOLERANCE * abs(losses[names[0]])
    ]


def _write(session: _Session) -> None:
    """Write what there is so far."""
    if 0 not in session.cluster.local_ranks:
        return
    run, output = session.run, session.args.output
    output.mkdir(parents=True, exist_ok=True)
    write_json(run, output / "algorithms.json")
    picture = "algorithms.png"
    is_drawn = bool(run.cells) and report.write_plot(run.cells, output / picture)
    (output / "algorithms.md").write_text(report.markdown(run, picture if is_drawn else ""))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    add = parser.add_argument
    add("--model", default="small", help="see `python -m benchmarks.harness.models`")
    add("--rates", type=names, default=["10mbit", "100mbit", "1gbit"], help="as tc has them")
    add("--algorithms", type=names, default=list(_ALGORITHMS), help="NAME or NAME:option=value")
    add("--straggling", type=names, default=list(_STRAGGLING), help="those that get a straggler")
    add("--straggler-rate", default="1gbit")
    add("--ranks", type=int, default=4, help="not under torchrun, which decides it")
    add("--threads", type=int, default=1, help="cores and threads a rank; 0: leave them alone")
    add("--inner", default="inductor", help="what ddpopt compiles its sections with")
    add("--rounds", type=int, default=9, help="at most")
    add("--budget-s", type=float, default=90.0, help="for a rate; two rounds are made anyway")
    add("--turn-s", type=float, default=3.0, help="for the steps of a turn, one at least")
    add("--loopback", action="store_true", help="emulate no network")
    add("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    add("--quick", action="store_true", help="under two minutes, to see that everything runs")
    args = parser.parse_args(arguments)
    if args.quick:
        vars(args).update(_QUICK)
    find_model(args.model)
    for name in (*args.algorithms, *args.straggling):
        find_peer(name)
    return args


def _describe(args: argparse.Namespace) -> str:
    model = find_model(args.model)
    return (
        f"{model.name} ({model.description}), {4 * model.num_parameters() / 1e6:.2f} MB of "
        f"gradients, {len(next(iter(model.batch().values())))} samples a step and rank"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return 1 if something could not be measured or computed something else."""
    args = _parse(arguments)
    shown = shlex.join(sys.argv[1:] if arguments is None else list(arguments))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddpopt-benchmark-"))
        opened = open_cluster(args.ranks, is_emulated=not args.loopback)
        cluster = stack.enter_context(opened)
        num_threads = None if cluster.is_torchrun or not args.threads else args.threads
        worker = "benchmarks.algorithms.worker"
        session = _Session(
            run=Run(
                command=f"python -m benchmarks.algorithms {shown}",
                date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                versions=f"torch {torch.__version__}, Python {platform.python_version()}",
                machine=f"{os.cpu_count()} cores, {num_threads or 'all'} a rank",
                network=cluster.description,
                model=_describe(args),
                inner=args.inner,
                is_counted=cluster.is_shaped,
            ),
            cluster=cluster,
            setting=Setting(
                inner=args.inner, num_threads=num_threads, folder=Path(folder), worker=worker
            ),
            args=args,
        )
        session.say(cluster.description)
        if not (cluster.is_shaped or cluster.is_torchrun or args.loopback):
            session.say(f"no network is emulated: {why_not_emulated()}")
        cluster.set_rate(FREE)
        _start_teams(session, stack)
        for rate in args.rates:
            if session.teams:
                session.run.cells.append(measure_cell(session, rate))
                _write(session)
        session.run.stragglers.extend(measure_stragglers(session))
        _write(session)
    differences = _find_different_losses(session)
    session.say("\n".join([*differences, f"written to {args.output}/algorithms.md and .json"]))
    return 1 if session.run.failures or differences else 0


if __name__ == "__main__":
    sys.exit(main())
