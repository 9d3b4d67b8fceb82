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
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.cluster import open_cluster
from benchmarks.harness.peers import find_peer
from benchmarks.harness.report import table
from benchmarks.harness.session import names
from benchmarks.harness.teams import Setting, Team, TeamError, open_team
from benchmarks.soak.census import MEASURES, PERIODS_COMPARED, Counts, find_growth, growth_of
from benchmarks.soak.models import LIVES

_PEERS = ["eager", "nosplit", "forward", "backward"]
_OWN_NAME, _UNSPLIT = "ddpopt", "nosplit"
_NUM_COUNTS, _NUM_PERIODS = 32, 8  # so that each quarter has the same places in a period


class Run(NamedTuple):
    """One peer's: for each rank its counts."""

    peer: str
    series: tuple[tuple[Counts, ...], ...]


@contextlib.contextmanager
def _team(peer: str) -> Iterator[Team]:
    """Start two ranks on loopback; raises TeamError if one fails."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_cluster(2, is_emulated=False) as cluster,
    ):
        place = Path(folder)
        setting = Setting(
            inner="aot_eager", num_threads=1, folder=place, worker="benchmarks.soak.worker"
        )
        with open_team(cluster, setting, peer, "soak", None, place / "caches") as team:
            team.wait_until_ready()
            yield team


def soak(peer: str, num_steps: int) -> Run:
    each = max(1, num_steps // _NUM_COUNTS)
    period = each * _NUM_COUNTS // _NUM_PERIODS
    taken: list[list[Counts]] = []
    with _team(peer) as team:
        for _ in range(_NUM_COUNTS):
            taken.append(team.ask("run", each, period))
            _tell(f"{peer}: {taken[-1][0]}")
    return Run(peer, tuple(tuple(counts) for counts in zip(*taken, strict=True)))


def drop_models(lives: Sequence[str], num_models: int) -> list[str]:
    """Have models live and die, each kind in processes of its own; return a table of what is left.

    Raises TeamError if a rank fails.
    """
    header = (
        "what the models went through", "weak references alive", "fds", "threads", "tensors",
        "objects a model", "entries in ddpopt's registries",
    )  # fmt: skip
    rows = []
    for life in lives:
        with _team(_UNSPLIT if life == "aot_eager" else "eager") as team:
            found = team.ask("live", life, num_models)
        grown = found["grown"]
        held = [f"{grown[name]:+.0f}" for name in ("num_fds", "num_threads", "num_tensors")]
        objects = f"{grown['num_objects'] / num_models:+.1f}"
        registries = str(found["registries"] or "none more")
        rows.append((life, str(len(found["left"])), *held, objects, registries))
        _tell(" | ".join(rows[-1]))
    return table(header, rows)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the report -------------------------------------------------------------------------------


def report(runs: Sequence[Run]) -> str:
    return "\n".join([*_growth_table(runs), "", *_verdicts(runs)])


def _growth_table(runs: Sequence[Run]) -> list[str]:
    header = (
        "peer", "rank", "steps", "RSS MiB, 2nd quarter to last", "fds", "threads", "tensors",
        "objects, each time all is compiled", "FX sources, likewise",
    )  # fmt: skip
    rows = []
    for run in runs:
        for rank, series in enumerate(run.series):
            growth, last = growth_of(series), series[-1]
            held = [f"{growth[name]:+.0f}" for name in MEASURES[1:4]]
            a_compile = [f"{growth[name] / PERIODS_COMPARED:+.0f}" for name in MEASURES[4:]]
            memory = f"{growth['rss_mib']:+.1f} (at {last['rss_mib']:.0f})"
            rows.append((run.peer, str(rank), f"{last['step']:,.0f}", memory, *held, *a_compile))
    return table(header, rows)


def _verdicts(runs: Sequence[Run]) -> list[str]:
    unsplit: Any = next((run.series for run in runs if run.peer == _UNSPLIT), None)
    lines = []
    for run in runs:
        if not find_peer(run.peer)[0].description.startswith(_OWN_NAME):
            continue
        for rank, series in enumerate(run.series):
            found = find_growth(series, unsplit[rank] if unsplit else None)
            verdict = f"GROWS: {'; '.join(found)}" if found else "holds no more than at the start"
            lines.append(f"- {run.peer}, rank {rank}: {verdict}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--steps", type=int, default=20_000, help="of each peer")
    add("--peers", type=names, default=_PEERS, help="as in benchmarks/harness/peers.py")
    add("--models", type=int, help="how many to drop of each kind, in place of it")
    add("--lives", type=names, default=list(LIVES), help="as in benchmarks/soak/models.py")
    given = parser.parse_args(arguments)
    try:
        if given.models is not None:
            print("\n".join(drop_models(given.lives, given.models)))
            return 0
        found = report([soak(peer, given.steps) for peer in given.peers])
    except TeamError as error:
        print(error, file=sys.stderr)
        return 1
    print(found)
    return int("GROWS" in found)


if __name__ == "__main__":
    sys.exit(main())
