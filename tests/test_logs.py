"""The lines that each log name prints, read from a process that a user would start."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from tests.support.beside import compiled
from tests.support.fresh import run_fresh
from tests.support.models import MLP, batches
from tests.support.on_ranks import on_ranks

BOUNDARIES = "3 backward sections for 3 DDP buckets"
GRAPH = "torch.ops.aten.mm"

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

compiled = torch.compile(
    DDP(MLP(), bucket_cap_mb=0.0316), backend="ddpopt", options={"inner": "aot_eager"} | OPTIONS
)
for _ in range(3):
    compiled(torch.randn(2, 64)).sum().backward()
"""


QUIET_S = """
from ddpopt.split import section_compiler
section_compiler._BETWEEN_REPORTS_S = {}
"""

REFUSE_TO_FORMAT = """
import sys, torch.fx
from ddpopt.split.cut import Cut

def refuse(*_, original=torch.fx.GraphModule.print_readable, **options):
    if "ddpopt" in sys._getframe(1).f_code.co_filename:
        raise AssertionError("formatted while logs are off")
    return original(*_, **options)  # AOTAutograd formats its own graphs

Cut.__str__ = torch.fx.GraphModule.print_readable = refuse
"""


def _run(prelude: str = "", options: dict[str, str] | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"OPTIONS = {options or {}}\n{prelude}{SCRIPT}"],
        env={k: v for k, v in os.environ.items() if not k.startswith("TORCH_")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@functools.cache
def _run_with_text_and_trace() -> tuple[str, list[dict[str, Any]]]:
    """What one process prints for `TORCH_LOGS=dynamo`, and what it traces of splits."""
    with tempfile.TemporaryDirectory() as folder:
        text = _run(TORCH_LOGS="dynamo", TORCH_TRACE=folder)
        return text, _traced_splits(Path(folder))


def _traced_splits(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
    return [json.loads(ln[ln.index("{") :]) for ln in lines if '"optimize_ddp_split_' in ln]


@pytest.mark.parametrize(
    "name",
    [
        "dynamo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("distributed", "ddp", "+ddpopt")),
    ],
)
def test_the_text_logs_print_bucket_boundaries_once_and_no_graph(name: str) -> None:
    """Logs have the cap, the bytes and parameters of each bucket, and the nodes of each section."""
    text = _run_with_text_and_trace()[0] if name == "dynamo" else _run(TORCH_LOGS=name)
    assert text.count(BOUNDARIES) == 1
    for part in (
        "32.4 KiB",
        "32.5 KiB",
        "layers.5.weight, layers.5.bias",
        "threshold_backward_2",
        "23 nodes",
    ):
        assert part in text
    assert GRAPH not in text


@pytest.mark.slow
def test_ddp_graphs_prints_all_graphs_and_no_boundaries() -> None:
    """The graphs are the original, its backward, and each section's."""
    text = _run(TORCH_LOGS="ddp_graphs")
    sections = [f"backward_section_{k}" for k in range(3)]
    for name in ("original", "original_backward", *sections):
        assert text.count(f"---{name} graph---") == 1
    assert text.count("torch._C._nn.linear(") == 6
    assert text.count(GRAPH) == 2 * 11  # each in the backward, and in its section
    assert BOUNDARIES not in text


@pytest.mark.slow
def test_with_logs_off_nothing_is_printed_or_formatted() -> None:
    """No plan and no graph is turned into text."""
    printing = "OPTIONS = {}; import os; os.dup2(1, 2)\n"
    script = printing + REFUSE_TO_FORMAT + QUIET_S.format(1e9) + SCRIPT
    assert "ddpopt" not in run_fresh(script)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "count"), [("0", 3), ("1", 0)])
def test_rank_0_tells_of_a_long_compile_where_stderr_is_a_pipe(rank: str, count: int) -> None:
    """A section has a line, since here none is too soon after the one before."""
    text = _run(QUIET_S.format(-1), RANK=rank)
    lines = re.findall(r"^ddpopt: graph \S+: compiling section (\d) of 3, ", text, re.MULTILINE)
    assert lines == [str(k + 1) for k in range(count)]


@pytest.mark.quick("ddpopt-num_plans0-False")
@pytest.mark.parametrize("is_warmed_up", [False, True])
@pytest.mark.parametrize(("names", "num_plans"), [("ddpopt", [1, 0]), ("+ddpopt", [1, 1])])
@on_ranks(2)
def test_rank_0_logs_its_plans_once_and_the_others_do_where_that_is_asked_for(
    rank: int, is_warmed_up: bool, names: str, num_plans: list[int]
) -> None:
    """Plans are logged whether the first step or `warmup` compiles."""
    run = compiled(DistributedDataParallel(MLP(), bucket_cap_mb=0.0316))
    inputs = batches(rank, [(2, 64)] * 2)
    lines: list[str] = []
    level = logging.DEBUG if names.startswith("+") else logging.INFO
    own_log = logging.getLogger("ddpopt")
    with (
        mock.patch.object(own_log, "isEnabledFor", lambda asked: asked >= level),
        mock.patch.object(own_log, "log", lambda _, text, *args, **__: lines.append(text % args)),
    ):
        if is_warmed_up:
            ddpopt.warmup(run, inputs[0])
        for x in inputs:
            run(x).sum().backward()
    plans = [line for line in lines if BOUNDARIES in line]
    assert len(plans) == num_plans[rank]
    assert all("layers.5.weight, layers.5.bias" in plan for plan in plans)


@pytest.mark.quick("options0-backward_section-0")
@pytest.mark.parametrize(
    ("options", "prefix", "num_stitched"),
    [({}, "backward_section", 0), ({"split": "forward"}, "section", 1)],
)
def test_the_structured_trace_holds_the_split_graphs(
    tmp_path: Path, options: dict[str, str], prefix: str, num_stitched: int
) -> None:
    """Graphs have the names that the in-tree optimizer uses, which tlparse knows."""
    if options:
        _run(options=options, TORCH_TRACE=str(tmp_path))
        entries = _traced_splits(tmp_path)
    else:
        _, entries = _run_with_text_and_trace()
    assert sum("optimize_ddp_split_graph" in entry for entry in entries) == num_stitched
    children = [
        entry["optimize_ddp_split_child"]
        for entry in entries
        if "optimize_ddp_split_child" in entry
    ]
    assert [child["name"] for child in children] == [f"{prefix}_{k}" for k in range(3)]
