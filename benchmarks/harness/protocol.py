"""What a team (teams.py) and its workers (worker.py) tell each other; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process is to be.

    `cap_mb` is DDP's `bucket_cap_mb`, None for its default; `num_threads` is None for torch's.
    Ranks meet in the file `store`, or if that is empty at torchrun's address, under the name
    `meeting`. `socket` is the inherited one on which requests come. `device` is cpu or cuda.
    """

    peer: str
    model: str
    cap_mb: float | None
    inner: str
    rank: int
    num_ranks: int
    num_threads: int | None
    store: str
    meeting: str
    socket: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step; `iteration_s` is the slowest rank's sum, not the sum of the slowest."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    iteration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """What the first steps cost: `compile_s` is how much longer the first took than later ones."""

    compile_s: float
    step_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a process can tell of its model after some steps.

    `num_sections` counts the compiled pieces of backward that ran in a step, None where autograd
    ran operator by operator or was compiled itself. `num_kernels` counts the different ones that
    Inductor wrote, `num_kernel_calls` the calls of those in C++ in a step.
    """

    num_graphs: int
    num_sections: int | None
    num_kernels: int
    num_kernel_calls: int
    num_recompiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """Seconds after the start of backward at which a bucket got through its life."""

    bucket: int
    num_bytes: int
    ready_s: float
    launched_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One backward, bucket by bucket."""

    backward_s: float
    buckets: tuple[BucketTimes, ...]
