"""Is `buckets="auto"` as good as the best cap, and are its predictions right?

    python -m benchmarks.overlap.tuning --models gpt,bert --rates 1gbit,free

One model is compiled once, in sections finer than any bucket. For each rate it is tuned; then its
buckets are changed in turns, by every cap and by the plan, and each is measured. See
benchmarks/README.md.
"""
# test: skip, minutes; tests/system/test_benchmarks.py runs a small one

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness.cluster import FREE
from benchmarks.harness.models import find_model
from benchmarks.harness.report import table
from benchmarks.harness.session import Session, make_parser, open_session, split_names
from benchmarks.harness.teams import Team, TeamError
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, BucketPlan

_MIB = 1024 * 1024
_NUM_STEPS = 2
_AUTO, _DEFAULT = "auto", "default"
_CHOICES: dict[str, tuple[int, ...]] = {
    _AUTO: (),  # the plan's
    _DEFAULT: DDP_DEFAULT_CAPS,
    **{f"{cap:g} MiB": (int(cap * _MIB),) for cap in (0.5, 1, 4, 8, 16, 1000)},
}


class Row(NamedTuple):
    """One choice of buckets: each round's backward, and what was predicted of it."""

    buckets: str
    num_buckets: int
    backwards_s: list[float]
    predicted_backward_s: float

    @property
    def backward_s(self) -> float:
        return statistics.median(self.backwards_s)

    @property
    def prediction(self) -> float:
        return self.predicted_backward_s / self.backward_s

    def backward_in(self, half: int) -> float:
        """Median over the even (0) or the odd (1) rounds; over all where there is but one."""
        return statistics.median(self.backwards_s[half::2] or self.backwards_s)


class Cell(NamedTuple):
    """All choices for one model at one rate, `outcome` is the search's decision in words."""

    model: str
    rate: str
    num_ranks: int
    outcome: str
    keeps_buckets: bool
    rows: dict[str, Row]


def measure(team: Team, model: str, rate: str, session: Session) -> Cell:
    """Tune, and measure all choices in turns."""
    tuned = team.ask("tune")
    if not tuned.plan:
        raise TeamError(f"{model} at {rate} was not tuned: {tuned.outcome}")
    plans: dict[str, BucketPlan] = {}
    times: dict[str, list[float]] = {name: [] for name in _CHOICES}
    for _ in range(session.args.rounds):
        for name, caps in _CHOICES.items():
            plans[name] = BucketPlan.from_json(team.ask("use_caps", caps))
            steps = team.ask("steps", 0, _NUM_STEPS)
            times[name].append(statistics.median(step.backward_s for step in steps))
    rows = {
        name: Row(name, len(plan.buckets), times[name], plan.timeline().backward_s)
        for name, plan in plans.items()
    }
    return Cell(
        model=model,
        rate=session.shown_rate(rate),
        num_ranks=session.cluster.num_ranks,
        outcome=tuned.outcome,
        keeps_buckets=tuned.keeps_buckets,
        rows=rows,
    )


def report(cells: Sequence[Cell]) -> str:
    header = (
        "model", "ranks", "rate", "auto, backward ms", "best cap", "default", "auto / best cap",
        "auto / default", "predicted / measured backward: auto", "all, worst", "decision",
    )  # fmt: skip
    return "\n".join(table(header, map(_table_row, cells))) + "\n"


def _table_row(cell: Cell) -> Sequence[str]:
    default = cell.rows[_DEFAULT]
    # Where the search keeps DDP's buckets, those are what one gets.
    auto = default if cell.keeps_buckets else cell.rows[_AUTO]
    caps = [row for name, row in cell.rows.items() if name != _AUTO]
    best = min(caps, key=lambda row: row.backward_s)
    # The best of several in the very rounds that are compared would be the luckiest of them: so
    # compare with the cap that was best in the other half of the rounds, for both halves.
    to_best = []
    for half in (0, 1):
        best_in_half = min(caps, key=lambda row: row.backward_in(half))
        to_best.append(auto.backward_in(1 - half) / best_in_half.backward_in(1 - half))
    worst = max(cell.rows.values(), key=lambda row: abs(row.prediction - 1))
    return (
        cell.model,
        str(cell.num_ranks),
        cell.rate,
        f"{auto.backward_s * 1e3:.0f} ({auto.num_buckets})",
        f"{best.backward_s * 1e3:.0f} ({best.buckets})",
        f"{default.backward_s * 1e3:.0f}",
        f"{statistics.mean(to_best):.3f}",
        f"{auto.backward_s / default.backward_s:.3f}",
        f"{auto.prediction:.2f}",
        f"{worst.prediction:.2f} ({worst.buckets})",
        cell.outcome.partition(":")[0],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return 1 if some model could not be tuned."""
    defaults = {"rates": ["1gbit", FREE], "ranks": 2, "rounds": 3}
    parser = make_parser("benchmarks.overlap.tuning", __doc__, **defaults)
    parser.add_argument("--models", type=split_names, default=["gpt"])
    args = parser.parse_args(arguments)
    for model in args.models:
        find_model(model)
    cells: list[Cell] = []
    with open_session("overlap.tuning", args, arguments) as session:
        for model in args.models:
            session.where = model
            session.set_rate(FREE)
            caches = session.setting.folder / model
            with session.failing(_AUTO), session.open(_AUTO, model, None, caches) as team:
                team.wait_until_ready()
                for rate in args.rates:
                    session.set_rate(rate)
                    cells.append(measure(team, model, rate, session))
                    session.say(f"{model}, {rate}: {cells[-1].outcome}\n{report(cells[-1:])}")
            if session.is_first:
                session.write({"cells": cells}, ["", report(cells)])
        return session.end({})


if __name__ == "__main__":
    sys.exit(main())
