"""Does a long run hold more and more?

    python -m benchmarks.soak

Two ranks on gloo train a small model for 20,000 steps: shapes alternate, some steps only
accumulate, evaluations come in between, and eight times all is compiled anew (see `worker.py`).
Each peer has processes of its own. What each rank holds is counted 32 times. The verdict compares
medians of the last quarter with those of the second, and ddpopt with the unsplit compile, since
torch itself keeps something of each graph that it compiles. What dropped models leave is tested in
tests/system/test_soak.py.
"""
# test: skip, hours; tests/system/test_soak.py runs a small one

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.cluster import open_cluster
from benchmarks.harness.peers import find_peer
from benchmarks.harness.report import table
from benchmarks.harness.session import names
from benchmarks.harness.teams import Setting, TeamError, open_team
from benchmarks.soak.census import MEASURES, PERIODS_COMPARED, Counts, find_growth, growth_of

_PEERS = ["eager", "nosplit", "forward", "backward"]
_UNSPLIT = "nosplit"
_NUM_COUNTS, _NUM_PERIODS = 32, 8  # so that each quarter has the same places in a period

Series = list[list[Counts]]  # the counts of each rank


def soak(peer: str, num_steps: int) -> Series:
    """Train on two ranks on loopback; raises TeamError if one fails."""
    each = max(1, num_steps // _NUM_COUNTS)
    period = each * _NUM_COUNTS // _NUM_PERIODS
    taken: list[list[Counts]] = []
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--steps", type=int, default=20_000, help="of each peer")
    add("--peers", type=names, default=_PEERS, help="as in benchmarks/harness/peers.py")
    given = parser.parse_args(arguments)
    try:
        lines = report({peer: soak(peer, given.steps) for peer in given.peers})
    except TeamError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return int(any("GROWS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
