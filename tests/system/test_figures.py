"""The pictures of the documentation: what is read from recordings, and that they can be drawn."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpopt.inspection.recording import (
    RecordedSection,
    RecordedStep,
    Recording,
)
from ddpopt.planning.timeline import BucketTimes
from tests.system.documents import DOCS, ROOT


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """docs/figures/step.py as a module."""
    return _load("step", monkeypatch)


def _load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = DOCS / "figures" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_figure", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def _step(start_s: float, stretch: float) -> RecordedStep:
    """Forward of 10 ms, two sections to 30 and 50, two allreduces to 40 and 70, times a factor."""
    at_30, at_40, at_50, at_70 = (start_s + stretch * t for t in (0.03, 0.04, 0.05, 0.07))
    begin = start_s + stretch * 0.01
    return RecordedStep(
        forward_start_s=start_s,
        forward_stop_s=begin,
        backward_stop_s=at_70,
        sections=(
            RecordedSection("0/0", 0, "backward", begin, at_30),
            RecordedSection("0/0", 1, "backward", at_30, at_50),
        ),
        buckets=(
            BucketTimes(0, 1000, at_30, at_30, at_40),
            BucketTimes(1, 1000, at_50, at_50, at_70),
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace for each way of compiling, of three steps of which the second is the median."""
    for way in ("without", "with"):
        (tmp_path / way).mkdir()
        recording = Recording(rank=0, world_size=2, host="here", machine="this", origin_unix_ns=0)
        recording.steps = (_step(0.0, 3.0), _step(1.0, 1.0), _step(2.0, 0.5))
        recording.save(tmp_path / way / "rank0.json")
    return tmp_path


def test_the_picture_of_a_step_shows_the_median_one(figure: Any, folder: Path) -> None:
    """In ms from its forward; what runs after the last gradient is exposed."""
    step = figure.median_step(folder / "with" / "rank0.json")
    assert step.forward == pytest.approx((0, 10), abs=0.01)
    assert step.ready == pytest.approx(50, abs=0.01)
    assert step.end == pytest.approx(70, abs=0.01)
    assert step.exposed == pytest.approx(20, abs=0.01)
    assert [round(span.stop) for span in step.sections] == [30, 50]
    assert [round(span.stop) for span in step.allreduces] == [40, 70]


def test_the_picture_of_a_step_is_drawn_from_traces(figure: Any, folder: Path) -> None:
    """By the command that its docstring names, without the recording."""
    pytest.importorskip("matplotlib", reason="pip install 'ddpopt[benchmarks]'")
    image = folder / "step.png"
    figure.main(["--draw", "--folder", str(folder), "--image", str(image)])
    assert image.stat().st_size > 1000


def test_plots_of_benchmarks_use_readers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer has a label of its own, which is not its name in the code."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.algorithms import peers as algorithms
    from benchmarks.harness.peers import PEERS, label
    from benchmarks.harness.report import label_of_rate
    from benchmarks.overlap import figures

    for peers in (PEERS, algorithms.PEERS):
        labels = {label(name, peers) for name in peers}
        assert len(labels) == len(peers)
        assert labels.isdisjoint(peers)
    assert label("auto:buckets=8", PEERS) == "ddpopt, tuned buckets (buckets=8)"
    assert label_of_rate("1gbit") == "1 Gbit/s"
    assert label_of_rate("free") == "no limit"
    assert figures.label_of_cap("default") == "DDP's default buckets"


@pytest.mark.parametrize(
    "column",
    [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in (1, 2))],
    ids=["ResNet-50", "GPT-2 medium", "GPT-2 large"],
)
def test_the_table_of_clusters_is_what_its_script_computes(
    column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a hundredth: releases of torch differ in what they trace."""
    clusters = _load("clusters", monkeypatch)
    computation = clusters.profile(list(clusters.MODELS)[column])
    assert computation.num_bytes // 2 == (25_557_032, 354_823_168, 774_030_080)[column]
    page = (DOCS / "index.md").read_text()
    for cluster in clusters.CLUSTERS:
        (row,) = re.findall(rf"^\| {cluster.name} (\|.*)\|$", page, re.MULTILINE)
        shown = [float(n) for n in re.findall(r"\d+", row.split("|")[column + 1])]
        cell = clusters.cell(computation, cluster)
        computed = [float(n) for n in re.findall(r"\d+", str(cell))]
        assert computed == pytest.approx(shown, rel=0.01, abs=1)
        assert cell.bound_s <= cell.best_s <= min(cell.default_s, *cell.rules_s)
