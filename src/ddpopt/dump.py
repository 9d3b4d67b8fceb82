"""Graph dumps: the graphs and the plan of each compile, as files for people.

    <config.dump_dir>/rank0-pid123/4_0/original.py, section_0.py, ..., stitched.py, plan.json

Each graph is there as code, as DOT and, where Graphviz is installed, as SVG. Nothing is formatted
while `dump_dir` is empty, and a dump that fails costs a warning, never the training run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import re
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import fx

from ddpopt import config, logs
from ddpopt.drawing import draw_svg, find_parameters, to_dot
from ddpopt.plans import BackwardCuts, NodeText, Plan
from ddpopt.splitting.backward import SectionGraph
from ddpopt.splitting.nodes import call_nodes, graph_name

_NUM_ATTEMPTS = 8  # to find a name that no file has

# Of each compile, by its graph as Dynamo gave it, and of each process, by `dump_dir` and its id.
_folders: weakref.WeakKeyDictionary[fx.GraphModule, Path] = weakref.WeakKeyDictionary()
_process_folders: dict[tuple[str, int], Path] = {}
_given_up: set[str] = set()  # values of `dump_dir` where writing failed


def dump_forward(
    gm: fx.GraphModule,
    stitched: fx.GraphModule,
    nodes: Sequence[Sequence[NodeText]],
    plan: Plan,
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
    plan: Plan,
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


def dump_plan(gm: fx.GraphModule, plan: Plan) -> None:
    """Write the final plan, and Dynamo's graph if it is not there: the graph is compiled whole."""

    def write() -> None:
        folder = _Folder.of(gm)
        folder.write_plan(plan)
        if not (folder.path / "original.py").exists():
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
        logs.warning(
            "graphs are no longer dumped to %s: %s: %s; training goes on",
            folder,
            type(error).__name__,
            error,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Folder:
    """That of one compile. Nobody else can write to it, so its files may be written again."""

    path: Path
    gm: fx.GraphModule

    @classmethod
    def of(cls, gm: fx.GraphModule) -> _Folder:
        path = _folders.get(gm)
        if path is None:
            path = _make_folder(_process_folder(), re.sub(r"\W+", "_", graph_name(gm)))
            _folders[gm] = path
        return cls(path, gm)

    def write_graph(
        self, name: str, graph: fx.GraphModule, section_of: Mapping[str, str] | None = None
    ) -> None:
        self._write(f"{name}.py", graph.print_readable(print_output=False))
        parameters = find_parameters(graph, self.gm)
        dot = self._write(f"{name}.dot", to_dot(graph, section_of or {}, parameters))
        draw_svg(dot, len(graph.graph.nodes))

    def write_plan(self, plan: Plan) -> None:
        content = dataclasses.asdict(plan)
        self._write("plan.json", json.dumps(content, indent=1, default=_name_of) + "\n")

    def _write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return path


def _name_of(value: object) -> str:
    """Return how a value that JSON does not know is written: an enum's by its name."""
    return value.name if isinstance(value, enum.Enum) else str(value)


def _process_folder() -> Path:
    """Return the folder of this process, which a fork of it does not share."""
    key = (config.dump_dir, os.getpid())
    if key not in _process_folders:
        parent = Path(config.dump_dir).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        _process_folders[key] = _make_folder(parent, f"rank{_rank()}-pid{os.getpid()}")
    return _process_folders[key]


def _rank() -> str:
    if dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return re.sub(r"\D", "", os.environ.get("RANK", "")) or "0"


def _make_folder(parent: Path, name: str) -> Path:
    """Make a new folder for this user alone; where the name is taken, it gets a random end.

    Raises:
        OSError: it cannot be made.
    """
    ends = ["", *(f"-{secrets.token_hex(4)}" for _ in range(_NUM_ATTEMPTS))]
    for path in (parent / f"{name}{end}" for end in ends):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise FileExistsError(f"there are too many folders {parent / name}-*")
