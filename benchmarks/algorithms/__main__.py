"""Measure what communication algorithms save, and what a slow rank costs.

    python -m benchmarks.algorithms --rates 10mbit,100mbit,1gbit --ranks 4

Each algorithm has processes of its own, one a rank, on an emulated cluster (harness/cluster.py) or,
when this runs under torchrun, on a real one. See benchmarks/README.md.
"""
# test: skip, minutes; tests/system/test_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.algorithms import report
from benchmarks.algorithms.peers import find_peer
from benchmarks.algorithms.report import Cell, Straggler, Turn
from benchmarks.harness.models import find_model
from benchmarks.harness.session import (
    Session,
    make_parser,
    open_session,
    parse_budgeted,
    split_names,
)

_ALGORITHMS = (
    "eager", "ddpopt", "decentralized", "shift_one", "low_precision", "async",
    "bytegrad", "qadam",
)  # fmt: skip
_STRAGGLING = ("eager", "ddpopt", "decentralized", "async")
_QUICK: dict[str, Any] = {
    "model": "small",
    "ranks": 2,
    "rates": ["1gbit"],
    "rounds": 2,
    "budget_s": 2.0,
    "turn_s": 0.1,
    "inner": "aot_eager",
}
_STRAGGLER_RATE = "1gbit"
_MIN_ROUNDS = 2
_MAX_STEPS = 200
_EXCHANGES_A_TURN = 4


@dataclass(slots=True, kw_only=True)
class _Run:
    """Measures one rate after the other; `num_samples` are those of a step and rank."""

    session: Session
    num_samples: int
    first_losses: dict[str, float] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start all algorithms, to stay. Each compiles while others wait, into the same cache."""
        session = self.session
        caches = session.setting.folder / "caches"
        for name in session.args.algorithms:
            team = stack.enter_context(session.open(name, session.args.model, None, caches))
            session.teams[name] = team
            with session.failing(name):
                team.wait_until_ready()
                self.first_losses[name] = team.ask("first_loss")
                session.say(f"{name}: ready")

    def measure_cell(self, rate: str) -> Cell:
        session = self.session
        session.set_rate(rate)
        num_steps, num_rounds = self._schedule(list(session.teams))

        def take(name: str) -> Turn:
            return self._take(name, num_steps[name])

        turns = session.take_turns(list(num_steps), num_rounds, take)
        peers = {name: report.measured(turns, name, self.num_samples) for name in turns}
        shown = [f"{name} {peer.samples_per_s.median:.0f}" for name, peer in peers.items()]
        session.say(f"{rate}: {', '.join(shown)} samples/s")
        return Cell(rate=session.shown_rate(rate), num_rounds=num_rounds, peers=peers)

    def measure_stragglers(self) -> Iterator[Straggler]:
        """Measure turns without and with a slow rank, the last one, in turns."""
        session, slow_rank = self.session, self.session.cluster.num_ranks - 1
        session.set_rate(_STRAGGLER_RATE)
        # A name alone stands for that algorithm with any options.
        chosen = [
            name
            for name in session.teams
            if {name, name.partition(":")[0]} & set(session.args.straggling)
        ]
        num_steps, num_rounds = self._schedule(chosen)

        def take(name: str) -> tuple[Turn, Turn]:
            without = self._take(name, num_steps[name])
            return without, self._take(name, num_steps[name], slow_rank)

        # A round is longer than the budget thinks.
        pairs = session.take_turns(list(num_steps), max(_MIN_ROUNDS, num_rounds // 2), take)
        for name, of_peer in pairs.items():
            straggler = report.straggler(
                name, session.shown_rate(_STRAGGLER_RATE), of_peer, self.num_samples
            )
            session.say(f"straggler, {name}: fast ranks {straggler.fast.median:.3f} of undisturbed")
            yield straggler

    def write(self) -> None:
        session, picture = self.session, "algorithms.png"
        if not session.is_first:
            return
        model, is_counted = find_model(session.args.model), session.cluster.is_shaped
        described = (
            f"{model.name} ({model.description}), {4 * model.num_parameters() / 1e6:.2f} MB of "
            f"gradients, {self.num_samples} samples a step and rank"
        )
        lines = list(report.lines(described, self.cells, self.stragglers, is_counted=is_counted))
        if self.cells and report.write_plot(self.cells, session.args.output / picture):
            lines += ["", f"![samples/s of eager's]({picture})"]
        session.write(
            {
                "model": described,
                "is_counted": is_counted,
                "cells": self.cells,
                "stragglers": self.stragglers,
            },
            lines,
        )

    def _schedule(self, chosen: Sequence[str]) -> tuple[dict[str, int], int]:
        """Return how many steps a turn of each has, and how many rounds fit the budget."""
        args = self.session.args
        first = self.session.take_turns(chosen, 1, lambda name: max(self._take(name, 1).times_s))
        steps_s = {name: step_s for name, (step_s,) in first.items()}
        # An asynchronous exchange takes about as long as the slowest of the others' steps.
        long_turn_s = max(args.turn_s, _EXCHANGES_A_TURN * max(steps_s.values(), default=0.0))
        num_steps, round_s = {}, 0.0
        for name, step_s in steps_s.items():
            turn_s = long_turn_s if find_peer(name)[0].is_asynchronous else args.turn_s
            num_steps[name] = min(_MAX_STEPS, max(1, math.ceil(turn_s / step_s)))
            round_s += num_steps[name] * step_s
        fitting = max(_MIN_ROUNDS, int(args.budget_s / max(round_s, 1e-3)))
        return num_steps, min(args.rounds, fitting)

    def _take(self, name: str, num_steps: int, slow_rank: int | None = None) -> Turn:
        turn: Turn = self.session.teams[name].ask("turn", num_steps, slow_rank)
        return turn


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    rates = ["10mbit", "100mbit", "1gbit"]
    defaults = {"rates": rates, "ranks": 4, "rounds": 9, "budget_s": 90.0}
    parser = make_parser("benchmarks.algorithms", __doc__, **defaults)
    add = parser.add_argument
    add("--model", default="small", help="see `python -m benchmarks.harness.models`")
    add(
        "--algorithms",
        type=split_names,
        default=list(_ALGORITHMS),
        help="NAME or NAME:option=value",
    )
    add(
        "--straggling",
        type=split_names,
        default=list(_STRAGGLING),
        help="those that get a straggler",
    )
    add("--turn-s", type=float, default=3.0, help="for the steps of a turn, one at least")
    args = parse_budgeted(parser, arguments, _QUICK)
    for name in (*args.algorithms, *args.straggling):
        find_peer(name)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return 1 if something could not be measured or computed something else."""
    args = _parse(arguments)
    worker = "benchmarks.algorithms.worker"
    num_samples = len(next(iter(find_model(args.model).batch().values())))
    with (
        open_session("algorithms", args, arguments, worker) as session,
        contextlib.ExitStack() as stack,
    ):
        run = _Run(session=session, num_samples=num_samples)
        run.start(stack)
        for rate in args.rates:
            if session.teams:
                run.cells.append(run.measure_cell(rate))
                run.write()
        run.stragglers.extend(run.measure_stragglers())
        run.write()
        return session.end({args.model: run.first_losses})


if __name__ == "__main__":
    sys.exit(main())
