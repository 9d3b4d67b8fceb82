"""`explain`: what is known about a DDP model's graphs and buckets, as text and as data.

page.py renders the data as a page.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._text import (
    count,
    format_bytes,
    format_ms,
    installed_version,
    shorten,
    table,
    write_text,
)
from ddpopt.errors import OptionError, TorchDriftError
from ddpopt.inspection.metrics import source_of
from ddpopt.inspection.page import render_page
from ddpopt.inspection.recorder import recording_of
from ddpopt.inspection.recording import RecordedStep, describe_steps
from ddpopt.planning import hint, rebucket, tuner
from ddpopt.planning.plan import BucketPlan
from ddpopt.planning.timeline import BucketTimes, Timeline, predict
from ddpopt.split import state
from ddpopt.split.cut import Cut, GraphText
from ddpopt.split.dump import graph_of_cuts

if TYPE_CHECKING:
    import networkx

_RECORD = "run some steps in `with ddpopt.record(ddp):`"
_NOTHING_PREDICTED = "predicted: nothing; give explain a plan of ddpopt.plan"
_OR_TUNE = ", or find buckets by buckets='auto'"
_KINDS = ("predicted", "measured")  # times of a bucket, as its attributes are called
# The times of each kind, by the attribute that has them, and what a table calls them.
_TIMES = {"ready_s": "ready", "launched_s": "launch", "finished_s": "finish"}
_MEASURED_TIMES = ("backward_s", "forward_s", "exposed_s", "communication_s")
_PREDICTED_TIMES = (*_MEASURED_TIMES, "between_s", "alone_s", "iteration_s", "bound_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """One bucket, planned and actual; names are in the order of arrival.

    `actual` is empty until DDP's buckets are known. `graphs` hold its parameters; `completed_by`
    is the section whose backward produces the last gradient, such as `4/0 section 2`; the buckets
    in `shares_section_with` wait for it too. `launched_after` counts the backward sections that had
    started when its allreduce was launched. Times count from the end of forward.
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
    measured: BucketTimes | None = None

    @property
    def is_as_planned(self) -> bool | None:
        """Whether DDP's bucket has the planned parameters; None if either is not known (yet)."""
        return set(self.planned) == set(self.actual) if self.planned and self.actual else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known about one model: its buckets, and the cut of each compiled graph.

    `bucket_plan` is the plan that assigned its buckets, `tuning` what `buckets="auto"` decided.
    `predicted` is the iteration predicted from `basis`; `measured` has the medians of the last
    recording, over `num_measured` of its `num_recorded` steps: those that ran what the last one
    did. `texts` has each graph's calls, by its name.
    """

    model: str
    cuts: tuple[Cut, ...]
    buckets: tuple[BucketReport, ...]
    bucket_plan: BucketPlan | None = None
    tuning: str = ""
    predicted: Timeline | None = None
    basis: str = ""
    measured: RecordedStep | None = None
    num_measured: int = 0
    num_recorded: int = 0
    hints: tuple[str, ...] = ()
    texts: Mapping[str, GraphText] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON data, times in seconds; see docs/reading-the-logs.md."""
        return {
            "format": "ddpopt explanation 1",
            "versions": {
                "ddpopt": installed_version(),
                "torch": str(torch.__version__),
            },
            **_fields(self, "model", "tuning", "hints"),
            "graphs": [_graph_data(cut, self.texts[cut.graph]) for cut in self.cuts],
            "buckets": [_bucket_data(bucket) for bucket in self.buckets],
            "predicted": self.predicted
            and {"basis": self.basis, **_fields(self.predicted, *_PREDICTED_TIMES)},
            "measured": self.measured
            and {
                "num_steps": self.num_measured,
                **_fields(self.measured, *_MEASURED_TIMES),
                "sections": [dataclasses.asdict(section) for section in self.measured.sections],
            },
        }

    def to_networkx(self) -> networkx.DiGraph:
        """Return sections and buckets as the nodes of a `networkx.DiGraph`.

        Nodes are `4/0 section 2`, `bucket 0` and so on, and have the attributes `kind`, `bytes` (of
        gradients) and `parameters`; sections also `index` and `calls`, and buckets, if known,
        `ready_s`, `launched_s` and `finished_s`, of which `times` says whether they are measured or
        predicted. An edge of the kind "gradients" leads from a section to a bucket, one of the kind
        "values" to a section that reads what another made. Its `values` are a JSON object of names
        and their sizes, its `bytes` the sum. `networkx.write_graphml` can write the graph.
        """
        buckets: list[tuple[Sequence[str], dict[str, Any]]] = []
        for bucket in self.buckets:
            attributes: dict[str, Any] = {"bytes": bucket.num_bytes}
            times = bucket.measured or bucket.predicted
            if times:
                known = {name: getattr(times, name) for name in _TIMES}
                attributes |= {name: time for name, time in known.items() if time is not None}
                attributes["times"] = "measured" if bucket.measured else "predicted"
            buckets.append((bucket.actual or bucket.planned, attributes))
        return graph_of_cuts(self.cuts, self.texts, buckets)

    def to_json(self) -> str:
        """Return `to_dict()` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write a page for a browser (`.html`), JSON (`.json`) or the printed text (`.txt`).

        The page is one self-contained file. An existing file or link of that name is replaced.

        Raises:
            OptionError: the name has another ending.
            OSError: the file cannot be written, or a folder or a device has that name.
        """
        suffix = Path(path).suffix
        if suffix not in (".html", ".json", ".txt"):
            raise OptionError(f"{path} does not end in .html, .json or .txt; choose one of them")
        text = self.to_json() if suffix == ".json" else f"{self}\n"
        write_text(path, render_page(self.to_dict()) if suffix == ".html" else text)

    def __str__(self) -> str:
        if not self.cuts:
            return (
                f"ddpopt has compiled no graph of this {self.model}. Either its forward "
                "has not run yet, or it does not run under torch.compile(..., backend='ddpopt'), "
                "or Dynamo skips it (as it skips a torch.nn container right under DDP)."
            )
        parts = [
            self._bucket_table() if self.buckets else "",
            self._times() if self.buckets and (self.predicted or self.measured) else "",
            self.tuning,
            f"planned: {self.bucket_plan}" if self.bucket_plan else "",
            *("\n".join([cut.headline(), *cut.section_table()]) for cut in self.cuts),
            "\n".join(self.hints),
        ]
        return "\n\n".join(filter(None, parts))

    def _bucket_table(self) -> str:
        sections = self.measured.sections if self.measured else ()
        num_sections = sum(section.kind == "backward" for section in sections)
        header = ("bucket", "size", "completed by", "launched", "DDP's", "parameters")
        rows = [
            (
                f"{b.index}",
                format_bytes(b.num_bytes),
                b.completed_by + (" (spans graphs)" if len(b.graphs) > 1 else ""),
                "-" if b.launched_after is None else f"after {b.launched_after} of {num_sections}",
                {True: "as planned", False: "DIFFERS", None: "-"}[b.is_as_planned],
                shorten(b.planned or b.actual),
            )
            for b in self.buckets
        ]
        shared = ", ".join(f"{b.index}" for b in self.buckets if b.shares_section_with)
        title = f"{self.model}: {count(len(rows), 'DDP bucket')}"
        lines = [title, "", *table(header, rows)]
        if shared:
            reason = "no cut between them can be made or helps"
            lines.append(f"  buckets {shared} share sections: {reason}")
        return "\n".join(lines)

    def _times(self) -> str:
        """A table of times in milliseconds, and a summary of them."""
        lines = [*_time_table(self.buckets), ""]
        if self.measured:
            steps = describe_steps(self.num_measured, self.num_recorded)
            lines.append(f"measured, medians of {steps}: {self.measured.summary()}")
        if self.predicted:
            t = self.predicted
            lines += [
                f"predicted: backward {format_ms(t.backward_s)} ms, iteration "
                f"{format_ms(t.iteration_s)}, of it {format_ms(t.exposed_s)} waiting for "
                f"communication; no buckets can make it shorter than {format_ms(t.bound_s)}",
                f"  ({self.basis})",
            ]
        if self.measured and self.predicted:
            lines.append("  (ranks also wait for slower ones, which is measured, not predicted)")
        return "\n".join(lines)


def _time_table(buckets: Sequence[BucketReport]) -> list[str]:
    """A row of milliseconds for each bucket; no lines if no bucket's times are known."""
    header = ["bucket"]
    rows = [[f"{bucket.index}"] for bucket in buckets]
    for kind in _KINDS:
        times = [getattr(bucket, kind) for bucket in buckets]
        if not any(times):
            continue
        first, *others = _TIMES.values()
        header += [f"{kind}: {first}", *others]
        for row, times_of_bucket in zip(rows, times, strict=True):
            row += [format_ms(getattr(times_of_bucket, name, None)) for name in _TIMES]
    if len(header) == 1:
        return []
    # `table` aligns the last column left, so an empty one stands there.
    lines = table((*header, ""), [(*row, "") for row in rows])
    return [line.rstrip() for line in lines]


def _graph_data(cut: Cut, text: GraphText) -> dict[str, Any]:
    nodes = text.nodes
    first_node = nodes[0][0].name if nodes and nodes[0] else ""
    sections = cut.sections or [cut.as_one_section(first_node)]
    names = ("index", "num_nodes", "first_node", "parameters", "completes")
    return {
        "name": cut.graph,
        **_fields(cut, "inner", "num_nodes", "split", "is_shared"),
        "headline": cut.headline(),
        "fallback": cut.fallback and _reason_data(cut.fallback, cut.detail),
        "backward_fallback": cut.backward_fallback
        and _reason_data(cut.backward_fallback, cut.detail),
        "sections": [
            {**_fields(section, *names), "nodes": [node._asdict() for node in members or ()]}
            for section, members in itertools.zip_longest(sections, nodes[: len(sections)])
        ],
    }


def _reason_data(reason: enum.Enum, detail: str) -> dict[str, str]:
    return {"name": reason.name, "text": reason.value, "detail": detail}


def _bucket_data(bucket: BucketReport) -> dict[str, Any]:
    names = (each.name for each in dataclasses.fields(bucket))
    data = _fields(bucket, *names, "is_as_planned")
    for kind in _KINDS:
        data[kind] = data[kind] and _fields(data[kind], *_TIMES)
    return data


def _fields(value: object, *names: str) -> dict[str, Any]:
    """Return attributes by name, with tuples as JSON has them."""
    pairs = ((name, getattr(value, name)) for name in names)
    return {name: list(item) if type(item) is tuple else item for name, item in pairs}


def explain(model: torch.nn.Module, plan: BucketPlan | None = None) -> Explanation:
    """Return what is known about a DDP model; it prints as tables, and `save` makes a page of it.

    Cuts are known once a forward with gradients has run, DDP's own buckets some steps later, and
    measured times after a `record` block.

    Args:
        model: A DistributedDataParallel module, or what `torch.compile` returned for one.
        plan: Costs from which to predict times for DDP's current buckets. Default: those of the
            plan that assigned its buckets, or of what `buckets="auto"` found.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
    """
    ddp = state.ddp_of(model)
    known, search = state.get(ddp), tuner.of(ddp)
    recording = recording_of(ddp)
    measured = recording.median_step() if recording else None
    assigned = rebucket.plan_of(ddp)
    costs = plan or assigned or (search.best if search else None)
    buckets = _find_buckets(ddp, known.cuts)
    predicted = _predict(buckets, costs) if costs and buckets else None
    hints = [] if measured else [_measured_by_ddp(ddp)]
    if predicted is None and not tuner.is_searching(ddp):
        hints.append(_NOTHING_PREDICTED + ("" if search else _OR_TUNE))
    if search is None and hint.hint_of(ddp):
        hints.append(hint.hint_of(ddp))
    return Explanation(
        model=type(ddp.module).__name__,
        cuts=known.cuts,
        buckets=_relate(buckets, predicted, measured),
        bucket_plan=assigned,
        tuning=search.outcome if search else "",
        predicted=predicted,
        basis=_basis(costs) if costs and predicted else "",
        measured=measured,
        num_measured=len(recording.steps_like_last) if recording else 0,
        num_recorded=len(recording.steps) if recording else 0,
        hints=(*hints, *(recording.notes if recording else ())),
        texts=dict(known.texts),
    )


def _measured_by_ddp(ddp: DistributedDataParallel) -> str:
    """Say what is known without a recording: times that DDP takes, as `metrics` has them."""
    try:
        step = _torch.last_logged_step(ddp)
    except TorchDriftError:
        step = None
    if step is None or not step.number:
        return f"measured: nothing yet; {_RECORD}"
    text = f"in step {step.number}, backward {format_ms(step.backward_s + step.exposed_s)} ms"
    if source_of(ddp) is None:  # of an algorithm's communication DDP knows nothing
        text += f", of it {format_ms(step.exposed_s)} waiting for communication"
    return f"measured by DDP: {text}; for each bucket's times, {_RECORD}"


def _find_buckets(ddp: DistributedDataParallel, cuts: Sequence[Cut]) -> list[BucketReport]:
    """Pair DDP's buckets with the latest ones predicted for the whole model.

    The latest graph knows of the most others.
    """
    whole = [cut for cut in cuts if cut.buckets and not cut.is_shared]
    planned = [bucket.parameters for bucket in whole[-1].buckets] if whole else []
    reported = state.get(ddp).reported_buckets or ()
    parameters = {p.index: p for p in _torch.reducer_parameters(ddp).values()} if reported else {}
    actual = [tuple(parameters[index] for index in bucket) for bucket in reported]
    # The newest of a frame's compiles that have gradients: not those of an evaluation.
    newest = {cut.frame: cut for cut in cuts if cut.arrival}.values()
    reports = []
    for index, (ours, theirs) in enumerate(itertools.zip_longest(planned, actual, fillvalue=())):
        names = {parameter.name for parameter in ours or theirs}
        graphs = [cut for cut in newest if names & {p.name for p in cut.arrival}]
        report = BucketReport(
            index=index,
            num_bytes=sum(parameter.num_bytes for parameter in ours or theirs),
            planned=tuple(parameter.name for parameter in ours),
            actual=tuple(parameter.name for parameter in theirs),
            graphs=tuple(cut.graph for cut in graphs),
            completed_by=_completing_section(graphs[0], names) if graphs else "-",
        )
        reports.append(report)
    return reports


def _completing_section(cut: Cut, members: set[str]) -> str:
    """The name of the last section to run that has one of the members; the graph's without any."""
    # Backward runs the sections of a forward in reverse.
    ran_last_first = reversed(cut.sections) if cut.split == "backward" else cut.sections
    for section in ran_last_first:
        if members & set(section.parameters):
            return cut.name_of(section)
    return cut.graph


def _relate(
    buckets: Sequence[BucketReport], predicted: Timeline | None, measured: RecordedStep | None
) -> tuple[BucketReport, ...]:
    """The buckets with their times, and with the others that share a section with each."""
    # Without times where buckets of several dtypes, or of a changed plan, do not match.
    none = [None] * len(buckets)
    expected = predicted.buckets if predicted and len(predicted.buckets) == len(none) else none
    recorded = measured.buckets if measured and len(measured.buckets) == len(none) else none
    sharing = [
        tuple(b.index for b in buckets if b.completed_by == bucket.completed_by and b is not bucket)
        for bucket in buckets
    ]
    return tuple(
        dataclasses.replace(
            bucket,
            shares_section_with=others if "section" in bucket.completed_by else (),
            launched_after=measured.num_started(times.launched_s) if measured and times else None,
            predicted=expectation,
            measured=times,
        )
        for bucket, others, expectation, times in zip(
            buckets, sharing, expected, recorded, strict=True
        )
    )


def _predict(buckets: Sequence[BucketReport], costs: BucketPlan) -> Timeline | None:
    """The iteration with these buckets; None if the plan is for other parameters."""
    gradients = {gradient.name: gradient for gradient in costs.profile.gradients}
    members = [bucket.actual or bucket.planned for bucket in buckets]
    names = list(itertools.chain(*members))
    if sorted(names) != sorted(gradients):
        return None
    ready_s = itertools.accumulate((gradients[name].ready_s for name in names), max)
    pairs = zip(names, ready_s, strict=True)
    arrived = tuple(dataclasses.replace(gradients[name], ready_s=time_s) for name, time_s in pairs)
    profile = dataclasses.replace(costs.profile, gradients=arrived)
    return predict(profile, list(map(len, members)), costs.cost)


def _basis(costs: BucketPlan) -> str:
    return (
        f"computation: {costs.profile.source}; an allreduce takes "
        f"{costs.cost.startup_s * 1e3:.2f} ms and {costs.cost.s_per_mib * 1e3:.2f} ms a MiB"
    )
