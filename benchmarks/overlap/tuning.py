"""Is `buckets="auto"` as good as the best cap, and are its predictions right?

    python -m benchmarks.overlap.tuning --models gpt,bert --rates 1gbit,free

One model is compiled once, in sections finer than any bucket. For each rate it is tuned; then its
buckets are changed in turns, by every cap and by the plan, and each is measured. See
benchmarks/README.md.
"""
# test: skip, minutes; tests/system/test_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.cluster import FREE, open_cluster
from benchmarks.harness.models import find_model
from benchmarks.harness.teams import Setting, Team, TeamError, open_team
from ddpopt.bucketing.plan import DDP_DEFAULT_CAPS, BucketPlan

_MIB = 1024 * 1024
_CAPS_MB = (0.5, 1, 4, 8, 16, 1000)
_TUNING_STEPS = 40  # at most
_NUM_STEPS = 2
_AUTO, _DEFAULT = "auto", "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One choice of buckets: each round's times, and what was predicted of both."""

    buckets: str
    num_buckets: int
    iterations_s: tuple[float, ...]
    backwards_s: tuple[float, ...]
    predicted_iteration_s: float
    predicted_backward_s: float

    @property
    def backward_s(self) -> float:
        """Median over all rounds."""
        return statistics.median(self.backwards_s)

    def backward_in(self, half: int) -> float:
        """Median over the even (0) or the odd (1) rounds; over all where there is but one."""
        return statistics.median(self.backwards_s[half::2] or self.backwards_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All choices for one model at one rate."""

    model: str
    rate: str
    num_ranks: int
    outcome: str
    rows: tuple[Row, ...]


def measure(team: Team, model: str, rate: str, num_ranks: int, num_rounds: int) -> Cell:
    """Tune, and measure all choices in turns."""
    tuned = json.loads(team.tune(_TUNING_STEPS))
    if "plan" not in tuned:
        raise TeamError(f"{model} at {rate} was not tuned: {tuned['outcome']}")
    choices: dict[str, tuple[int, ...]] = {
        _AUTO: (),
        _DEFAULT: DDP_DEFAULT_CAPS,
        **{f"{cap:g} MB": (int(cap * _MIB),) for cap in _CAPS_MB},
    }
    plans: dict[str, BucketPlan] = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in choices}
    for _ in range(num_rounds):
        for name, caps in choices.items():
            plans[name] = BucketPlan.from_json(team.use_caps(caps))
            steps = team.steps(0, _NUM_STEPS)
            times[name].append(
                (
                    statistics.median(step.iteration_s for step in steps),
                    statistics.median(step.backward_s for step in steps),
                )
            )
    rows = []
    for name, plan in plans.items():
        timeline = plan.timeline()
        iterations_s, backwards_s = zip(*times[name], strict=True)
        rows.append(
            Row(
                buckets=name,
                num_buckets=len(plan.buckets),
                iterations_s=iterations_s,
                backwards_s=backwards_s,
                predicted_iteration_s=timeline.iteration_s,
                predicted_backward_s=timeline.backward_s,
            )
        )
    return Cell(
        model=model, rate=rate, num_ranks=num_ranks, outcome=tuned["outcome"], rows=tuple(rows)
    )


def report(cells: Sequence[Cell]) -> str:
    """Return all cells as Markdown."""
    lines = [
        "| model | ranks | rate | auto, backward ms | best cap | default | auto / best cap "
        "| auto / default | predicted / measured backward: auto | all, worst | decision |",
        "| --- | --: | --- | --: | --- | --: | --: | --: | --: | --: | --- |",
    ]
    for cell in cells:
        rows = {row.buckets: row for row in cell.rows}
        auto, default = rows[_AUTO], rows[_DEFAULT]
        # Where it stays with DDP's buckets, those are what one gets.
        if cell.outcome.startswith("buckets stay"):
            auto = default
        caps = [row for name, row in rows.items() if name != _AUTO]
        best = min(caps, key=lambda row: row.backward_s)
        ratios = {name: row.predicted_backward_s / row.backward_s for name, row in rows.items()}
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
        lines.append(
            f"| {cell.model} | {cell.num_ranks} | {cell.rate} | {_ms(auto)} ({auto.num_buckets}) "
            f"| {_ms(best)} ({best.buckets}) | {_ms(default)} "
            f"| {_to_best(auto, caps):.3f} "
            f"| {auto.backward_s / default.backward_s:.3f} | {ratios[auto.buckets]:.2f} "
            f"| {ratios[worst]:.2f} ({worst}) | {cell.outcome.partition(':')[0]} |"
        )
    return "\n".join(lines) + "\n"


def _to_best(auto: Row, caps: Sequence[Row]) -> float:
    """Compare with the cap that was best in the other half of the rounds, for both halves.

    The best of several in the very rounds that are compared would be the luckiest of them.
    """
    ratios = []
    for half in (0, 1):
        best = min(caps, key=lambda row: row.backward_in(half))
        ratios.append(auto.backward_in(1 - half) / best.backward_in(1 - half))
    return statistics.mean(ratios)


def _ms(row: Row) -> str:
    return f"{row.backward_s * 1e3:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 if something could not be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap.tuning", description=__doc__
    )
    parser.add_argument("--models", default="gpt")
    parser.add_argument("--rates", default="1gbit,free")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args(arguments)
    models, rates = args.models.split(","), args.rates.split(",")
    for model in models:
        find_model(model)
    args.output.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    is_good = True
    with (
        tempfile.TemporaryDirectory(prefix="ddpopt-benchmark-") as folder,
        open_cluster(args.ranks, is_emulated=True) as cluster,
    ):
        setting = Setting(inner=args.inner, num_threads=1, folder=Path(folder))
        print(cluster.description)
        for model in models:
            cluster.set_rate(FREE)
            caches = Path(folder) / model
            try:
                with open_team(cluster, setting, "auto", model, None, caches) as team:
                    team.wait_until_ready()
                    for rate in rates:
                        cluster.set_rate(rate)
                        cell = measure(team, model, rate, args.ranks, args.rounds)
                        cells.append(cell)
                        print(f"{model}, {rate}: {cell.outcome}", flush=True)
                        print(report([cell]), flush=True)
            except TeamError as error:
                is_good = False
                print(error, flush=True)
            content = [asdict(cell) for cell in cells]
            (args.output / "tuning.json").write_text(json.dumps(content, indent=1))
            (args.output / "tuning.md").write_text(report(cells))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
