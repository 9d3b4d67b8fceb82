"""An explanation as JSON and as files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.inspection import Explanation
from ddpopt.planning import AllreduceCost
from ddpopt.split import state
from tests.support.models import MLP


def _explain(is_recorded: bool = False, **options: Any) -> Explanation:
    module = MLP(bias=False)
    x = torch.randn(2, 64)
    plan = ddpopt.plan(
        module, x, network=AllreduceCost(startup_s=1e-4, s_per_byte=1e-7), world_size=2
    )
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.03)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager", **options})
    for _ in range(4):
        compiled(x).sum().backward()
    if is_recorded:
        with ddpopt.record(ddp):
            compiled(x).sum().backward()
    return ddpopt.explain(ddp, plan)


@pytest.mark.parametrize("split", ["forward", "backward"])
def test_the_document_is_json_with_every_section_and_node(one_rank: None, split: str) -> None:
    document = json.loads(_explain(split=split).to_json())
    (graph,) = document["graphs"]
    assert graph["split"] == split
    assert [section["completes"] for section in graph["sections"]] == (
        [[2], [1], [0]] if split == "forward" else [[0], [1], [2]]
    )
    for section in graph["sections"]:
        assert len(section["nodes"]) >= section["num_nodes"] > 0
        assert section["first_node"]
        assert all(node["target"] for node in section["nodes"])
    nodes = [node for section in graph["sections"] for node in section["nodes"]]
    assert any(node["shape"].startswith("float32[") for node in nodes)
    assert any(node["source"].startswith("models.py:") for node in nodes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, ["backward"] * 3), ({"split": "forward"}, ["forward"] * 3 + ["backward"] * 3)],
)
def test_buckets_have_predicted_and_measured_times(
    one_rank: None, options: dict[str, Any], expected: list[str]
) -> None:
    """In order, and the predicted ones for DDP's buckets, not for the plan's.

    A forward that is not cut has no sections to measure.
    """
    document = _explain(is_recorded=True, **options).to_dict()
    assert len(document["buckets"]) == 3
    for bucket in document["buckets"]:
        predicted, measured = bucket["predicted"], bucket["measured"]
        for times in (predicted, measured):
            assert 0 <= times["ready_s"] <= times["launched_s"] < times["finished_s"]
        assert bucket["launched_after"] == bucket["index"] + 1
    last = document["buckets"][-1]["predicted"]["finished_s"]
    assert document["predicted"]["backward_s"] >= last
    assert document["predicted"]["bound_s"] <= document["predicted"]["iteration_s"]
    assert document["measured"]["num_steps"] == 1
    kinds = [section["kind"] for section in document["measured"]["sections"]]
    assert kinds == expected
    assert document["hints"] == []


def test_what_is_missing_is_named_with_the_way_to_get_it(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    compiled(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    document = explanation.to_dict()
    assert document["predicted"] is None is document["measured"]
    assert all(bucket["predicted"] is None for bucket in document["buckets"])
    for hint in document["hints"]:
        assert hint in str(explanation)
    assert "ddpopt.record" in document["hints"][0]
    assert "ddpopt.plan" in document["hints"][1]


def test_a_plan_of_another_model_predicts_nothing(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(depth=4), bucket_cap_mb=0.03)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    compiled(torch.randn(2, 64)).sum().backward()
    network = AllreduceCost(startup_s=1e-4, s_per_byte=1e-7)
    plan = ddpopt.plan(MLP(), torch.randn(2, 64), network=network, world_size=2, backend=None)
    assert ddpopt.explain(ddp, plan).predicted is None


def test_a_graph_that_is_compiled_whole_says_why(one_rank: None) -> None:
    """With all its nodes in one section."""
    (graph,) = _explain(enabled=False).to_dict()["graphs"]
    assert graph["fallback"]["name"] == "DISABLED"
    assert graph["fallback"]["text"] == ddpopt.errors.Reason.DISABLED.value
    (section,) = graph["sections"]
    assert section["num_nodes"] == len(section["nodes"]) == graph["num_nodes"]


def test_buckets_that_share_a_section_are_named(one_rank: None) -> None:
    """As they do where nothing between them can be cut: here two sections are made one."""
    ddp = DistributedDataParallel(MLP(bias=False), bucket_cap_mb=0.03)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    compiled(torch.randn(2, 64)).sum().backward()
    (plan,) = ddpopt.explain(ddp).plans
    first, second, third = plan.sections
    joined = dataclasses.replace(
        first, stop=second.stop, parameters=first.parameters + second.parameters
    )
    plan = dataclasses.replace(plan, sections=(joined, third)).with_buckets(plan.buckets)
    state.get(ddp).keep(plan, ())
    explanation = ddpopt.explain(ddp)
    assert [bucket.shares_section_with for bucket in explanation.buckets] == [(1,), (0,), ()]
    assert "buckets 0, 1 share sections" in str(explanation)


@pytest.mark.parametrize("suffix", ["html", "json", "txt"])
def test_save_writes_what_the_name_says(one_rank: None, tmp_path: Path, suffix: str) -> None:
    explanation = _explain()
    path = tmp_path / f"model.{suffix}"
    explanation.save(path)
    text = path.read_text()
    start = {"html": "<!doctype html>", "json": "{", "txt": "MLP: 3 DDP buckets"}[suffix]
    assert text.lower().startswith(start.lower())


@pytest.mark.parametrize("suffix", ["html", "json", "txt"])
def test_save_replaces_a_file(one_rank: None, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_text("an earlier one")
    _explain().save(path)
    assert "an earlier one" not in path.read_text()


def test_another_name_is_an_error(one_rank: None, tmp_path: Path) -> None:
    with pytest.raises(ddpopt.errors.OptionError, match=r"does not end in \.html, \.json or \.txt"):
        _explain().save(tmp_path / "model.pdf")
    assert not list(tmp_path.iterdir())
