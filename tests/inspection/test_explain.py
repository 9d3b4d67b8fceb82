"""`explain`: as text, as data and as files."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.inspection import Explanation
from ddpopt.planning import AllreduceCost
from ddpopt.split import state
from ddpopt.split.cut import GraphText
from tests.support.beside import compiled
from tests.support.cuts import only_cut
from tests.support.logs import logged
from tests.support.models import MLP, WIDTH, Broken
from tests.support.plans import SIZES_OF_MLP, plan_of

CAP_MB = 0.0316  # two layers fill a bucket, whether a weight or its bias comes first


def test_explain_tells_the_plans_as_data_and_as_a_table(one_rank: None) -> None:
    """`explain` takes the compiled and the plain DDP module alike."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    run = compiled(ddp)
    run(torch.randn(2, 64))
    explanation = ddpopt.explain(run)
    assert explanation == ddpopt.explain(ddp)
    (cut,) = explanation.cuts
    assert [bucket.num_bytes for bucket in cut.buckets] == [33280] * 3
    assert [section.completes for section in cut.sections] == [(0,), (1,), (2,)]
    for text in (str(explanation), str(cut)):
        assert "3 backward sections for 3 DDP buckets of 97.5 KiB" in text
        assert "layers.5.weight, layers.5.bias and 2 more" in text
        assert max(len(line) for line in text.splitlines()) < 100


def test_explain_shows_ddps_buckets_once_it_has_formed_them(one_rank: None) -> None:
    """`explain` says too whether the buckets are the planned ones."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    run = compiled(ddp)
    run(torch.randn(2, 64)).sum().backward()
    assert [bucket.is_as_planned for bucket in ddpopt.explain(ddp).buckets] == [None] * 3
    for _ in range(3):
        run(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    assert [bucket.is_as_planned for bucket in explanation.buckets] == [True] * 3
    assert [b.completed_by[-9:] for b in explanation.buckets] == [f"section {s}" for s in (0, 1, 2)]
    assert str(explanation).count("as planned") == 3


def test_a_model_that_was_compiled_before_ddp_has_its_own_name_and_names(one_rank: None) -> None:
    """The names are not those of the wrapper that torch.compile returns."""
    ddp = DistributedDataParallel(compiled(MLP()), bucket_cap_mb=CAP_MB)
    ddp(torch.randn(2, 64)).sum().backward()
    text = str(ddpopt.explain(ddp))
    assert text.startswith("MLP: ")
    assert "_orig_mod" not in text


def test_where_nothing_is_compiled_explain_says_what_the_warning_said(one_rank: None) -> None:
    """Dynamo skips a container of torch's right under DDP."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))
    with logged("warning") as warnings:
        compiled(ddp)(torch.randn(2, 4)).sum().backward()
    (warning,) = warnings
    assert str(ddpopt.explain(ddp)) == warning


def test_a_notebook_shows_an_explanation_as_its_text(one_rank: None) -> None:
    """Recordings and plans have the same; what looks like markup is text."""
    explanation = ddpopt.explain(DistributedDataParallel(MLP()))
    shown = dataclasses.replace(explanation, uncompiled="<b>")._repr_html_()
    assert shown == "<pre>&lt;b&gt;</pre>"


def test_explain_names_buckets_that_span_graphs(one_rank: None) -> None:
    """Such buckets are completed by the graph that runs first in forward; no graph is cut short."""
    ddp = DistributedDataParallel(Broken(), bucket_cap_mb=CAP_MB)
    run = compiled(ddp)
    for _ in range(4):
        run(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    first, second = (cut.graph for cut in explanation.cuts)
    assert [bucket.graphs for bucket in explanation.buckets] == [
        (second,),
        (first, second),
        (first,),
    ]
    assert explanation.buckets[1].completed_by == f"{first} section 0"
    assert "(spans graphs)" in str(explanation)
    assert [len(cut.sections) for cut in explanation.cuts] == [2, 2]
    assert all(bucket.is_as_planned for bucket in explanation.buckets)


def test_explain_shows_after_which_section_a_recorded_allreduce_was_launched(
    one_rank: None,
) -> None:
    """Each allreduce was launched before the next section's backward began."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    run = compiled(ddp)
    for _ in range(3):
        run(torch.randn(2, 64)).sum().backward()
    with ddpopt.record(run):
        run(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    assert [bucket.launched_after for bucket in explanation.buckets] == [1, 2, 3]
    assert "after 1 of 3" in str(explanation)


def test_explain_of_a_model_that_has_not_run_says_what_may_be_wrong(one_rank: None) -> None:
    assert "has compiled no graph" in str(ddpopt.explain(DistributedDataParallel(MLP())))


def test_explain_refuses_what_is_no_ddp_module() -> None:
    with pytest.raises(TypeError, match="this is a Linear"):
        ddpopt.explain(nn.Linear(1, 1))


@pytest.mark.slow
def test_evaluation_between_steps_does_not_change_a_recompile_of_a_later_graph(
    one_rank: None,
) -> None:
    """Evaluation's plans have no parameters; those of training plans still count as used before.

    The first graph of all had to guess the order in the second, where a weight's gradient comes
    before its bias's; with this cap buckets differ by that.
    """
    ddp = DistributedDataParallel(Broken(), bucket_cap_mb=0.03)
    run = compiled(ddp)
    for batch in (2, 3):
        run(torch.randn(batch, 64)).sum().backward()
        with torch.no_grad():
            run(torch.randn(batch, 64))
    planned = [
        [{p.index for p in bucket.parameters} for bucket in cut.buckets]
        for cut in ddpopt.explain(ddp).cuts
        if cut.buckets
    ]
    assert len(planned) == 4
    assert planned[0] != planned[1] == planned[2] == planned[3]


def test_after_an_evaluation_explain_still_says_what_completes_buckets(one_rank: None) -> None:
    """An evaluation's graph has no gradients, and is no recompile; DDP's own times stay."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    run = compiled(ddp)
    assert "measured: nothing yet" in str(ddpopt.explain(ddp).hints)
    for _ in range(4):
        run(torch.randn(2, 64)).sum().backward()
    before = ddpopt.explain(ddp)
    with torch.no_grad():
        run(torch.randn(2, 64))
    after = ddpopt.explain(ddp)
    assert len(after.cuts) == 2
    assert after.buckets == before.buckets != ()
    assert all("section" in bucket.completed_by for bucket in after.buckets)
    assert ddpopt.metrics(ddp)["ddpopt.recompiles"] == 0
    assert re.search(r"measured by DDP: in step 3, backward [\d.]+ ms; for", str(after))


# ---- as JSON and as files ----------------------------------------------------------------------


def _explain(is_recorded: bool = False, **options: Any) -> Explanation:
    module = MLP(bias=False)
    x = torch.randn(2, 64)
    plan = ddpopt.plan(
        module, x, network=AllreduceCost(startup_s=1e-4, s_per_byte=1e-7), world_size=2
    )
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.03)
    run = compiled(ddp, **options)
    for _ in range(4):
        run(x).sum().backward()
    if is_recorded:
        with ddpopt.record(ddp):
            run(x).sum().backward()
    return ddpopt.explain(ddp, plan)


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_the_document_is_json_with_every_section_and_node(one_rank: None, split: str) -> None:
    """Sections are in order of their index: backward completes a forward's last one first.

    A section's graph may have more nodes than the calls that it counts: views, for example.
    """
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


@pytest.mark.quick("options0-expected0")
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, ["backward"] * 3), ({"split": "forward"}, ["forward"] * 3 + ["backward"] * 3)],
)
def test_buckets_have_predicted_and_measured_times(
    one_rank: None, options: dict[str, Any], expected: list[str]
) -> None:
    """Times are in order, and predicted ones are for DDP's buckets, not for the plan's.

    A forward that is not cut has no sections to measure.
    """
    explanation = _explain(is_recorded=True, **options)
    assert "slower ones, which is measured, not predicted" in str(explanation)
    document = explanation.to_dict()
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


def test_missing_times_are_named_with_the_way_to_get_them(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    run = compiled(ddp)
    run(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    document = explanation.to_dict()
    assert document["predicted"] is None is document["measured"]
    assert {bucket["predicted"] for bucket in document["buckets"]} == {None}
    for hint in document["hints"]:
        assert hint in str(explanation)
    assert "ddpopt.record" in document["hints"][0]
    assert "ddpopt.plan" in document["hints"][1]


def test_a_plan_of_another_model_predicts_nothing(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(depth=4), bucket_cap_mb=0.03)
    run = compiled(ddp)
    run(torch.randn(2, 64)).sum().backward()
    network = AllreduceCost(startup_s=1e-4, s_per_byte=1e-7)
    plan = ddpopt.plan(MLP(), torch.randn(2, 64), network=network, world_size=2, backend=None)
    assert ddpopt.explain(ddp, plan).predicted is None


def test_a_graph_that_is_compiled_whole_says_why(one_rank: None) -> None:
    """All its nodes are in one section."""
    (graph,) = _explain(enabled=False).to_dict()["graphs"]
    assert graph["fallback"]["name"] == "DISABLED"
    assert graph["fallback"]["text"] == ddpopt.errors.Reason.DISABLED.value
    (section,) = graph["sections"]
    assert section["num_nodes"] == len(section["nodes"]) == graph["num_nodes"]


def test_buckets_that_share_a_section_are_named(one_rank: None) -> None:
    """Two sections are made one here, as where no boundary is possible between two buckets."""
    ddp = DistributedDataParallel(MLP(bias=False), bucket_cap_mb=0.03)
    run = compiled(ddp)
    run(torch.randn(2, 64)).sum().backward()
    cut = only_cut(ddp)
    first, second, third = cut.sections
    joined = dataclasses.replace(
        first, stop=second.stop, parameters=first.parameters + second.parameters
    )
    cut = dataclasses.replace(cut, sections=(joined, third)).with_buckets(cut.buckets)
    state.get(ddp).keep(cut, GraphText)
    explanation = ddpopt.explain(ddp)
    assert [bucket.shares_section_with for bucket in explanation.buckets] == [(1,), (0,), ()]
    assert "buckets 0, 1 share sections" in str(explanation)


def test_save_writes_the_format_of_the_files_suffix_over_an_earlier_file(
    one_rank: None, tmp_path: Path
) -> None:
    explanation, path = _explain(), tmp_path / "model"
    for suffix, start in {".html": "<!doctype html>", ".json": "{", ".txt": "mlp: 3 ddp"}.items():
        path.with_suffix(suffix).write_text("an earlier one")
        explanation.save(path.with_suffix(suffix))
        text = path.with_suffix(suffix).read_text()
        assert text.lower().startswith(start)
        assert "an earlier one" not in text


def test_save_refuses_other_suffixes(one_rank: None, tmp_path: Path) -> None:
    with pytest.raises(ddpopt.errors.OptionError, match=r"model\.pdf.*\.html"):
        ddpopt.explain(DistributedDataParallel(MLP())).save(tmp_path / "model.pdf")
    assert not list(tmp_path.iterdir())


class _Words(nn.Module):
    """A layer behind an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(words))


def test_a_frozen_model_with_sparse_gradients_is_explained(one_rank: None) -> None:
    """Its Reducer does not tell what a frozen model reduces, so DDP's buckets have no names."""
    ddp = DistributedDataParallel(_Words(), bucket_cap_mb=0.001)
    run = compiled(ddp)
    words = torch.arange(4)
    run(words).sum().backward()
    ddp.requires_grad_(False)
    for _ in range(3):  # in which the Reducer is asked
        run(words)
    assert {bucket.actual for bucket in ddpopt.explain(ddp).buckets} == {()}


def test_a_plan_stays_in_force_and_is_shown_after_a_reset(one_rank: None) -> None:
    """A plan belongs to its Reducer: when the module gets another one, the plan is gone."""
    ddp = DistributedDataParallel(MLP())
    plan = plan_of(ddp.module, SIZES_OF_MLP)
    ddpopt.rebucket(ddp, plan)
    torch._dynamo.reset()
    assert ddpopt.explain(ddp).bucket_plan == plan
    assert ddpopt.explain(copy.deepcopy(ddp)).bucket_plan is None
