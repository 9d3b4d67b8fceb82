"""`explain`: what is known of a DDP model's graphs and buckets, as data and as text.

How it is written down as JSON or HTML is for document.py and page.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._files import write_text
from ddpopt._text import format_bytes, printable, shorten, table
from ddpopt.bucketing import rebucket, tuner
from ddpopt.bucketing.plan import BucketPlan
from ddpopt.bucketing.timeline import BucketTimes, Timeline, predict
from ddpopt.errors import OptionError
from ddpopt.inspection import recorder
from ddpopt.inspection.document import document_of, to_json
from ddpopt.inspection.page import render_page
from ddpopt.inspection.recording import RecordedBucket, RecordedStep, format_ms, summary_of
from ddpopt.reducer import Parameter
from ddpopt.split import state
from ddpopt.split.plan import SplitPlan

NOTHING_MEASURED = "measured: nothing yet; run some steps in `with ddpopt.record(ddp):`"
NOTHING_PREDICTED = (
    "predicted: nothing; give explain a plan of ddpopt.plan, or find buckets by buckets='auto'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """One bucket, planned and actual; names in the order of arrival.

    `actual` is empty until DDP has formed its buckets and told them. `graphs` hold its
    parameters; `completed_by` is the section whose backward produces the last gradient, as in
    `4/0 section 2`, and `shares_section_with` are other buckets that wait for the same one,
    because no cut between them can be made or would release one earlier. `launched_after` counts
    the backward sections that had started when its allreduce was launched, in the steps that were
    recorded. Times count from the end of forward.
    """

    index: int
    num_bytes: int
    planned: tuple[str, ...]
    actual: tuple[str, ...]
    graphs: tuple[str, ...]
    completed_by: str
    shares_section_with: tuple[int, ...] = ()
    launched_after: int | None = None
    predicted: BucketTimes | None = None
    measured: RecordedBucket | None = None

    @property
    def is_as_planned(self) -> bool | None:
        """Whether DDP's bucket has the planned parameters; None where one is not known (yet)."""
        return set(self.planned) == set(self.actual) if self.planned and self.actual else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of one model: its buckets, and a plan for each compiled graph.

    `bucket_plan` is what its buckets were assigned by, `tuning` what `buckets="auto"` decided.
    `predicted` is the iteration by `basis`; `measured` the medians of the last recording, of
    `num_measured` steps. `nodes` are those of each graph's sections.
    """

    model: str
    plans: tuple[SplitPlan, ...]
    buckets: tuple[BucketReport, ...]
    bucket_plan: BucketPlan | None = None
    tuning: str = ""
    predicted: Timeline | None = None
    basis: str = ""
    measured: RecordedStep | None = None
    num_measured: int = 0
    hints: tuple[str, ...] = ()
    nodes: Mapping[str, state.Nodes] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        if not self.plans:
            return (
                f"ddpopt has compiled no graph of this {printable(self.model)}. Either its forward "
                "has not run yet, or it does not run under torch.compile(..., backend='ddpopt'), "
                "or Dynamo skips it (as it skips a torch.nn container right under DDP)."
            )
        parts = [self._bucket_table(), *self._times()] if self.buckets else []
        parts += [self.tuning] if self.tuning else []
        parts += [f"planned: {self.bucket_plan}"] if self.bucket_plan else []
        parts += ["\n".join([plan.headline(), *plan.section_table()]) for plan in self.plans]
        return "\n\n".join(parts + ["\n".join(self.hints)] * bool(self.hints))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as data for JSON; see docs/reading-the-logs.md."""
        return document_of(self)

    def to_json(self) -> str:
        """Return `to_dict()` as text."""
        return to_json(document_of(self))

    def save(self, path: str | Path) -> None:
        """Write a page for a browser (`.html`), JSON (`.json`) or this object's text (`.txt`).

        The page is one file that loads nothing. A file of yours is replaced, a link is not
        followed.

        Raises:
            OptionError: the name ends otherwise.
            OSError: it cannot be written, or something else has that name.
        """
        path = Path(path)
        if path.suffix == ".html":
            text = render_page(document_of(self))
        elif path.suffix == ".json":
            text = self.to_json()
        elif path.suffix == ".txt":
            text = f"{self}\n"
        else:
            raise OptionError(f"{path} does not end in .html, .json or .txt; choose one of them")
        write_text(path, text)

    def _bucket_table(self) -> str:
        header = ("bucket", "size", "completed by", "launched", "DDP's", "parameters")
        rows = [
            (
                f"{bucket.index}",
                format_bytes(bucket.num_bytes),
                bucket.completed_by + (" (spans graphs)" if len(bucket.graphs) > 1 else ""),
                self._launched(bucket),
                {True: "as planned", False: "DIFFERS", None: "-"}[bucket.is_as_planned],
                shorten(bucket.planned or bucket.actual),
            )
            for bucket in self.buckets
        ]
        lines = [f"{printable(self.model)}: {len(rows)} DDP buckets", "", *table(header, rows)]
        shared = [bucket.index for bucket in self.buckets if bucket.shares_section_with]
        if shared:
            names = ", ".join(map(str, shared))
            lines.append(
                f"  buckets {names} share sections: no cut between them can be made or helps"
            )
        return "\n".join(lines)

    def _launched(self, bucket: BucketReport) -> str:
        if bucket.launched_after is None or self.measured is None:
            return "-"
        num_sections = sum(section.kind == "backward" for section in self.measured.sections)
        return f"after {bucket.launched_after} of {num_sections}"

    def _times(self) -> list[str]:
        """Return a table of times in milliseconds, if there are any, and what they amount to."""
        lines = []
        if self.measured:
            lines.append(f"measured ({self.num_measured} steps): {summary_of(self.measured)}")
        if self.predicted:
            t = self.predicted
            lines += [
                f"predicted: backward {format_ms(t.backward_s)} ms, iteration "
                f"{format_ms(t.iteration_s)}, of it {format_ms(t.exposed_s)} waiting for "
                f"communication; no buckets can make it shorter than {format_ms(t.bound_s)}",
                f"  ({self.basis})",
            ]
        if not lines:
            return []
        columns = [[f"{bucket.index}" for bucket in self.buckets]]
        header = ["bucket"]
        for name in ("predicted", "measured"):
            times = [getattr(bucket, name) for bucket in self.buckets]
            if any(times):
                header += [f"{name}: ready", "launch", "finish"]
                columns += map(list, zip(*map(_milliseconds, times), strict=True))
        rows = list(zip(*columns, strict=True))
        shown = [line.rstrip() for line in table((*header, ""), [(*row, "") for row in rows])]
        return ["\n".join([*shown, "", *lines])]


def _milliseconds(times: BucketTimes | RecordedBucket | None) -> tuple[str, str, str]:
    if times is None:
        return ("-", "-", "-")
    return format_ms(times.ready_s), format_ms(times.launched_s), format_ms(times.finished_s)


def explain(model: torch.nn.Module, plan: BucketPlan | None = None) -> Explanation:
    """Return what is known of a DDP model; it prints as tables, and `save` makes a page of it.

    Plans exist once a forward with gradients has run, DDP's own buckets some steps later, measured
    times after a `record`.

    Args:
        model: A DistributedDataParallel module, or what `torch.compile` made of one.
        plan: Costs to predict times by, for DDP's buckets as they are. Default: those of the
            plan that its buckets were assigned by, or of what `buckets="auto"` found.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
    """
    ddp = state.ddp_of(model)
    record = state.of(ddp)
    plans = record.plans
    recording, search = recorder.recording_of(ddp), tuner.of(ddp)
    assigned = rebucket.plan_of(ddp)
    measured = recording.median_step() if recording else None
    buckets = _report_buckets(ddp, plans, record.told_buckets)
    costs = plan or assigned or (search.best if search else None)
    predicted = _predict(buckets, costs) if costs and buckets else None
    hints = [] if measured else [NOTHING_MEASURED]
    hints += [] if predicted else [NOTHING_PREDICTED]
    return Explanation(
        model=type(ddp.module).__name__,
        plans=plans,
        buckets=tuple(_with_times(buckets, predicted, measured)),
        bucket_plan=assigned,
        tuning=search.outcome if search else "",
        predicted=predicted,
        basis=_basis(costs) if costs and predicted else "",
        measured=measured,
        num_measured=len(recording.steps) if recording else 0,
        hints=(*hints, *(recording.notes if recording else ())),
        nodes=dict(record.nodes),
    )


def _report_buckets(
    ddp: DistributedDataParallel, plans: Sequence[SplitPlan], actual: Sequence[Sequence[int]] | None
) -> list[BucketReport]:
    """Merge the latest plan of the whole model, which knows most graphs, with DDP's buckets."""
    whole = [plan for plan in plans if plan.buckets and not plan.is_shared]
    planned = [bucket.parameters for bucket in whole[-1].buckets] if whole else []
    parameters = {p.index: p for p in _torch.reducer_parameters(ddp).values()} if actual else {}
    formed = [[parameters[index] for index in bucket] for bucket in actual or ()]
    reports = [
        _report_bucket(
            index,
            planned[index] if index < len(planned) else (),
            formed[index] if index < len(formed) else (),
            plans,
        )
        for index in range(max(len(planned), len(formed)))
    ]
    waiting: dict[str, list[int]] = {}
    for report in reports:
        waiting.setdefault(report.completed_by, []).append(report.index)
    return [
        dataclasses.replace(
            report,
            shares_section_with=tuple(k for k in waiting[report.completed_by] if k != report.index)
            if "section" in report.completed_by
            else (),
        )
        for report in reports
    ]


def _report_bucket(
    index: int,
    planned: Sequence[Parameter],
    actual: Sequence[Parameter],
    plans: Sequence[SplitPlan],
) -> BucketReport:
    members = {parameter.name for parameter in planned or actual}
    newest = {plan.frame: plan for plan in plans}.values()  # of a frame's compiles
    graphs = [plan for plan in newest if members & {p.name for p in plan.arrival}]
    return BucketReport(
        index=index,
        num_bytes=sum(parameter.num_bytes for parameter in planned or actual),
        planned=tuple(parameter.name for parameter in planned),
        actual=tuple(parameter.name for parameter in actual),
        graphs=tuple(plan.graph for plan in graphs),
        completed_by=_completing_section(graphs[0], members) if graphs else "-",
    )


def _completing_section(plan: SplitPlan, members: set[str]) -> str:
    """Return the section with a member that runs last."""
    ran_last_first = reversed(plan.sections) if plan.split == "backward" else plan.sections
    for section in ran_last_first:
        if members & set(section.parameters):
            return f"{plan.graph} section {section.index}"
    return plan.graph


def _predict(buckets: Sequence[BucketReport], costs: BucketPlan) -> Timeline | None:
    """Return the iteration with these buckets; None where the plan is of other parameters."""
    gradients = {gradient.name: gradient for gradient in costs.profile.gradients}
    members = [bucket.actual or bucket.planned for bucket in buckets]
    names = [name for bucket in members for name in bucket]
    if sorted(names) != sorted(gradients):
        return None
    ready_s = itertools.accumulate((gradients[name].ready_s for name in names), max)
    profile = dataclasses.replace(
        costs.profile,
        gradients=tuple(
            dataclasses.replace(gradients[name], ready_s=time_s)
            for name, time_s in zip(names, ready_s, strict=True)
        ),
    )
    return predict(profile, [len(bucket) for bucket in members], costs.cost)


def _basis(costs: BucketPlan) -> str:
    ms_per_mib = costs.cost.s_per_mib * 1e3
    return (
        f"computation: {costs.profile.source}; an allreduce takes "
        f"{costs.cost.startup_s * 1e3:.2f} ms and {ms_per_mib:.2f} ms a MiB"
    )


def _with_times(
    buckets: Sequence[BucketReport], predicted: Timeline | None, measured: RecordedStep | None
) -> list[BucketReport]:
    times = predicted.buckets if predicted and len(predicted.buckets) == len(buckets) else None
    if times:
        buckets = [
            dataclasses.replace(bucket, predicted=each)
            for bucket, each in zip(buckets, times, strict=True)
        ]
    if measured is None or len(measured.buckets) != len(buckets):
        return list(buckets)
    return [
        dataclasses.replace(
            bucket, measured=each, launched_after=measured.num_started(each.launched_s)
        )
        for bucket, each in zip(buckets, measured.buckets, strict=True)
    ]
