"""What each log name prints, read from a process that a user would start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BOUNDARIES = "3 sections for 3 DDP buckets"
GRAPH = "class submod_1"

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
    DDP(MLP(), bucket_cap_mb=0.03), backend="ddpopt", options={"inner": "aot_eager"}
)
for _ in range(3):
    compiled(torch.randn(2, 64)).sum().backward()
"""


REFUSE_TO_FORMAT = """
import sys, torch.fx
from ddpopt.split.plan import SplitPlan

def refuse(*_, original=torch.fx.GraphModule.print_readable, **options):
    if "ddpopt" in sys._getframe(1).f_code.co_filename:
        raise AssertionError("formatted while logs are off")
    return original(*_, **options)  # AOTAutograd formats its own graphs

SplitPlan.__str__ = torch.fx.GraphModule.print_readable = refuse
"""


def _run(prelude: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", prelude + SCRIPT],
        env={k: v for k, v in os.environ.items() if not k.startswith("TORCH_")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", ["dynamo", "distributed", "ddp", "+ddpopt"])
def test_the_text_logs_print_bucket_boundaries_once_and_no_graph(name: str) -> None:
    """How many buckets, which cap, bytes and parameters of each, nodes of each section."""
    text = _run(TORCH_LOGS=name)
    assert text.count(BOUNDARIES) == 1
    for part in ("30.7 KiB", "32.5 KiB", "layers.5.bias, layers.5.weight", "linear_2", "12 nodes"):
        assert part in text
    assert GRAPH not in text


def test_ddp_graphs_prints_all_graphs_and_no_boundaries() -> None:
    """The original, each section's and the stitched one."""
    text = _run(TORCH_LOGS="ddp_graphs")
    for title in ("original graph", "section_0 graph", "section_2 graph", "stitched graph"):
        assert text.count(f"---{title}---") == 1
    assert text.count("torch._C._nn.linear(") >= 12
    assert BOUNDARIES not in text


def test_with_logs_off_nothing_is_printed_or_formatted() -> None:
    """Neither a plan nor a graph is turned into text."""
    assert "ddpopt" not in _run(REFUSE_TO_FORMAT)


def test_the_structured_trace_holds_the_split_graphs(tmp_path: Path) -> None:
    """Under the names that the in-tree optimizer uses, which tlparse knows."""
    _run(TORCH_TRACE=str(tmp_path))
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    entries = [json.loads(ln[ln.index("{") :]) for ln in lines if '"optimize_ddp_split_' in ln]
    assert sum("optimize_ddp_split_graph" in entry for entry in entries) == 1
    children = [
        entry["optimize_ddp_split_child"]
        for entry in entries
        if "optimize_ddp_split_child" in entry
    ]
    assert [child["name"] for child in children] == ["section_0", "section_1", "section_2"]
