"""Graph dumps: the graphs and the plan of each compile, as files for people.

    <config.dump_dir>/rank0-pid123/4_0/original.py, section_0.py, ..., stitched.py, plan.json

Each graph is there as code and in Graphviz' language DOT. Nothing is formatted while `dump_dir` is
empty, and a dump that fails costs a warning, never the training run. `dump_dir` may be shared with
others: see [Note: files of others] in _files.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from ddpopt import _logs, _torch, config
from ddpopt._files import PrivateFolder
from ddpopt.split.backward.cut import SectionGraph
from ddpopt.split.nodes import call_nodes, describe, graph_name, is_call
from ddpopt.split.plan import BackwardCuts, NodeText, SplitPlan

_LONGEST_NAME = 60  # of a folder
_PARAMETER, _BOUNDARY, _CALL = "#ffe9a8", "#dddddd", "#ffffff"  # how nodes are filled

# Of each compile, by its graph as Dynamo gave it, and of each process, by `dump_dir` and its id.
_folders: weakref.WeakKeyDictionary[fx.GraphModule, PrivateFolder] = weakref.WeakKeyDictionary()
_process_folders: dict[tuple[str, int], PrivateFolder] = {}
_given_up: set[str] = set()  # values of `dump_dir` where writing failed


def dump_forward(
    gm: fx.GraphModule,
    stitched: fx.GraphModule,
    nodes: Sequence[Sequence[NodeText]],
    plan: SplitPlan,
) -> None:
    """Write the plan, Dynamo's graph, its sections, and the stitched graph that calls them.

    `nodes` are each section's, by their names in Dynamo's graph.
    """

    def write() -> None:
        graphs = {
            f"section {k}": graph
            for k, node in enumerate(stitched.graph.find_nodes(op="call_module"))
            if isinstance(graph := stitched.get_submodule(str(node.target)), fx.GraphModule)
        }
        section_of = {
            node.name: f"section {k}" for k, members in enumerate(nodes) for node in members
        }
        folder = _Folder.of(gm)
        folder.write_plan(plan)
        folder.write_graph("original", gm, section_of)
        for title, graph in graphs.items():
            folder.write_graph(title.replace(" ", "_"), graph)
        folder.write_graph("stitched", stitched)

    _attempt(write)


def dump_backward(
    gm: fx.GraphModule,
    backward: fx.GraphModule,
    cuts: BackwardCuts,
    sections: Sequence[SectionGraph],
    plan: SplitPlan,
) -> None:
    """Write the plan, Dynamo's graph `gm`, AOTAutograd's backward of it and its sections."""

    def write() -> None:
        calls = call_nodes(backward.graph)
        section_of = {
            calls[i].name: f"section {section.index}"
            for section in cuts.sections
            for i in cuts.order[section.start : section.stop]
        }
        folder = _Folder.of(gm)
        folder.write_plan(plan)
        folder.write_graph("original", gm)
        folder.write_graph("original_backward", backward, section_of)
        for index, section in enumerate(sections):
            folder.write_graph(f"backward_section_{index}", section.graph)

    _attempt(write)


def dump_plan(gm: fx.GraphModule, plan: SplitPlan) -> None:
    """Write the final plan, and Dynamo's graph if it is not there: the graph is compiled whole."""

    def write() -> None:
        folder = _Folder.of(gm)
        folder.write_plan(plan)
        if not (folder.place.path / "original.py").exists():
            folder.write_graph("original", gm)

    _attempt(write)


def _attempt(write: Callable[[], None]) -> None:
    folder = config.dump_dir
    if not folder or folder in _given_up:
        return
    try:
        write()
    except Exception as error:  # whatever it is, a dump is not worth a training run
        _given_up.add(folder)
        _logs.warning(
            "graphs are no longer dumped to %s: %s: %s; training goes on",
            folder,
            type(error).__name__,
            error,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Folder:
    """The folder of one compile. Nobody else can write to it, so its files may be overwritten."""

    place: PrivateFolder
    gm: fx.GraphModule

    @classmethod
    def of(cls, gm: fx.GraphModule) -> _Folder:
        place = _folders.get(gm)
        if place is None:
            place = _process_folder().make_inside(_plain(graph_name(gm)))
            _folders[gm] = place
        return cls(place, gm)

    def write_graph(
        self, name: str, graph: fx.GraphModule, section_of: Mapping[str, str] | None = None
    ) -> None:
        self.place.write_text(f"{name}.py", graph.print_readable(print_output=False))
        dot = to_dot(graph, section_of or {}, find_parameters(graph, self.gm))
        self.place.write_text(f"{name}.dot", dot)

    def write_plan(self, plan: SplitPlan) -> None:
        content = dataclasses.asdict(plan)
        self.place.write_text("plan.json", json.dumps(content, indent=1, default=_name_of) + "\n")


def _plain(name: str) -> str:
    """Return a name that leads to no other folder."""
    return re.sub(r"\W+", "_", name)[:_LONGEST_NAME]


def _name_of(value: object) -> str:
    """Return how a value that JSON does not know is written: an enum's by its name."""
    return value.name if isinstance(value, enum.Enum) else str(value)


def _process_folder() -> PrivateFolder:
    """Return the folder of this process, which a fork of it does not share."""
    key = (config.dump_dir, os.getpid())
    if key not in _process_folders:
        parent = Path(config.dump_dir).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        name = f"rank{_rank()}-pid{os.getpid()}"
        _process_folders[key] = PrivateFolder.make(parent, name)
    return _process_folders[key]


def _rank() -> str:
    if dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return _plain(re.sub(r"\D", "", os.environ.get("RANK", ""))) or "0"


# ---- DOT --------------------------------------------------------------------------------------


def to_dot(gm: fx.GraphModule, section_of: Mapping[str, str], parameters: Collection[str]) -> str:
    """Return a graph in DOT: each node with its name, target and shape.

    `section_of` gives the section of a node by the node's name; those of a section are drawn in
    one box. `parameters` are names of nodes, which are marked.
    """
    ids = {node: f"n{index}" for index, node in enumerate(gm.graph.nodes)}
    lines = [
        "digraph {",
        '  node [shape=box, style="filled", fontname="monospace", fontsize=10];',
        '  graph [fontname="monospace", labeljust="l"];',
    ]
    for node, text in zip(gm.graph.nodes, describe(gm.graph.nodes), strict=True):
        is_parameter = node.name in parameters
        label = [text.name, "(parameter)" if is_parameter else "", text.target, text.shape]
        color = _PARAMETER if is_parameter else _CALL if is_call(node) else _BOUNDARY
        shown = _quote("\n".join(filter(None, label)))
        lines.append(f"  {ids[node]} [label={shown}, fillcolor={_quote(color)}];")
    for index, section in enumerate(dict.fromkeys(section_of.values())):
        members = " ".join(
            f"{ids[node]};" for node in gm.graph.nodes if section_of.get(node.name) == section
        )
        lines.append(f"  subgraph cluster_{index} {{ label={_quote(section)}; {members} }}")
    lines += [f"  {ids[source]} -> {ids[node]};" for node in ids for source in node.all_input_nodes]
    return "\n".join([*lines, "}", ""])


def _quote(text: str) -> str:
    """Return a DOT string that shows `text` as it is."""
    # Graphviz ends a string only at a quote, but reads backslashes as escapes, and entities.
    escaped = text.replace("&", "&amp;").replace("\\", "\\\\")
    escaped = escaped.replace('"', '\\"').replace("\n", "\\n")
    return f'"{"".join(c for c in escaped if c.isprintable())}"'


def find_parameters(gm: fx.GraphModule, original: fx.GraphModule) -> set[str]:
    """Return the names of the nodes of `gm` that bring parameters in.

    `original` is the graph that Dynamo made, of whose backward `gm` may be.
    """
    found = {node.name for node in gm.graph.nodes if _is_parameter(gm, node)}
    given = list(original.graph.find_nodes(op="placeholder"))
    for node, index in _torch.argument_placeholders(gm).items():
        if index < len(given) and _is_parameter(original, given[index]):
            found.add(node.name)
    return found


def _is_parameter(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        with contextlib.suppress(AttributeError):  # it is a buffer, or a constant
            return isinstance(gm.get_parameter(str(node.target)), torch.nn.Parameter)
    value = node.meta.get("example_value")
    return node.op == "placeholder" and isinstance(value, torch.nn.Parameter)
