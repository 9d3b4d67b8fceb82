"""Find better buckets while training runs: measure, decide once for all ranks, switch together.

[Note: tuning]
    backward   1 2 3    4 ... 8      | before forward 9         | 9 ... 16    | before forward 17
    each rank  untimed  notes times  | all meet, measure, plan, | notes times | all compare: keep
                                     | get new Reducers         | again       | the new, or undo

With `buckets="auto"` the first iterations run with DDP's own buckets, in graphs that are cut more
finely, and each rank notes when its gradients arrive. Then ranks meet and switch together:

1. Steps are counted by backwards that reduce gradients: these are the same on all ranks, whatever
   other forwards one of them runs.
2. In the forward that leads to a stage's last backward, each rank announces itself.
3. Ranks meet before the first forward with gradients that follows this backward, even one under
   `no_sync`: a new Reducer knows nothing of what was accumulated before it. They meet through the
   process group's store, with a time limit. If a rank does not come, or cannot go on, all keep
   their buckets; if one has gradients that wait to be reduced, or that lie in the present buckets,
   all meet again one backward later, a few times.
4. From there on they run the same code and use collectives: they measure the network, rank 0
   gets their times and plans, each rank says whether the plan fits it, and all apply it, or none
   does. The new Reducer's first steps, in which ranks communicate once more, are taken there too:
   from then on any rank may run a forward more again (`_torch.pass_first_steps`).
5. A few iterations later they meet once more: rank 0 compares, and if iterations did not get
   shorter, all undo the change.

A plan from a file is applied at such a meeting too, after the second backward.

No rank waits if the answer is already known. Each announces itself one step ahead, and one that
cannot go on says so at once. See also [Note: keys of meetings] in steps/numbers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._text import quote
from ddpopt._torch import Forward
from ddpopt.errors import PeerError, PlanError, TorchDriftError
from ddpopt.planning import rebucket, static_graph
from ddpopt.planning.calibrate import calibrate
from ddpopt.planning.decision import STAY, Decision, Verdict, decide, judge
from ddpopt.planning.plan import BucketPlan
from ddpopt.planning.spread import Spread
from ddpopt.planning.stopwatch import Measured, Stopwatch
from ddpopt.ranks.agree import decide_on_rank_0, gather_on_rank_0
from ddpopt.ranks.meetings import JointDecision
from ddpopt.split import state
from ddpopt.split.phases import Buckets
from ddpopt.steps.clock import device_of
from ddpopt.steps.forwards import Subscriber, Turn, subscribe, unsubscribe, will_communicate

# How long ranks wait for one that does not come: in seconds, and as a part of the process group's
# timeout, since others wait in a collective meanwhile. `JointDecision` says when it is twice that.
_LONGEST_MEETING_S = 30.0
_PART_OF_TIMEOUT = 0.25
# The number of backwards after which ranks try to meet. If gradients are pending after each of
# these, they are taken to be pending always in this training loop.
_NUM_TRIES = 8
# Forwards with gradients after which it is said that no step has ended.
_MOST_IDLE = 100


class _Stage(NamedTuple):
    """A part of the way to other buckets, with a meeting of all ranks at its end."""

    # What ranks meet for, for messages.
    title: str
    # How many of its first steps do not count in what is measured.
    num_untimed: int
    # The backwards after which ranks meet.
    num_backwards: int


# Three are untimed: in its second step a Reducer rebuilds buckets, and caches fill.
_SEARCH = _Stage("looking for better buckets", 3, 8)
_COMPARISON = _Stage("comparing new buckets with those before", 3, 8)
_GIVEN = _Stage("taking buckets from a file", 0, 2)

_UNREDUCED = (
    "when a forward begins, a backward has run after the last one that reduced gradients, and has "
    "reduced none; let no backward run there that does not go through DDP"
)

_UNCOUNTED = (
    "static_graph=True, and no backward has run yet in which each gradient arrived that DDP waits "
    "for; let a step end with a backward of its whole loss"
)


def start(ddp: DistributedDataParallel, buckets: str, *, is_provisional: bool) -> None:
    """Begin to find better buckets for `ddp`, or to take those of a file.

    It is called whenever code is compiled for the module, or first shared with it; of these calls
    the first since `torch._dynamo.reset()` counts. One after a reset goes on with the same tuner,
    unless it has other `buckets`: "auto", or the path of a plan. `is_provisional` says that code
    is compiled anew when a search ends. That is so where the forward is cut, in which needless
    sections cost time; those of a backward hardly cost any.

    Raises:
        PlanError: there is no plan in the file, or it does not fit the model.
    """
    if find_tuner(ddp) is not None:
        return
    tuner = _tuners.get(ddp)
    if tuner is None or tuner.source != buckets:
        if tuner is not None:
            tuner.stop_measuring()
        tuner = _Tuner(ddp, buckets)
        _tuners.set(ddp, tuner)
        subscribe(ddp, tuner, Turn.CHANGES)
    _tuners_in_use.set(ddp, tuner)
    tuner.prepare_cuts(ddp, is_provisional=is_provisional)


def search_again(ddp: DistributedDataParallel) -> None:
    """Forget what was found, and search once more, where a network has changed.

    Call it on all ranks in the same step, when the search before is over and DDP has buckets of its
    own (`rebucket.take_back`): a search leaves a module alone that runs with a plan, since somebody
    other than the search may have applied the plan.
    """
    tuner = find_tuner(ddp)
    assert tuner is not None, "there was a search before"
    assert tuner.is_done, "and it is over"
    _tuners.set(ddp, None)
    _tuners_in_use.set(ddp, None)
    start(ddp, tuner.source, is_provisional=state.get(ddp).is_provisional)


def find_tuner(ddp: DistributedDataParallel) -> _Tuner | None:
    """The tuner that searches, or has searched, buckets for `ddp`; None without one."""
    return _tuners_in_use.get(ddp)


def is_searching(ddp: DistributedDataParallel) -> bool:
    """Whether the buckets of `ddp` may still change."""
    tuner = find_tuner(ddp)
    return tuner is not None and not tuner.is_done


def share_if_done(ddp: DistributedDataParallel, copy: DistributedDataParallel) -> None:
    """Spare a copy of `ddp` the search if that of `ddp` is over."""
    tuner = find_tuner(ddp)
    if tuner is not None and tuner.is_done:
        _tuners_in_use.set(copy, tuner)


def continue_search(copy: DistributedDataParallel, ddp: DistributedDataParallel) -> None:
    """Begin for `ddp`, which will run its copy's code, what compiling this code has begun."""
    begun = find_tuner(copy)
    if begun is not None and find_tuner(ddp) is None:
        start(ddp, begun.source, is_provisional=state.get(copy).is_provisional)


class _Tuner(Subscriber):
    """One module's way to other buckets; see [Note: tuning].

    Read `before_forward` first: it is called with each forward of the module, counts steps, and
    leads to a meeting of ranks, which ends a stage in `_conclude`.
    """

    may_raise = True  # ranks that no longer agree on buckets must not train on

    def __init__(self, ddp: DistributedDataParallel, source: str) -> None:
        # "auto", or the path of a plan.
        self.source = source
        # The best plan that was found, or the one from the file.
        self.best: BucketPlan | None = None
        # How ranks differed in the search, once it is over.
        self.spread: Spread | None = None
        # The result of the stages that are over, for users.
        self._outcome = ""
        # None when all is over.
        self._stage: _Stage | None = _SEARCH if source == "auto" else _GIVEN
        # Measures the present stage. It is made in the first forward of the stage.
        self._stopwatch: Stopwatch | None = None
        # The meeting that this rank has announced.
        self._meeting: JointDecision | None = None
        # How often ranks have met at the end of this stage, and put it off by a step.
        self._num_postponed = 0
        self._idle = _IdleForwards()
        # The change that is being judged, during the comparison.
        self._change: _Change | None = None

        if self._stage is _GIVEN:
            self.best = _load(ddp, source)
        self._longest_meeting_s = _LONGEST_MEETING_S
        # Find out first whether anything can be changed or gained at all.
        group = ddp.process_group
        try:
            _torch.check_names_for_tuning(ddp)
            obstacle = _find_lasting_obstacle(ddp, source)
            if not obstacle:  # a group by which ranks cannot meet may have no timeout
                # Others may wait in a collective meanwhile, which must not fail because of that.
                timeout_s = _torch.group_timeout(group, device_of(ddp)).total_seconds()
                self._longest_meeting_s = min(_LONGEST_MEETING_S, _PART_OF_TIMEOUT * timeout_s)
        except TorchDriftError as error:
            obstacle = str(error)
        if obstacle:
            self._keep_buckets(ddp, obstacle)  # all is over
        elif self._stage is _SEARCH and group.size() < 2:  # a plan that is given is taken even so
            self._stage = None
            self._report(ddp, f"{STAY}: one rank communicates nothing")

    @property
    def is_done(self) -> bool:
        return self._stage is None

    @property
    def outcome(self) -> str:
        """The result so far, and how far the present stage is."""
        return "\n".join(filter(None, [self._outcome, self._describe_progress()]))

    def stop_measuring(self) -> None:
        """Let go of autograd's nodes, where another tuner takes over from this one."""
        if self._stopwatch is not None:
            self._stopwatch.stop()

    def prepare_cuts(self, ddp: DistributedDataParallel, *, is_provisional: bool) -> None:
        """Make graphs be cut for any buckets during a search, or for the given ones to come."""
        if self._stage is _SEARCH:
            state.get(ddp).begin_search(is_provisional=is_provisional)
        elif self._stage is _GIVEN and self.best is not None:
            state.get(ddp).expect_buckets(rebucket.indices_of(ddp, self.best))

    # ---- Counting steps ----------------------------------------------------------------------

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Count a step, and meet the other ranks where the stage has had enough of them."""
        stage = self._stage
        if stage is None:
            unsubscribe(ddp, _Tuner)
            return
        self._warn_if_idle(ddp)

        is_communicating = will_communicate(ddp)
        if is_communicating:
            stopwatch = self._begin_step(ddp, stage)
        elif self._stopwatch is not None:
            stopwatch = self._stopwatch
            stopwatch.skip_forward()  # its backward is in no step
        else:
            return  # an evaluation, or a micro-batch under no_sync, before the first step

        # Ranks meet when the stage's last backward has run, to agree on what comes next. Each
        # announces itself one step ahead, so that nobody waits for a rank that will not come.
        last_backward = stage.num_backwards + self._num_postponed
        if self._meeting is None:
            if is_communicating and stopwatch.num_backwards == last_backward - 1:
                self._announce(ddp, stage, stopwatch)
        elif stopwatch.num_backwards == last_backward and torch.is_grad_enabled():
            # They meet before the first forward with gradients, also one under no_sync: a new
            # Reducer would know nothing of what that accumulates.
            self._meet(ddp, stage, stopwatch)

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        if self._stage is not None and will_communicate(ddp):
            # This tuner may have been made in the forward that ends here, or its stage have begun
            # in `before_forward`, when the one before was concluded.
            (self._stopwatch or self._begin_step(ddp, self._stage)).end_forward()

    def _begin_step(self, ddp: DistributedDataParallel, stage: _Stage) -> Stopwatch:
        """Begin to time a step, and return what times it: a new stopwatch in a stage's first."""
        if self._stopwatch is None:
            self._stopwatch = Stopwatch(ddp, stage.num_untimed)
        self._stopwatch.begin_forward()
        return self._stopwatch

    @property
    def _num_backwards(self) -> int:
        """How many steps of the present stage have ended."""
        return self._stopwatch.num_backwards if self._stopwatch else 0

    def _warn_if_idle(self, ddp: DistributedDataParallel) -> None:
        """Warn once if no step ends; the search stays open, as ranks can only end it together."""
        if torch.is_grad_enabled() and self._idle.count(self._stage, self._num_backwards):
            log = _logs.info if state.is_copy(ddp) else _logs.warning
            log("%s", self._describe_progress())

    def _describe_progress(self) -> str:
        """How far the present stage is, and what to do if it does not get on."""
        if self._stage is None:
            return ""
        text = f"{self._stage.title}: {self._num_backwards} of {self._stage.num_backwards} steps"
        if self._idle.are_many:
            text += (
                f"; gradients were reduced after none of the last {self._idle.num} forwards: "
                "unless they are still accumulated, call backward() on what a forward outside of "
                f"no_sync returns, or leave out buckets={quote(self.source)}"
            )
        return text

    # ---- Meeting the other ranks -------------------------------------------------------------

    def _announce(self, ddp: DistributedDataParallel, stage: _Stage, stopwatch: Stopwatch) -> None:
        """Tell the other ranks that this one comes to the meeting after the next backward."""
        try:
            # Ranks that were refused for now meet again, under another key.
            key = f"{stopwatch.key}/{self._num_postponed}"
            # Several modules may meet one after another, while some rank waits in one collective
            # for all of that: so each, this one too, has its part of the time.
            limit_s = self._longest_meeting_s / _num_searches(ddp.process_group)
            # To make it announces this rank.
            self._meeting = JointDecision(ddp.process_group, stage.title, key, limit_s)
        except PeerError as error:
            # The store is gone. The others will miss this rank at the meeting, and give up too.
            self._end_stage(ddp, stopwatch)
            self._give_up(ddp, stage, str(error))

    def _meet(self, ddp: DistributedDataParallel, stage: _Stage, stopwatch: Stopwatch) -> None:
        """Go on with all ranks, or with none; or try again after the next backward.

        If the store is gone, nobody knows what the others do, and its PeerError ends training.
        """
        assert self._meeting is not None, "it was announced before the last backward"
        # The plan whose buckets DDP has now, unless somebody else has changed them.
        planned = self.best if stage is _COMPARISON else None
        obstacle = _find_obstacle(ddp, planned, self.source)
        pending = "" if obstacle else _find_pending(ddp, stopwatch)
        # On an accelerator nobody has waited for the last allreduce: this rank may be a step ahead
        # of ranks that have not announced themselves.
        stopwatch.finish()
        refusal = self._meeting.decide(obstacle or pending, is_for_now=bool(pending))
        if refusal is None:
            self._end_stage(ddp, stopwatch)  # first, since `_conclude` may begin another
            self._conclude(ddp, stage, stopwatch)
        elif refusal.is_for_now and self._num_postponed + 1 < _NUM_TRIES:
            self._num_postponed += 1
            self._announce(ddp, stage, stopwatch)
        else:
            self._end_stage(ddp, stopwatch)
            again = f" (so in each of {_NUM_TRIES} steps)" if refusal.is_for_now else ""
            self._give_up(ddp, stage, f"{refusal.reason}{again}")

    def _end_stage(self, ddp: DistributedDataParallel, stopwatch: Stopwatch) -> None:
        """Leave the present stage; what follows may begin another, and all is over otherwise."""
        stopwatch.stop()
        self._stage = self._stopwatch = self._meeting = None
        self._num_postponed = 0
        state.get(ddp).end_search()

    # ---- What follows, on all ranks together ------------------------------------------------

    def _conclude(self, ddp: DistributedDataParallel, stage: _Stage, stopwatch: Stopwatch) -> None:
        """All ranks have met and go on: do what the stage has led to, by collectives."""
        if stage is _GIVEN:
            self._take_given(ddp)
        elif stage is _SEARCH:
            self._decide(ddp, stopwatch.measured())
        else:
            self._judge(ddp, stopwatch.measured())

    def _take_given(self, ddp: DistributedDataParallel) -> None:
        """Apply the plan of the file.

        Where a search would keep the buckets, a PlanError ends training: a user asked for these.
        """
        best = self.best
        assert best is not None, "the file was read when the tuner was made"
        rebucket.agree(ddp, lambda: best)
        rebucket.apply(ddp, best)
        _tell_new_reducer_of_forward(ddp)
        if state.get(ddp).is_recut:  # otherwise compiled code was already cut for these buckets
            state.get(ddp).recompile_by_new_limits()
        ranks = rebucket.note_on_predictions(ddp, best)
        self._report(ddp, f"buckets are those of {self.source}{ranks}")

    def _decide(self, ddp: DistributedDataParallel, measured: Measured) -> None:
        """Measure the network, plan on rank 0, and apply the plan if it fits all ranks."""
        cost = calibrate(ddp.process_group, device_of(ddp))
        # Empty on other ranks, on which nothing is decided.
        by_rank = gather_on_rank_0(ddp, measured, _SEARCH.title) or []
        decision = decide_on_rank_0(
            ddp,
            _SEARCH.title,
            lambda: decide(ddp, by_rank, cost),
            lambda error: Decision(f"{STAY}: planning raised {error!r}"),
        )
        self.spread = decision.spread
        # Kept even if it is not used: `explain` shows what it would save.
        self.best = best = BucketPlan.from_json(decision.plan) if decision.plan else None
        if best is None or not decision.is_better:
            self._report(ddp, decision.text)
            return
        try:
            rebucket.agree(ddp, lambda: best)
        except PlanError as error:
            self._keep_buckets(ddp, str(error))
            return
        caps_bytes_before = _torch.reducer_caps(ddp)
        try:
            rebucket.apply(ddp, best)
        except PlanError as error:
            _tell_new_reducer_of_forward(ddp)  # it may be a new one, with the former buckets
            self._keep_buckets(ddp, str(error))
            return
        self._report(ddp, decision.text)
        self._change = _Change(
            buckets_before=measured.buckets,
            measured_before=by_rank,
            caps_bytes_before=caps_bytes_before,
            predicted_gain=decision.gain,
        )
        _go_on_with_new_buckets(ddp)
        self._stage = _COMPARISON

    def _judge(self, ddp: DistributedDataParallel, measured: Measured) -> None:
        """Undo the change if iterations did not get shorter."""
        change, self._change = self._change, None
        assert change is not None, "buckets were changed before the comparison"
        by_rank = gather_on_rank_0(ddp, measured, _COMPARISON.title) or []
        verdict = decide_on_rank_0(
            ddp,
            _COMPARISON.title,
            lambda: judge(change.measured_before, by_rank, change.predicted_gain),
            lambda error: Verdict(f"what came of it is not known: comparing raised {error!r}"),
        )
        self._report(ddp, verdict.text)
        if verdict.undoes_change:
            try:
                rebucket.take_back(ddp, change.buckets_before, change.caps_bytes_before)
            except PlanError as error:
                _tell_new_reducer_of_forward(ddp)  # it may be a new one, with the planned buckets
                self._report(ddp, str(error))
                return
            _go_on_with_new_buckets(ddp)

    # ---- What users read ---------------------------------------------------------------------

    def _report(self, ddp: DistributedDataParallel, news: str) -> None:
        """Note what all ranks know, and log it on rank 0."""
        self._note(news)
        if ddp.process_group.rank() == 0:
            _logs.info("%s", news)

    def _note(self, news: str) -> None:
        self._outcome = "\n".join(filter(None, [self._outcome, news]))

    def _give_up(self, ddp: DistributedDataParallel, stage: _Stage, problem: str) -> None:
        """End all stages here: a search or a plan's file changes nothing, a change is kept."""
        self._stage = self._change = None
        if stage is _COMPARISON:  # the buckets have changed, and stay that way
            news = f"what came of it is not known: {problem}"
            self._note(news)
            # Not on rank 0 alone: where the store is gone, other ranks may not know.
            _logs.info("%s", news)
        else:
            self._keep_buckets(ddp, problem)

    def _keep_buckets(self, ddp: DistributedDataParallel, reason: str) -> None:
        """Keep the buckets for good although others were requested; warn, but not for a copy."""
        self._stage, self._outcome = None, f"{STAY}: {reason}"
        log = _logs.info if state.is_copy(ddp) else _logs.warning
        log("buckets=%r changes nothing: %s", self.source, self._outcome)


class _Change(NamedTuple):
    """A change of buckets that is to be judged: what there was before, and what was predicted."""

    buckets_before: Buckets
    # What each rank measured before the change, on rank 0, which judges; empty on other ranks.
    measured_before: Sequence[Measured]
    caps_bytes_before: Sequence[int]
    # The part of an iteration that the change should save.
    predicted_gain: float


class _IdleForwards:
    """Forwards with gradients since the last step that ended."""

    def __init__(self) -> None:
        self.num = 0
        self._limit = _MOST_IDLE
        self._progress: object = None
        self._is_told = False

    @property
    def are_many(self) -> bool:
        return self.num >= self._limit

    def count(self, *progress: object) -> bool:
        """Count a forward; return whether to warn now, which is once.

        `progress` is whatever changes when a step ends.
        """
        if progress != self._progress:
            # A step may have more forwards than the limit, whose gradients accumulate. Another may
            # be as long, so the warning waits for twice as many.
            self._limit = max(self._limit, 2 * self.num)
            self._progress, self.num = progress, 0
            return False
        self.num += 1
        if self.num == self._limit and not self._is_told:
            self._is_told = True
            return True
        return False


# A search goes on after `torch._dynamo.reset()`, which one rank may call alone.
_tuners: ModuleSlot[_Tuner | None] = ModuleSlot(lambda: None, Lifetime.MODULE)
# The tuners of modules for which code was compiled since the last reset.
_tuners_in_use: ModuleSlot[_Tuner | None] = ModuleSlot(lambda: None, Lifetime.CODE)


def _num_searches(group: object) -> int:
    """How many modules of a process group have yet to meet."""
    of_group = [_tuners.get(ddp) for ddp in _tuners.modules() if ddp.process_group is group]
    return sum(tuner is not None and not tuner.is_done for tuner in of_group)


def _load(ddp: DistributedDataParallel, path: str) -> BucketPlan:
    """The plan in a file; raises PlanError if it cannot be read, or is not one for this model."""
    try:
        plan = BucketPlan.load(path)
    except OSError as error:
        raise PlanError(
            f"buckets={quote(path)} cannot be read: {error.strerror}; give the path of a "
            "file that BucketPlan.save wrote"
        ) from error
    misfit = rebucket.find_misfit(ddp, plan)
    if misfit:
        raise PlanError(f"buckets={quote(path)} does not fit this model: {misfit}")
    return plan


def _find_lasting_obstacle(ddp: DistributedDataParallel, source: str) -> str:
    """Say why the buckets of `ddp` cannot be changed automatically; "" if they can."""
    if source == "auto" and _torch.hook_states(ddp):
        return (
            "its comm hook keeps a state, which may be by bucket; call ddpopt.rebucket if it is not"
        )
    return rebucket.find_lasting_obstacle(ddp)


def _find_obstacle(ddp: DistributedDataParallel, planned: BucketPlan | None, source: str) -> str:
    """Say why this rank cannot go on; "" if it can.

    Buckets have to be those that the tuner has left: DDP's own, or the `planned` ones.
    """
    if find_tuner(ddp) is None:
        return (
            "torch._dynamo.reset() was called, and nothing is compiled with "
            f"buckets={quote(source)} since"
        )
    if rebucket.plan_of(ddp) not in (None, planned):
        return "ddpopt.rebucket has changed them"
    return _find_lasting_obstacle(ddp, source) or rebucket.find_obstacle(ddp)


def _find_pending(ddp: DistributedDataParallel, stopwatch: Stopwatch) -> str:
    """Say why this rank cannot go on now, but perhaps after a backward more; "" if it can."""
    if stopwatch.has_unreduced:
        return _UNREDUCED
    if pending := rebucket.find_pending(ddp):
        return pending
    if ddp.static_graph and static_graph.find_arrivals(ddp) is None:
        return _UNCOUNTED
    return ""


def _go_on_with_new_buckets(ddp: DistributedDataParallel) -> None:
    """Continue with the forward that was about to begin, by code for the module's new buckets.

    Sections of a backward serve any buckets. Those of a forward do not, nor does code of another
    module that was cut for that one's own buckets (`DDPState.is_recut`).
    """
    _tell_new_reducer_of_forward(ddp)
    known = state.get(ddp)
    if known.has_forward_sections or known.is_recut:
        known.recompile_by_new_limits()


def _tell_new_reducer_of_forward(ddp: DistributedDataParallel) -> None:
    """Tell the module's new Reducer of the forward of which DDP has told the one before."""
    if will_communicate(ddp):
        _torch.prepare_reducer(ddp)
