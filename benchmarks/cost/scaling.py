r"""Predicted iterations beside measured ones, of more and more ranks.

    sudo python -m benchmarks.cost.scaling --ranks 2,4,8,16

Ranks are network namespaces joined by links of a given rate. Their computation sleeps, so that as
many of them as there are links can share a few cores, and each takes exactly as long as the profile
says: what is compared is the model of the network and of overlap. Links are equal, or the last
rank's has half the rate; or the last rank computes half as long again.

Each iteration is predicted in three ways: from the rate of the links, as `ddpopt simulate` does;
from what `calibrate` measures in the job; and from what it measured with the fewest ranks, as for a
job that has grown.
"""
# test: skip, it needs root, and takes five minutes

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cost.sleeping import BACKWARD_S, DEPTH, FORWARD_S, WIDTH, Measured
from benchmarks.harness.cluster import Cluster, open_cluster, why_not_emulated
from benchmarks.harness.report import table
from benchmarks.harness.teams import Setting, open_team
from ddpopt import BucketPlan
from ddpopt.planning import AllreduceCost, Gradient, Network, Profile, simulate

_RATE, _HALF_RATE = "100mbit", "50mbit"
_BYTES_PER_S = 100e6 / 8
_LATENCY_S = 1e-4
_SLOWDOWN = 1.5
_NUM_STEPS = 8
_EQUAL, _SLOW_LINK, _SLOW_RANK = "equal", "one slow link", "one slow rank"
_PROFILE = Profile(
    gradients=tuple(
        Gradient(
            name=f"layers.{layer}.weight",
            num_bytes=4 * WIDTH * WIDTH,
            ready_s=BACKWARD_S * (DEPTH - layer),
        )
        for layer in reversed(range(DEPTH))
    ),
    forward_s=FORWARD_S * DEPTH,
    backward_s=BACKWARD_S * DEPTH,
)


def _measure(cluster: Cluster, folder: Path, kind: str) -> Measured:
    """Train on all ranks of a cluster of this kind."""
    setting = Setting(
        inner="aot_eager", num_threads=1, folder=folder, worker="benchmarks.cost.sleeping"
    )
    cluster.set_rate(_RATE)
    if kind == _SLOW_LINK:
        cluster.set_rate_of(cluster.num_ranks - 1, _HALF_RATE)
    with open_team(cluster, setting, "backward", "sleeping", None, folder / "caches") as team:
        team.wait_until_ready()
        measured: Measured = team.ask("measure", _NUM_STEPS, _slowdown(kind))
    return measured


def _slowdown(kind: str) -> float:
    return _SLOWDOWN if kind == _SLOW_RANK else 1.0


def _predict(num_ranks: int, cost: AllreduceCost, kind: str) -> float:
    """Seconds of an iteration with an allreduce of this cost; each layer is a bucket."""
    profile = _PROFILE.slowed(_slowdown(kind))
    plan = BucketPlan(profile=profile, cost=cost, world_size=num_ranks, sizes=(1,) * DEPTH)
    return simulate(plan, world_size=num_ranks).timeline.iteration_s


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost.scaling", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", default="2,4,8,16", help="how many, separated by commas")
    sizes = [int(size) for size in parser.parse_args().ranks.split(",")]
    if reason := why_not_emulated():
        sys.exit(f"no network can be emulated here: {reason}")
    rows, cost_of_fewest = [], {}
    for num_ranks in sizes:
        with tempfile.TemporaryDirectory() as folder, open_cluster(num_ranks) as cluster:
            for kind in (_EQUAL, _SLOW_LINK, _SLOW_RANK):
                measured = _measure(cluster, Path(folder), kind)
                if measured.num_buckets != DEPTH:
                    raise RuntimeError(f"{measured.num_buckets} buckets instead of {DEPTH}")
                # The first steps compile, and replace DDP's first buckets.
                measured_s = statistics.median(measured.iterations_s[3:])
                rate = _BYTES_PER_S / 2 if kind == _SLOW_LINK else _BYTES_PER_S
                links = Network(latency_s=_LATENCY_S, bytes_per_s=rate).allreduce(num_ranks)
                first_cost = cost_of_fewest.setdefault(kind, measured.cost)
                grown = first_cost.extrapolated(sizes[0], num_ranks)
                row = [str(num_ranks), kind, f"{measured_s * 1e3:.0f}"]
                for cost in (links, measured.cost, grown):
                    predicted_s = _predict(num_ranks, cost, kind)
                    row.append(f"{predicted_s * 1e3:.0f} ({predicted_s / measured_s - 1:+.0%})")
                rows.append(row)
                print(" | ".join(row), file=sys.stderr, flush=True)
    header = ("ranks", "links, ranks", "measured, ms", "from links", "from calibrate")
    print("\n".join(table((*header, f"calibrated with {sizes[0]} ranks"), rows)))


if __name__ == "__main__":
    main()
