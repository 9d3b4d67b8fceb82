"""`metrics`: numbers about a DDP model's steps, for a logger to read in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt.errors import Reason
from ddpopt.planning import rebucket, tuner
from ddpopt.split import state
from ddpopt.steps.clock import IterationClock
from ddpopt.steps.forwards import subscribe, watch_forwards

ReadMetrics = Callable[[], dict[str, float]]


def metrics(model: torch.nn.Module) -> dict[str, float]:
    """Return numbers by dotted name, units included; cheap enough for every step.

    `ddpopt.step.ms` is the last step's time, from one forward that communicates to the next, known
    from the second step after the first call. Other times are those that DDP measures in the first
    ten steps and in every hundredth, `ddpopt.sampled_step`: forward, backward with its wait for
    allreduces, communication from the first launch to the last end, and the part of it that was
    exposed, that is, for which backward waited. The bus bandwidth is what each rank's link carries
    if allreduces are rings: 2 (n - 1) / n times the bytes, on n ranks (as NCCL's tests define it).
    `ddpopt.recompiles` counts all compiles of a frame but the first with gradients, and the
    first without, as in evaluation.

    Where `buckets="auto"` has measured all ranks, `ddpopt.ranks` has what a step computes on the
    median rank then, without waiting for others, and which rank was the slowest, by how much.

    An attached algorithm adds what its `Handle.metrics` returns. DDP does not measure an
    algorithm's communication, so then DDP's times of communication are left out. So is any number
    that is not known yet. If the model is not compiled, the numbers of sections and graphs are 0.

    Args:
        model: A DistributedDataParallel module, or what `torch.compile` returned for one.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
    """
    ddp = state.ddp_of(model)
    ddp_state = state.get(ddp)
    clock = _clocks.get(ddp)
    if clock is None:
        clock = IterationClock()
        _clocks.set(ddp, clock)
        watch_forwards()
        subscribe(ddp, clock)
    cuts = ddp_state.cuts
    first_compiles = {(cut.frame, cut.fallback is Reason.NO_GRAD) for cut in cuts}
    numbers: dict[str, float] = {
        "ddpopt.graphs": len(cuts),
        "ddpopt.graphs_compiled_whole": sum(cut.fallback is not None for cut in cuts),
        "ddpopt.sections": sum(len(cut.sections) for cut in cuts),
        "ddpopt.recompiles": len(cuts) - len(first_compiles),
        "ddpopt.has_bucket_plan": float(rebucket.plan_of(ddp) is not None),
    }
    if clock.last_s is not None:
        numbers["ddpopt.step.ms"] = clock.last_s * 1e3
    if buckets := ddp_state.buckets:
        numbers["ddpopt.buckets"] = len(buckets)
    search = tuner.find_tuner(ddp)
    if search is not None and search.spread is not None:
        spread = search.spread
        numbers["ddpopt.ranks.computation_ms"] = spread.median_s * 1e3
        numbers["ddpopt.ranks.slowest"] = spread.slowest_rank
        numbers["ddpopt.ranks.slowest_behind_ms"] = spread.behind_s * 1e3
    step = _torch.last_logged_step(ddp)
    read_algorithm_metrics = algorithm_metrics_of(ddp)
    if step.number:
        numbers["ddpopt.sampled_step"] = step.number
        numbers["ddpopt.forward.ms"] = step.forward_s * 1e3
        # DDP's log has backward's computation alone.
        numbers["ddpopt.backward.ms"] = (step.backward_s + step.exposed_s) * 1e3
        if read_algorithm_metrics is None:
            numbers |= _communication_of(step, ddp.process_group.size())
    return numbers if read_algorithm_metrics is None else numbers | read_algorithm_metrics()


# After a reset, which has everything compiled anew, a new one begins.
_clocks: ModuleSlot[IterationClock | None] = ModuleSlot(lambda: None, Lifetime.CODE)
# For each module a function that finds its algorithm's; a module without one has no algorithm.
_algorithm_metrics: ModuleSlot[Callable[[], ReadMetrics | None]] = ModuleSlot(
    lambda: lambda: None, Lifetime.MODULE
)


def set_algorithm_metrics(
    ddp: DistributedDataParallel, find: Callable[[], ReadMetrics | None]
) -> None:
    """Add an algorithm's metrics to a module's: `find` returns what reads them, None if detached.

    While there are any, neither `metrics` nor `explain` shows DDP's own times of communication.
    """
    state.get(ddp)  # registers the DDP module, see `has_modules`
    _algorithm_metrics.set(ddp, find)


def algorithm_metrics_of(ddp: DistributedDataParallel) -> ReadMetrics | None:
    """What returns the metrics of the algorithm that is attached, None if none is."""
    return _algorithm_metrics.get(ddp)()


def _communication_of(step: _torch.LoggedStep, num_ranks: int) -> dict[str, float]:
    """The numbers of DDP's own allreduces in a step that DDP has timed."""
    numbers = {
        "ddpopt.communication.ms": step.communication_s * 1e3,
        "ddpopt.communication.exposed_ms": step.exposed_s * 1e3,
        "ddpopt.communication.bytes": step.num_bytes,
    }
    if step.communication_s > 0:
        moved_bits = 2 * (num_ranks - 1) / num_ranks * step.num_bytes * 8
        numbers["ddpopt.communication.bus_gbit_per_s"] = moved_bits / step.communication_s / 1e9
    return numbers
