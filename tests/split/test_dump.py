"""Dumps: the files that a compile leaves, whose folder they are in, and a cut as a graph."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _torch, config
from ddpopt.inspection import Explanation
from ddpopt.planning import AllreduceCost
from ddpopt.split import dump
from ddpopt.split.cut import Cut, GraphText
from tests.support.beside import Beside, compiled
from tests.support.cuts import only_cut
from tests.support.models import MLP, batches, train
from tests.support.on_ranks import on_ranks

CAP_MB = 0.0316  # two layers fill a bucket, so there are three


def _train(dump_dir: Path | str, num_steps: int = 2, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=options.pop("cap_mb", CAP_MB))
    model = compiled(ddp, **options)
    with config.patch(dump_dir=str(dump_dir)):
        train(ddp, batches(0, [(2, 64)] * num_steps), model)
    return ddp


def _compile_folders(dump_dir: Path) -> list[Path]:
    """Return the folders of the one process that dumped."""
    (process,) = dump_dir.iterdir()
    return sorted(process.iterdir())


def _stems(folder: Path, suffix: str) -> set[str]:
    return {file.stem for file in folder.glob(f"*{suffix}")}


def _read_cut(folder: Path) -> dict[str, Any]:
    """Return the cut that was written, without the values that cross it, which are beside it."""
    written = json.loads((folder / "cut.json").read_text())
    crossings = written.pop("crossings")
    assert bool(crossings) == bool(written["sections"])
    assert all(crossing["read_in"] for crossing in crossings)
    return written


def test_a_forward_split_leaves_all_its_graphs_and_the_cut(one_rank: None, tmp_path: Path) -> None:
    """They are code; the cut is the one that explain shows, enumerations by name."""
    ddp = _train(tmp_path, split="forward")
    (folder,) = _compile_folders(tmp_path)
    graphs = {"original", "section_0", "section_1", "section_2", "stitched"}
    assert _stems(folder, ".py") == graphs
    assert (folder / "original.py").read_text().count("torch._C._nn.linear(") == 6
    for k in range(3):
        assert (folder / f"section_{k}.py").read_text().count("torch._C._nn.linear(") == 2
    assert "submod_2" in (folder / "stitched.py").read_text()
    cut = only_cut(ddp)
    assert _read_cut(folder) == json.loads(json.dumps(dataclasses.asdict(cut)))
    assert folder.name == cut.graph.replace("/", "_")


def test_a_backward_split_leaves_the_backward_and_its_sections(
    one_rank: None, tmp_path: Path
) -> None:
    """Files for both are beside Dynamo's graph, and each call of the backward is in one section."""
    ddp = _train(tmp_path)
    (folder,) = _compile_folders(tmp_path)
    sections = {f"backward_section_{k}" for k in range(3)}
    assert _stems(folder, ".py") == {"original", "original_backward", *sections}
    whole = (folder / "original_backward.py").read_text()
    parts = "".join((folder / f"{name}.py").read_text() for name in sorted(sections))
    assert whole.count("torch.ops.aten.mm") == parts.count("torch.ops.aten.mm") > 0
    cut = only_cut(ddp)
    assert _read_cut(folder) == json.loads(json.dumps(dataclasses.asdict(cut)))
    assert cut.split == "backward"


def test_a_graph_that_is_compiled_whole_is_dumped_with_the_reason(
    one_rank: None, tmp_path: Path
) -> None:
    """With a cap of 25 MB the model has one bucket, so its graph is not cut."""
    _train(tmp_path, cap_mb=25)
    (folder,) = _compile_folders(tmp_path)
    assert _stems(folder, ".py") == {"original"}
    assert json.loads((folder / "cut.json").read_text())["fallback"] == "ONE_BUCKET"


def test_each_compile_of_a_frame_has_its_folder(one_rank: None, tmp_path: Path) -> None:
    """A second shape compiles the frame again."""
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": CAP_MB})
    with config.patch(dump_dir=str(tmp_path)):
        beside.train(batches(0, [(2, 64), (5, 64)]))
    names = [folder.name for folder in _compile_folders(tmp_path)]
    assert names == [cut.graph.replace("/", "_") for cut in beside.cuts]
    assert len(names) == 2


def test_a_graph_that_cannot_be_compiled_is_dumped(one_rank: None, tmp_path: Path) -> None:
    """Its user looks for it then."""

    def fail(_graph: fx.GraphModule, _inputs: Any) -> Any:
        raise ValueError("no compiler today")

    with pytest.raises(Exception, match="no compiler today"):
        _train(tmp_path, inner=fail)
    (folder,) = _compile_folders(tmp_path)
    assert {"original.py", "section_0.py", "cut.json"} <= {f.name for f in folder.iterdir()}


def test_folders_are_for_their_user_alone(one_rank: None, tmp_path: Path) -> None:
    """Their mode is 0700, and nothing is written elsewhere in the folder that was named."""
    _train(tmp_path)
    (process,) = tmp_path.iterdir()
    assert process.name == f"rank0-pid{os.getpid()}"
    for folder in (process, *process.iterdir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.quick("folder")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_name_that_is_taken_is_left_alone(one_rank: None, tmp_path: Path, kind: str) -> None:
    """Somebody else may have foreseen it: the folder gets another name."""
    dump_dir, foreign = tmp_path / "dumps", tmp_path / "foreign"
    foreign.mkdir()
    dump_dir.mkdir()
    foreseen = dump_dir / f"rank0-pid{os.getpid()}"
    foreseen.mkdir() if kind == "folder" else foreseen.symlink_to(foreign)
    _train(dump_dir)
    assert not list(foreseen.iterdir())
    (folder,) = set(dump_dir.iterdir()) - {foreseen}
    assert folder.name.startswith(f"{foreseen.name}-")
    assert list(folder.glob("*/cut.json"))


@pytest.mark.quick("../../evil")
@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/../../b", "x\0y", "n" * 5000, ".."])
def test_no_name_of_a_graph_leads_out_of_the_folder(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Dynamo's are plain; a folder's name is made plain all the same, and short."""
    monkeypatch.setattr(_torch, "graph_name", lambda _gm: name)
    _train(tmp_path / "dumps")
    (folder,) = _compile_folders(tmp_path / "dumps")
    assert re.fullmatch(r"\w{1,60}", folder.name)
    assert (folder / "cut.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]


@pytest.mark.parametrize("rank", ["../../evil", "3" * 5000, "\u0663"])
def test_the_environments_rank_leads_to_no_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """Without a process group RANK is believed, as far as it is a number."""
    monkeypatch.setattr(dump.dist, "is_initialized", lambda: False)
    monkeypatch.setenv("RANK", rank)
    gm = fx.symbolic_trace(torch.nn.ReLU())
    with config.patch(dump_dir=str(tmp_path / "dumps")):
        cut = Cut(graph="0/0", inner="eager", num_nodes=1, split="forward")
        dump.write(gm, cut, GraphText, {})
    (process,) = (tmp_path / "dumps").iterdir()
    assert re.fullmatch(r"rank\d{1,60}-pid\d+", process.name)
    assert list(process.glob("*/cut.json"))


def test_a_dump_that_fails_costs_one_warning_and_no_training(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is where the folder should be; later compiles do not try again."""
    (tmp_path / "file").write_text("")
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": CAP_MB})
    with config.patch(dump_dir=str(tmp_path / "file" / "dumps")):
        beside.train(batches(0, [(2, 64), (5, 64)]))
    assert [cut.fallback for cut in beside.cuts] == [None, None]
    (text,) = (r.getMessage() for r in caplog.records if "no longer dumped" in r.getMessage())
    assert "NotADirectoryError" in text


def test_without_a_dump_folder_nothing_is_formatted_or_written(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code is not even made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("formatted while dumps are off")

    monkeypatch.chdir(tmp_path)
    for name in ("_code", "_folder_of"):
        monkeypatch.setattr(dump, name, refuse)
    _train("")
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_each_rank_has_its_folder(rank: int, tmp_path: Path) -> None:
    """The folder is named after the rank."""
    _train(tmp_path)
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    assert len(list(tmp_path.glob(f"rank{rank}-pid{os.getpid()}/*/backward_section_*.py"))) == 3


MLP_CAP_MB = 0.03  # two layers of MLP fill a bucket


def _explain(module: nn.Module, *, is_recorded: bool = False, **options: Any) -> Explanation:
    ddp = DistributedDataParallel(module, bucket_cap_mb=options.pop("cap_mb", MLP_CAP_MB))
    model = compiled(ddp, **options)
    x = torch.randn(8, 64)
    for _ in range(3):
        model(x).square().mean().backward()
    if is_recorded:
        with ddpopt.record(ddp):
            model(x).square().mean().backward()
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


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_sections_fill_buckets_and_hand_values_on(one_rank: None, split: str) -> None:
    """Nodes are those that explain names; sizes are those of the shapes."""
    explanation = _explain(MLP(), split=split)
    (cut,) = explanation.cuts
    graph = explanation.to_networkx()
    sections, buckets = _of_kind(graph, f"{split} section"), _of_kind(graph, "bucket")
    assert sections == [f"{cut.graph} section {k}" for k in range(len(cut.sections))]
    assert buckets == [f"bucket {bucket.index}" for bucket in explanation.buckets]
    assert len(sections) > 2
    assert {bucket.completed_by for bucket in explanation.buckets} <= set(sections)
    assert sum(graph.nodes[node]["calls"] for node in sections) == cut.num_nodes
    for bucket, node in zip(explanation.buckets, buckets, strict=True):
        filled = graph.in_edges(node, data="bytes")
        assert graph.nodes[node]["bytes"] == bucket.num_bytes == sum(b for *_, b in filled)
        assert graph.nodes[node]["parameters"] == ", ".join(bucket.actual)
    value_edges = [(a, b, d) for a, b, d in graph.edges(data=True) if d["kind"] == "values"]
    assert [(a, b) for a, b, _ in value_edges] == [*itertools.pairwise(sections)]
    calls = [{node.name for node in nodes} for nodes in explanation.texts[cut.graph].nodes]
    for maker, _, edge in value_edges:
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
    (cut,) = explanation.cuts
    assert len(cut.sections) == 4
    graph = explanation.to_networkx()
    wide, waist, wide_again = (_crossing(graph, cut) for cut in (1, 2, 3))
    (skipping,) = set(wide) & set(waist)
    crossings = explanation.texts[cut.graph].crossings
    assert [c.read_in for c in crossings if c.made_in == 0] == [(2,), (1,)]
    assert wide.pop(skipping) == waist.pop(skipping) == 8 * 64 * 4
    assert [*wide.values(), *waist.values(), *wide_again.values()] == [2048, 8 * 8 * 4, 2048]


def test_buckets_have_times_once_these_are_known(one_rank: None) -> None:
    """Measured ones come before predicted ones, and there are none before either."""
    assert "ready_s" not in _explain(MLP()).to_networkx().nodes["bucket 0"]
    measured = _explain(MLP(), is_recorded=True).to_networkx()
    network = AllreduceCost(startup_s=1e-4, s_per_byte=1e-7)
    module = MLP()
    plan = ddpopt.plan(module, torch.randn(8, 64), network=network, world_size=2, backend=None)
    ddp = DistributedDataParallel(module, bucket_cap_mb=MLP_CAP_MB)
    compiled(ddp)(torch.randn(8, 64)).sum().backward()
    predicted = ddpopt.explain(ddp, plan).to_networkx()
    for graph, kind in ((measured, "measured"), (predicted, "predicted")):
        bucket = graph.nodes["bucket 1"]
        assert bucket["times"] == kind
        assert 0 < bucket["ready_s"] <= bucket["launched_s"] < bucket["finished_s"]


def test_a_graph_that_is_compiled_whole_is_one_node(one_rank: None) -> None:
    explanation = _explain(MLP(), enabled=False)
    (cut,) = explanation.cuts
    graph = explanation.to_networkx()
    assert graph.nodes[cut.graph]["kind"] == "whole graph"
    assert graph.nodes[cut.graph]["calls"] == cut.num_nodes
    assert _of_kind(graph, "forward section", "backward section") == []


class _Named(nn.Module):
    """A layer of MLP's, with a name that XML has to escape."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.register_parameter("a<b>", nn.Parameter(torch.ones(64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self._parameters["a<b>"]
        return self.inner(x) * scale


def test_graphml_gives_the_same_graph_back(one_rank: None, tmp_path: Path) -> None:
    """It does with all attributes, whatever a parameter is called."""
    graph = _explain(_Named(), is_recorded=True).to_networkx()
    assert "a<b>" in graph.nodes["bucket 0"]["parameters"]
    networkx.write_graphml(graph, tmp_path / "x.graphml")
    _assert_is_in(tmp_path / "x.graphml", graph)


def _assert_is_in(path: Path, graph: networkx.DiGraph) -> None:
    read = networkx.read_graphml(path)
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(read.edges(data=True)) == list(graph.edges(data=True))


def test_a_dump_has_the_graph_beside_the_cut(one_rank: None, tmp_path: Path) -> None:
    """It has the buckets that graphs were cut for, before any has a time."""
    with config.patch(dump_dir=str(tmp_path)):
        explanation = _explain(MLP(bias=False))
    (path,) = tmp_path.rglob("cut.graphml")
    assert (path.parent / "cut.json").is_file()
    _assert_is_in(path, explanation.to_networkx())
