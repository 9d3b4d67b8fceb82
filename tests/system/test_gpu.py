"""The proof on a GPU, without one: its program, its twin on the CPU, and what only a GPU runs."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import report, runner  # noqa: E402
from benchmarks.gpu.features import KINDS  # noqa: E402
from benchmarks.gpu.lines import Line, lines_for  # noqa: E402
from benchmarks.gpu.overlap import Experiment  # noqa: E402
from benchmarks.harness import device as measuring  # noqa: E402
from benchmarks.harness import network, trace  # noqa: E402
from benchmarks.harness.models import find_model  # noqa: E402
from benchmarks.harness.peers import PEERS  # noqa: E402
from tests.support import planted_lines  # noqa: E402

# ---- the program ------------------------------------------------------------------------------


def _line(function: Any, **fields: Any) -> Line:
    name = function.__name__
    run = f"{function.__module__}:{name}"
    return Line(name=name, part="Right", shows="What it says", run=run, **fields)


def test_a_line_that_fails_or_hangs_is_told_and_the_others_run(tmp_path: Path) -> None:
    """With what each had found out until then; nothing that it started is left."""
    lines = [
        _line(planted_lines.break_one),
        _line(planted_lines.stop_early),
        _line(planted_lines.hang, limit_s=8),
        _line(planted_lines.miss),
        _line(planted_lines.say, arguments={"said": "a | b"}),
        _line(planted_lines.say, least_s=1e6, is_alone=True),
    ]
    setting = runner.Setting(device="cpu", folder=tmp_path, budget_s=600, num_jobs=1)
    said: list[str] = []
    outcomes = runner.run_lines(lines, setting, lambda outcome: said.append(outcome.result))
    results = ["failed", "failed", "failed", "skipped", "passed", "not run"]
    assert said == [outcome.result for outcome in outcomes] == results
    broken, raised, hung, missed, good, late = outcomes
    assert broken.why == "is wrong: AssertionError: two is not three"
    assert [check.outcome for check in broken.found.checks] == ["passed", "failed"]
    assert raised.why == "RuntimeError: no device"
    assert hung.why == "killed after 8 s, in ends"
    assert missed.why == "there is no such kernel"
    assert good.found.figures == {"said": "a | b"}
    assert late.why == "out of time"
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=False)
    assert "print('asleep'" not in listed.stdout
    report.write(outcomes, {"device": "none"}, tmp_path)
    page = (tmp_path / "gpu.md").read_text()
    assert "# ddpopt on none: 1 passed, 3 failed, 1 skipped, 1 not run" in page
    assert r"a \| b" in page
    assert "two is not three" in page
    assert len(json.loads((tmp_path / "gpu.json").read_text())["lines"]) == len(lines)


def test_the_twin_on_the_cpu_proves_a_line_of_each_program(tmp_path: Path) -> None:
    """As people run it; every line passes."""
    run = subprocess.run(
        ["bash", "benchmarks/gpu/run.sh", "cpu", str(tmp_path), "--jobs", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    page = (tmp_path / "gpu.md").read_text()
    assert run.returncode == 0, f"{run.stdout}\n{page}"
    lines = json.loads((tmp_path / "gpu.json").read_text())["lines"]
    assert {line["line"]["part"] for line in lines} == {"Right", "Tools", "Overlap"}
    assert all(line["result"] == "passed" for line in lines)
    assert "| backward |" in page


# ---- what only a GPU runs ---------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_line_names_what_there_is(device: str) -> None:
    """Functions with their arguments, kinds of features, models and peers."""
    lines = lines_for(device, is_all=True)
    assert len({line.name for line in lines}) == len(lines)
    for line in lines:
        module, _, name = line.run.partition(":")
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(None, device, **line.arguments)
        json.dumps(line.arguments)  # it goes to another process
        assert line.arguments.get("kind", "TRAINING") in KINDS
        assert set(line.arguments.get("peers", ())) <= set(PEERS)
        if "model" in line.arguments:
            find_model(line.arguments["model"])
        if name == "measure_model":
            Experiment(**line.arguments)


def test_on_a_gpu_buckets_pass_on_a_stream_of_their_own() -> None:
    """After what was queued before them, for as long as the network takes, one after the other."""
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


def test_on_a_gpu_moments_are_events_of_its_queue() -> None:
    """Which are read when they are over."""
    clock = measuring.Clock("cuda")
    stop = mock.Mock()
    event = mock.Mock(elapsed_time=lambda _: 250)
    with mock.patch.object(torch, "Event", return_value=event):
        start = clock.moment()
    start.record.assert_called_once_with()
    assert clock.seconds(start, stop) == 0.25
    stop.synchronize.assert_called_once_with()


def _kernel(name: str, start: int, stop: int, stream: int, category: str = "kernel") -> Any:
    place = {"cat": category, "args": {"stream": stream}}
    return {"ph": "X", "name": name, "ts": start, "dur": stop - start, **place}


def test_a_gpus_trace_tells_what_ran_beside_what(tmp_path: Path) -> None:
    """Spinning kernels and copies to the host are communication, whatever else runs is not."""
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
    seen = trace.summarise(trace.Trace.load(path), [])
    assert seen.computation_ms == 2.0
    assert seen.communication_ms == 2.2
    assert seen.hidden_ms == pytest.approx(1.2)
    assert seen.gaps_ms == pytest.approx(0.2)
    assert (seen.num_products, seen.num_beside, seen.num_streams) == (2, 1, 2)
    path.write_text("[]")
    with pytest.raises(ValueError, match="has no traceEvents"):
        trace.Trace.load(path)
