"""The graph that a plan is: sections and buckets, and what goes from one to another."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import config
from ddpopt.inspection import Explanation
from ddpopt.planning import AllreduceCost
from tests.support.models import MLP

CAP_MB = 0.03  # two layers of MLP fill a bucket


def _explain(module: nn.Module, *, is_recorded: bool = False, **options: Any) -> Explanation:
    ddp = DistributedDataParallel(module, bucket_cap_mb=options.pop("cap_mb", CAP_MB))
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager", **options})
    x = torch.randn(8, 64)
    for _ in range(3):
        compiled(x).square().mean().backward()
    if is_recorded:
        with ddpopt.record(ddp):
            compiled(x).square().mean().backward()
    return ddpopt.explain(ddp)


def _of_kind(graph: networkx.DiGraph, *kinds: str) -> list[str]:
    return [node for node, kind in graph.nodes(data="kind") if kind in kinds]


def _crossing(graph: networkx.DiGraph, cut: int) -> dict[tuple[str, str], int]:
    """Return the bytes of each value that is kept across the cut in front of a section."""
    sections = _of_kind(graph, "backward section")
    edges = networkx.edge_boundary(graph, sections[:cut], sections[cut:], data="values")
    return {
        (section, value): num_bytes
        for section, _, values in edges
        for value, num_bytes in json.loads(values).items()
    }


@pytest.mark.parametrize("split", ["forward", "backward"])
def test_sections_fill_buckets_and_hand_values_on(one_rank: None, split: str) -> None:
    """Nodes are those that explain names; sizes are those of the shapes."""
    explanation = _explain(MLP(), split=split)
    (plan,) = explanation.plans
    graph = explanation.to_networkx()
    sections, buckets = _of_kind(graph, f"{split} section"), _of_kind(graph, "bucket")
    assert sections == [f"{plan.graph} section {k}" for k in range(len(plan.sections))]
    assert buckets == [f"bucket {bucket.index}" for bucket in explanation.buckets]
    assert len(sections) > 2
    assert {bucket.completed_by for bucket in explanation.buckets} <= set(sections)
    assert sum(graph.nodes[node]["calls"] for node in sections) == plan.num_nodes
    for bucket, node in zip(explanation.buckets, buckets, strict=True):
        filled = graph.in_edges(node, data="bytes")
        assert graph.nodes[node]["bytes"] == bucket.num_bytes == sum(b for *_, b in filled)
        assert graph.nodes[node]["parameters"] == ", ".join(bucket.actual)
    handed = [(a, b, d) for a, b, d in graph.edges(data=True) if d["kind"] == "values"]
    assert [(a, b) for a, b, _ in handed] == [*itertools.pairwise(sections)]
    calls = [{node.name for node in nodes} for nodes in explanation.nodes[plan.graph]]
    for maker, _, edge in handed:
        values = json.loads(edge["values"])
        assert edge["bytes"] == sum(values.values()) > 0
        for text, num_bytes in values.items():
            name, shape, source = re.fullmatch(r"(\w+) float32(\[.*\]) (.*)", text).groups()
            assert num_bytes == 4 * math.prod(json.loads(shape))
            assert source.startswith("models.py:")
            assert split == "forward" or name in calls[graph.nodes[maker]["index"]]


class _Hourglass(nn.Module):
    """Layers of 64, 8, 64 and 64 values, and one that skips those between."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((64, 64), (64, 8), (8, 64), (64, 64))
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        x = first(x).tanh()
        return (last(third(second(x).tanh()).tanh()) + x).tanh()


def test_fewest_bytes_cross_at_the_waist(one_rank: None) -> None:
    """A value that is read two sections later is kept across both cuts, and counts in each."""
    explanation = _explain(_Hourglass(), cap_mb=0.001)
    (plan,) = explanation.plans
    assert len(plan.sections) == 4
    graph = explanation.to_networkx()
    wide, waist, wide_again = (_crossing(graph, cut) for cut in (1, 2, 3))
    (skipping,) = set(wide) & set(waist)
    assert [c.read_in for c in plan.crossings if c.made_in == 0] == [(2,), (1,)]
    assert wide.pop(skipping) == waist.pop(skipping) == 8 * 64 * 4
    assert [*wide.values(), *waist.values(), *wide_again.values()] == [2048, 8 * 8 * 4, 2048]


def test_buckets_have_times_once_these_are_known(one_rank: None) -> None:
    """Measured ones before predicted ones, and none before either."""
    assert "ready_s" not in _explain(MLP()).to_networkx().nodes["bucket 0"]
    measured = _explain(MLP(), is_recorded=True).to_networkx()
    network = AllreduceCost(startup_s=1e-4, s_per_byte=1e-7)
    module = MLP()
    plan = ddpopt.plan(module, torch.randn(8, 64), network=network, world_size=2, backend=None)
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP_MB)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    compiled(torch.randn(8, 64)).sum().backward()
    predicted = ddpopt.explain(ddp, plan).to_networkx()
    for graph, kind in ((measured, "measured"), (predicted, "predicted")):
        bucket = graph.nodes["bucket 1"]
        assert bucket["times"] == kind
        assert 0 < bucket["ready_s"] <= bucket["launched_s"] < bucket["finished_s"]


def test_a_graph_that_is_compiled_whole_is_one_node(one_rank: None) -> None:
    explanation = _explain(MLP(), enabled=False)
    (plan,) = explanation.plans
    graph = explanation.to_networkx()
    assert graph.nodes[plan.graph]["kind"] == "whole graph"
    assert graph.nodes[plan.graph]["calls"] == plan.num_nodes
    assert _of_kind(graph, "forward section", "backward section") == []


class _Named(nn.Module):
    """A layer of MLP's, with a name that XML cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.register_parameter("a\x1b<b>", nn.Parameter(torch.ones(64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self._parameters["a\x1b<b>"]
        return self.inner(x) * scale


def test_graphml_gives_the_same_graph_back(one_rank: None, tmp_path: Path) -> None:
    """With all attributes, whatever a parameter is called."""
    graph = _explain(_Named(), is_recorded=True).to_networkx()
    assert r"a\x1b<b>" in graph.nodes["bucket 0"]["parameters"]
    networkx.write_graphml(graph, tmp_path / "x.graphml")
    again = networkx.read_graphml(tmp_path / "x.graphml")
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(again.edges(data=True)) == list(graph.edges(data=True))


def test_a_dump_has_the_graph_beside_the_plan(one_rank: None, tmp_path: Path) -> None:
    """With the buckets that graphs were cut for, before any has a time."""
    with config.patch(dump_dir=str(tmp_path)):
        explanation = _explain(MLP(bias=False))
    (path,) = tmp_path.rglob("plan.graphml")
    assert (path.parent / "plan.json").is_file()
    dumped, graph = networkx.read_graphml(path), explanation.to_networkx()
    assert dict(dumped.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(dumped.edges(data=True)) == list(graph.edges(data=True))
