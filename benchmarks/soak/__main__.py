"""Does a long run hold more and more? Do models that are dropped leave anything?

    python -m benchmarks.soak
    python -m benchmarks.soak --models 50

Two ranks on gloo train a small model for 20,000 steps: shapes alternate, some steps only
accumulate, evaluations come in between, and eight times all is compiled anew (see `worker.py`).
Each peer has processes of its own. What each rank holds is counted 32 times. The verdict compares
medians of the last quarter with those of the second, and ddpopt with the unsplit compile, since
torch itself keeps something of each graph that it compiles. With `--models`, that many models of
each kind are made, compiled, trained and dropped on both ranks instead.
"""
# test: skip, hours; tests/system/test_soak.py runs a small one

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.cluster import open_cluster
from benchmarks.harness.peers import find_peer
from benchmarks.harness.report import table
from benchmarks.harness.session import names
from benchmarks.harness.teams import Setting, Team, TeamError, open_team
from benchmarks.soak.census import MEASURES, PERIODS_COMPARED, Counts, find_growth, growth_of
from benchmarks.soak.worker import LIVES

_PEERS = ["eager", "nosplit", "forward", "backward"]
_UNSPLIT = "nosplit"
_NUM_COUNTS, _NUM_PERIODS = 32, 8  # so that each quarter has the same places in a period

Series = list[list[Counts]]  # the counts of each rank


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


def soak(peer: str, num_steps: int) -> Series:
    each = max(1, num_steps // _NUM_COUNTS)
    period = each * _NUM_COUNTS // _NUM_PERIODS
    taken: list[list[Counts]] = []
    with _team(peer) as team:
        for _ in range(_NUM_COUNTS):
            taken.append(team.ask("run", each, period))
            print(f"{peer}: {taken[-1][0]}", file=sys.stderr, flush=True)
    return [list(counts) for counts in zip(*taken, strict=True)]


def report(found: Mapping[str, Series]) -> list[str]:
    header = (
        "peer", "rank", "steps", "RSS MiB, 2nd quarter to last", "fds", "threads", "tensors",
        "objects, each time all is compiled", "FX sources, likewise", "verdict",
    )  # fmt: skip
    rows = []
    for peer, by_rank in found.items():
        for rank, series in enumerate(by_rank):
            growth, last = growth_of(series), series[-1]
            held = [f"{growth[name]:+.0f}" for name in MEASURES[1:4]]
            a_compile = [f"{growth[name] / PERIODS_COMPARED:+.0f}" for name in MEASURES[4:]]
            memory = f"{growth['rss_mib']:+.1f} (at {last['rss_mib']:.0f})"
            verdict = "-"
            if find_peer(peer)[0].label.startswith("ddpopt"):
                more = find_growth(series, found[_UNSPLIT][rank] if _UNSPLIT in found else None)
                verdict = f"GROWS: {'; '.join(more)}" if more else "holds no more"
            steps = f"{last['step']:,.0f}"
            rows.append((peer, str(rank), steps, memory, *held, *a_compile, verdict))
    return table(header, rows)


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
        more = found["more"]
        held = [f"{more[name]:+.0f}" for name in ("num_fds", "num_threads", "num_tensors")]
        objects = f"{more['num_objects'] / num_models:+.1f}"
        grown = str(found["grown"] or "none more")
        rows.append((life, str(len(found["left"])), *held, objects, grown))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--steps", type=int, default=20_000, help="of each peer")
    add("--peers", type=names, default=_PEERS, help="as in benchmarks/harness/peers.py")
    add("--models", type=int, help="how many to drop of each kind, in place of it")
    add("--lives", type=names, default=list(LIVES), help="as in benchmarks/soak/worker.py")
    given = parser.parse_args(arguments)
    try:
        if given.models is not None:
            lines = drop_models(given.lives, given.models)
        else:
            lines = report({peer: soak(peer, given.steps) for peer in given.peers})
    except TeamError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return int(any("GROWS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
