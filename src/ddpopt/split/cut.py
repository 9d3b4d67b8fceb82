"""What happens to one graph: a `Cut` has its sections, or the reason why it stays whole.

[Note: sections and cuts]
A *section* is a piece of a graph that is compiled on its own. Once a section's backward has run,
the buckets that it *completes* can be reduced while other sections are still in backward. To that
end a section ends where a bucket's last gradient has been computed.

- Sections of a forward graph are numbered in forward order. Backward runs the last one first.
- Sections of a backward graph are numbered in the order in which they run.

A *cut* is the record of one graph: its sections, the buckets that they follow, and, where the graph
is compiled whole, the reason. Equal graphs with equal settings have equal cuts, on every rank: cuts
are compared between ranks, and stored with compiled code.

A *plan* is something else: which gradients share a bucket, see `planning/plan.py`.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpopt._indices import (
    BucketIndex,
    Call,
    ParameterIndex,
    Place,
    Position,
    SectionIndex,
    numbered,
)
from ddpopt._text import count, format_bytes, shorten, table
from ddpopt.errors import Reason
from ddpopt.reducer import Bucket, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The calls `[start, stop)` of a graph, in the order in which they run.

    Placeholders, attributes and the output are no calls, and are not counted.
    """

    index: SectionIndex
    start: Position
    stop: Position
    first_node: str
    # The parameters whose gradients become final in this section's backward, in arrival order.
    parameters: tuple[str, ...]
    # The indices of those of the cut's buckets whose last gradient this section produces.
    completes: tuple[BucketIndex, ...] = ()
    # How many of its calls are not known to be pure, and so keep their order: the proof counts them
    # too. They may communicate, so that ranks must have equally many on each side of a bucket's
    # allreduce.
    num_fixed: int = 0

    @property
    def num_nodes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one Dynamo graph is compiled."""

    # The graph's name: its frame and the number of the frame's compile, such as `4/0`.
    graph: str
    # The inner compiler's name.
    inner: str
    # The number of calls of Dynamo's graph; if the backward is cut, of the backward's calls but for
    # views and constants, see [Note: calls, views and constants] in facts.py.
    num_nodes: int
    sections: tuple[Section, ...] = ()
    # The Reducer's buckets as predicted, or as known before it told them (`DDPState.keep`). They
    # include parameters of other graphs under the module.
    buckets: tuple[Bucket, ...] = ()
    # The parameters whose gradients end in this graph's backward, in the order of their release.
    arrival: tuple[Parameter, ...] = ()
    # Why the graph is compiled whole; None if it has sections.
    fallback: Reason | None = None
    # Completes the sentence of `backward_fallback` if there is one, else that of `fallback`.
    detail: str = ""
    # Whether the graph may run for several modules; it was cut for the first of them.
    is_shared: bool = False
    # Which graph has the sections, "forward" or "backward".
    split: str = "forward"
    # Why the backward is not cut although it was to be.
    backward_fallback: Reason | None = None
    # How many calls of Dynamo's graph may communicate, or their backward may.
    num_collectives: int = 0
    # A digest of the order in which a graph that may communicate issues collectives and releases
    # gradients: the program's own order, whatever the sections are; see [Note: collectives] in
    # sections.py.
    order: str = ""

    @property
    def frame(self) -> str:
        return frame_of(self.graph)

    def as_one_section(self, first_node: str = "") -> Section:
        """All calls of a graph that is compiled whole, as if they were a section.

        For readers that go through sections, such as `explain`, which then need no case for such a
        graph. It completes no bucket early, and so `completes` is empty. `first_node` names its
        first call, for readers that show it.
        """
        names = tuple(parameter.name for parameter in self.arrival)
        return Section(
            index=SectionIndex(0),
            start=Position(0),
            stop=Position(self.num_nodes),
            first_node=first_node,
            parameters=names,
        )

    def name_of(self, section: Section) -> str:
        """What a section is called: `4/0 section 2`, or `4/0` for a whole graph."""
        return f"{self.graph} section {section.index}" if self.sections else self.graph

    def with_buckets(self, buckets: Sequence[Bucket]) -> Cut:
        """This cut with other buckets, and for each section which of them it completes.

        `buckets` are in launch order.
        """
        sections_in_backward = self.sections
        if self.split == "forward":
            sections_in_backward = self.sections[::-1]
        # How many sections run in backward before the one that completes each parameter.
        num_before: dict[str, int] = {}
        for num_earlier, section in enumerate(sections_in_backward):
            num_before.update(dict.fromkeys(section.parameters, num_earlier))
        completed: list[list[BucketIndex]] = [[] for _ in sections_in_backward]
        # Buckets are launched in order: none is complete earlier than those before it.
        reached = -1
        for bucket in buckets:
            # The parameters of other graphs are in none of these sections.
            nums_before = [num_before[p.name] for p in bucket.parameters if p.name in num_before]
            if nums_before:
                reached = max(reached, *nums_before)
                completed[reached].append(bucket.index)
        completed_by = {
            section.index: tuple(indices)
            for section, indices in zip(sections_in_backward, completed, strict=True)
        }
        sections = tuple(
            dataclasses.replace(section, completes=completed_by[section.index])
            for section in self.sections
        )
        return dataclasses.replace(self, buckets=tuple(buckets), sections=sections)

    def with_parameters(self, parameter_of: Mapping[str, Parameter]) -> Cut:
        """The cut of the same code when it runs for another DDP module, without buckets.

        `parameter_of` gives the other module's parameters by the names that this cut has for those
        of its own module. Parameters that are not in it are left out. The graph may have been cut
        at other buckets than the other module has, so the cut `is_shared`: then nobody is warned
        that these differ.
        """
        sections = []
        for section in self.sections:
            names = [parameter_of[n].name for n in section.parameters if n in parameter_of]
            sections.append(dataclasses.replace(section, parameters=tuple(names), completes=()))
        arrival = tuple(parameter_of[p.name] for p in self.arrival if p.name in parameter_of)
        return dataclasses.replace(
            self, sections=tuple(sections), arrival=arrival, buckets=(), is_shared=True
        )

    def __str__(self) -> str:
        lines = [self.headline()]
        if self.buckets:
            lines += ["", *self._bucket_table(), ""]
        return "\n".join([*lines, *self.section_table()])

    def _bucket_table(self) -> list[str]:
        """The buckets as lines of text, with the section that completes each; `-` if none here."""
        completed_in = {
            bucket: section.index for section in self.sections for bucket in section.completes
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
        return table(("bucket", "size", "cap", "section", "parameters"), rows)

    def section_table(self) -> list[str]:
        """The sections as lines of text; none for a graph that is compiled whole."""
        if not self.sections:
            return []
        rows = [
            (f"{s.index}", f"{s.num_nodes}", s.first_node, ", ".join(map(str, s.completes)) or "-")
            for s in self.sections
        ]
        return table(("section", "nodes", "first node", "completes buckets"), rows)

    def headline(self) -> str:
        """What was done, and why, in one sentence."""
        nodes = count(self.num_nodes, "node")
        graph = f"graph {self.graph} ({nodes}, inner compiler {self.inner})"
        if self.is_shared:
            graph += ", planned alone because modules of one class share it"
        detail = f"\n  {self.detail}" if self.detail else ""
        of_backward = ""
        if self.backward_fallback is not None:
            of_backward = f"because {self.backward_fallback.value}{detail}"
        if self.fallback is not None:
            line = f"{graph}: compiled whole, because {self.fallback.value}"
            if of_backward:  # which has the detail: backward was tried, and failed, before forward
                return f"{line}; its backward is not cut {of_backward}"
            return f"{line}{detail}"
        total = format_bytes(sum(bucket.num_bytes for bucket in self.buckets))
        kind = "backward section" if self.split == "backward" else "section"
        sections, buckets = count(len(self.sections), kind), count(len(self.buckets), "DDP bucket")
        line = f"{graph}: {sections} for {buckets} of {total}"
        if of_backward:
            return f"{line}; cut in forward, not in backward, {of_backward}"
        return line


def digest_of_order(collectives: Mapping[Call, str], releases: Mapping[str, Place]) -> str:
    """A short text that is equal for equal orders of collectives and releases.

    `collectives` are the names of operators by their call. `releases` has by each parameter's name
    the place where its gradient is released; in a graph whose forward is cut, the parameter's first
    use. Between two collectives the order of releases does not matter: DDP launches buckets in
    their own order.
    """
    calls = sorted(collectives)
    # The parameters in front of all collectives, then those behind each.
    groups: list[list[str]] = [[] for _ in range(len(calls) + 1)]
    for name, place in sorted(releases.items()):
        # A place is behind the call of its number, and so behind a collective that is this call.
        groups[bisect.bisect_right(calls, place)].append(name)
    events = [groups[0]]
    for call, group in zip(calls, groups[1:], strict=True):
        events += [[collectives[call]], group]
    return hashlib.sha256(repr(events).encode()).hexdigest()[:12]


# ---- What people are shown of it -------------------------------------------------------------


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
    num_bytes: int  # in the first call; of code from a cache, in that of the process that stored it
    made_in: SectionIndex
    read_in: tuple[SectionIndex, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphText:
    """The calls of each section as text, and the values that go from one section to another.

    A graph that is compiled whole is one section. Of code from torch's cache there are no calls,
    and values have no names: no graph comes back from it.
    """

    nodes: tuple[tuple[NodeText, ...], ...] = ()
    crossings: tuple[Crossing, ...] = ()


# Made when somebody asks, from data that keeps no graph alive.
MakeText = Callable[[], GraphText]


# ---- Making sections -------------------------------------------------------------------------


def make_sections(
    bounds: Sequence[Position],
    section_of: Mapping[Parameter, SectionIndex],
    call_names: Sequence[str],
    has_effects: Sequence[bool],
) -> tuple[Section, ...]:
    """The sections between these bounds, the first and the last of which are the graph's ends.

    `section_of` has, in arrival order, the parameters whose gradients become final in a section.
    `call_names` and `has_effects`, whether a call is not known to be pure and so keeps its order,
    are of each call, in the order in which calls run. No section completes a bucket yet, see
    `Cut.with_buckets`.
    """
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
            num_fixed=sum(has_effects[start:stop]),
        )
        for index, (start, stop) in numbered(SectionIndex, itertools.pairwise(bounds))
    )


def parts_of_buckets(
    buckets: Sequence[Bucket], parameters: Container[ParameterIndex]
) -> list[list[Parameter]]:
    """The part of each bucket that one graph has; buckets of which it has none are left out.

        buckets (a, b), (c, d), (e,), and a graph with a, b and e   ->   [a, b], [e]

    `parameters` are the graph's, by index. Other graphs under the module may have the rest.
    """
    parts = []
    for bucket in buckets:
        part = [p for p in bucket.parameters if p.index in parameters]
        if part:
            parts.append(part)
    return parts


def frame_of(graph: str) -> str:
    """The frame in a graph's name: `4` of `4/0`, its first compile."""
    return graph.partition("/")[0]
