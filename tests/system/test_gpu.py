"""The proof on a GPU, without one: its program on the CPU, and code that only a GPU runs."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.harness import network, trace
from tests.gpu import page
from tests.gpu.__main__ import Runner, environment_for
from tests.gpu.lines import Line
from tests.support.documents import run_python

# ---- the program ------------------------------------------------------------------------------

PLANTED = """
import subprocess, sys, pytest

def test_good(record_property):
    record_property("said", "a | b")

def test_broken():
    raise AssertionError("two is not three")

def test_hangs():
    subprocess.run([sys.executable, "-c", "import time; print('asleep'); time.sleep(600)"])

def test_misses():
    pytest.skip("there is no such kernel")
"""


def test_a_line_that_fails_or_hangs_is_told_and_the_others_run(tmp_path: Path) -> None:
    """The line is told with what its tests had recorded; nothing that it started is left."""
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    (tmp_path / "place").mkdir()

    def line(name: str, tests: str, **fields: Any) -> Line:
        select = [f"{planted}::test_{test}" for test in tests.split()]
        return Line(name=name, part="Right", shows="What it says", select=select, **fields)

    lines = [
        line("broken", "good broken"),
        line("hung", "good hangs", limit_s=20),
        line("missing", "misses"),
        line("unknown", "nothing"),
        line("good", "good"),
        line("late", "good", least_s=1e6, is_alone=True),
    ]
    outcomes: list[page.Outcome] = []
    runner = Runner(
        folder=tmp_path,
        environment=environment_for(tmp_path / "place"),
        end_s=time.monotonic() + 600,
        tell=outcomes.append,
    )
    runner.run(lines, 1)
    results = {outcome.line.name: (outcome.result, outcome.why) for outcome in outcomes}
    assert results == {
        "broken": ("failed", "test_broken: AssertionError: two is not three"),
        "hung": ("failed", "killed after 20 s, in test_hangs"),
        "missing": ("skipped", "Skipped: there is no such kernel"),
        "unknown": ("failed", "pytest ended with status 4"),
        "good": ("passed", ""),
        "late": ("not run", "out of time"),
    }
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=False)
    assert "print('asleep'" not in listed.stdout
    page.write(outcomes, {"device": "none"}, tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "# ddpopt on none: 1 passed, 3 failed, 1 skipped, 1 not run" in text
    assert r"a \| b" in text
    assert len(json.loads((tmp_path / "gpu.json").read_text())["lines"]) == len(lines)


@pytest.mark.nightly
def test_lines_run_on_the_cpu(tmp_path: Path) -> None:
    """The command is the one for people; measurements are on the page."""
    options = ("--device", "cpu", "--jobs", "1", "--output", str(tmp_path))
    lines = ("tools, one rank", "DataParallel", "overlap in a profile")
    run_python("-m", "tests.gpu", *options, "--lines", *lines, TEST_DEVICE="cpu")
    text = (tmp_path / "gpu.md").read_text()
    assert "3 passed" in text
    assert "matrix products began beside communication" in text


SELECTED = """
import sys
from tests.gpu.lines import all_lines
names = [line.name for line in all_lines()]
assert len(set(names)) == len(names)
print(*(test for line in all_lines() for test in line.select if "tests/" in test), sep="\\n")
"""


@pytest.mark.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.nightly)])
def test_every_line_names_tests_that_there_are(device: str) -> None:
    """A line names such tests on the CPU, and on a GPU."""
    selected = run_python("-c", SELECTED, TEST_DEVICE=device)
    options = ("--collect-only", "-q", "-p", "no:cacheprovider")
    run_python("-m", "pytest", *options, *selected.splitlines(), TEST_DEVICE=device)


# ---- what only a GPU runs ---------------------------------------------------------------------


@pytest.mark.quick
def test_on_a_gpu_buckets_pass_on_a_stream_of_their_own() -> None:
    """Buckets pass after all that was queued before, one by one, at the network's rate."""
    calls: list[Any] = []
    stream = SimpleNamespace(wait_stream=lambda other: calls.append(("wait", other)))
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 8)
    cuda = mock.Mock(
        Stream=lambda: stream,
        Event=lambda **_: event,
        current_stream=lambda: "the current one",
        stream=lambda used: mock.MagicMock(__enter__=lambda _: calls.append(("on", used))),
        _sleep=lambda cycles: calls.append(("spin", cycles)),
    )
    done = mock.Mock()
    with (
        mock.patch.object(torch, "cuda", cuda),
        mock.patch.object(torch.futures, "Future", return_value=done),
    ):
        wire = network.open_network("cuda")
        calls.clear()
        wire.rate = network.Rate(gbit=8, num_ranks=2, startup_s=1e-3)
        buffer = torch.zeros(250_000)  # 1 MB: of a ring of two each sends as much
        assert wire.send(buffer) is done
    cycles_per_s = 20_000_000 / 8e-3
    assert calls[:2] == [("wait", "the current one"), ("on", stream)]
    assert calls[2] == ("spin", int(2e-3 * cycles_per_s))
    done.set_result.assert_called_once_with(buffer)


def _kernel(name: str, start: int, stop: int, stream: int, category: str = "kernel") -> Any:
    place = {"cat": category, "args": {"stream": stream}}
    return {"ph": "X", "name": name, "ts": start, "dur": stop - start, **place}


def test_a_gpus_trace_tells_what_ran_beside_what(tmp_path: Path) -> None:
    """Spinning kernels and copies to the host are communication; all others are computation."""
    path = tmp_path / "trace.json"
    events = [
        _kernel("nvjet_hsh_128x256", 0, 1000, 7),
        _kernel("spin_kernel(long)", 800, 2800, 20),
        _kernel("triton_poi_fused_add", 1000, 1500, 7),
        _kernel("sm90_xmma_gemm", 1500, 2000, 7),
        _kernel("Memcpy DtoH (Device -> Pageable)", 3000, 3200, 7, "gpu_memcpy"),
        _kernel("aten::mm", 0, 9000, 0, "cpu_op"),
    ]
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 1}))
    seen = trace.summarise(path, [])
    assert seen.computation_ms == 2.0
    assert seen.communication_ms == 2.2
    assert seen.hidden_ms == pytest.approx(1.2)
    assert seen.gaps_ms == pytest.approx(0.2)
    assert (seen.num_products, seen.num_beside, seen.num_streams) == (2, 1, 2)
