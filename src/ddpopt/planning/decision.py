"""Decide from what all ranks measured whether other buckets are better, and give the reasons."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, _waits
from ddpopt._text import format_ms, table
from ddpopt.planning.costs import ALLREDUCE, SHARDED, AllreduceCost, Gradient, Profile
from ddpopt.planning.plan import plan_buckets
from ddpopt.planning.stopwatch import Measured
from ddpopt.planning.timeline import Timeline, predict, undisturbed

_LEAST_GAIN = 0.03  # of an iteration, as predicted
_LEAST_MEASURED_GAIN = 0.01
STAY = "buckets stay as they are"


class Decision(NamedTuple):
    """What is decided and why, the best plan as JSON, and the part of an iteration it saves."""

    text: str
    plan: str = ""
    gain: float = 0.0

    @property
    def is_better(self) -> bool:
        return self.gain >= _LEAST_GAIN


def communication_of(ddp: DistributedDataParallel) -> str:
    """Return how a module communicates: one of `COMMUNICATIONS`."""
    return SHARDED if _waits.hides_behind_forward(ddp) else ALLREDUCE


def decide(
    ddp: DistributedDataParallel, gathered: Sequence[Measured], cost: AllreduceCost
) -> Decision:
    """Plan for the slowest rank's times on this network."""
    for rank, measured in enumerate(gathered):
        if measured.problem:
            return Decision(f"{STAY}: on rank {rank}, {measured.problem}")
        if measured.buckets != gathered[0].buckets:
            return Decision(f"{STAY}: rank {rank} has others than rank 0")
    sizes = [len(bucket) for bucket in gathered[0].buckets]
    communication = communication_of(ddp)
    profile = _profile(ddp, gathered, sizes, cost)
    plan = plan_buckets(profile, cost, len(gathered), communication)
    own, best = predict(profile, sizes, cost, communication), plan.timeline()
    gain = 1 - best.iteration_s / own.iteration_s
    if gain >= _LEAST_GAIN:
        text = (
            f"buckets change, {len(sizes)} to {len(plan.buckets)}: iterations are predicted to get "
            f"{gain:.0%} shorter"
        )
    else:
        text = (
            f"{STAY}, {len(sizes)}: with the best, {len(plan.buckets)}, iterations are predicted "
            f"to get {max(gain, 0.0):.0%} shorter, and a change has to save {_LEAST_GAIN:.0%}"
        )
    lines = [text, "", *_compare(profile, own, best), "", *_describe(cost)]
    return Decision("\n".join(lines), plan.to_json(), gain)


def _compare(profile: Profile, own: Timeline, best: Timeline) -> list[str]:
    times = {
        "iteration": (own.iteration_s, best.iteration_s),
        "of it waiting for communication": (own.exposed_s, best.exposed_s),
        "backward": (own.backward_s, best.backward_s),
    }
    if own.gathers:
        times["forward, behind which parameters are gathered"] = (own.forward_s, best.forward_s)
        times["all communication, halved"] = (own.communication_s, best.communication_s)
    else:
        times["of it after the last allreduce"] = (profile.after_s, profile.after_s)
        times["all allreduces"] = (own.communication_s, best.communication_s)
    rows = [(*map(format_ms, pair), name) for name, pair in times.items()]
    counts = (f"{len(own.buckets)}", f"{len(best.buckets)}", "buckets")
    return table(("now", "best", "predicted, in ms"), [*rows, counts])


def _describe(cost: AllreduceCost) -> list[str]:
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
) -> Profile:
    """Return the computation of the slowest rank without communication.

    The part of the measured backward that the model does not explain is assumed to follow all
    allreduces. A Reducer that looks for unused parameters does not have its buckets in the order of
    arrival, in which they are planned; it is assumed to have as many gradients in each of them.
    With sharded updates measured times contain no waiting, and sums take half of an allreduce.
    """
    is_sharded = communication_of(ddp) == SHARDED
    each = cost.half if is_sharded else cost
    by_index = {p.index: p for p in _torch.reducer_parameters(ddp).values()}
    arrived = [by_index[index] for bucket in gathered[0].buckets for index in bucket]
    slowest = [max(0.0, *times) for times in zip(*(m.ready_s for m in gathered), strict=True)]
    if not _torch.follows_arrival_order(ddp):
        order = sorted(range(len(slowest)), key=slowest.__getitem__)
        arrived, slowest = [arrived[k] for k in order], [slowest[k] for k in order]
    ready_s = list(itertools.accumulate(slowest, max))
    forward_s = max(measured.forward_s for measured in gathered)
    if is_sharded:  # slowed down for as long as bytes move beside it
        moving_s = each.s_per_byte * sum(p.num_bytes for p in arrived) * cost.contention
        forward_s -= cost.interference * min(forward_s, moving_s)
    disturbed = Profile(
        gradients=tuple(
            Gradient(name=p.name, num_bytes=p.num_bytes, ready_s=at_s, group=p.group)
            for p, at_s in zip(arrived, ready_s, strict=True)
        ),
        backward_s=ready_s[-1],
        forward_s=forward_s,
        between_s=max(measured.between_s for measured in gathered),
        source="measured",
    )
    alone_s = undisturbed(disturbed, sizes, each)
    profile = disturbed.with_ready_times(alone_s, backward_s=alone_s[-1])
    explained = predict(profile, sizes, each)
    explained_s = explained.computed_s if is_sharded else explained.backward_s
    left_s = max(m.backward_s for m in gathered) - explained_s
    return dataclasses.replace(profile, after_s=max(0.0, left_s))


class Verdict(NamedTuple):
    """What a change achieved, and whether to undo it."""

    text: str
    is_worse: bool = False


def judge(before: Sequence[Measured], after: Sequence[Measured], predicted_gain: float) -> Verdict:
    """Compare the slowest rank's iterations; all ranks get the same, from what all measured."""
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
