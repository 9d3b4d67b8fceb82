"""Decide from what all ranks measured whether other buckets are better, and give the reasons.

Where DDP keeps its buckets, say how long iterations wait for communication: as a line of the log
and of `explain`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._slots import Slot
from ddpopt._text import format_ms, table
from ddpopt._torch import Forward
from ddpopt.planning.costs import AllreduceCost, Gradient, Profile
from ddpopt.planning.plan import BucketPlan, plan_buckets
from ddpopt.planning.rebucket import find_lasting_obstacle, plan_of
from ddpopt.planning.stopwatch import Measured
from ddpopt.planning.timeline import Timeline, predict, undisturbed
from ddpopt.split import state
from ddpopt.steps.clock import IterationClock
from ddpopt.steps.forwards import subscribe, unsubscribe, will_communicate

# Parts of an iteration, as predicted; a gain in between has to exceed the prediction's own error.
_LEAST_GAIN = 0.03
_LARGE_GAIN = 0.1
_LEAST_MEASURED_GAIN = 0.01
STAY = "buckets stay as they are"
_UNMEASURED = (
    "a plan from the graph needs no such steps: ddpopt.plan(model, inputs).save('plan.json'), and "
    "then options={'buckets': 'plan.json'}"
)


class Decision(NamedTuple):
    """What is decided and why, the best plan as JSON, and the part of an iteration it saves."""

    text: str
    plan: str = ""
    gain: float = 0.0
    is_better: bool = False


def decide(
    ddp: DistributedDataParallel, gathered: Sequence[Measured], cost: AllreduceCost
) -> Decision:
    """Plan for the slowest rank's times on this network."""
    for rank, measured in enumerate(gathered):
        if measured.problem:
            return Decision(f"{STAY}: on rank {rank}, {measured.problem}; {_UNMEASURED}")
        if measured.buckets != gathered[0].buckets:
            return Decision(f"{STAY}: rank {rank} has others than rank 0")
    compared = _compare(ddp, gathered, cost)
    gain, num_own, num_best = compared.gain, len(gathered[0].buckets), len(compared.plan.buckets)
    needed = min(max(_LEAST_GAIN, compared.error), _LARGE_GAIN)
    is_better = gain >= needed
    if is_better:
        text = (
            f"buckets change, {num_own} to {num_best}: iterations are predicted to get {gain:.0%} "
            "shorter"
        )
    else:
        text = (
            f"{STAY}, {num_own}: with the best, {num_best}, iterations are predicted to get "
            f"{max(gain, 0.0):.1%} shorter, and a change has to save {needed:.1%}"
        )
        if needed > _LEAST_GAIN:
            text += f", since the prediction leaves {compared.error:.1%} of one unexplained"
    lines = [text, "", *_describe_times(compared), "", *_describe_cost(cost)]
    return Decision("\n".join(lines), compared.plan.to_json(), gain, is_better)


class _Compared(NamedTuple):
    """The best plan, and the iterations predicted with DDP's own buckets and with it.

    `left_s` is the part of the measured backward that the prediction does not explain.
    """

    plan: BucketPlan
    own: Timeline
    best: Timeline
    left_s: float

    @property
    def gain(self) -> float:
        """The part of an iteration that the best plan saves."""
        return 1 - self.best.iteration_s / self.own.iteration_s

    @property
    def error(self) -> float:
        """The prediction's error with DDP's own buckets, as a part of an iteration."""
        return abs(self.left_s) / self.own.iteration_s


def _compare(
    ddp: DistributedDataParallel, gathered: Sequence[Measured], cost: AllreduceCost
) -> _Compared:
    sizes = [len(bucket) for bucket in gathered[0].buckets]
    profile, left_s = _profile(ddp, gathered, sizes, cost)
    world_size = dist.get_world_size(ddp.process_group)
    plan = plan_buckets(profile, cost, world_size)
    return _Compared(plan, predict(profile, sizes, cost), plan.timeline(), left_s)


def _describe_times(compared: _Compared) -> list[str]:
    after_s = compared.plan.profile.after_s
    own, best = compared.own, compared.best
    times = {
        "iteration": (own.iteration_s, best.iteration_s),
        "of it waiting for communication": (own.exposed_s, best.exposed_s),
        "backward": (own.backward_s, best.backward_s),
        "of it after the last allreduce": (after_s, after_s),
        "all allreduces": (own.communication_s, best.communication_s),
    }
    rows = [(*map(format_ms, pair), name) for name, pair in times.items()]
    counts = (f"{len(own.buckets)}", f"{len(best.buckets)}", "buckets")
    return table(("now", "best", "predicted, in ms"), [*rows, counts])


def _describe_cost(cost: AllreduceCost) -> list[str]:
    rows = [
        (f"{cost.startup_s * 1e3:.2f}", "ms to start an allreduce"),
        (f"{cost.s_per_mib * 1e3:.2f}", "ms for each MiB"),
        (f"{cost.contention:.2f}", "times that beside computation"),
        (f"{cost.launch_s * 1e3:.2f}", "ms of computation lost to each launch"),
        (f"{cost.interference:.0%}", "of computation's speed lost to each transfer"),
    ]
    return table(("measured", "of the network"), rows)


def _profile(
    ddp: DistributedDataParallel,
    gathered: Sequence[Measured],
    sizes: Sequence[int],
    cost: AllreduceCost,
) -> tuple[Profile, float]:
    """The computation of the slowest rank without communication, and what is left over.

    That is the part of the measured backward that the model does not explain; it is assumed to
    follow all allreduces. A Reducer that looks for unused parameters does not have its buckets in
    the order of arrival, in which they are planned; it is assumed to have as many gradients in each
    of them.
    """
    by_index = {p.index: p for p in _torch.reducer_parameters(ddp).values()}
    arrived = [by_index[index] for bucket in gathered[0].buckets for index in bucket]
    slowest = [max(0.0, *times) for times in zip(*(m.ready_s for m in gathered), strict=True)]
    if not _torch.follows_arrival_order(ddp):
        order = sorted(range(len(slowest)), key=slowest.__getitem__)
        arrived, slowest = [arrived[k] for k in order], [slowest[k] for k in order]
    ready_s = list(itertools.accumulate(slowest, max))
    disturbed = Profile(
        gradients=tuple(
            Gradient(name=p.name, num_bytes=p.num_bytes, ready_s=at_s, group=p.group)
            for p, at_s in zip(arrived, ready_s, strict=True)
        ),
        backward_s=ready_s[-1],
        forward_s=max(measured.forward_s for measured in gathered),
        between_s=max(measured.between_s for measured in gathered),
        source="measured",
    )
    alone_s = undisturbed(disturbed, sizes, cost)
    profile = disturbed.with_ready_times(alone_s, backward_s=alone_s[-1])
    left_s = max(m.backward_s for m in gathered) - predict(profile, sizes, cost).backward_s
    return dataclasses.replace(profile, after_s=max(0.0, left_s)), left_s


class Verdict(NamedTuple):
    """What a change achieved, and whether to undo it."""

    text: str
    is_worse: bool = False


def judge(before: Sequence[Measured], after: Sequence[Measured], predicted_gain: float) -> Verdict:
    """Compare the slowest rank's iterations, from what all ranks measured before and after."""
    for rank, measured in enumerate(after):
        if measured.problem:
            return Verdict(f"what came of it is not known: on rank {rank}, {measured.problem}")
    before_s, after_s = (max(m.iteration_s for m in each) for each in (before, after))
    times = f"{format_ms(after_s)} ms, with the buckets before {format_ms(before_s)}"
    predicted = f"predicted to get {predicted_gain:.0%} shorter"
    gain = 1 - after_s / before_s
    if gain >= _LEAST_MEASURED_GAIN:
        return Verdict(f"measured: iterations got {gain:.0%} shorter ({times}; {predicted})")
    return Verdict(
        f"buckets are those of before again: iterations, {predicted}, took {times}", is_worse=True
    )


# ---- A hint, where DDP keeps its buckets --------------------------------------------------------

_MUCH_EXPOSED = 0.1  # of an iteration
_STEPS = range(5, 11)  # whose times count; earlier ones compile, later ones DDP does not time

# That much is exposed, "" if not, and None until somebody has begun to watch for it.
_hints: Slot[str | None] = Slot(lambda: None, is_kept_at_reset=True)


def hint_of(ddp: DistributedDataParallel) -> str:
    """What was found to be exposed, as a sentence for users; "" without one."""
    return _hints.get(ddp) or ""


def watch(ddp: DistributedDataParallel) -> None:
    """Log once, on rank 0, how long an iteration waits for communication: a tenth of it or more.

    The times are those that DDP takes anyway.
    """
    if _hints.get(ddp) is not None:
        return
    _hints.set(ddp, "")
    group = ddp.process_group
    is_first = dist.get_rank(group) == 0 and dist.get_world_size(group) > 1
    if is_first and not state.is_copy(ddp):
        subscribe(ddp, _Watch())


class _Watch(IterationClock):
    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[int, tuple[_torch.LoggedStep, float]] = {}  # with its iteration's time

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Note the times of the step that ends where the next begins."""
        if not will_communicate(ddp):
            return
        super().before_forward(ddp, forward)
        try:
            step = _torch.last_logged_step(ddp)
            if step.number in _STEPS and self.last_s is not None:
                self._steps.setdefault(step.number, (step, self.last_s))
            if step.number >= _STEPS[-1]:
                unsubscribe(ddp, _Watch)
                hint = self._find_hint(ddp)
                _hints.set(ddp, hint)
                if hint:
                    _logs.info("%s", hint)
        except Exception as error:  # which costs the hint, and nothing else
            unsubscribe(ddp, _Watch)
            _logs.info("how long iterations wait for communication is not known: %r", error)

    def _find_hint(self, ddp: DistributedDataParallel) -> str:
        if not self._steps or plan_of(ddp) or _torch.has_comm_hook(ddp):
            return ""
        exposed_s = statistics.median(step.exposed_s for step, _ in self._steps.values())
        iteration_s = statistics.median(step_s for _, step_s in self._steps.values())
        if exposed_s < _MUCH_EXPOSED * iteration_s or find_lasting_obstacle(ddp):
            return ""
        return (
            f"of an iteration of {format_ms(iteration_s)} ms, {format_ms(exposed_s)} are spent "
            "waiting for communication; options={'buckets': 'auto'} looks for buckets that hide "
            "more of it"
        )
