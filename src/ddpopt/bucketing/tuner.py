"""Find better buckets while training runs: measure, decide once for all ranks, switch together.

[Note: tuning]
With `buckets="auto"` the first iterations run with DDP's own buckets, in graphs that are cut more
finely, and each rank notes when its gradients arrive. Steps are counted by backwards that reduce
gradients: these are the same on all ranks, whatever forwards one of them runs besides. Before the
forward that follows one and the same backward, ranks meet by the process group's store, with a time
limit: a rank that does not come, or cannot go on, makes all ranks stay. From there on they are at
the same place, and use collectives: measure the network, gather the times, rank 0 plans and
broadcasts, each says whether the plan fits it, and all apply it, or none does.

No rank waits where the answer is known already. Each announces itself one step ahead, and one that
cannot go on says so at once. A search is named after the backward in which it began, so ranks whose
searches began in different ones do not wait either.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._events import Observer, Turn, ignore, observe
from ddpopt.bucketing import rebucket
from ddpopt.bucketing.calibrate import calibrate
from ddpopt.bucketing.costs import AllreduceCost, Gradient, Profile
from ddpopt.bucketing.plan import BucketPlan, plan_buckets
from ddpopt.bucketing.timeline import predict, undisturbed
from ddpopt.errors import PeerError, PlanError, TorchDriftError
from ddpopt.ranks.agreement import gather
from ddpopt.ranks.rendezvous import Appointment
from ddpopt.split import state

_FIRST_MEASURED = 4  # step, counted from 1; buckets are rebuilt in the second, and caches fill
_NUM_MEASURED = 5
_LEAST_COMPLETE = 2  # of those, steps of one forward and one backward
_LEAST_GAIN = 0.03  # of an iteration
_DECIDED_AFTER = _FIRST_MEASURED + _NUM_MEASURED - 1  # backwards
_MEETING_S = 30.0  # that ranks wait for each other, at most
_PART_OF_TIMEOUT = 0.25  # of the process group's: others wait in a collective meanwhile
_TITLE = "looking for better buckets"

# They outlive `torch._dynamo.reset()`, which one rank may call alone.
_tuners: weakref.WeakKeyDictionary[DistributedDataParallel, _Tuner] = weakref.WeakKeyDictionary()
# Those of modules for which code was compiled with buckets="auto" since.
_in_use: weakref.WeakKeyDictionary[DistributedDataParallel, _Tuner] = state.new_table()


def start(ddp: DistributedDataParallel, *, is_trial: bool) -> None:
    """Look for better buckets of `ddp`, unless that was done before.

    `is_trial` says that the forward is cut, where sections cost time if they are not needed;
    sections of a backward hardly cost any.
    """
    if ddp in _in_use:
        return
    if ddp not in _tuners:
        _tuners[ddp] = _Tuner(ddp)
        observe(ddp, Turn.TUNER, _tuners[ddp])
    tuner = _in_use[ddp] = _tuners[ddp]
    if not tuner.is_done:
        state.of(ddp).begin_search(is_trial=is_trial)


def restart(ddp: DistributedDataParallel) -> None:
    """Look for better buckets once more, on all ranks in the same step."""
    _tuners.pop(ddp, None)
    _in_use.pop(ddp, None)
    start(ddp, is_trial=False)


def of(ddp: DistributedDataParallel) -> _Tuner | None:
    """Return what looks for better buckets of `ddp`, or has found them; None if nothing does."""
    return _in_use.get(ddp)


def is_searching(ddp: DistributedDataParallel) -> bool:
    """Whether better buckets are looked for, so that graphs are to be cut finely."""
    tuner = of(ddp)
    return tuner is not None and not tuner.is_done


def share(ddp: DistributedDataParallel, copy: DistributedDataParallel) -> None:
    """Spare a copy of `ddp` the search where it is over."""
    tuner = of(ddp)
    if tuner is not None and tuner.is_done:
        _in_use[copy] = tuner


class _Tuner(Observer):
    """See [Note: tuning]."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.is_done = False
        self.outcome = "not decided yet"
        self.best: BucketPlan | None = None
        self._stopwatch: _Stopwatch | None = None
        self._appointment: Appointment | None = None
        self._limit_s = _MEETING_S
        group = ddp.process_group
        log: Callable[..., object] = _logs.info
        try:  # whether it is clear from the start that nothing can be changed or won
            _torch.check_names_for_tuning(ddp)
            timeout_s = _torch.group_timeout(group, _device_of(ddp)).total_seconds()
            self._limit_s = min(_MEETING_S, _PART_OF_TIMEOUT * timeout_s)
            _torch.num_collectives(group)
            if dist.get_world_size(group) < 2:
                self.stay("one rank communicates nothing")
        except TorchDriftError as error:
            self.stay(str(error))
            log = _logs.warning
        except RuntimeError as error:  # its backend does not count collectives
            self.stay(str(error))
        if self.is_done:
            log("%s", self.outcome)

    def stay(self, reason: str) -> None:
        """Decide for DDP's own buckets."""
        self.is_done = True
        self.outcome = f"buckets stay DDP's own: {reason}"

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Count, measure, or decide."""
        if self.is_done:
            ignore(ddp, Turn.TUNER)
            return
        if not torch.is_grad_enabled() or not ddp.require_backward_grad_sync:
            return
        stopwatch = self._begin_step(ddp)
        if stopwatch.num_backwards == _DECIDED_AFTER - 1 and self._appointment is None:
            absence = "did not look for them in the same steps"
            try:
                self._appointment = Appointment(
                    ddp.process_group, _TITLE, stopwatch.key, self._limit_s, absence=absence
                )
            except PeerError as error:
                self.stay(str(error))
                stopwatch.remove()
                state.of(ddp).end_search()
        if stopwatch.num_backwards == _DECIDED_AFTER:
            self._finish(ddp, stopwatch)

    def after_forward(self, ddp: DistributedDataParallel, is_ours: bool) -> None:
        """Note the time."""
        if not self.is_done:
            # This may have been made in the forward that ends here.
            (self._stopwatch or self._begin_step(ddp)).end_forward()

    def _begin_step(self, ddp: DistributedDataParallel) -> _Stopwatch:
        if self._stopwatch is None:
            self._stopwatch = _Stopwatch(ddp)
        self._stopwatch.begin_step()
        return self._stopwatch

    def _finish(self, ddp: DistributedDataParallel, stopwatch: _Stopwatch) -> None:
        assert self._appointment is not None
        stopwatch.remove()
        self._stopwatch = None
        self.is_done = True
        state.of(ddp).end_search()
        problem = self._appointment.keep(_find_obstacle(ddp))
        self._appointment = None  # it has a connection to the store
        if problem:
            self.stay(problem)
        else:
            self.outcome, self.best = _decide(ddp, stopwatch.measured())
        _logs.info("%s", self.outcome)


def _device_of(ddp: DistributedDataParallel) -> torch.device:
    return next(iter(_torch.reducer_parameters(ddp))).device


# ---- measuring --------------------------------------------------------------------------------


_Moment = Any  # in seconds, or an event on a device's stream


@dataclass(slots=True)
class _Step:
    """What was noted of one step."""

    began: _Moment
    forward_ended: _Moment = None
    backward_ended: _Moment = None
    num_forwards: int = 1
    ended: _Moment = None
    ready: dict[int, _Moment] = field(default_factory=dict)  # by parameter index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One rank's medians in seconds; `ready_s` and `backward_s` count from the end of forward.

    `ready_s` is in the order of `buckets`, which are by parameter index. `problem` says why there
    are none.
    """

    problem: str = ""
    buckets: tuple[tuple[int, ...], ...] = ()
    ready_s: tuple[float, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    between_s: float = 0.0


class _Stopwatch:
    """Notes when gradients arrive, by hooks on autograd's nodes that accumulate them.

    `key` is set by the first backward: this search has it on all ranks, and no other search.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.key = ""
        self._ddp = weakref.ref(ddp)  # the tuner that holds this must not hold its module
        parameters = _torch.reducer_parameters(ddp)
        self._parameters = tuple(parameters)
        self._device = _device_of(ddp)
        self._steps: list[_Step] = []
        self._hooks = []
        for tensor, parameter in parameters.items():
            node = _torch.accumulate_node(tensor)  # it lives as long as we hold it
            note = functools.partial(self._note_arrival, parameter.index)
            self._hooks.append((node, node.register_prehook(note)))

    @property
    def num_backwards(self) -> int:
        """How many backwards have reduced gradients."""
        return sum(bool(step.backward_ended) for step in self._steps)

    def begin_step(self) -> None:
        """A forward begins, and with it the end of the step before.

        One whose parameters are all frozen, such as a GAN's discriminator's, is no part of a step.
        """
        if not any(parameter.requires_grad for parameter in self._parameters):
            return
        now = self._now()
        if self._steps and not self._steps[-1].backward_ended:
            self._steps[-1].num_forwards += 1
            return
        if self._steps:
            self._steps[-1].ended = now
        self._steps.append(_Step(began=now))

    def end_forward(self) -> None:
        """A forward has ended; if it is none of a step that is measured, nothing is noted."""
        if self._steps and not self._steps[-1].forward_ended:
            self._steps[-1].forward_ended = self._now()

    def remove(self) -> None:
        """Stop measuring."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = []

    def measured(self) -> _Measured:
        """Return the medians over the complete steps."""
        ddp = self._ddp()
        assert ddp is not None
        buckets = state.of(ddp).buckets or _torch.rebuilt_buckets(ddp)
        if not buckets:
            return _Measured(problem="DDP did not tell its buckets")
        arrival = list(itertools.chain.from_iterable(buckets))
        complete = [
            step
            for step in self._steps[_FIRST_MEASURED - 1 :]
            if step.ended and step.num_forwards == 1 and step.ready.keys() >= set(arrival)
        ]
        if len(complete) < _LEAST_COMPLETE:
            return _Measured(
                problem="too few steps of one forward and one backward that used all parameters "
                "could be measured"
            )

        def median_s(starts: Iterable[_Moment], stops: Iterable[_Moment]) -> float:
            return statistics.median(map(_seconds, starts, stops))

        forward_ended = [step.forward_ended for step in complete]
        backward_ended = [step.backward_ended for step in complete]
        return _Measured(
            buckets=tuple(map(tuple, buckets)),
            ready_s=tuple(median_s(forward_ended, [s.ready[k] for s in complete]) for k in arrival),
            forward_s=median_s([step.began for step in complete], forward_ended),
            backward_s=median_s(forward_ended, backward_ended),
            between_s=median_s(backward_ended, [step.ended for step in complete]),
        )

    def _note_arrival(self, index: int, _gradients: object) -> None:
        if not self._steps or self._steps[-1].backward_ended:
            return  # it is the backward of a step that does not communicate
        ready = self._steps[-1].ready
        if not ready:
            _torch.at_end_of_backward(self._end_backward)
        ready[index] = self._now()

    def _end_backward(self) -> None:
        self._steps[-1].backward_ended = self._now()
        ddp = self._ddp()
        if not self.key and ddp is not None:
            parameters = [(p.name, p.num_bytes) for p in _torch.reducer_parameters(ddp).values()]
            digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]
            # How many collectives came before tells in which backward a search is asked for.
            self.key = f"ddpopt/buckets/{digest}/{_torch.num_collectives(ddp.process_group)}"

    def _now(self) -> _Moment:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _seconds(start: _Moment, stop: _Moment) -> float:
    if not isinstance(stop, torch.Event):
        return float(stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


# ---- deciding ---------------------------------------------------------------------------------


def _find_obstacle(ddp: DistributedDataParallel) -> str:
    """Say why the buckets of `ddp` cannot be changed unasked; "" if they can."""
    if ddp not in _in_use:
        return "torch._dynamo.reset() was called, and nothing is compiled with buckets='auto' since"
    if _torch.hook_states(ddp):
        return (
            "its comm hook keeps a state, which may be by bucket; call ddpopt.rebucket if it is not"
        )
    return rebucket.find_obstacle(ddp)


class _Decision(NamedTuple):
    """Why to change buckets or not, the best plan as JSON, and whether it is worth the change."""

    reason: str
    plan: str = ""
    is_better: bool = False


def _decide(ddp: DistributedDataParallel, measured: _Measured) -> tuple[str, BucketPlan | None]:
    """Measure the network, plan on rank 0, and apply the plan if it fits all ranks.

    A collective call. Returns what was decided and why, and the best plan that was found.
    """
    group = ddp.process_group
    cost = calibrate(group, _device_of(ddp))
    gathered = gather(ddp, measured, _TITLE)
    decision: list[_Decision] = [_Decision("planning raised an error")]
    if dist.get_rank(group) == 0:
        try:
            decision = [_choose(ddp, gathered, cost)]
        except Exception as error:  # the others wait for a word
            decision = [_Decision(f"planning raised {error!r}")]
    dist.broadcast_object_list(decision, src=dist.get_global_rank(group, 0), group=group)
    ((reason, text, is_better),) = decision
    plan = BucketPlan.from_json(text) if text else None
    if plan is None or not is_better:
        return f"buckets stay DDP's own: {reason}", plan
    try:
        rebucket.agree(ddp, plan)
    except PlanError as error:
        return str(error), plan
    rebucket.apply(ddp, plan)
    _torch.prepare_reducer(ddp)
    if state.of(ddp).has_forward_sections:
        state.of(ddp).take_new_limits()
    return f"buckets change: {reason}", plan


def _choose(
    ddp: DistributedDataParallel, gathered: Sequence[_Measured], cost: AllreduceCost
) -> _Decision:
    """Decide from what all ranks measured."""
    for rank, measured in enumerate(gathered):
        if measured.problem:
            return _Decision(f"on rank {rank}: {measured.problem}")
        if measured.buckets != gathered[0].buckets:
            return _Decision(f"rank {rank} has others than rank 0")
    sizes = [len(bucket) for bucket in gathered[0].buckets]
    profile = _profile(ddp, gathered, sizes, cost)
    plan = plan_buckets(profile, cost, len(gathered))
    before, after = predict(profile, sizes, cost), plan.timeline()
    gain = 1 - after.iteration_s / before.iteration_s
    reason = (
        f"iterations would get {gain:.0%} shorter; predicted is a backward of "
        f"{before.backward_s * 1e3:.0f} ms with DDP's own {len(sizes)} buckets (of it "
        f"{profile.after_s * 1e3:.0f} after the last allreduce) and {after.backward_s * 1e3:.0f} "
        f"ms with the best {len(plan.buckets)}, as an allreduce costs {cost.startup_s * 1e3:.2f} "
        f"ms and {cost.s_per_mib * 1e3:.2f} ms a MiB, {cost.contention:.2f} times that beside "
        f"computation, which each launch keeps up by {cost.launch_s * 1e3:.2f} ms and the transfer "
        f"slows down by {cost.interference:.0%}"
    )
    return _Decision(reason, plan.to_json(), is_better=gain >= _LEAST_GAIN)


def _profile(
    ddp: DistributedDataParallel,
    gathered: Sequence[_Measured],
    sizes: Sequence[int],
    cost: AllreduceCost,
) -> Profile:
    """Return the computation of the slowest rank without communication.

    What the model does not explain of the measured backward is taken to come after all allreduces.
    """
    by_index = {p.index: p for p in _torch.reducer_parameters(ddp).values()}
    arrived = [by_index[index] for bucket in gathered[0].buckets for index in bucket]
    slowest = (max(0.0, *times) for times in zip(*(m.ready_s for m in gathered), strict=True))
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
    return dataclasses.replace(profile, after_s=max(0.0, left_s))
