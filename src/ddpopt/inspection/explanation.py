"""`Explanation`: what is known about a DDP model's graphs and buckets, as data and as text.

`explain.py` makes one; `page.py` renders its data as a page.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpopt._text import (
    as_html,
    count,
    format_bytes,
    format_ms,
    installed_version,
    shorten,
    table,
    write_text,
)
from ddpopt.errors import OptionError
from ddpopt.inspection.page import render_page
from ddpopt.inspection.recording import RecordedStep, describe_steps
from ddpopt.planning.plan import BucketPlan
from ddpopt.planning.timeline import BucketTimes, Timeline
from ddpopt.split.cut import Cut, GraphText
from ddpopt.split.dump import graph_of_cuts

if TYPE_CHECKING:
    import networkx

# The attributes of a `BucketReport` that have its times.
_KINDS_OF_TIMES = ("predicted", "measured")
# The attributes of a `BucketTimes`, and what a table calls them.
_TITLE_OF_TIME = {"ready_s": "ready", "launched_s": "launch", "finished_s": "finish"}
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
    did. `texts` has each graph's calls, by its name. `uncompiled` says why there are no cuts, if a
    warning has said it.
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
    uncompiled: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Graphs, buckets, hints and times (in s) as JSON data; see docs/reading-the-logs.md."""
        predicted: dict[str, Any] | None = None
        if self.predicted is not None:
            predicted = {"basis": self.basis, **_fields(self.predicted, *_PREDICTED_TIMES)}
        measured: dict[str, Any] | None = None
        if self.measured is not None:
            measured = {
                "num_steps": self.num_measured,
                **_fields(self.measured, *_MEASURED_TIMES),
                "sections": [dataclasses.asdict(section) for section in self.measured.sections],
            }
        return {
            "format": "ddpopt explanation 1",
            "versions": {
                "ddpopt": installed_version(),
                "torch": str(torch.__version__),
            },
            **_fields(self, "model", "tuning", "hints"),
            "graphs": [_graph_data(cut, self.texts[cut.graph]) for cut in self.cuts],
            "buckets": [_bucket_data(bucket) for bucket in self.buckets],
            "predicted": predicted,
            "measured": measured,
        }

    def to_networkx(self) -> networkx.DiGraph:
        """Sections and buckets as the nodes of a `networkx.DiGraph`.

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
            if times is not None:
                for name in _TITLE_OF_TIME:
                    time_s = getattr(times, name)
                    if time_s is not None:
                        attributes[name] = time_s
                attributes["times"] = "measured" if bucket.measured else "predicted"
            buckets.append((bucket.actual or bucket.planned, attributes))
        return graph_of_cuts(self.cuts, self.texts, buckets)

    def to_json(self) -> str:
        """`to_dict()` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write a page for a browser (`.html`), JSON (`.json`) or the printed text (`.txt`).

        The page is one self-contained file. An existing file or link of that name is replaced.

        Raises:
            OptionError: the name has another ending.
            OSError: the file cannot be written, or a folder or a device has that name.
        """
        suffix = Path(path).suffix
        if suffix == ".html":
            text = render_page(self.to_dict())
        elif suffix == ".json":
            text = self.to_json()
        elif suffix == ".txt":
            text = f"{self}\n"
        else:
            raise OptionError(f"{path} does not end in .html, .json or .txt; choose one of them")
        write_text(path, text)

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        if not self.cuts and self.uncompiled:
            return self.uncompiled
        if not self.cuts:
            return (
                f"ddpopt has compiled no graph of this {self.model}. Either its forward "
                "has not run yet, or it does not run under torch.compile(..., backend='ddpopt'), "
                "or Dynamo skips it (as it skips a torch.nn container right under DDP)."
            )
        paragraphs: list[str] = []
        if self.buckets:
            paragraphs.append(self._bucket_table())
            if self.predicted or self.measured:
                paragraphs.append(self._times())
        if self.tuning:
            paragraphs.append(self.tuning)
        if self.bucket_plan:
            paragraphs.append(f"planned: {self.bucket_plan}")
        paragraphs += ["\n".join([cut.headline(), *cut.section_table()]) for cut in self.cuts]
        if self.hints:
            paragraphs.append("\n".join(self.hints))
        return "\n\n".join(paragraphs)

    def _bucket_table(self) -> str:
        """A row for each bucket, and which of them share a section."""
        sections = self.measured.sections if self.measured else ()
        num_sections = sum(section.kind == "backward" for section in sections)
        header = ("bucket", "size", "completed by", "launched", "DDP's", "parameters")
        rows: list[tuple[str, ...]] = []
        for bucket in self.buckets:
            completed_by, launched = bucket.completed_by, "-"
            if len(bucket.graphs) > 1:
                completed_by += " (spans graphs)"
            if bucket.launched_after is not None:
                launched = f"after {bucket.launched_after} of {num_sections}"
            row = (
                f"{bucket.index}",
                format_bytes(bucket.num_bytes),
                completed_by,
                launched,
                {True: "as planned", False: "DIFFERS", None: "-"}[bucket.is_as_planned],
                shorten(bucket.planned or bucket.actual),
            )
            rows.append(row)
        title = f"{self.model}: {count(len(rows), 'DDP bucket')}"
        lines = [title, "", *table(header, rows)]
        sharing = [f"{bucket.index}" for bucket in self.buckets if bucket.shares_section_with]
        if sharing:
            lines.append(
                f"  buckets {', '.join(sharing)} share sections: cutting between them "
                "is impossible, or of no use"
            )
        return "\n".join(lines)

    def _times(self) -> str:
        """A table of times in milliseconds, and a summary of them."""
        lines = [*_time_table(self.buckets), ""]
        if self.measured:
            steps = describe_steps(self.num_measured, self.num_recorded)
            lines.append(f"measured, medians of {steps}: {self.measured.summary()}")
        if self.predicted:
            times = self.predicted
            lines += [
                f"predicted: backward {format_ms(times.backward_s)} ms, of it "
                f"{format_ms(times.exposed_s)} waiting for communication; iteration "
                f"{format_ms(times.iteration_s)}; whatever the buckets, it takes "
                f"{format_ms(times.bound_s)} or more",
                "  (the longer of its computation and one allreduce of all gradients)",
                f"  ({self.basis})",
            ]
        if self.measured and self.predicted:
            lines.append("  (ranks also wait for slower ones, which is measured, not predicted)")
        return "\n".join(lines)


def _time_table(buckets: Sequence[BucketReport]) -> list[str]:
    """A row of milliseconds for each bucket; no lines if no bucket's times are known."""
    header = ["bucket"]
    rows = [[f"{bucket.index}"] for bucket in buckets]
    for kind in _KINDS_OF_TIMES:
        times: list[BucketTimes | None] = [getattr(bucket, kind) for bucket in buckets]
        if not any(times):
            continue
        first, *others = _TITLE_OF_TIME.values()
        header += [f"{kind}: {first}", *others]
        for row, times_of_bucket in zip(rows, times, strict=True):
            # None, of a bucket without times too, is shown as "-".
            row += [format_ms(getattr(times_of_bucket, name, None)) for name in _TITLE_OF_TIME]
    if len(header) == 1:
        return []
    # `table` aligns the last column left, so an empty one stands there.
    lines = table((*header, ""), [(*row, "") for row in rows])
    return [line.rstrip() for line in lines]


def _graph_data(cut: Cut, text: GraphText) -> dict[str, Any]:
    """A graph as JSON data; one that is not cut is one section."""
    nodes = text.nodes
    first_node = nodes[0][0].name if nodes and nodes[0] else ""
    section_names = ("index", "num_nodes", "first_node", "parameters", "completes")
    sections: list[dict[str, Any]] = []
    for index, section in enumerate(cut.sections or [cut.as_one_section(first_node)]):
        # Of code that came from torch's cache no calls are known.
        members = nodes[index] if index < len(nodes) else ()
        section_data = _fields(section, *section_names)
        section_data["nodes"] = [node._asdict() for node in members]
        sections.append(section_data)
    return {
        "name": cut.graph,
        **_fields(cut, "inner", "num_nodes", "split", "is_shared"),
        "headline": cut.headline(),
        "fallback": _reason_data(cut.fallback, cut.detail),
        "backward_fallback": _reason_data(cut.backward_fallback, cut.detail),
        "sections": sections,
    }


def _reason_data(reason: enum.Enum | None, detail: str) -> dict[str, str] | None:
    if reason is None:
        return None
    return {"name": reason.name, "text": reason.value, "detail": detail}


def _bucket_data(bucket: BucketReport) -> dict[str, Any]:
    """A bucket as JSON data, with the times of each kind as an object, or null."""
    names = [field.name for field in dataclasses.fields(bucket)]
    data = _fields(bucket, *names, "is_as_planned")
    for kind in _KINDS_OF_TIMES:
        times = data[kind]
        data[kind] = None if times is None else _fields(times, *_TITLE_OF_TIME)
    return data


def _fields(value: object, *names: str) -> dict[str, Any]:
    """Attributes by name, with tuples as JSON has them."""
    fields: dict[str, Any] = {}
    for name in names:
        attribute = getattr(value, name)
        fields[name] = list(attribute) if type(attribute) is tuple else attribute
    return fields
