"""Shows a split: the graphs and the plan of each compile, in logs and as files.

    <config.dump_dir>/rank0-pid123/4_0/plan.json, plan.graphml, original.py, and of
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
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import fx

from ddpopt import _logs, _torch, config
from ddpopt._text import new_folder
from ddpopt.split.crossings import write_graphml
from ddpopt.split.nodes import graph_name
from ddpopt.split.plan import SplitPlan

Graphs = Mapping[str, fx.GraphModule]  # by name

_LONGEST_NAME = 60  # of a folder

# One per compile, by Dynamo's graph, and one per process, by `dump_dir` and process id.
_folders: weakref.WeakKeyDictionary[fx.GraphModule, Path] = weakref.WeakKeyDictionary()
_process_folders: dict[tuple[str, int], Path] = {}
_given_up: set[str] = set()  # values of `dump_dir` where writing failed


def is_showing() -> bool:
    return bool(config.dump_dir or os.environ.get("TORCH_TRACE")) or _logs.is_showing_graphs()


def show(gm: fx.GraphModule, plan: SplitPlan, graphs: Graphs) -> None:
    """Show what became of Dynamo's graph `gm`: in the log, the structured trace, and files."""
    for name, graph in graphs.items():
        code = functools.partial(_code, graph)
        _logs.graph(f"{name} graph", code)
        if name == "stitched":
            _torch.trace_structured("optimize_ddp_split_graph", {}, code)
        elif "section" in name:
            _torch.trace_structured("optimize_ddp_split_child", {"name": name}, code)
    write(gm, plan, graphs)


def write(gm: fx.GraphModule, plan: SplitPlan, graphs: Graphs) -> None:
    """Write a plan and graphs to the folder of the compile that Dynamo made `gm` for."""
    dump_dir = config.dump_dir
    if not dump_dir or dump_dir in _given_up:
        return
    try:
        folder = _folder_of(gm)
        by_name = operator.attrgetter("name")  # of an enum member
        content = json.dumps(dataclasses.asdict(plan), indent=1, default=by_name)
        (folder / "plan.json").write_text(content + "\n")
        for name, graph in graphs.items():
            code = _code(graph)
            (folder / f"{name}.py").write_text(code, encoding="utf-8", errors="backslashreplace")
        write_graphml(plan, folder / "plan.graphml")
    except Exception as error:  # whatever it is, a dump is not worth a training run
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
    if gm not in _folders:
        _folders[gm] = new_folder(_process_folder(), _plain(graph_name(gm)))
    return _folders[gm]


def _plain(name: str) -> str:
    """Return a name that cannot lead to another folder."""
    return re.sub(r"\W+", "_", name)[:_LONGEST_NAME]


def _process_folder() -> Path:
    """Return the folder of this process, which a fork of it does not share."""
    key = (config.dump_dir, os.getpid())
    if key not in _process_folders:
        parent = Path(config.dump_dir).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        rank = re.sub(r"[^0-9]", "", os.environ.get("RANK", ""))[:_LONGEST_NAME] or "0"
        if dist.is_available() and dist.is_initialized():
            rank = str(dist.get_rank())
        _process_folders[key] = new_folder(parent, f"rank{rank}-pid{os.getpid()}")
    return _process_folders[key]
