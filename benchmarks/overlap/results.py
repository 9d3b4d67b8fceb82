"""What a run of `benchmarks.overlap` found out, as it is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.harness.protocol import Timeline
from benchmarks.harness.tables import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One peer in one cell; seconds, each round's median.

    `alone_s` is an iteration without communication, `exposed_s` what an iteration takes longer
    than that. Ratios are those of the rounds, None where the other peer is not measured:
    throughputs to eager's and the in-tree optimizer's, and the time of backward to the latter's.
    `over_bound` is by how much of the bound an iteration is longer.
    """

    iteration_s: Spread
    forward_s: Spread
    backward_s: Spread
    optimizer_s: Spread
    alone_s: Spread
    exposed_s: Spread
    throughput_of_eager: Spread | None
    throughput_of_intree: Spread | None
    backward_of_intree: Spread | None
    over_bound: float
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What no peer can beat.

    `compute_s` is the best iteration without communication, that of `compute_peer`.
    `communication_s` is how long buckets of the same sizes take to be reduced with nothing to
    compute, at `megabits_per_s` sent by each rank.
    """

    compute_s: float
    compute_peer: str
    communication_s: float
    megabits_per_s: float
    num_buckets: int
    num_bytes: int

    @property
    def bound_s(self) -> float:
        """Perfect overlap."""
        return max(self.compute_s, self.communication_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model, cap and rate; a round has `num_steps` timed steps of each peer."""

    model: str
    cap: str
    rate: str
    num_rounds: int
    num_steps: int
    bounds: Bounds
    peers: dict[str, Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What compiling one model for one cap did: fresh processes, with empty and filled caches."""

    model: str
    cap: str
    peer: str
    cold_s: float
    warm_s: float
    num_graphs: int
    num_sections: int | None
    num_kernels: int
    num_kernel_calls: int
    num_recompiles: int
    num_buckets: int
    peak_mb: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A peer that could not be measured (any further)."""

    model: str
    cap: str
    peer: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All of it."""

    command: str
    date: str
    versions: str
    machine: str
    network: str
    inner: str
    cells: list[Cell] = field(default_factory=list)
    compilations: list[Compilation] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
