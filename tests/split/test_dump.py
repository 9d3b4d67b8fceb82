"""Dumps: which files a compile leaves, in whose folder, and that nothing can break by it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import config
from ddpopt.split import dump
from ddpopt.split.plan import SplitPlan
from tests.support.models import MLP, assert_equal_states, batches, train, twins
from tests.support.ranks import Ranks

CAP_MB = 0.0316  # two layers fill a bucket, so there are three


def _train(dump_dir: Path | str, num_steps: int = 2, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=options.pop("cap_mb", CAP_MB))
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager", **options})
    with config.patch(dump_dir=str(dump_dir)):
        train(ddp, batches(0, [(2, 64)] * num_steps), compiled)
    return ddp


def _compile_folders(dump_dir: Path) -> list[Path]:
    """Return the folders of the one process that dumped."""
    (process,) = dump_dir.iterdir()
    return sorted(process.iterdir())


def _stems(folder: Path, suffix: str) -> set[str]:
    return {file.stem for file in folder.glob(f"*{suffix}")}


def test_a_forward_split_leaves_all_its_graphs_and_the_plan(one_rank: None, tmp_path: Path) -> None:
    """As code; the plan is the one that explain shows, enumerations by name."""
    ddp = _train(tmp_path, split="forward")
    (folder,) = _compile_folders(tmp_path)
    graphs = {"original", "section_0", "section_1", "section_2", "stitched"}
    assert _stems(folder, ".py") == graphs
    assert (folder / "original.py").read_text().count("torch._C._nn.linear(") == 6
    for k in range(3):
        assert (folder / f"section_{k}.py").read_text().count("torch._C._nn.linear(") == 2
    assert "submod_2" in (folder / "stitched.py").read_text()
    (plan,) = ddpopt.explain(ddp).plans
    written = json.loads((folder / "plan.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(plan)))
    assert folder.name == plan.graph.replace("/", "_")


def test_a_backward_split_leaves_the_backward_and_its_sections(
    one_rank: None, tmp_path: Path
) -> None:
    """Beside Dynamo's graph. Each gradient is returned by one section."""
    ddp = _train(tmp_path)
    (folder,) = _compile_folders(tmp_path)
    sections = {f"backward_section_{k}" for k in range(3)}
    assert _stems(folder, ".py") == {"original", "original_backward", *sections}
    whole = (folder / "original_backward.py").read_text()
    parts = "".join((folder / f"{name}.py").read_text() for name in sorted(sections))
    assert whole.count("torch.ops.aten.mm") == parts.count("torch.ops.aten.mm") > 0
    (plan,) = ddpopt.explain(ddp).plans
    written = json.loads((folder / "plan.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(plan)))
    assert written["split"] == "backward"


def test_a_graph_that_is_compiled_whole_is_dumped_with_the_reason(
    one_rank: None, tmp_path: Path
) -> None:
    """One bucket, so no section."""
    _train(tmp_path, cap_mb=25)
    (folder,) = _compile_folders(tmp_path)
    assert _stems(folder, ".py") == {"original"}
    assert json.loads((folder / "plan.json").read_text())["fallback"] == "ONE_BUCKET"


def test_each_compile_of_a_frame_has_its_folder(one_rank: None, tmp_path: Path) -> None:
    """A second shape compiles the frame again."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    with config.patch(dump_dir=str(tmp_path)):
        train(ddp, batches(0, [(2, 64), (5, 64)]), compiled)
    names = [folder.name for folder in _compile_folders(tmp_path)]
    assert names == [plan.graph.replace("/", "_") for plan in ddpopt.explain(ddp).plans]
    assert len(names) == 2


def test_a_graph_that_cannot_be_compiled_is_dumped(one_rank: None, tmp_path: Path) -> None:
    """That is when one looks for it."""

    def fail(_graph: fx.GraphModule, _inputs: Any) -> Any:
        raise ValueError("no compiler today")

    with pytest.raises(Exception, match="no compiler today"):
        _train(tmp_path, inner=fail)
    (folder,) = _compile_folders(tmp_path)
    assert {"original.py", "section_0.py", "plan.json"} <= {f.name for f in folder.iterdir()}


def test_folders_are_for_their_user_alone(one_rank: None, tmp_path: Path) -> None:
    """Mode 0700, and nothing is written elsewhere in the given folder."""
    _train(tmp_path)
    (process,) = tmp_path.iterdir()
    assert process.name == f"rank0-pid{os.getpid()}"
    for folder in (process, *process.iterdir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_name_that_is_taken_is_left_alone(one_rank: None, tmp_path: Path, kind: str) -> None:
    """Somebody else may have foreseen it: the folder gets another name."""
    dump_dir, foreign = tmp_path / "dumps", tmp_path / "foreign"
    foreign.mkdir()
    dump_dir.mkdir()
    taken = dump_dir / f"rank0-pid{os.getpid()}"
    taken.mkdir() if kind == "folder" else taken.symlink_to(foreign)
    _train(dump_dir)
    assert not list(taken.iterdir())
    (other,) = set(dump_dir.iterdir()) - {taken}
    assert other.name.startswith(f"{taken.name}-")
    assert list(other.glob("*/plan.json"))


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/../../b", "x\0y", "n" * 5000, ".."])
def test_no_name_of_a_graph_leads_out_of_the_folder(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Dynamo's are plain; a folder's name is made plain all the same, and short."""
    monkeypatch.setattr(dump, "graph_name", lambda _gm: name)
    _train(tmp_path / "dumps")
    (folder,) = _compile_folders(tmp_path / "dumps")
    assert re.fullmatch(r"\w{1,60}", folder.name)
    assert (folder / "plan.json").is_file()
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
        plan = SplitPlan(graph="0/0", inner="eager", num_nodes=1, split="forward")
        dump.write(gm, plan, [])
    (process,) = (tmp_path / "dumps").iterdir()
    assert re.fullmatch(r"rank\d{1,60}-pid\d+", process.name)
    assert list(process.glob("*/plan.json"))


def test_a_dump_that_fails_costs_one_warning_and_no_training(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is where the folder should be; later compiles do not try again."""
    (tmp_path / "file").write_text("")
    eager, ddp = twins(MLP(), bucket_cap_mb=CAP_MB)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    inputs = batches(0, [(2, 64), (5, 64)])
    with config.patch(dump_dir=str(tmp_path / "file" / "dumps")):
        assert_equal_states(train(ddp, inputs, compiled), train(eager, inputs))
    assert [plan.fallback for plan in ddpopt.explain(ddp).plans] == [None, None]
    said = [r.getMessage() for r in caplog.records if "no longer dumped" in r.getMessage()]
    assert len(said) == 1
    assert "NotADirectoryError" in said[0]


def test_off_nothing_is_formatted_or_written(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even code."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("formatted while dumps are off")

    monkeypatch.chdir(tmp_path)
    for name in ("_code", "_folder_of"):
        monkeypatch.setattr(dump, name, refuse)
    _train("")
    assert not list(tmp_path.iterdir())


def _dump_on_rank(_rank: int, dump_dir: str) -> None:
    _train(dump_dir)


def test_each_rank_has_its_folder(ranks: Ranks, tmp_path: Path) -> None:
    """Named after it."""
    ranks.run(_dump_on_rank, str(tmp_path))
    names = sorted(folder.name for folder in tmp_path.iterdir())
    assert [name.partition("-pid")[0] for name in names] == ["rank0", "rank1"]
    for name in names:
        assert len(list(tmp_path.glob(f"{name}/*/backward_section_*.py"))) == 3
