"""`explain`: gather what is known about a DDP model's graphs and buckets."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._text import count, format_ms
from ddpopt._values import check_kind
from ddpopt.checks.uncompiled import warning_of
from ddpopt.errors import PlanError, TorchDriftError
from ddpopt.inspection.explanation import BucketReport, Explanation
from ddpopt.inspection.metrics import algorithm_metrics_of
from ddpopt.inspection.recorder import recording_of
from ddpopt.inspection.recording import RecordedStep
from ddpopt.planning import hint, rebucket, tuner
from ddpopt.planning.costs import Gradient
from ddpopt.planning.plan import BucketPlan
from ddpopt.planning.timeline import Timeline, predict
from ddpopt.reducer import Parameter
from ddpopt.split import state
from ddpopt.split.cut import Cut

_RECORD = "run some steps in `with ddpopt.record(ddp):`"
_PLAN = "give explain a plan of ddpopt.plan"


def explain(model: torch.nn.Module, plan: BucketPlan | None = None) -> Explanation:
    """What is known about a DDP model; it prints as tables, and `save` makes a page of it.

    Cuts are known once a forward with gradients has run, DDP's own buckets some steps later, and
    measured times after a `record` block.

    Args:
        model: A DistributedDataParallel module, or what `torch.compile` returned for one.
        plan: Costs from which to predict times for DDP's current buckets. Default: those of the
            plan that assigned its buckets, or of what `buckets="auto"` found. If it is for another
            number of ranks than DDP has, they are extrapolated, as by `BucketPlan.for_ranks`; a
            process alone is told about the plan's own number.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`, or `plan` is no plan.
    """
    ddp = state.ddp_of(model)
    if plan is not None:
        check_kind("plan", plan, BucketPlan, "give what ddpopt.plan returned", TypeError)
    ddp_state = state.get(ddp)
    buckets = _find_buckets(ddp, ddp_state.cuts)
    texts = ddp_state.make_texts()
    recording = recording_of(ddp)
    measured = recording.median_step() if recording else None
    search = tuner.find_tuner(ddp)
    assigned_plan = rebucket.plan_of(ddp)

    # Predictions are for as many ranks as there are, whatever number a plan was made for.
    basis_plan = plan or assigned_plan or (search.best if search else None)
    basis_plan, problem = _for_ranks_of(ddp, basis_plan)
    predicted = _predict(buckets, basis_plan) if basis_plan and buckets else None

    hints: list[str] = []
    if measured is None:
        hints.append(_describe_ddps_measurement(ddp))
    if problem:
        hints.append(f"predicted: nothing; {problem}")
    elif predicted is None and not tuner.is_searching(ddp):  # a search may yet find costs
        remedy = _PLAN if search else f"{_PLAN}, or find buckets by buckets='auto'"
        hints.append(f"predicted: nothing; {remedy}")
    advice = hint.hint_of(ddp)
    # The advice is to search for better buckets, on the times that DDP measured.
    if search is None and advice and (measured is None or _waits_long(measured)):
        hints.append(advice)
    if recording is not None:
        hints += recording.notes
    if without_calls := [cut.graph for cut in ddp_state.cuts if not texts[cut.graph].nodes]:
        hints.append(
            f"calls of graph {', '.join(without_calls)} are not known, as the code came from "
            "torch's cache: with DDPOPT_DUMP_DIR set, graphs are compiled anew"
        )

    return Explanation(
        model=_name_of(ddp.module),
        cuts=ddp_state.cuts,
        buckets=_relate(buckets, predicted, measured),
        # Without a cost for these ranks it says itself for how many it is.
        bucket_plan=_for_ranks_of(ddp, assigned_plan)[0] or assigned_plan,
        tuning=search.outcome if search else "",
        predicted=predicted,
        basis=_describe_basis(basis_plan) if basis_plan and predicted else "",
        measured=measured,
        num_measured=len(recording.steps_like_last) if recording else 0,
        num_recorded=len(recording.steps) if recording else 0,
        hints=tuple(hints),
        texts=texts,
        uncompiled=warning_of(ddp),
    )


def _name_of(module: torch.nn.Module) -> str:
    """The class of a module, not of what `torch.compile` wrapped it in before DDP."""
    with contextlib.suppress(TorchDriftError):  # only the better name is lost
        module = _torch.unwrap_compiled(module)
    return type(module).__name__


def _for_ranks_of(
    ddp: DistributedDataParallel, plan: BucketPlan | None
) -> tuple[BucketPlan | None, str]:
    """A plan with the costs of the ranks of `ddp`, or None and why there is none."""
    if plan is None:
        return None, ""
    try:
        return rebucket.for_ranks_of(ddp, plan), ""
    except PlanError as error:
        num_ranks = ddp.process_group.size()
        return None, f"{error}: explain(model, plan.for_ranks({num_ranks}, network))"


def _waits_long(measured: RecordedStep) -> bool:
    """Whether a recording agrees with the hint, which is from the first steps."""
    if measured.exposed_s is None:
        return True
    return measured.exposed_s >= hint.MUCH_EXPOSED * (measured.forward_s + measured.backward_s)


def _describe_ddps_measurement(ddp: DistributedDataParallel) -> str:
    """What is known without a recording: times that DDP takes, as `metrics` has them."""
    wait = hint.wait_of(ddp)
    if wait is not None and algorithm_metrics_of(ddp) is None:
        return (
            f"measured by DDP, {wait.steps}: backward {format_ms(wait.backward_s)} ms, of it "
            f"{format_ms(wait.exposed_s)} waiting for communication; for each bucket's times, "
            f"{_RECORD}"
        )
    try:
        step = _torch.last_logged_step(ddp)
    except TorchDriftError:
        step = None
    if step is None or not step.number:
        return f"measured: nothing yet; {_RECORD}"
    # DDP's log has backward's computation alone, the hint's medians have all of backward.
    text = f"in step {step.number}, backward {format_ms(step.backward_s + step.exposed_s)} ms"
    # Of an algorithm's communication DDP knows nothing, and one rank waits for nobody.
    if algorithm_metrics_of(ddp) is None and ddp.process_group.size() > 1:
        text += f", of it {format_ms(step.exposed_s)} waiting for communication"
    return f"measured by DDP: {text}; for each bucket's times, {_RECORD}"


def _find_buckets(ddp: DistributedDataParallel, cuts: Sequence[Cut]) -> list[BucketReport]:
    """DDP's buckets beside the latest ones that were predicted for the whole model."""
    planned: list[tuple[Parameter, ...]] = []
    for cut in cuts:
        # A graph that modules share is cut for itself alone, not by buckets of the whole model.
        if cut.buckets and not cut.is_shared:
            # The last cut in the loop counts: the latest graph knows most of the others.
            planned = [bucket.parameters for bucket in cut.buckets]
    actual: list[tuple[Parameter, ...]] = []
    reported = state.get(ddp).reported_buckets
    if reported:
        parameters = {p.index: p for p in _torch.reducer_parameters(ddp).values()}
        # A Reducer with sparse gradients may not tell what it reduces. Then only parameters that
        # still require gradients are known, and a bucket with another one cannot be named.
        if all(index in parameters for bucket in reported for index in bucket):
            actual = [tuple(parameters[index] for index in bucket) for bucket in reported]

    # The graphs that ran in the last step count, in the order of its forward. Before the first step
    # these are, of each function, the newest compile with gradients.
    newest_cuts = state.get(ddp).last_cuts
    if not newest_cuts:
        newest_cuts = tuple({cut.frame: cut for cut in cuts if cut.arrival}.values())
    reports: list[BucketReport] = []
    for index in range(max(len(planned), len(actual))):
        planned_here = planned[index] if index < len(planned) else ()
        actual_here = actual[index] if index < len(actual) else ()
        # If both are known and differ, `is_as_planned` says so.
        members = planned_here or actual_here
        names = {parameter.name for parameter in members}
        graphs = [cut for cut in newest_cuts if names & {p.name for p in cut.arrival}]
        # Backward runs graphs in reverse, so the bucket's last gradient is of the first in forward.
        completed_by = _completing_section(graphs[0], names) if graphs else "-"
        report = BucketReport(
            index=index,
            num_bytes=sum(parameter.num_bytes for parameter in members),
            planned=tuple(parameter.name for parameter in planned_here),
            actual=tuple(parameter.name for parameter in actual_here),
            graphs=tuple(cut.graph for cut in graphs),
            completed_by=completed_by,
        )
        reports.append(report)
    return reports


def _completing_section(cut: Cut, members: set[str]) -> str:
    """The name of the section whose backward makes a bucket's last gradient.

    `members` are the bucket's parameters. The graph's name if no section has any of them.
    """
    # From the last to run: backward runs the sections of a forward in reverse.
    last_to_first = reversed(cut.sections) if cut.split == "backward" else cut.sections
    for section in last_to_first:
        if members & set(section.parameters):
            return cut.name_of(section)
    return cut.graph


def _relate(
    buckets: Sequence[BucketReport], predicted: Timeline | None, measured: RecordedStep | None
) -> tuple[BucketReport, ...]:
    """The buckets with their times, and with the others that share a section with each."""
    # Where buckets are of several dtypes, or have changed, there may be other buckets with times.
    has_predicted = predicted is not None and len(predicted.buckets) == len(buckets)
    has_measured = measured is not None and len(measured.buckets) == len(buckets)
    related: list[BucketReport] = []
    for position, bucket in enumerate(buckets):
        sharing: list[int] = []
        # Else it is the graph's name, or "-".
        if "section" in bucket.completed_by:
            same = [other for other in buckets if other.completed_by == bucket.completed_by]
            sharing = [other.index for other in same if other is not bucket]
        predicted_times = measured_times = launched_after = None
        if predicted is not None and has_predicted:
            predicted_times = predicted.buckets[position]
        if measured is not None and has_measured:
            measured_times = measured.buckets[position]
            launched_after = measured.num_started(measured_times.launched_s)
        related.append(
            dataclasses.replace(
                bucket,
                shares_section_with=tuple(sharing),
                launched_after=launched_after,
                predicted=predicted_times,
                measured=measured_times,
            )
        )
    return tuple(related)


def _predict(buckets: Sequence[BucketReport], basis_plan: BucketPlan) -> Timeline | None:
    """The iteration with these buckets; None if the plan is for other parameters."""
    planned = {gradient.name: gradient for gradient in basis_plan.profile.gradients}
    # The plan may have been made before the module was compiled, with other names, or after it.
    gradient_of = {called: planned[name] for name, called in _torch.plain_names(planned).items()}
    names_by_bucket = [bucket.actual or bucket.planned for bucket in buckets]
    all_names = [name for names in names_by_bucket for name in names]
    if sorted(all_names) != sorted(gradient_of):
        return None
    gradients: list[Gradient] = []
    ready_s = 0.0
    for name in all_names:
        # These buckets may have another order than the plan's: a gradient behind a later one waits.
        ready_s = max(ready_s, gradient_of[name].ready_s)
        gradients.append(dataclasses.replace(gradient_of[name], ready_s=ready_s))
    sizes = [len(names) for names in names_by_bucket]
    profile = dataclasses.replace(basis_plan.profile, gradients=tuple(gradients))
    return predict(profile, sizes, basis_plan.cost)


def _describe_basis(basis_plan: BucketPlan) -> str:
    """What a prediction is made from: how many ranks, which computation and which allreduces."""
    allreduce, cost = "an allreduce", basis_plan.cost
    if basis_plan.extrapolation:
        allreduce += f", {basis_plan.extrapolation},"
    return (
        f"{count(basis_plan.world_size, 'rank')}; computation: {basis_plan.profile.source}; "
        f"{allreduce} takes {cost.startup_s * 1e3:.2f} ms and {cost.s_per_mib * 1e3:.2f} ms a MiB"
    )
