"""Does a long run hold more and more? Do models that are dropped leave anything?

    python -m benchmarks.soak
    python -m benchmarks.soak --models 50

Two ranks on gloo train a small model for 20,000 steps: shapes alternate, some steps only
accumulate, evaluations come in between, and eight times all is compiled anew (see
`worker.py`). Each peer has processes of its own: eager DDP, torch's compile of one graph, and
ddpopt with both splits. What each rank holds is counted 32 times. The verdict compares medians of
the last quarter with those of the second, and ddpopt with the unsplit compile, since torch itself
keeps something of each graph that it compiles. With `--models`, that many models of each kind (see
`models.py`) are made, compiled, trained and dropped on both ranks instead.
"""
# test: skip, hours; tests/system/test_soak.py runs a small one

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.cluster import open_cluster
from benchmarks.harness.peers import find_peer
from benchmarks.harness.teams import Setting, TeamError, open_team
from benchmarks.soak.census import PERIODS_COMPARED, Counts, find_growth, growth_of
from benchmarks.soak.models import LIVES

_PEERS = "eager,nosplit,forward,backward"
_OWN_NAME, _UNSPLIT = "ddpopt", "nosplit"
_NUM_COUNTS, _NUM_PERIODS = 32, 8  # so that each quarter has the same places in a period
_ROWS_SHOWN = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One peer's: for each rank its counts, `took_s` for all, what grew on rank 0."""

    peer: str
    inner: str
    series: tuple[tuple[Counts, ...], ...]
    grown: tuple[str, ...]
    took_s: float


def soak(peer: str, inner: str, num_steps: int, folder: Path) -> Run:
    """Train; raises TeamError if a rank fails."""
    began_s = time.monotonic()
    each = max(1, num_steps // _NUM_COUNTS)
    period = each * _NUM_COUNTS // _NUM_PERIODS
    taken: list[list[Counts]] = []
    with open_cluster(2, is_emulated=False) as cluster:
        setting = Setting(
            inner=inner, num_threads=1, folder=folder, worker="benchmarks.soak.worker"
        )
        with open_team(cluster, setting, peer, "soak", None, folder / "caches") as team:
            team.wait_until_ready()
            for number in range(1, _NUM_COUNTS + 1):
                taken.append(team.ask("run", each, period))
                if number == _NUM_COUNTS // 4:
                    team.ask("begin")
                print(f"{peer}: {taken[-1][0]}", file=sys.stderr, flush=True)
            grown = team.ask("grown")
    return Run(
        peer=peer,
        inner=inner,
        series=tuple(tuple(counts) for counts in zip(*taken, strict=True)),
        grown=tuple(grown[:_ROWS_SHOWN]),
        took_s=time.monotonic() - began_s,
    )


def drop_models(lives: Sequence[str], num_models: int, folder: Path) -> str:
    """Have models live and die, each kind in processes of its own; return a table of what is left.

    Raises TeamError if a rank fails.
    """
    lines = [
        "| what the models went through | weak references alive | fds | threads | tensors "
        "| objects a model | entries in ddpopt's registries |",
        "|---|---|---|---|---|---|---|",
    ]
    setting = Setting(
        inner="aot_eager", num_threads=1, folder=folder, worker="benchmarks.soak.worker"
    )
    for life in lives:
        peer = _UNSPLIT if life == "aot_eager" else "eager"
        with (
            open_cluster(2, is_emulated=False) as cluster,
            open_team(cluster, setting, peer, "soak", None, folder / "caches") as team,
        ):
            team.wait_until_ready()
            found = team.ask("live", life, num_models)
        grown = found["grown"]
        lines.append(
            f"| {life} | {len(found['left'])} | {grown['num_fds']:+.0f} | "
            f"{grown['num_threads']:+.0f} | {grown['num_tensors']:+.0f} | "
            f"{grown['num_objects'] / num_models:+.1f} | {found['registries'] or 'none more'} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


# ---- the report -------------------------------------------------------------------------------


def report(runs: Sequence[Run]) -> str:
    """Return the tables and the verdict, in Markdown."""
    return "\n".join([*_growth_table(runs), "", *_verdicts(runs), "", *_series_table(runs)])


def _growth_table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| peer | inner | rank | steps | RSS MiB, 2nd quarter to last | fds | threads | tensors "
        "| objects, each time all is compiled | FX sources, likewise |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        for rank, series in enumerate(run.series):
            growth = growth_of(series)
            objects, sources = (
                growth[name] / PERIODS_COMPARED for name in ("num_objects", "num_sources")
            )
            lines.append(
                f"| {run.peer} | {run.inner} | {rank} | {series[-1]['step']:,.0f} | "
                f"{growth['rss_mib']:+.1f} (at {series[-1]['rss_mib']:.0f}) | "
                f"{growth['num_fds']:+.0f} | {growth['num_threads']:+.0f} | "
                f"{growth['num_tensors']:+.0f} | {objects:+.0f} | {sources:+.0f} |"
            )
    return lines


def _verdicts(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in runs:
        if not is_own(run.peer):
            continue
        for rank, series in enumerate(run.series):
            found = find_growth(series, _unsplit_series(runs, run.inner, rank))
            verdict = f"GROWS: {'; '.join(found)}" if found else "holds no more than at the start"
            lines.append(f"- {run.peer} ({run.inner}), rank {rank}: {verdict}")
    return lines


def is_own(peer: str) -> bool:
    """Whether a peer is ddpopt with some options."""
    return find_peer(peer)[0].description.startswith(_OWN_NAME)


def _unsplit_series(runs: Sequence[Run], inner: str, rank: int) -> Sequence[Counts] | None:
    found = (run.series[rank] for run in runs if (run.peer, run.inner) == (_UNSPLIT, inner))
    return next(found, None)


def _series_table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| peer (rank 0) | step | RSS MiB | fds | threads | tensors | objects | FX sources |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        series = run.series[0]
        distance = max(1, (len(series) - 1) // (_ROWS_SHOWN - 1))
        for counts in series[::-distance][::-1]:
            numbers = (f"{counts[name]:,.0f}" for name in _COLUMNS)
            lines.append(f"| {run.peer} | " + " | ".join(numbers) + " |")
    return lines


_COLUMNS = (
    "step",
    "rss_mib",
    "num_fds",
    "num_threads",
    "num_tensors",
    "num_objects",
    "num_sources",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print, and return 1 if ddpopt grew."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=20_000, help="of each peer")
    parser.add_argument("--peers", default=_PEERS, help="as in benchmarks/harness/peers.py")
    parser.add_argument("--inner", default="aot_eager", help="what compiles")
    parser.add_argument("--json", type=Path, help="a file for the counts; added to if it is there")
    parser.add_argument("--models", type=int, help="how many to drop of each kind, in place of it")
    parser.add_argument("--lives", default=",".join(LIVES), help="as in benchmarks/soak/models.py")
    given = parser.parse_args(arguments)
    runs = _kept(given.json)
    with tempfile.TemporaryDirectory() as folder:
        if given.models is not None:
            print(drop_models(given.lives.split(","), given.models, Path(folder)))
            return 0
        for peer in given.peers.split(","):
            try:
                runs.append(soak(peer, given.inner, given.steps, Path(folder)))
            except TeamError as error:
                print(error, file=sys.stderr)
                return 1
            if given.json is not None:
                given.json.write_text(json.dumps([asdict(run) for run in runs]))
    print(report(runs))
    return int("GROWS" in report(runs))


def _kept(file: Path | None) -> list[Run]:
    if file is None or not file.exists():
        return []
    return [Run(**run) for run in json.loads(file.read_text())]


if __name__ == "__main__":
    sys.exit(main())
