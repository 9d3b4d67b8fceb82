"""Shows what happened to a graph: its cut and the graphs made, in logs, as files, for networkx.

    <config.dump_dir>/rank0-pid123/4_0/cut.json, cut.graphml, original.py, and of
        a cut backward: original_backward.py, backward_section_0.py, ...
        a cut forward: section_0.py, ..., stitched.py

Nothing is formatted for outputs that are off, and a failing dump costs a warning, no training run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import fx

from ddpopt import _logs, _torch, config
from ddpopt._indices import SectionIndex, numbered
from ddpopt._text import new_folder
from ddpopt.errors import TorchDriftError
from ddpopt.split.cut import Crossing, Cut, GraphText, MakeText, NodeText
from ddpopt.split.nodes import num_bytes_of

if TYPE_CHECKING:
    import networkx

Graphs = Mapping[str, fx.GraphModule]  # by name
# What one section makes for others, by the value's key: as text, and how many bytes it has.
SectionOutputs = Mapping[Any, tuple[NodeText, int]]

_LONGEST_NAME = 60  # of a folder

# The folder of each compile, by Dynamo's graph: what becomes of the graph may be written twice, as
# where compiling a section fails, and the graph is compiled whole.
_folders: weakref.WeakKeyDictionary[fx.GraphModule, Path] = weakref.WeakKeyDictionary()
# Values of `dump_dir` where writing failed. For the life of the process: it says so once.
_given_up: set[str] = set()


def is_showing() -> bool:
    """Whether somebody wants to see the graphs that are compiled."""
    return bool(config.dump_dir or os.environ.get("TORCH_TRACE")) or _logs.is_showing_graphs()


def show(
    gm: fx.GraphModule,
    cut: Cut,
    text: MakeText,
    wholes: Graphs,
    sections: Graphs,
    stitched: fx.GraphModule | None = None,
) -> None:
    """Show how Dynamo's graph `gm` is cut: in the log, the structured trace, and files.

    `wholes` has `gm`, and the traced backward if that is cut; `stitched` calls the sections of a
    cut forward. `text` is called only if files are written.
    """
    # Entries of the trace are of the kinds that the in-tree DDPOptimizer writes, which tools know.
    for name, section in sections.items():
        code = functools.partial(_code, section)
        _torch.trace_structured("optimize_ddp_split_child", {"name": name}, code)
    graphs = {**wholes, **sections}
    if stitched is not None:
        graphs["stitched"] = stitched
        _torch.trace_structured("optimize_ddp_split_graph", {}, functools.partial(_code, stitched))
    for name, graph in graphs.items():
        _logs.graph(f"{name} graph", functools.partial(_code, graph))
    write(gm, cut, text, graphs)


def write(gm: fx.GraphModule, cut: Cut, text: MakeText, graphs: Graphs) -> None:
    """Write a cut and graphs to the folder of the compile that Dynamo made `gm` for.

    Called by `show`, and alone for a graph that stays whole: log and trace have it from Dynamo.
    """
    dump_dir = config.dump_dir
    if not dump_dir or dump_dir in _given_up:
        return
    try:
        folder = _folder_of(gm)
        content = dataclasses.asdict(cut)
        graph_text = text()
        content["crossings"] = [dataclasses.asdict(crossing) for crossing in graph_text.crossings]
        name_of_reason = operator.attrgetter("name")  # for what JSON does not have: a `Reason`
        (folder / "cut.json").write_text(
            json.dumps(content, indent=1, default=name_of_reason) + "\n"
        )
        for name, graph in graphs.items():
            code = _code(graph)
            # Its comments have paths of source files, in which there may be what is no UTF-8.
            (folder / f"{name}.py").write_text(code, encoding="utf-8", errors="backslashreplace")
        write_graphml(cut, graph_text, folder / "cut.graphml")
    except Exception as error:
        # A full disk, a folder that may not be written to, a graph that cannot be printed: whatever
        # it is, a dump is not worth a training run.
        _given_up.add(dump_dir)
        _logs.warning(
            "graphs are no longer dumped to %s: %s: %s; training goes on",
            dump_dir,
            type(error).__name__,
            error,
        )


def _code(graph: fx.GraphModule) -> str:
    return graph.print_readable(print_output=False)


def _folder_of(gm: fx.GraphModule) -> Path:
    """The folder of the compile that Dynamo made `gm` for; it is made at the first call."""
    if gm not in _folders:
        of_process = _process_folder(config.dump_dir, os.getpid())
        _folders[gm] = new_folder(of_process, _plain(_torch.graph_name(gm)))
    return _folders[gm]


def _plain(name: str) -> str:
    """A name that cannot lead to another folder."""
    return re.sub(r"\W+", "_", name)[:_LONGEST_NAME]


@functools.cache
def _process_folder(dump_dir: str, process_id: int) -> Path:
    """Make, once, the folder of this process.

    `process_id` is a part of the cache's key: a fork makes a folder of its own. A process without a
    process group has its rank from the environment, in which anything may stand. If an earlier
    process has left a folder of that name, this one's has a suffix.
    """
    parent = Path(dump_dir).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    rank = re.sub(r"[^0-9]", "", os.environ.get("RANK", ""))[:_LONGEST_NAME] or "0"
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    return new_folder(parent, f"rank{rank}-pid{process_id}")


def find_crossings(
    outputs_of_sections: Sequence[SectionOutputs], inputs_of_sections: Sequence[Iterable[Any]]
) -> tuple[Crossing, ...]:
    """The values that sections hand to later ones, each with the sections that make and read it.

    Between sections a value has a key: its slot in a backward, its name in a stitched forward. One
    section has it among its outputs. Each section's inputs are given by their keys, once each; some
    may be inputs of the graph, which no section makes.
    """
    readers: dict[Any, list[SectionIndex]] = {}
    for section, keys in numbered(SectionIndex, inputs_of_sections):
        for key in keys:
            readers.setdefault(key, []).append(section)
    crossings = []
    for section, outputs in numbered(SectionIndex, outputs_of_sections):
        for key, (value, num_bytes) in outputs.items():
            if key in readers:  # else the graph returns it, and no section takes it
                crossing = Crossing(
                    value=value,
                    num_bytes=num_bytes,
                    made_in=section,
                    read_in=tuple(readers[key]),
                )
                crossings.append(crossing)
    return tuple(crossings)


def shown_bytes(node: fx.Node) -> int:
    """The size of a node's value; 0 if that cannot be told."""
    try:
        return num_bytes_of(_torch.traced_value(node))
    except TorchDriftError:
        raise  # it is the reason for which the graph stays whole
    except Exception:
        # Raised by somebody's tensor subclass. What is shown is not worth a training run.
        return 0


def graph_of_cuts(
    cuts: Iterable[Cut],
    texts: Mapping[str, GraphText],
    buckets: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
) -> networkx.DiGraph:
    """Sections and buckets as nodes, and what goes from one to another as edges.

    Nodes are called `4/0 section 2`, or `4/0` where a graph is whole, and `bucket 1`. `texts` has
    each graph's text by the graph's name, or lacks it where nobody has one: then no value is seen
    to go from section to section. `buckets` has each bucket's parameters and its further
    attributes. `Explanation.to_networkx` says which attributes there are; all are text or numbers,
    as GraphML needs them.
    """
    import networkx  # noqa: PLC0415  # torch brings it along, and importing it takes a while

    graph = networkx.DiGraph()
    bucket_of: dict[str, str] = {}
    for index, (names, attributes) in enumerate(buckets):
        bucket_of |= dict.fromkeys(names, f"bucket {index}")
        graph.add_node(f"bucket {index}", kind="bucket", parameters=", ".join(names), **attributes)
    for cut in cuts:
        num_bytes = {parameter.name: parameter.num_bytes for parameter in cut.arrival}
        # Edges by their two ends, with what they carry: the bytes of gradients, or of other values.
        edges: dict[tuple[str, str], dict[str, int]] = {}
        for section in cut.sections or [cut.as_one_section()]:
            node = cut.name_of(section)
            graph.add_node(
                node,
                kind=f"{cut.split} section" if cut.sections else "whole graph",
                index=section.index,
                calls=section.num_nodes,
                bytes=sum(num_bytes[name] for name in section.parameters),
                parameters=", ".join(section.parameters),
            )
            for name in section.parameters:
                if name in bucket_of:  # else its bucket is not known
                    carried = edges.setdefault((node, bucket_of[name]), {})
                    carried[name] = num_bytes[name]
        for crossing in texts.get(cut.graph, GraphText()).crossings:
            maker = cut.name_of(cut.sections[crossing.made_in])
            value = crossing.value
            label = " ".join(filter(None, (value.name, value.shape, value.source)))
            for reader in crossing.read_in:
                carried = edges.setdefault((maker, cut.name_of(cut.sections[reader])), {})
                carried[label] = crossing.num_bytes
        for (start, end), carried in edges.items():
            kind = "gradients" if graph.nodes[end]["kind"] == "bucket" else "values"
            size, values = sum(carried.values()), json.dumps(carried)
            graph.add_edge(start, end, kind=kind, bytes=size, values=values)
    return graph


def write_graphml(cut: Cut, text: GraphText, path: Path) -> None:
    """Write the graph of a cut and of the buckets that it was made for."""
    import networkx  # noqa: PLC0415  # see graph_of_cuts

    buckets = [([p.name for p in b.parameters], {"bytes": b.num_bytes}) for b in cut.buckets]
    networkx.write_graphml(graph_of_cuts([cut], {cut.graph: text}, buckets), path)
