"""`explain`: what is known of a DDP model's graphs and buckets, as text and as data.

page.py makes a page of the data.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._files import write_text
from ddpopt._text import format_bytes, format_ms, printable, shorten, table
from ddpopt.bucketing import rebucket, tuner
from ddpopt.bucketing.plan import BucketPlan
from ddpopt.bucketing.timeline import BucketTimes, Timeline, predict
from ddpopt.errors import OptionError
from ddpopt.inspection import recorder
from ddpopt.inspection.page import render_page
from ddpopt.inspection.recording import RecordedBucket, RecordedStep
from ddpopt.reducer import Parameter
from ddpopt.split import state
from ddpopt.split.plan import NodeText, Section, SplitPlan

FORMAT = "ddpopt explanation 1"
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

    def to_dict(self) -> dict[str, Any]:
        """Return everything as data for JSON, times in seconds; see docs/reading-the-logs.md."""
        return {
            "format": FORMAT,
            "versions": {
                "ddpopt": importlib.metadata.version("ddpopt"),
                "torch": str(torch.__version__),
            },
            "model": self.model,
            "tuning": self.tuning,
            "hints": list(self.hints),
            "graphs": [_graph_data(plan, self.nodes.get(plan.graph, ())) for plan in self.plans],
            "buckets": [_bucket_data(bucket) for bucket in self.buckets],
            "predicted": self.predicted
            and {"basis": self.basis, **_fields(self.predicted, *_PREDICTED_TIMES)},
            "measured": self.measured and _step_data(self.measured, self.num_measured),
        }

    def to_json(self) -> str:
        """Return `to_dict()` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

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
            text = render_page(self.to_dict())
        elif path.suffix == ".json":
            text = self.to_json()
        elif path.suffix == ".txt":
            text = f"{self}\n"
        else:
            raise OptionError(f"{path} does not end in .html, .json or .txt; choose one of them")
        write_text(path, text)

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
        shared = [f"{bucket.index}" for bucket in self.buckets if bucket.shares_section_with]
        if shared:
            names = ", ".join(shared)
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
            lines.append(f"measured ({self.num_measured} steps): {self.measured.summary()}")
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
                columns += [
                    [format_ms(getattr(each, kind, None)) for each in times] for kind in _TIMES
                ]
        rows = [(*row, "") for row in zip(*columns, strict=True)]
        shown = [line.rstrip() for line in table((*header, ""), rows)]
        return ["\n".join([*shown, "", *lines])]


# ---- as data ----------------------------------------------------------------------------------

_TIMES = ("ready_s", "launched_s", "finished_s")
_PREDICTED_TIMES = (
    *("backward_s", "forward_s", "between_s", "communication_s", "alone_s"),
    *("iteration_s", "exposed_s", "bound_s"),
)


def _graph_data(plan: SplitPlan, nodes: Sequence[Sequence[NodeText]]) -> dict[str, Any]:
    whole = Section(
        index=0,
        start=0,
        stop=plan.num_nodes,
        first_node=nodes[0][0].name if nodes and nodes[0] else "",
        parameters=tuple(parameter.name for parameter in plan.arrival),
        completes=(),
    )
    sections = plan.sections or [whole]
    return {
        "name": plan.graph,
        **_fields(plan, "inner", "num_nodes", "split", "is_shared"),
        "headline": plan.headline(),
        "fallback": plan.fallback and _reason_data(plan.fallback, plan.detail),
        "instead": plan.instead and _reason_data(plan.instead, plan.detail),
        "sections": [
            {
                **_fields(section, "index", "num_nodes", "first_node", "parameters", "completes"),
                "nodes": [
                    _fields(node, "name", "target", "shape", "source") for node in members or ()
                ],
            }
            for section, members in itertools.zip_longest(sections, nodes[: len(sections)])
        ],
    }


def _reason_data(reason: enum.Enum, detail: str) -> dict[str, str]:
    return {"name": reason.name, "text": reason.value, "detail": detail}


def _bucket_data(bucket: BucketReport) -> dict[str, Any]:
    return {
        **_fields(bucket, *(each.name for each in dataclasses.fields(bucket)), "is_as_planned"),
        "predicted": bucket.predicted and _fields(bucket.predicted, *_TIMES),
        "measured": bucket.measured and _fields(bucket.measured, *_TIMES),
    }


def _step_data(step: RecordedStep, num_steps: int) -> dict[str, Any]:
    return {
        "num_steps": num_steps,
        **_fields(step, "backward_s", "forward_s", "exposed_s", "communication_s"),
        "sections": [dataclasses.asdict(section) for section in step.sections],
    }


def _fields(value: object, *names: str) -> dict[str, Any]:
    """Return attributes by their names, tuples as JSON has them."""
    pairs = ((name, getattr(value, name)) for name in names)
    return {name: list(item) if type(item) is tuple else item for name, item in pairs}


# ---- what is known ----------------------------------------------------------------------------


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
    plans, recording, search = state.of(ddp).plans, recorder.recording_of(ddp), tuner.of(ddp)
    measured = recording.median_step() if recording else None
    assigned = rebucket.plan_of(ddp)
    costs = plan or assigned or (search.best if search else None)
    buckets = _find_buckets(ddp, plans)
    predicted = _predict(buckets, costs) if costs and buckets else None
    hints = [] if measured else [NOTHING_MEASURED]
    hints += [] if predicted else [NOTHING_PREDICTED]
    return Explanation(
        model=type(ddp.module).__name__,
        plans=plans,
        buckets=_report(buckets, plans, predicted, measured),
        bucket_plan=assigned,
        tuning=search.outcome if search else "",
        predicted=predicted,
        basis=_basis(costs) if costs and predicted else "",
        measured=measured,
        num_measured=len(recording.steps) if recording else 0,
        hints=(*hints, *(recording.notes if recording else ())),
        nodes=dict(state.of(ddp).nodes),
    )


class _Bucket(NamedTuple):
    """A bucket as it was planned, and as DDP formed it; either may be empty."""

    planned: Sequence[Parameter]
    actual: Sequence[Parameter]

    @property
    def names(self) -> list[str]:
        return [parameter.name for parameter in self.actual or self.planned]


def _find_buckets(ddp: DistributedDataParallel, plans: Sequence[SplitPlan]) -> list[_Bucket]:
    """Pair the latest plan of the whole model, which knows most graphs, with DDP's buckets."""
    whole = [plan for plan in plans if plan.buckets and not plan.is_shared]
    planned = [bucket.parameters for bucket in whole[-1].buckets] if whole else []
    actual = state.of(ddp).told_buckets or ()
    parameters = {p.index: p for p in _torch.reducer_parameters(ddp).values()} if actual else {}
    formed = [[parameters[index] for index in bucket] for bucket in actual]
    return [_Bucket(*pair) for pair in itertools.zip_longest(planned, formed, fillvalue=())]


def _report(
    buckets: Sequence[_Bucket],
    plans: Sequence[SplitPlan],
    predicted: Timeline | None,
    measured: RecordedStep | None,
) -> tuple[BucketReport, ...]:
    newest = {plan.frame: plan for plan in plans}.values()  # of a frame's compiles
    members = [{p.name for p in bucket.planned or bucket.actual} for bucket in buckets]
    graphs = [
        [plan for plan in newest if names & {p.name for p in plan.arrival}] for names in members
    ]
    completed_by = [
        _completing_section(holders[0], names) if holders else "-"
        for holders, names in zip(graphs, members, strict=True)
    ]
    # Without times where those of several dtypes, or of a plan that was changed, do not match.
    predictions = predicted.buckets if predicted else ()
    measurements = measured.buckets if measured else ()
    reports = []
    for index, bucket in enumerate(buckets):
        times = measurements[index] if len(measurements) == len(buckets) else None
        section = completed_by[index]
        shared = [k for k, other in enumerate(completed_by) if other == section and k != index]
        reports.append(
            BucketReport(
                index=index,
                num_bytes=sum(p.num_bytes for p in bucket.planned or bucket.actual),
                planned=tuple(parameter.name for parameter in bucket.planned),
                actual=tuple(parameter.name for parameter in bucket.actual),
                graphs=tuple(plan.graph for plan in graphs[index]),
                completed_by=section,
                shares_section_with=tuple(shared) if "section" in section else (),
                launched_after=measured.num_started(times.launched_s)
                if measured and times
                else None,
                predicted=predictions[index] if len(predictions) == len(buckets) else None,
                measured=times,
            )
        )
    return tuple(reports)


def _completing_section(plan: SplitPlan, members: set[str]) -> str:
    """Return the section with a member that runs last."""
    ran_last_first = reversed(plan.sections) if plan.split == "backward" else plan.sections
    for section in ran_last_first:
        if members & set(section.parameters):
            return f"{plan.graph} section {section.index}"
    return plan.graph


def _predict(buckets: Sequence[_Bucket], costs: BucketPlan) -> Timeline | None:
    """Return the iteration with these buckets; None where the plan is of other parameters."""
    gradients = {gradient.name: gradient for gradient in costs.profile.gradients}
    names = [name for bucket in buckets for name in bucket.names]
    if sorted(names) != sorted(gradients):
        return None
    ready_s = itertools.accumulate((gradients[name].ready_s for name in names), max)
    pairs = zip(names, ready_s, strict=True)
    arrived = tuple(dataclasses.replace(gradients[name], ready_s=time_s) for name, time_s in pairs)
    profile = dataclasses.replace(costs.profile, gradients=arrived)
    return predict(profile, [len(bucket.names) for bucket in buckets], costs.cost)


def _basis(costs: BucketPlan) -> str:
    return (
        f"computation: {costs.profile.source}; an allreduce takes "
        f"{costs.cost.startup_s * 1e3:.2f} ms and {costs.cost.s_per_mib * 1e3:.2f} ms a MiB"
    )
