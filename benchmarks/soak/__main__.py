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
from benchmarks.harness.session import split_names
from benchmarks.harness.teams import Setting, TeamError, open_team
from benchmarks.soak.census import PERIODS_COMPARED, Counts, find_growth, growth_of

_PEERS = ["eager", "nosplit", "forward", "backward"]
_UNSPLIT = "nosplit"
_NUM_COUNTS, _NUM_PERIODS = 32, 8  # so that each quarter has the same steps of a period

SeriesByRank = list[list[Counts]]  # the counts of each rank, in order


def soak(peer: str, num_steps: int) -> SeriesByRank:
    """Train on two ranks on loopback; raises TeamError if one fails."""
    steps_a_count = max(1, num_steps // _NUM_COUNTS)
    period = steps_a_count * _NUM_COUNTS // _NUM_PERIODS
    counts_of_ranks: list[list[Counts]] = []
    with (
        tempfile.TemporaryDirectory() as folder_name,
        open_cluster(2, is_emulated=False) as cluster,
    ):
        folder = Path(folder_name)
        setting = Setting(
            inner="aot_eager", num_threads=1, folder=folder, worker="benchmarks.soak.worker"
        )
        with open_team(cluster, setting, peer, "soak", None, folder / "caches") as team:
            team.wait_until_ready()
            for _ in range(_NUM_COUNTS):
                counts_of_ranks.append(team.ask("run", steps_a_count, period))
                print(f"{peer}: {counts_of_ranks[-1][0]}", file=sys.stderr, flush=True)
    return [list(series) for series in zip(*counts_of_ranks, strict=True)]


def judge(measured: Mapping[str, SeriesByRank]) -> dict[tuple[str, int], list[str]]:
    """Return what each rank of each of our peers held more and more of; see `find_growth`."""
    growing = {}
    for peer, by_rank in measured.items():
        if find_peer(peer)[0].is_ours:
            for rank, series in enumerate(by_rank):
                unsplit = measured[_UNSPLIT][rank] if _UNSPLIT in measured else None
                growing[peer, rank] = find_growth(series, unsplit)
    return growing


def report(
    measured: Mapping[str, SeriesByRank], growing: Mapping[tuple[str, int], Sequence[str]]
) -> list[str]:
    """Return a table of what was measured, with the verdicts of `judge`."""
    header = (
        "peer", "rank", "steps", "RSS MiB, 2nd quarter to last", "fds", "threads", "tensors",
        "objects, each time all is compiled", "FX sources, likewise", "verdict",
    )  # fmt: skip
    rows = []
    for peer, by_rank in measured.items():
        for rank, series in enumerate(by_rank):
            growth, last = growth_of(series), series[-1]
            handles = [f"{growth[name]:+.0f}" for name in ("num_fds", "num_threads", "num_tensors")]
            a_compile = [
                f"{growth[name] / PERIODS_COMPARED:+.0f}" for name in ("num_objects", "num_sources")
            ]
            memory = f"{growth['rss_mib']:+.1f} (at {last['rss_mib']:.0f})"
            verdict = "-"
            if (peer, rank) in growing:
                more = growing[peer, rank]
                verdict = f"GROWS: {'; '.join(more)}" if more else "holds no more"
            steps = f"{last['step']:,.0f}"
            rows.append((peer, str(rank), steps, memory, *handles, *a_compile, verdict))
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--steps", type=int, default=20_000, help="of each peer")
    add("--peers", type=split_names, default=_PEERS, help="as in benchmarks/harness/peers.py")
    args = parser.parse_args(arguments)
    try:
        measured = {peer: soak(peer, args.steps) for peer in args.peers}
    except TeamError as error:
        print(error, file=sys.stderr)
        return 1
    growing = judge(measured)
    print("\n".join(report(measured, growing)))
    return 1 if any(growing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
