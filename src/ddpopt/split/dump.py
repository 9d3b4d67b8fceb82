"""Shows a split: the graphs and the plan of each compile, in logs, as files and for networkx.

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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import fx

from ddpopt import _logs, _torch, config
from ddpopt._text import new_folder
from ddpopt.errors import TorchDriftError
from ddpopt.split.nodes import describe, num_bytes_of
from ddpopt.split.plan import Crossing, SplitPlan

if TYPE_CHECKING:
    import networkx

Graphs = Mapping[str, fx.GraphModule]  # by name

_LONGEST_NAME = 60  # of a folder

# One per compile, by Dynamo's graph.
_folders: weakref.WeakKeyDictionary[fx.GraphModule, Path] = weakref.WeakKeyDictionary()
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
        of_process = _process_folder(config.dump_dir, os.getpid())
        _folders[gm] = new_folder(of_process, _plain(_torch.graph_name(gm)))
    return _folders[gm]


def _plain(name: str) -> str:
    """Return a name that cannot lead to another folder."""
    return re.sub(r"\W+", "_", name)[:_LONGEST_NAME]


@functools.cache
def _process_folder(dump_dir: str, process_id: int) -> Path:
    """Make, once, the folder of this process, which a fork of it does not share."""
    parent = Path(dump_dir).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    rank = re.sub(r"[^0-9]", "", os.environ.get("RANK", ""))[:_LONGEST_NAME] or "0"
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    return new_folder(parent, f"rank{rank}-pid{process_id}")


def find_crossings(
    made: Sequence[Mapping[Any, fx.Node]], taken: Sequence[Iterable[Any]]
) -> tuple[Crossing, ...]:
    """Return the values that sections hand to later ones.

    `made` has each section's outputs by what stands for them between sections, `taken` what stands
    for its inputs.
    """
    readers: dict[Any, list[int]] = {}
    for index, keys in enumerate(taken):
        for key in dict.fromkeys(keys):
            readers.setdefault(key, []).append(index)
    return tuple(
        Crossing(
            value=describe([node])[0],
            num_bytes=_num_bytes(node),
            made_in=index,
            read_in=tuple(readers[key]),
        )
        for index, outputs in enumerate(made)
        for key, node in outputs.items()
        if key in readers
    )


def _num_bytes(node: fx.Node) -> int:
    try:
        return num_bytes_of(_torch.traced_value(node))
    except TorchDriftError:
        raise
    except Exception:  # raised by someone's subclass; what is shown is not worth a training run
        return 0


def plan_graph(
    plans: Iterable[SplitPlan], buckets: Sequence[tuple[Sequence[str], Mapping[str, Any]]]
) -> networkx.DiGraph:
    """Return sections and buckets as nodes, and what goes from one to another as edges.

    `buckets` are the parameters of each, and its further attributes. `Explanation.to_networkx` says
    which there are; all are text or numbers, as GraphML needs them.
    """
    import networkx  # noqa: PLC0415  # torch brings it along, and importing it takes a while

    graph = networkx.DiGraph()
    bucket_of: dict[str, str] = {}
    for index, (names, attributes) in enumerate(buckets):
        bucket_of |= dict.fromkeys(names, f"bucket {index}")
        graph.add_node(f"bucket {index}", kind="bucket", parameters=", ".join(names), **attributes)
    for plan in plans:
        num_bytes = {parameter.name: parameter.num_bytes for parameter in plan.arrival}
        edges: dict[tuple[str, str], dict[str, int]] = {}
        for section in plan.sections or [plan.as_one_section()]:
            node, own = plan.name_of(section), section.parameters
            graph.add_node(
                node,
                kind=f"{plan.split} section" if plan.sections else "whole graph",
                index=section.index,
                calls=section.num_nodes,
                bytes=sum(num_bytes[name] for name in own),
                parameters=", ".join(own),
            )
            for name in filter(bucket_of.get, own):
                carried = edges.setdefault((node, bucket_of[name]), {})
                carried[name] = num_bytes[name]
        for crossing in plan.crossings:
            maker = plan.name_of(plan.sections[crossing.made_in])
            value = crossing.value
            text = " ".join(filter(None, (value.name, value.shape, value.source)))
            for reader in crossing.read_in:
                carried = edges.setdefault((maker, plan.name_of(plan.sections[reader])), {})
                carried[text] = crossing.num_bytes
        for (start, end), carried in edges.items():
            kind = "gradients" if graph.nodes[end]["kind"] == "bucket" else "values"
            size, values = sum(carried.values()), json.dumps(carried)
            graph.add_edge(start, end, kind=kind, bytes=size, values=values)
    return graph


def write_graphml(plan: SplitPlan, path: Path) -> None:
    """Write the graph of a plan and of the buckets that it was made for."""
    import networkx  # noqa: PLC0415  # see plan_graph

    buckets = [([p.name for p in b.parameters], {"bytes": b.num_bytes}) for b in plan.buckets]
    networkx.write_graphml(plan_graph([plan], buckets), path)
