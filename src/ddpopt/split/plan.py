"""SplitPlan: the frozen decision of how one graph is compiled, and its rendering as text.

[Note: sections and plans]
A *section* is a piece of a graph that is compiled on its own. It starts where the first of a
bucket's gradients would otherwise have to wait: once a section's backward has run, the buckets
that it *completes* can be reduced while other sections are still in backward. Sections of a
forward graph are numbered in forward order, so backward runs the last one first; sections of a
backward graph are numbered in the order in which they run. A *plan* holds a graph's
sections, the buckets that they follow, and, if the graph is compiled whole, the reason.
Equal graphs with equal settings give equal plans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpopt._text import count, format_bytes, shorten, table
from ddpopt.errors import Reason
from ddpopt.reducer import Bucket, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The nodes `[start, stop)` of a graph, counted over its calls.

    `parameters` are those whose gradients become final in its backward, in arrival order, and
    `completes` the indices of those of the plan's buckets whose last gradient it produces.
    `num_fixed` is the number of its calls that are not known to be pure.
    """

    index: int
    start: int
    stop: int
    first_node: str
    parameters: tuple[str, ...]
    completes: tuple[int, ...] = ()
    num_fixed: int = 0

    @property
    def num_nodes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCuts:
    """How a backward graph is cut: its sections, and the order in which its calls run.

    `order` leaves out repeats (see [Note: calls and repeats] in backward_plan.py).
    `releases[k]` are the arguments of the forward whose gradients section k releases.
    `late_forward_reads` maps calls of sections after the first to the arguments of which they read
    snapshots; see [Note: order, as a hook sees it] in backward_plan.py.
    """

    order: tuple[int, ...]
    sections: tuple[Section, ...]
    releases: tuple[tuple[int, ...], ...]
    late_forward_reads: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)


class NodeText(NamedTuple):
    """A node as text for people; shape and source may be empty.

    For example `linear`, `torch._C._nn.linear`, `float32[8, 64]` and `model.py:12`.
    """

    name: str
    target: str
    shape: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that one section makes and later ones read; sections by index.

    In a cut backward it is kept until the last of them has run; in a cut forward autograd sees it.
    """

    value: NodeText
    num_bytes: int
    made_in: int
    read_in: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """How one Dynamo graph is compiled.

    `arrival` lists the graph's own parameters in the order in which their gradients are released;
    `buckets` are the Reducer's as predicted, and include parameters of other graphs under the same
    DDP module. `fallback` is None for a graph that is split. `split` says which graph was cut; if
    that is not the backward although it was wanted, `backward_fallback` says why. `detail`
    completes their sentences. If `is_shared`, the same compiled graph may run for several modules;
    it is planned for its first module only. `num_fixed` counts the calls of Dynamo's graph that
    are not known to be pure. `crossings` are the values that cross its cuts, as large as in the
    first call.
    """

    graph: str
    inner: str
    num_nodes: int
    sections: tuple[Section, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    arrival: tuple[Parameter, ...] = ()
    fallback: Reason | None = None
    detail: str = ""
    is_shared: bool = False
    split: str = "forward"
    backward_fallback: Reason | None = None
    num_fixed: int = 0
    crossings: tuple[Crossing, ...] = ()

    @property
    def frame(self) -> str:
        return frame_of(self.graph)

    def as_one_section(self, first_node: str = "") -> Section:
        """Return all calls of a graph that is compiled whole."""
        names = tuple(parameter.name for parameter in self.arrival)
        return Section(
            index=0, start=0, stop=self.num_nodes, first_node=first_node, parameters=names
        )

    def name_of(self, section: Section) -> str:
        """Return what a section is called: `4/0 section 2`, or `4/0` for a whole graph."""
        return f"{self.graph} section {section.index}" if self.sections else self.graph

    def with_buckets(self, buckets: Sequence[Bucket]) -> SplitPlan:
        """Return the plan with other buckets, for the same sections.

        Buckets are launched in order, so none is complete earlier than those before it.
        """
        order = self.sections[::-1] if self.split == "forward" else self.sections  # in backward
        place_of = {name: k for k, section in enumerate(order) for name in section.parameters}
        completed: list[list[int]] = [[] for _ in order]
        reached = -1
        for bucket in buckets:
            places = [place_of[p.name] for p in bucket.parameters if p.name in place_of]
            if places:
                reached = max(reached, *places)
                completed[reached].append(bucket.index)
        by_index = {order[k].index: tuple(indices) for k, indices in enumerate(completed)}
        sections = tuple(dataclasses.replace(s, completes=by_index[s.index]) for s in self.sections)
        return dataclasses.replace(self, buckets=tuple(buckets), sections=sections)

    def with_parameters(self, own: Mapping[str, Parameter]) -> SplitPlan:
        """Return the plan, without buckets, of the same code with these in the place of its own."""
        sections = tuple(
            dataclasses.replace(s, parameters=tuple(own[n].name for n in s.parameters if n in own))
            for s in self.sections
        )
        arrival = tuple(own[p.name] for p in self.arrival if p.name in own)
        return dataclasses.replace(self, sections=sections, arrival=arrival, is_shared=True)

    def __str__(self) -> str:
        lines = [self.headline()]
        if self.buckets:
            completed_in = {
                k: section.index for section in self.sections for k in section.completes
            }
            rows = [
                (
                    f"{bucket.index}",
                    format_bytes(bucket.num_bytes),
                    format_bytes(bucket.cap_bytes),
                    f"{completed_in.get(bucket.index, '-')}",
                    shorten([parameter.name for parameter in bucket.parameters]),
                )
                for bucket in self.buckets
            ]
            lines += ["", *table(("bucket", "size", "cap", "section", "parameters"), rows), ""]
        return "\n".join([*lines, *self.section_table()])

    def section_table(self) -> list[str]:
        """Return the sections as lines of text; none for a graph that is compiled whole."""
        if not self.sections:
            return []
        rows = [
            (f"{s.index}", f"{s.num_nodes}", s.first_node, ", ".join(map(str, s.completes)) or "-")
            for s in self.sections
        ]
        return table(("section", "nodes", "first node", "completes buckets"), rows)

    def headline(self) -> str:
        """Say in one sentence what was done, and why."""
        nodes = count(self.num_nodes, "node")
        graph = f"graph {self.graph} ({nodes}, inner compiler {self.inner})"
        if self.is_shared:
            graph += ", planned alone because modules of one class share it"
        detail = f"\n  {self.detail}" if self.detail else ""
        of_backward = self.backward_fallback and f"because {self.backward_fallback.value}{detail}"
        if self.fallback is not None:
            line = f"{graph}: compiled whole, because {self.fallback.value}"
            more = f"; its backward is not cut {of_backward}" if of_backward else detail
            return f"{line}{more}"
        total = format_bytes(sum(bucket.num_bytes for bucket in self.buckets))
        kind = "backward section" if self.split == "backward" else "section"
        sections, buckets = count(len(self.sections), kind), count(len(self.buckets), "DDP bucket")
        line = f"{graph}: {sections} for {buckets} of {total}"
        return f"{line}; cut in forward, not in backward, {of_backward}" if of_backward else line


def make_sections(
    bounds: Sequence[int],
    section_of: Mapping[Parameter, int],
    call_names: Sequence[str],
    is_fixed: Sequence[bool],
) -> tuple[Section, ...]:
    """Return the sections between these bounds, with parameters, which come in arrival order."""
    names: list[list[str]] = [[] for _ in bounds[1:]]
    for parameter, index in section_of.items():
        names[index].append(parameter.name)
    return tuple(
        Section(
            index=index,
            start=start,
            stop=stop,
            first_node=call_names[start],
            parameters=tuple(names[index]),
            num_fixed=sum(is_fixed[start:stop]),
        )
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def parts_of_buckets(buckets: Sequence[Bucket], own: Container[int]) -> list[list[Parameter]]:
    """Return the parameters with indices in `own`, by bucket, for buckets that have any."""
    parts = ([p for p in bucket.parameters if p.index in own] for bucket in buckets)
    return [parameters for parameters in parts if parameters]


def frame_of(graph: str) -> str:
    """Return the frame in a graph's name: `4` of `4/0`, its first compile."""
    return graph.partition("/")[0]
