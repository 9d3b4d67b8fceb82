"""Decide from what all ranks measured whether other buckets are better, and judge the change.

Both run on rank 0 alone, which tells the others; so they communicate nothing. Each gives a text
for users with what it found and why.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._indices import ParameterIndex
from ddpopt._text import format_ms, table
from ddpopt.planning.costs import AllreduceCost, Gradient, Profile
from ddpopt.planning.plan import plan_buckets
from ddpopt.planning.spread import Spread, find_spread
from ddpopt.planning.stopwatch import Measured
from ddpopt.planning.timeline import Timeline, predict, undisturbed

# Parts of an iteration, as predicted. Buckets never change for a gain below _LEAST_GAIN, and always
# for one above _LARGE_GAIN. In between the gain has to exceed the prediction's own error.
_LEAST_GAIN = 0.03
_LARGE_GAIN = 0.1
# The part of an iteration, as measured, for which a change is kept.
_LEAST_MEASURED_GAIN = 0.01

STAY = "buckets stay as they are"
_PLAN_AHEAD = (
    "a plan from the graph needs no such steps: ddpopt.plan(model, batch, network=...).save("
    "'plan.json'), and then options={'buckets': 'plan.json'}"
)


# ---- Before a change -----------------------------------------------------------------------------


class Decision(NamedTuple):
    """Whether buckets change and why, the best plan as JSON, and the part of an iteration it saves.

    `plan` is "" if none could be made. It is given where buckets stay too, for `explain` to show.
    """

    text: str
    plan: str = ""
    gain: float = 0.0
    is_better: bool = False
    # How ranks differ; None if one of them could not measure.
    spread: Spread | None = None


def decide(
    ddp: DistributedDataParallel, measured_by_rank: Sequence[Measured], cost: AllreduceCost
) -> Decision:
    """Plan for the slowest ranks' times on this network, and say whether the plan saves enough.

    Buckets stay if they are not the same on all ranks, or if a rank could measure no times.
    """
    present_buckets = measured_by_rank[0].buckets
    for rank, measured in enumerate(measured_by_rank):
        if measured.problem:
            where = f"on rank {rank} ({measured.host})"
            return Decision(f"{STAY}: {where}, {measured.problem}; {_PLAN_AHEAD}")
        if measured.buckets != present_buckets:
            where = f"rank {rank} ({measured.host})"
            return Decision(f"{STAY}: {where} has other buckets than rank 0")

    # Times were measured while allreduces of the present buckets slowed computation down. A plan
    # starts from those without any, and backward is taken to end with the last gradient.
    sizes = [len(bucket) for bucket in present_buckets]
    disturbed = _worst_case_profile(ddp, measured_by_rank)
    undisturbed_s = undisturbed(disturbed, sizes, cost)
    profile = disturbed.with_ready_times(undisturbed_s, backward_s=undisturbed_s[-1])

    # The part of the measured backward that the model does not explain: mostly what DDP does with
    # reduced gradients. It is assumed to follow all allreduces, whatever the buckets.
    slowest_backward_s = max(measured.backward_s for measured in measured_by_rank)
    unexplained_s = slowest_backward_s - predict(profile, sizes, cost).backward_s
    profile = dataclasses.replace(profile, after_s=max(0.0, unexplained_s))

    plan = plan_buckets(profile, cost, ddp.process_group.size())
    present, best = predict(profile, sizes, cost), plan.timeline()
    gain = 1 - best.iteration_s / present.iteration_s
    error = abs(unexplained_s) / present.iteration_s
    # A gain within the prediction's own error may be none, but a large one is tried all the same:
    # `judge` compares iterations afterwards.
    needed_gain = min(max(_LEAST_GAIN, error), _LARGE_GAIN)
    is_better = gain >= needed_gain
    if is_better:
        text = (
            f"buckets change, {len(sizes)} to {len(plan.buckets)}: iterations are predicted to get "
            f"{gain:.0%} shorter"
        )
    else:
        text = (
            f"{STAY}, {len(sizes)}: with the best, {len(plan.buckets)}, iterations are predicted "
            f"to get {max(gain, 0.0):.1%} shorter, and a change has to save {needed_gain:.1%}"
        )
        if needed_gain > _LEAST_GAIN:
            text += f", since the prediction leaves {error:.1%} of one unexplained"
    times = _describe_times(present, best, profile.after_s)
    # DDP broadcasts buffers before each forward, and ranks wait for each other there.
    broadcasts_buffers = ddp.broadcast_buffers and len(ddp.modules_buffers) > 0
    spread = find_spread(measured_by_rank, broadcasts_buffers=broadcasts_buffers)
    text = "\n".join([text, "", *times, "", *_describe_cost(cost), "", str(spread)])
    return Decision(text, plan=plan.to_json(), gain=gain, is_better=is_better, spread=spread)


def _worst_case_profile(
    ddp: DistributedDataParallel, measured_by_rank: Sequence[Measured]
) -> Profile:
    """The computation of a rank as slow as the slowest in each respect, beside allreduces.

    Each gradient is as late as on the rank where it was latest, and backward ends with the last of
    them: when DDP has reduced them all is predicted, and compared with what was measured.
    """
    parameters = {p.index: p for p in _torch.reducer_parameters(ddp).values()}
    latest: list[tuple[float, ParameterIndex]] = []  # when a gradient arrived, and whose
    arrival = itertools.chain.from_iterable(measured_by_rank[0].buckets)
    for position, index in enumerate(arrival):
        times_s = [measured.ready_s[position] for measured in measured_by_rank]
        latest.append((max(times_s), index))
    if not _torch.follows_arrival_order(ddp):
        # A Reducer that looks for unused parameters does not have its buckets in the order of
        # arrival, in which they are planned. It is assumed to have as many gradients in each.
        latest.sort(key=lambda pair: pair[0])

    gradients: list[Gradient] = []
    ready_s = 0.0
    for at_s, index in latest:
        # Ranks may differ in the order of gradients that arrive close to each other.
        ready_s = max(ready_s, at_s)
        parameter = parameters[index]
        gradients.append(
            Gradient(
                name=parameter.name,
                num_bytes=parameter.num_bytes,
                ready_s=ready_s,
                group=parameter.group,
            )
        )
    return Profile(
        gradients=tuple(gradients),
        backward_s=ready_s,
        forward_s=max(measured.forward_s for measured in measured_by_rank),
        between_s=max(measured.between_s for measured in measured_by_rank),
        source="measured",
    )


def _describe_times(present: Timeline, best: Timeline, after_s: float) -> list[str]:
    """A table of what is predicted with the present buckets and with the best ones."""
    times = {
        "iteration": (present.iteration_s, best.iteration_s),
        "of it waiting for communication": (present.exposed_s, best.exposed_s),
        "backward": (present.backward_s, best.backward_s),
        "all allreduces": (present.communication_s, best.communication_s),
    }
    if after_s > 0:
        # It is no measurement: what the slowest ranks' backwards take beyond what the model says.
        times["of backward not explained, and added to both"] = (after_s, after_s)
    rows = [(format_ms(now_s), format_ms(then_s), name) for name, (now_s, then_s) in times.items()]
    counts = (f"{len(present.buckets)}", f"{len(best.buckets)}", "buckets")
    return table(("now", "best", "predicted, in ms"), [*rows, counts])


def _describe_cost(cost: AllreduceCost) -> list[str]:
    """A table of what was measured of the network."""
    rows = [
        (f"{cost.startup_s * 1e3:.2f}", "ms to start an allreduce"),
        (f"{cost.s_per_mib * 1e3:.2f}", "ms for each MiB"),
        (f"{cost.contention:.2f}", "times as long beside computation"),
        (f"{cost.launch_s * 1e3:.2f}", "ms of computation lost to each launch"),
        (f"{cost.interference:.0%}", "of computation's speed lost to each transfer"),
    ]
    return table(("measured", "of the network"), rows)


# ---- After a change ------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What a change achieved, and whether to undo it."""

    text: str
    undoes_change: bool = False


def judge(
    before_by_rank: Sequence[Measured], after_by_rank: Sequence[Measured], predicted_gain: float
) -> Verdict:
    """Compare the slowest rank's iterations, from what all ranks measured before and after.

    A change is undone unless iterations got shorter by `_LEAST_MEASURED_GAIN`; one of which nothing
    could be measured is kept.
    """
    for rank, measured in enumerate(after_by_rank):
        if measured.problem:
            where = f"on rank {rank} ({measured.host})"
            return Verdict(f"what came of it is not known: {where}, {measured.problem}")
    before_s = max(measured.iteration_s for measured in before_by_rank)
    after_s = max(measured.iteration_s for measured in after_by_rank)
    times = f"{format_ms(after_s)} ms, with the buckets before {format_ms(before_s)}"
    predicted = f"predicted to get {predicted_gain:.0%} shorter"
    gain = 1 - after_s / before_s
    if gain >= _LEAST_MEASURED_GAIN:
        return Verdict(f"measured: iterations got {gain:.0%} shorter ({times}; {predicted})")
    return Verdict(
        f"the previous buckets are back: iterations, {predicted}, took {times}", undoes_change=True
    )
