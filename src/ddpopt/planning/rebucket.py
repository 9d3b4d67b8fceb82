"""`rebucket`: give an existing DDP module the buckets of a plan."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddpopt import _logs, _torch
from ddpopt._indices import ParameterIndex
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._text import count, shorten
from ddpopt._torch import Forward
from ddpopt._values import check_kind
from ddpopt.errors import PlanError, TorchDriftError
from ddpopt.planning import static_graph
from ddpopt.planning.batch import tensors_of
from ddpopt.planning.plan import BucketPlan
from ddpopt.ranks.agree import Fact, require_equal
from ddpopt.ranks.store import why_no_meeting
from ddpopt.split import state
from ddpopt.split.phases import Buckets, Origin
from ddpopt.split.state import MODES_WITHOUT_REBUCKET, find_mode
from ddpopt.steps.forwards import (
    Subscriber,
    Turn,
    find_subscriber,
    subscribe,
    unsubscribe,
    will_communicate,
)

# The plan that the Reducer was made for, if any.
_plans: ModuleSlot[BucketPlan | None] = ModuleSlot(lambda: None, Lifetime.REDUCER)
# How often DDP had reduced, and cleared, its notes of used parameters at the first forward under
# no_sync: while that number stays the same, the notes are still there. A new Reducer has no notes.
_num_resets_before: ModuleSlot[int | None] = ModuleSlot(lambda: None, Lifetime.REDUCER)
# Hooks after `rebucket`, on the module and its parameters. Until the next forward they make each
# backward raise. Then, with a static graph of unknown arrivals, others on the module raise unless
# DDP learns its gradients from the next backward.
_hooks: ModuleSlot[Sequence[RemovableHandle]] = ModuleSlot(lambda: (), Lifetime.MODULE)


def rebucket(model: torch.nn.Module, plan: BucketPlan | str | os.PathLike[str]) -> None:
    """Rebuild the Reducer of a DDP model with exactly the buckets of `plan`, or of a saved one.

    Comm hooks and all options are kept; a hook of yours that keeps state by bucket must drop it.
    This is a collective call: every rank of DDP's process group must make it with an equal plan,
    between a step and the next forward: not while gradients are accumulated under `no_sync`, and
    with `gradient_as_bucket_view=True` or `find_unused_parameters=True` after `zero_grad()`. Until
    the next forward of the DDP module each backward raises. Graphs compiled with
    `backend="ddpopt"` are compiled again in that forward.

    Raises:
        PlanError: on all ranks, if on any of them the plan's file cannot be read, the plan does not
            fit the model, plans differ, a backward is running, gradients wait to be reduced or lie
            in DDP's buckets, or DDP or its comm hook is of a kind whose Reducer cannot be replaced;
            or if a new one cannot be made, for want of memory for one. Buckets stay as they are.
        PeerError: a rank did not make this call.
        TypeError: on all ranks, `plan` is no plan; or there is no DistributedDataParallel at the
            top of `model`.
    """
    ddp = state.ddp_of(model)
    agreed = agree(ddp, lambda: _read(plan), lambda: _find_noted_gradients(ddp))
    apply(ddp, agreed)
    state.get(ddp).recompile_by_new_limits()
    _forbid_backward(ddp)
    note = note_on_predictions(ddp, agreed)
    if note and ddp.process_group.rank() == 0:
        _logs.info("buckets are those of a plan%s", note)


def _read(plan: object) -> BucketPlan:
    """A plan, or the one in a file."""
    if isinstance(plan, str | os.PathLike):
        return BucketPlan.load(Path(plan))
    remedy = "rebucket takes a BucketPlan or the path of a saved one"
    check_kind("plan", plan, BucketPlan, remedy, TypeError)
    assert isinstance(plan, BucketPlan)
    return plan


def _find_noted_gradients(ddp: DistributedDataParallel) -> str:
    """Say that DDP may have noted gradients as used that it has not reduced; "" if it cannot.

    `_Accumulation` knows of such notes from forwards under no_sync. A backward that went past DDP,
    through `ddp.module`, leaves some as well, and nobody is told of its forward. So who calls
    `rebucket` is asked for a state without any; the tuner notices such backwards
    (`Stopwatch.has_unreduced`).
    """
    # DDP takes no such notes unless it looks for unused parameters.
    if _torch.follows_arrival_order(ddp) or not _torch.has_gradients(ddp):
        return ""
    return (
        "parameters have gradients, and DDP, which looks for unused parameters, may have noted "
        "them for its next reduction; call zero_grad(), with set_to_none=True, before rebucket"
    )


def find_obstacle(ddp: DistributedDataParallel) -> str:
    """Say why no plan can be applied to `ddp` now; "" if one can."""
    if _torch.is_in_backward():
        return "a backward is running; call rebucket between a step and the next forward"
    return find_lasting_obstacle(ddp)


def find_pending(ddp: DistributedDataParallel) -> str:
    """Say which gradients a new Reducer would know nothing of; "" if none are known.

    Where nothing has called `watch`, gradients that DDP has noted as used may be missed: see
    `_find_noted_gradients`.
    """
    if _torch.has_unfinished_reduction(ddp):
        return "DDP has not ended the reduction of the last backward"
    if _torch.may_hold_gradients(ddp):
        return (
            "gradients lie in DDP's buckets (gradient_as_bucket_view=True); call zero_grad(), with "
            "set_to_none=True, between the step and the next forward, and before rebucket"
        )
    if _is_accumulating(ddp):
        return (
            "gradients may be accumulating under no_sync; call rebucket after a backward without "
            "no_sync, before the next forward"
        )
    return ""


def watch(ddp: DistributedDataParallel) -> None:
    """Note from this forward on what a new Reducer depends on, see `find_pending` and `apply`.

    That is whether gradients accumulate under `no_sync`, and, with a static graph, how often each
    gradient arrives in a backward.
    """
    static_graph.watch(ddp)
    if not state.is_copy(ddp) and find_subscriber(ddp, _Accumulation) is None:
        subscribe(ddp, _Accumulation(ddp), Turn.REMEMBERS)


class _Accumulation(Subscriber):
    """Knows whether gradients accumulate under `no_sync`, where a new Reducer would not see them.

    They do if the last forward with gradients was under `no_sync`. Where DDP looks for unused
    parameters, it notes used ones under `no_sync` too, and gradients count as accumulating until
    DDP has reduced these notes.

    It is told of each forward after `_Tuner`, so that the tuner's question is about the one before.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Whether the last forward with gradients was under no_sync. None is unknown, as at first,
        # where DDP only tells that the last one was under no_sync or without gradients.
        self._was_under_no_sync: bool | None = None
        with contextlib.suppress(TorchDriftError):  # then it stays unknown
            if _torch.last_forward_synced(ddp):
                self._was_under_no_sync = False
        self._note_forward(ddp)  # the one that is running

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        self._note_forward(ddp)

    def _note_forward(self, ddp: DistributedDataParallel) -> None:
        """Note whether a forward is under no_sync, and before the first such one DDP's count."""
        if not torch.is_grad_enabled():
            return
        is_under_no_sync = not will_communicate(ddp)
        if is_under_no_sync and not self._was_under_no_sync:
            # If this torch lacks the name, steps go on, and `rebucket`, which asks again, raises.
            with contextlib.suppress(TorchDriftError):
                _num_resets_before.set(ddp, _torch.num_used_map_resets(ddp))
        self._was_under_no_sync = is_under_no_sync

    def is_accumulating(self, ddp: DistributedDataParallel) -> bool | None:
        """Whether gradients accumulate, None if that is not known."""
        num_resets = _num_resets_before.get(ddp)
        has_notes = num_resets is not None and num_resets == _torch.num_used_map_resets(ddp)
        return has_notes or self._was_under_no_sync


def _is_accumulating(ddp: DistributedDataParallel) -> bool:
    """Whether gradients accumulate under no_sync, or may do so if nobody has watched forwards."""
    watching = find_subscriber(ddp, _Accumulation)
    is_accumulating = None if watching is None else watching.is_accumulating(ddp)
    if is_accumulating is not None:
        return is_accumulating
    if _torch.last_forward_synced(ddp):
        return False
    return _torch.has_gradients(ddp)  # it was under no_sync, or an evaluation; DDP does not tell


def find_lasting_obstacle(ddp: DistributedDataParallel) -> str:
    """Say why no plan can be applied to `ddp` as it is set up; "" if one can."""
    mode = find_mode(ddp, MODES_WITHOUT_REBUCKET)
    if mode is not None:
        return f"this DDP module's buckets cannot be changed: {mode.value}"
    if why := why_no_meeting(ddp.process_group):
        return f"{why}, to change buckets on all of them; give the plan's ddp_kwargs() instead"
    if problem := _find_odd_setting(ddp):
        return problem
    if problem := _find_hook_problem(ddp):
        return problem
    reduced = list(_torch.reducer_parameters(ddp).values())
    if len({p.group for p in reduced}) > 1 or any(p.is_sparse for p in reduced):
        return (
            "its parameters are of several dtypes or devices, or sparse, for which DDP forms "
            "buckets apart; give DistributedDataParallel the plan's ddp_kwargs() instead"
        )
    return ""


def _find_odd_setting(ddp: DistributedDataParallel) -> str:
    """Say which of DDP's settings a new Reducer would lose or change; "" if there is none."""
    if unknown := _torch.find_unknown_setting(ddp):
        return (
            f"{unknown} is an option of DistributedDataParallel that this ddpopt does not know, "
            "so it might be lost; upgrade ddpopt, or give DistributedDataParallel the plan's "
            "ddp_kwargs() instead"
        )
    if changed := _torch.find_changed_setting(ddp):
        return (
            f"its {changed} was changed after it was made, which DDP's Reducer has not noticed; "
            "make DistributedDataParallel with the value that it is to have"
        )
    return ""


def _find_hook_problem(ddp: DistributedDataParallel) -> str:
    """Say why a comm hook cannot work for other buckets; "" if it can, or there is none."""
    if why_unknown := _torch.find_unknown_hook(ddp):
        return why_unknown
    # The class, or the one that a subclass has it from, is recognised by its name: importing it
    # needs numpy.
    kinds = [kind for kept in _torch.hook_states(ddp) for kind in type(kept).__mro__]
    if any(kind.__name__ == "PowerSGDState" for kind in kinds):
        kept_by_hook = "is PowerSGD, which keeps errors by bucket"
    elif _torch.runs_optimizers(ddp):
        kept_by_hook = "runs an optimizer, whose parameters are in the order of the present buckets"
    else:
        return ""
    remedy = "give DistributedDataParallel the plan's ddp_kwargs() instead"
    return f"its comm hook {kept_by_hook}; {remedy}"


def find_misfit(ddp: DistributedDataParallel, plan: BucketPlan) -> str:
    """Say how the parameters of `plan` differ from those that `ddp` reduces; "" if they match."""
    reduced = {p.name: p.num_bytes for p in _torch.reducer_parameters(ddp).values()}
    reducer_name_of = _names_in_reducer(ddp, plan)
    planned = {reducer_name_of[g.name]: g.num_bytes for g in plan.profile.gradients}
    remedy = "plan for this very model"
    not_planned, not_reduced = reduced.keys() - planned, planned.keys() - reduced
    for names, where in ((not_planned, "in the plan"), (not_reduced, "reduced")):
        if names:
            shown = shorten(sorted(names))
            are = "is" if len(names) == 1 else "are"
            return f"{count(len(names), 'parameter')} {are} not {where} ({shown}); {remedy}"
    for name, size in reduced.items():
        if planned[name] != size:
            sizes = f"{size} bytes, and {planned[name]} in the plan"
            return f"the gradient of {name} has {sizes}; {remedy}"
    return ""


def agree(
    ddp: DistributedDataParallel,
    get_plan: Callable[[], BucketPlan],
    find_problem: Callable[[], str] = lambda: "",
) -> BucketPlan:
    """Return this rank's plan, or raise on all ranks unless all can apply the same. Collective.

    If `get_plan` raises on one rank, all ranks raise its error. `find_problem` returns a further
    reason why this rank cannot apply the plan, or "".

    Raises:
        PlanError: the first problem, or the ranks that differ from the first one.
        PeerError: a rank did not make this call.
    """
    plans = []  # this rank's, unless `get_plan` raises

    def check_and_describe() -> list[Fact]:
        plan = get_plan()
        plans.append(plan)
        problem = find_obstacle(ddp) or find_pending(ddp) or find_problem()
        problem = problem or find_misfit(ddp, plan)
        if problem:
            raise PlanError(problem)
        # Compared by parameters' indices: names may differ where ranks have compiled other modules.
        buckets = str(indices_of(ddp, plan)).encode()
        facts = [Fact("the plan", hashlib.sha256(buckets).hexdigest()[:16])]
        if ddp.static_graph:
            # Whether arrivals are known decides which collectives follow in `apply`.
            is_known = static_graph.find_arrivals(ddp) is not None
            facts.append(
                Fact(
                    "how often gradients arrive (static_graph=True)",
                    "known" if is_known else "unknown",
                    "compile the model on all ranks, and run two steps before",
                )
            )
        return facts

    require_equal(
        ddp,
        check_and_describe,
        PlanError,
        "make the plan on one rank and broadcast its to_json()",
        title="buckets stay as they are: ",
    )
    return plans[0]


def apply(ddp: DistributedDataParallel, plan: BucketPlan) -> None:
    """Give `ddp` the buckets of a plan that fits. Collective.

    Raises:
        PlanError: on all ranks, if one could not make a Reducer; `ddp` has the buckets of before.
        PeerError: a rank did not make this call.
    """
    buckets = indices_of(ddp, plan)
    _replace_reducer(ddp, buckets, plan.caps_bytes)
    state.get(ddp).give_buckets(buckets, Origin.PLANNED)
    _plans.set(ddp, plan)


def take_back(ddp: DistributedDataParallel, buckets: Buckets, caps_bytes: Sequence[int]) -> None:
    """Give `ddp` back the buckets that it had before a plan, and their limits. Collective.

    Within each bucket, `buckets` has the parameters in the order that DDP had them in, equal on
    all ranks: it is their order in the tensor that is reduced. The next search takes that order
    for the one in which gradients arrive, as it is where DDP follows arrival.

    Raises as `apply` does.
    """
    _replace_reducer(ddp, buckets, caps_bytes)  # the plan is forgotten with its Reducer
    state.get(ddp).give_buckets(buckets, Origin.RETURNED)


def _replace_reducer(
    ddp: DistributedDataParallel, buckets: Buckets, caps_bytes: Sequence[int]
) -> None:
    """Replace the Reducer on all ranks or on none: one may lack the memory for a new one."""

    # Called on all ranks after each part that a rank does alone, with what went wrong in it here.
    def settle(problem: Exception | None) -> None:
        """Raise on all ranks if one of them has a problem."""

        def find_facts() -> list[Fact]:
            if problem is not None:
                raise problem
            return []

        title = "buckets stay as they are: "
        require_equal(ddp, find_facts, PlanError, "report it", title=title)

    num_arrivals = static_graph.find_arrivals(ddp)
    _torch.replace_reducer(ddp, buckets, caps_bytes, num_arrivals, settle)


def indices_of(ddp: DistributedDataParallel, plan: BucketPlan) -> list[list[ParameterIndex]]:
    """The buckets of a plan that fits, by parameters' indices, as DDP has its own."""
    index_of = {p.name: p.index for p in _torch.reducer_parameters(ddp).values()}
    reducer_name_of = _names_in_reducer(ddp, plan)
    return [
        [index_of[reducer_name_of[name]] for name in bucket.parameters] for bucket in plan.buckets
    ]


def _names_in_reducer(ddp: DistributedDataParallel, plan: BucketPlan) -> Mapping[str, str]:
    """By a plan's name of a parameter, its name in `reducer_parameters`.

    A plan's names have `_orig_mod` in them where modules were compiled when it was made.
    """
    planned = [gradient.name for gradient in plan.profile.gradients]
    # The module's own names, of which some may have kept `_orig_mod`, need no change.
    if {p.name for p in _torch.reducer_parameters(ddp).values()} == set(planned):
        return dict(zip(planned, planned, strict=True))
    return _torch.plain_names(planned)


def plan_of(ddp: DistributedDataParallel) -> BucketPlan | None:
    """The plan that gave `ddp` its buckets, None if they are DDP's own.

    It is as it was made, perhaps for another number of ranks: see `for_ranks_of`.
    """
    return _plans.get(ddp)


def for_ranks_of(ddp: DistributedDataParallel, plan: BucketPlan) -> BucketPlan:
    """A plan with the cost of an allreduce among the ranks of `ddp`, for predictions.

    A process that is alone communicates nothing. Whoever looks at a model there asks about the
    ranks that the plan is for, as `ddpopt explain` does.

    Raises:
        PlanError: the plan's cost says nothing of so many ranks.
    """
    num_ranks = ddp.process_group.size()
    return plan if num_ranks == 1 else plan.for_ranks(num_ranks)


def note_on_predictions(ddp: DistributedDataParallel, plan: BucketPlan) -> str:
    """What becomes of a plan's predictions among the ranks of `ddp`, to end a sentence.

    "" if the plan's cost was measured among as many ranks as `ddp` has.
    """
    num_ranks = ddp.process_group.size()
    try:
        there = for_ranks_of(ddp, plan)
    except PlanError as error:
        return f"; nothing is predicted for {count(num_ranks, 'rank')}: {error}"
    if there.extrapolation:
        return f"; what is predicted of them is {there.extrapolation}"
    if there.world_size != num_ranks:  # of a process that is alone, see `for_ranks_of`
        return f"; what is predicted of them is for {count(there.world_size, 'rank')}"
    return ""


def _forbid_backward(ddp: DistributedDataParallel) -> None:
    """Make backward raise until the next forward: a new Reducer does not know earlier ones."""
    _remove_hooks(ddp)  # of an earlier `rebucket`, if no forward has run since
    reduced = _torch.reducer_parameters(ddp)
    # Frozen parameters too, on which no hook can be registered: they may be trained again.
    with _torch.requiring_grad(reduced):
        handles = [
            parameter.register_hook(_refuse_backward)  # type: ignore[no-untyped-call]  # as torch has it
            for parameter in reduced
        ]
    # Subscribers are told of forwards only once something has been compiled in this process; until
    # then a hook tells. Dynamo must not trace into it.
    _torch.hide_from_dynamo()
    handles.append(ddp.register_forward_pre_hook(_allow_at_forward))
    _hooks.set(ddp, handles)
    subscribe(ddp, _Permission(), Turn.PERMITS)


def _refuse_backward(_gradient: torch.Tensor) -> None:
    raise PlanError(
        "this backward belongs to a forward from before ddpopt.rebucket, whose gradients would not "
        "be reduced, or to none of DistributedDataParallel's; call rebucket between a step and the "
        "next forward, and let that be one of the DDP module"
    )


def _allow_at_forward(ddp: DistributedDataParallel, _inputs: object) -> None:
    """A hook of the module's; a function of the file, so that the module can be pickled."""
    if _hooks.get(ddp):  # a copy of the module has this hook too, but its backwards never raised
        _allow_backward(ddp)


class _Permission(Subscriber):
    """Calls `_allow_backward` before others are told of a forward, which this may refuse."""

    may_raise = True

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        _allow_backward(ddp)


def _allow_backward(ddp: DistributedDataParallel) -> None:
    """Let backwards run again, which `_forbid_backward` made raise: a forward begins.

    With a static graph whose arrivals are not known, the forward has to be one from whose backward
    DDP learns them, or this raises; and backwards are watched until DDP has.
    """
    if not torch.is_grad_enabled():
        return  # an evaluation, after which a backward from before is still to be refused
    is_reduced = will_communicate(ddp) and _torch.trains_any(ddp)
    if _torch.awaits_static_graph(ddp) and not is_reduced:
        raise PlanError(
            "with static_graph=True the first forward after ddpopt.rebucket can neither be under "
            "no_sync nor with all parameters frozen: DDP learns in its backward which gradients "
            "to expect; run one step first that has all of them, or compile the model with ddpopt "
            "and run two steps before rebucket"
        )
    _remove_hooks(ddp)
    if _torch.awaits_static_graph(ddp):
        before = ddp.register_forward_pre_hook(_check_first_backward)
        after = ddp.register_forward_hook(_watch_first_backward)
        _hooks.set(ddp, [before, after])


def _watch_first_backward(ddp: DistributedDataParallel, _inputs: object, output: object) -> None:
    """A hook of the module's that makes a backward raise in which no gradient arrives.

    `torch.autograd.grad` runs such a backward. DDP would take it for the first of a static graph,
    at whose end it allreduces: a rank that makes that call alone would hang.
    """
    if not _hooks.get(ddp) or not _torch.awaits_static_graph(ddp):
        return  # this is a copy, which has the hook too; or DDP has learned its gradients
    reduced = [tensor for tensor in _torch.reducer_parameters(ddp) if tensor.requires_grad]
    accumulating = [_torch.accumulate_node(tensor) for tensor in reduced]

    def check(_gradients: object) -> None:
        if _torch.awaits_static_graph(ddp) and not any(map(_torch.will_accumulate, accumulating)):
            raise PlanError(_NOT_LEARNED)

    for node in {tensor.grad_fn for tensor in tensors_of(output)}:
        if node is not None:
            node.register_prehook(check)


_NOT_LEARNED = (
    "with static_graph=True DDP learns in the first backward after ddpopt.rebucket which gradients "
    "to expect, and none arrives in this one, as with torch.autograd.grad; start again, and run "
    "one step without that first, or compile the model with ddpopt and run two steps before "
    "rebucket"
)


def _check_first_backward(ddp: DistributedDataParallel, _inputs: object) -> None:
    """A hook of the module's: in the forward after DDP's first backward, look at what DDP learned.

    If that is nothing, no step can go on. Otherwise nothing has to be watched any more.
    """
    if not _hooks.get(ddp) or _torch.awaits_static_graph(ddp):
        return  # this is a copy, which has the hook too; or DDP's first backward has yet to run
    if not _torch.used_in_static_graph(ddp):
        raise PlanError(_NOT_LEARNED)
    _remove_hooks(ddp)


def _remove_hooks(ddp: DistributedDataParallel) -> None:
    """End what `_forbid_backward` or `_allow_backward` has begun; nothing may be left to end."""
    for handle in _hooks.get(ddp):
        handle.remove()
    _hooks.set(ddp, ())
    unsubscribe(ddp, _Permission)
