"""Simulate a plan on other clusters: one iteration, or efficiencies over a grid of clusters.

Pure and deterministic, stragglers included. Plans are made in plan.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpopt._text import count, format_ms, quote, table
from ddpopt._values import RANKS, Limits, check_kind, check_number
from ddpopt.errors import PlanError
from ddpopt.planning.costs import AllreduceCost, Network, describe_extrapolation
from ddpopt.planning.merging import buckets_of_caps
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, BucketPlan, plan_buckets
from ddpopt.planning.timeline import BucketTimes, Timeline, bucket_table, predict

_BAR_WIDTH = 24
_ROWS_AT_EACH_END = 10
# Named as in Linux's tc(8): powers of 1000, in bits.
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SAME = 1e-4  # of efficiency: plans closer than this are equally good


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Ranks that compute more slowly than the profile says, at random.

    Each rank takes 1 + X times as long for an iteration's computation, where X is independent and
    exponential with mean `mean_delay`; docs/simulation.md has the reasons and the sources.

    Raises:
        PlanError: `mean_delay` is negative or not finite.
    """

    mean_delay: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("mean_delay", self.mean_delay, Limits(at_least=0), PlanError)
        check_number("seed", self.seed, Limits(is_whole=True), PlanError)

    def slowdown(self, world_size: int) -> float:
        """Return how many times as long the slowest of `world_size` ranks takes.

        It draws once for any `world_size`, by the inverse of the maximum's distribution function,
        (1 - exp(-x / mean))^N. For a fixed seed it grows with `world_size`.
        """
        uniform = max(random.Random(self.seed).random(), 2.0**-53)  # 0 has no logarithm
        return 1 - self.mean_delay * math.log(-math.expm1(math.log(uniform) / world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The predicted iteration of a plan on `world_size` ranks.

    `cost` is what an allreduce costs there. `timeline` is that of the slowest rank, whose
    computation takes `slowdown` times as long as the profile says. `basis` says where the numbers
    come from.
    """

    world_size: int
    cost: AllreduceCost
    timeline: Timeline
    slowdown: float
    basis: str

    @property
    def efficiency(self) -> float:
        """Weak scaling: the iteration of one undisturbed rank alone, divided by this iteration."""
        iteration_s = self.timeline.iteration_s
        return self.timeline.alone_s / self.slowdown / iteration_s if iteration_s else 1.0

    def to_json(self) -> str:
        """Return all numbers, derived ones included, as JSON text; times are in seconds."""
        content = dataclasses.asdict(self) | {"efficiency": self.efficiency}
        for name in ("iteration_s", "exposed_s"):
            content["timeline"][name] = getattr(self.timeline, name)
        return json.dumps(content, indent=1, allow_nan=False)

    def __str__(self) -> str:
        timeline = self.timeline
        slowest = f", slowest rank {self.slowdown:.2f} x" if self.slowdown > 1 else ""
        bars = map(self._bar, timeline.buckets)
        rows = _without_middle(bucket_table(timeline.buckets, "- waits, = runs", bars))
        return "\n".join(
            [
                f"{count(self.world_size, 'rank')}: "
                f"iteration {format_ms(timeline.iteration_s)} ms, "
                f"efficiency {self.efficiency:.1%}{slowest}",
                "  efficiency: the iteration of one rank alone, divided by this one",
                f"  computation {format_ms(timeline.alone_s)} ms, all allreduces "
                f"{format_ms(timeline.communication_s)}, waiting for them "
                f"{format_ms(timeline.exposed_s)}",
                f"  whatever the buckets, an iteration takes {format_ms(timeline.bound_s)} or more",
                f"  an allreduce takes {self.cost.startup_s * 1e3:.3f} ms to start and "
                f"{self.cost.s_per_mib * 1e3:.3f} ms for each MiB",
                f"  {self.basis}",
                "",
                *rows,
            ]
        )

    def _bar(self, bucket: BucketTimes) -> str:
        whole_s = self.timeline.backward_s or 1.0
        times = (bucket.ready_s, bucket.launched_s, bucket.finished_s or 0.0)
        # Divide first: the width divided by a tiny time would be infinite.
        ready, launched, finished = (math.floor(_BAR_WIDTH * (time / whole_s)) for time in times)
        return " " * ready + "-" * (launched - ready) + "=" * max(1, finished - launched)


def _without_middle(rows: list[str]) -> list[str]:
    middle = slice(1 + _ROWS_AT_EACH_END, -_ROWS_AT_EACH_END)
    if len(rows[middle]) > 1:
        rows[middle] = [f"  ... {len(rows[middle])} more"]
    return rows


def simulate(
    plan: BucketPlan,
    *,
    world_size: int,
    network: Network | AllreduceCost | None = None,
    stragglers: Stragglers | None = None,
) -> Simulation:
    """Predict one iteration of `plan` on a cluster of `world_size` ranks.

    What an allreduce costs there follows from `network`, or from the plan's cost, as in
    `BucketPlan.for_ranks`. A bucket is ready when its last gradient is ready on the slowest rank.

    Raises:
        PlanError: `world_size` is not a positive whole number, or no network follows from the plan.
    """
    check_kind("plan", plan, BucketPlan, "give what ddpopt.plan returned", PlanError)
    check_number("world_size", world_size, RANKS, PlanError)
    if network is not None:
        remedy = "give a ddpopt.planning.Network, or what calibrate returned"
        check_kind("network", network, (Network, AllreduceCost), remedy, PlanError)
    if stragglers is not None:
        check_kind("stragglers", stragglers, Stragglers, "give a Stragglers", PlanError)
    cost, origin = _cost(plan, world_size, network)
    slowdown = stragglers.slowdown(world_size) if stragglers else 1.0
    return Simulation(
        world_size=world_size,
        cost=cost,
        timeline=predict(plan.profile.slowed(slowdown), plan.sizes, cost),
        slowdown=slowdown,
        basis=f"computation: {plan.profile.source}; allreduce: {origin}",
    )


def _cost(
    plan: BucketPlan, world_size: int, network: Network | AllreduceCost | None
) -> tuple[AllreduceCost, str]:
    """The cost of an allreduce among `world_size` ranks, and its origin, as text.

    See `BucketPlan.for_ranks`.
    """
    if isinstance(network, AllreduceCost):
        return network, "as given"
    if network is not None:
        return network.allreduce(world_size), f"{network.algorithm}, computed from given links"
    # The text is by the ranks whose cost was measured: the plan's own may be extrapolated from it.
    extrapolation = describe_extrapolation(plan.basis_ranks, world_size)
    cost = plan.cost.extrapolated(plan.world_size, world_size)
    return cost, f"ring, {extrapolation}" if extrapolation else "as in the plan"


@dataclass(frozen=True, slots=True)
class Cell:
    """Efficiencies on one cluster: of the saved plan, DDP's default buckets, a plan made for it.

    `num_buckets` is that of the plan made for it.
    """

    world_size: int
    bytes_per_s: float
    saved: float
    default: float
    replanned: float
    num_buckets: int

    @property
    def best(self) -> str:
        """The best of the three; among equally good ones, the one that takes the least effort."""
        efficiency = {"saved": self.saved, "default": self.default, "replanned": self.replanned}
        enough = max(efficiency.values()) - _SAME
        return next(name for name, value in efficiency.items() if value >= enough)


def sweep(
    plan: BucketPlan,
    world_sizes: Sequence[int],
    bandwidths: Sequence[float],
    network: Network,
    stragglers: Stragglers | None = None,
) -> list[Cell]:
    """A cell for each world size and each bandwidth of `network`'s nodes, in bytes/s.

    It has the efficiencies of `plan`, of DDP's default buckets, and of a plan for that very
    cluster, which is made without regard to stragglers.

    Raises:
        PlanError: a world size or a bandwidth is out of range.
    """
    check_kind("plan", plan, BucketPlan, "give what ddpopt.plan returned", PlanError)
    check_kind("network", network, Network, "give a ddpopt.planning.Network", PlanError)
    default = dataclasses.replace(plan, sizes=buckets_of_caps(plan.profile, DDP_DEFAULT_CAPS))
    cells = []
    for world_size, bytes_per_s in itertools.product(world_sizes, bandwidths):
        links = dataclasses.replace(network, bytes_per_s=bytes_per_s)
        cost = links.allreduce(world_size)
        replanned = plan_buckets(plan.profile, cost, world_size)
        of_plan, of_default, of_replanned = (
            simulate(each, world_size=world_size, network=links, stragglers=stragglers).efficiency
            for each in (plan, default, replanned)
        )
        num_buckets = len(replanned.buckets)
        cells.append(Cell(world_size, bytes_per_s, of_plan, of_default, of_replanned, num_buckets))
    return cells


def render(cells: Sequence[Cell]) -> str:
    """What `sweep` returned, as a table with a row for each cluster."""
    header = ("ranks", "bandwidth", "saved", "default", "replanned", "buckets", "best")
    rows = [
        (
            f"{cell.world_size}",
            format_bandwidth(cell.bytes_per_s),
            *(f"{efficiency:.1%}" for efficiency in (cell.saved, cell.default, cell.replanned)),
            *(f"{cell.num_buckets}", cell.best),
        )
        for cell in cells
    ]
    return "\n".join(table(header, rows))


def parse_bandwidth(text: str) -> float:
    """A rate such as `10gbit`, written as for `tc`, in bytes per second.

    Units are bit, kbit, mbit, gbit and tbit, also as in `10Gbps` or `10 Gb/s`: bits, as people who
    speak of networks mean it (tc itself takes `bps` for bytes). A bare number is refused, and so is
    `GB/s`, in bytes.

    Raises:
        PlanError: the text is no such rate, or the rate is 0.
    """
    found = re.fullmatch(
        r"(\d+\.?\d*|\.\d+)\s*([kmgt]?)(?:(?i:bits?(?:/s|ps)?)|b(?:/s|ps))",
        re.sub("[KMGT]", lambda unit: unit[0].lower(), text.strip()),
    )
    if found is None or not float(found[1]):
        raise PlanError(
            f"the bandwidth is {quote(text)}; give a number above 0 and one of the units "
            f"{', '.join(_BITS_PER_S)} (bits per second), such as 10gbit"
        )
    return float(found[1]) * _BITS_PER_S[f"{found[2]}bit"] / 8


def format_bandwidth(bytes_per_s: float) -> str:
    """A rate in the largest unit in which it is 1 or more."""
    bits_per_s = bytes_per_s * 8
    fitting = [unit for unit, scale in _BITS_PER_S.items() if bits_per_s >= scale]
    unit = fitting[-1] if fitting else "bit"
    return f"{bits_per_s / _BITS_PER_S[unit]:g}{unit}"
