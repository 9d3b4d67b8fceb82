"""Say if other buckets would pay off, from times that DDP takes in its first steps anyway."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._events import StepClock, Turn, ignore, observe, will_communicate
from ddpopt._text import format_ms
from ddpopt.planning.costs import AllreduceCost, Gradient, Profile
from ddpopt.planning.plan import plan_buckets
from ddpopt.planning.rebucket import find_lasting_obstacle, plan_of
from ddpopt.planning.timeline import predict
from ddpopt.split import state

_STEPS = range(5, 11)  # whose times count; earlier ones compile, later ones DDP does not time
_LEAST_GAIN = 0.1  # of an iteration
_STARTUP_S = 1e-3  # of an allreduce, about the most on a network where tuning pays off
_HALVINGS = 40


def watch(ddp: DistributedDataParallel) -> None:
    """Estimate once, on rank 0, what better buckets would save; report a tenth or more."""
    known = state.get(ddp)
    if known.hint is not None:
        return
    known.hint = ""
    with _costing_the_hint(ddp):
        group = ddp.process_group
        is_first = dist.get_rank(group) == 0 and dist.get_world_size(group) > 1
        if is_first and not known.is_copy:
            observe(ddp, Turn.ADVICE, _Adviser())


@contextlib.contextmanager
def _costing_the_hint(ddp: DistributedDataParallel) -> Iterator[None]:
    """Give up the hint if this block raises; nothing else may end with it."""
    try:
        yield
    except Exception as error:
        ignore(ddp, Turn.ADVICE)
        _logs.info("what better buckets would save is not known: %r", error)


class _Adviser(StepClock):
    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[int, tuple[_torch.LoggedStep, float]] = {}  # with its iteration's time

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Note the times of the step that ends where the next begins."""
        if not will_communicate(ddp):
            return
        super().before_forward(ddp)
        with _costing_the_hint(ddp):
            step = _torch.last_logged_step(ddp)
            if step.number in _STEPS and self.step_s is not None:
                self._steps.setdefault(step.number, (step, self.step_s))
            if step.number >= _STEPS[-1]:
                ignore(ddp, Turn.ADVICE)
                self._advise(ddp)

    def _advise(self, ddp: DistributedDataParallel) -> None:
        buckets = _torch.final_buckets(ddp)
        if not (self._steps and buckets) or plan_of(ddp) or _torch.has_comm_hook(ddp):
            return
        steps, iterations_s = zip(*self._steps.values(), strict=True)
        step = _torch.LoggedStep(*map(statistics.median, zip(*steps, strict=True)))
        iteration_s = statistics.median(iterations_s)
        if step.exposed_s < _LEAST_GAIN * iteration_s or find_lasting_obstacle(ddp):
            return
        gain = estimate_gain(ddp, buckets, step, iteration_s)
        if gain >= _LEAST_GAIN:
            _logs.info(
                "of an iteration of %s ms %s are spent waiting for allreduces; other buckets are "
                "estimated to make iterations %.0f%% shorter: options={'buckets': 'auto'} finds "
                "the best and tries them",
                format_ms(iteration_s),
                format_ms(step.exposed_s),
                gain * 100,
            )


def estimate_gain(
    ddp: DistributedDataParallel,
    buckets: Sequence[Sequence[int]],
    step: _torch.LoggedStep,
    iteration_s: float,
) -> float:
    """Return the part of an iteration that the best buckets would save, by the cost model.

    Gradients are assumed to arrive at a steady rate up to the first launch, and at another from
    there to the end of backward. The time per byte of an allreduce is chosen so that the model
    waits as long as DDP does.
    """
    by_index = {p.index: p for p in _torch.reducer_parameters(ddp).values()}
    arrived = [by_index[index] for bucket in buckets for index in bucket]
    total = sum(p.num_bytes for p in arrived)
    first = sum(by_index[index].num_bytes for index in buckets[0])
    launched_s = max(0.0, step.backward_s - step.overlap_s)
    left_s, left = step.backward_s - launched_s, max(1, total - first)
    ends = itertools.accumulate(p.num_bytes for p in arrived)
    ready_s = [
        launched_s * end / first if end <= first else launched_s + left_s * (end - first) / left
        for end in ends
    ]
    backward_s = max(step.backward_s, ready_s[-1])
    measured_s = backward_s + step.exposed_s
    profile = Profile(
        gradients=tuple(
            Gradient(name=p.name, num_bytes=p.num_bytes, ready_s=at_s, group=p.group)
            for p, at_s in zip(arrived, ready_s, strict=True)
        ),
        backward_s=backward_s,
        forward_s=max(0.0, iteration_s - measured_s),
        source="DDP's log",
    )
    sizes = [len(bucket) for bucket in buckets]
    low, high = 0.0, measured_s / total
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        cost = AllreduceCost(startup_s=_STARTUP_S, s_per_byte=middle)
        if predict(profile, sizes, cost).backward_s < measured_s:
            low = middle
        else:
            high = middle
    cost = AllreduceCost(startup_s=_STARTUP_S, s_per_byte=low)
    best = plan_buckets(profile, cost, dist.get_world_size(ddp.process_group)).timeline()
    return 1 - best.iteration_s / predict(profile, sizes, cost).iteration_s
