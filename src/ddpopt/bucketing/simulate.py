"""One iteration of a plan on a cluster of any size, stragglers included. Pure and deterministic.

Plans are made in bucket_plan.py, whole grids of clusters are compared in sweep.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass

from ddpopt._text import format_bytes, table
from ddpopt.bucketing.costs import AllreduceCost, Network, Profile
from ddpopt.bucketing.plan import BucketPlan
from ddpopt.bucketing.timeline import BucketTimes, Timeline, predict
from ddpopt.errors import PlanError

_BAR_WIDTH = 24
_ROWS_AT_EACH_END = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Ranks that compute more slowly than the profile says, at random.

    Each rank takes 1 + X times as long for an iteration's computation, with X independent and
    exponential of mean `mean_delay`. Exponential delays on top of a fixed time are the usual model
    of stragglers (Lee, Lam, Pedarsani, Papailiopoulos and Ramchandran, "Speeding up distributed
    machine learning using codes", 2018), and the largest of N has a closed form. Its mean is
    `mean_delay` times 1 + 1/2 + ... + 1/N.

    Raises:
        PlanError: `mean_delay` is negative or not finite.
    """

    mean_delay: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mean_delay < math.inf:
            raise PlanError(f"mean_delay is {self.mean_delay!r}; it must be 0 or more, and finite")

    def slowdown(self, world_size: int) -> float:
        """Return how many times as long the slowest of `world_size` ranks takes.

        One draw whatever `world_size`, by the inverse of the maximum's distribution function,
        (1 - exp(-x / mean))^N (Devroye, "Non-uniform random variate generation", 1986). With one
        seed it grows with `world_size`.
        """
        uniform = max(random.Random(self.seed).random(), 2.0**-53)  # 0 has no logarithm
        return 1 - self.mean_delay * math.log(-math.expm1(math.log(uniform) / world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One iteration of a plan on `world_size` ranks, as predicted.

    `cost` is what an allreduce costs there. `timeline` is that of the slowest rank, whose
    computation takes `slowdown` times as long as the profile says. `basis` says what the numbers
    are from.
    """

    world_size: int
    cost: AllreduceCost
    timeline: Timeline
    slowdown: float
    basis: str

    @property
    def efficiency(self) -> float:
        """Weak scaling: one undisturbed rank's iteration by itself, over this iteration."""
        iteration_s = self.timeline.iteration_s
        return self.timeline.alone_s / self.slowdown / iteration_s if iteration_s else 1.0

    def to_json(self) -> str:
        """Return all numbers as JSON text, with those that follow from others; in seconds."""
        timeline = dataclasses.asdict(self.timeline)
        names = ("num_bytes", "ready_s", "launched_s", "finished_s")
        timeline["buckets"] = [
            dict(zip(names, bucket, strict=True)) for bucket in self.timeline.buckets
        ]
        for name in ("iteration_s", "exposed_s", "bound_s"):
            timeline[name] = getattr(self.timeline, name)
        content = {
            "world_size": self.world_size,
            "cost": dataclasses.asdict(self.cost),
            "slowdown": self.slowdown,
            "basis": self.basis,
            "efficiency": self.efficiency,
            "timeline": timeline,
        }
        return json.dumps(content, indent=1, allow_nan=False)

    def __str__(self) -> str:
        timeline = self.timeline
        ms_per_mib = self.cost.s_per_mib * 1e3
        slowest = f", slowest rank {self.slowdown:.2f} x" if self.slowdown > 1 else ""
        lines = [
            f"{self.world_size} ranks: iteration {timeline.iteration_s * 1e3:.1f} ms, "
            f"efficiency {self.efficiency:.1%}{slowest}",
            f"  computation {timeline.alone_s * 1e3:.1f} ms, communication "
            f"{timeline.communication_s * 1e3:.1f}, exposed {timeline.exposed_s * 1e3:.1f}, "
            f"bound {timeline.bound_s * 1e3:.1f}",
            f"  an allreduce takes {self.cost.startup_s * 1e3:.3f} ms and "
            f"{ms_per_mib:.3f} ms per MiB",
            f"  {self.basis}",
            "",
        ]
        header = ("bucket", "size", "ready ms", "launch", "finish", "- waits, = runs")
        rows = [self._row(index, bucket) for index, bucket in enumerate(timeline.buckets)]
        num_hidden = len(rows) - 2 * _ROWS_AT_EACH_END
        if num_hidden > 1:
            gap = ("...", "", "", "", "", f"{num_hidden} more")
            rows = [*rows[:_ROWS_AT_EACH_END], gap, *rows[-_ROWS_AT_EACH_END:]]
        return "\n".join([*lines, *table(header, rows)])

    def _row(self, index: int, bucket: BucketTimes) -> tuple[str, ...]:
        times = (bucket.ready_s, bucket.launched_s, bucket.finished_s)
        whole_s = self.timeline.backward_s or 1.0
        # The part first: the width over a tiny time would be infinite.
        ready, launched, finished = (math.floor(_BAR_WIDTH * (time / whole_s)) for time in times)
        runs = max(1, finished - launched)
        bar = " " * ready + "-" * (launched - ready) + "=" * runs
        return (f"{index}", format_bytes(bucket.num_bytes), *(f"{t * 1e3:.1f}" for t in times), bar)


def simulate(
    plan: BucketPlan,
    *,
    world_size: int,
    network: Network | AllreduceCost | None = None,
    stragglers: Stragglers | None = None,
) -> Simulation:
    """Return one iteration of `plan` on a cluster of `world_size` ranks.

    Without a network it is the one that the plan's cost implies for a ring with one rank a node;
    an `AllreduceCost` is used as it is, whatever `world_size`. A bucket is ready when its last
    gradient is ready on the slowest of the ranks.

    Raises:
        PlanError: `world_size` is no whole number above 0, or no network follows from the plan.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise PlanError(f"world_size is {world_size!r}; it must be a whole number, 1 or more")
    cost, origin = _cost(plan, world_size, network)
    slowdown = stragglers.slowdown(world_size) if stragglers else 1.0
    profile = _slowed(plan.profile, slowdown) if stragglers else plan.profile
    return Simulation(
        world_size=world_size,
        cost=cost,
        timeline=predict(profile, plan.sizes, cost),
        slowdown=slowdown,
        basis=f"computation: {profile.source}; allreduce: {origin}",
    )


def _cost(
    plan: BucketPlan, world_size: int, network: Network | AllreduceCost | None
) -> tuple[AllreduceCost, str]:
    if isinstance(network, AllreduceCost):
        return network, "as given"
    if network is not None:
        return network.allreduce(world_size), f"{network.algorithm}, computed from given links"
    if world_size == plan.world_size:
        return plan.cost, "the plan's"
    implied = Network.of_ring(plan.cost, plan.world_size)
    return implied.allreduce(world_size), f"ring, extrapolated from {plan.world_size} ranks"


def _slowed(profile: Profile, factor: float) -> Profile:
    """Return the profile of a rank that takes `factor` times as long."""
    gradients = tuple(
        dataclasses.replace(gradient, ready_s=gradient.ready_s * factor)
        for gradient in profile.gradients
    )
    names = ("backward_s", "forward_s", "between_s", "cut_s", "after_s")
    times = {name: getattr(profile, name) * factor for name in names}
    return dataclasses.replace(profile, gradients=gradients, **times)
