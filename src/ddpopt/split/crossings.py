"""What crosses the cuts of a graph, and the graph that plans are, for networkx."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from ddpopt._text import printable
from ddpopt.errors import TorchDriftError
from ddpopt.split.nodes import describe, num_bytes_of
from ddpopt.split.plan import Crossing, SplitPlan

if TYPE_CHECKING:
    import networkx


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
        return num_bytes_of(node.meta.get("example_value", node.meta.get("val")))
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
        graph.add_node(f"bucket {index}", kind="bucket", parameters=_listed(names), **attributes)
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
                parameters=_listed(own),
            )
            for name in filter(bucket_of.get, own):
                carried = edges.setdefault((node, bucket_of[name]), {})
                carried[printable(name)] = num_bytes[name]
        for crossing in plan.crossings:
            maker = plan.name_of(plan.sections[crossing.made_in])
            value = crossing.value
            text = printable(" ".join(filter(None, (value.name, value.shape, value.source))))
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


def _listed(names: Iterable[str]) -> str:
    return printable(", ".join(names))
