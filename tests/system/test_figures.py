"""The pictures of the documentation: times that are read from recordings, and drawing."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import DOCS, ROOT


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


def _peer(stretch: float) -> dict[str, Any]:
    """Forward of 10 ms, gradients at 30 and 50, allreduces to 40 and 70, all times a factor."""

    def at(*times_ms: float) -> list[float]:
        return [stretch * (time_ms - 10) / 1e3 for time_ms in times_ms]

    keys = ("ready_s", "launched_s", "finished_s")
    return {
        "times": {
            name: {"median": stretch * time_ms / 1e3}
            for name, time_ms in (("iteration_s", 76), ("exposed_s", 21), ("optimizer_s", 5))
        },
        "timeline": {
            "forward_start_s": at(0)[0],
            "forward_stop_s": at(10)[0],
            "backward_stop_s": at(70)[0],
            "buckets": [
                dict(zip(keys, at(30, 30, 40), strict=True)),
                dict(zip(keys, at(35, 35, 70), strict=True)),
                dict(zip(keys, at(50, 50, 60), strict=True)),
            ],
        },
        "over_bound": 0.0,
    }


@pytest.fixture
def overlap_json(tmp_path: Path) -> Path:
    """A file as the benchmark writes it, of two peers, the second twice as fast."""
    path = tmp_path / "overlap.json"
    peers = {"intree": _peer(2.0), "auto": _peer(1.0)}
    path.write_text(json.dumps({"cells": [{"peers": peers}]}))
    return path


@pytest.mark.quick
def test_the_picture_of_an_iteration_has_the_benchmarks_times(
    figure: Any, overlap_json: Path
) -> None:
    """Times are in ms from its forward; allreduces may overtake each other."""
    steps = figure.read(overlap_json)
    step = steps["auto"]
    assert (step.total, step.exposed) == pytest.approx((76, 21))
    assert step.forward == pytest.approx((0, 10))
    assert step.backward == pytest.approx((10, 50))
    assert step.optimizer == pytest.approx((70, 75))
    assert step.allreduces == (
        pytest.approx((30, 40)),
        pytest.approx((50, 60)),
        pytest.approx((60, 70)),
    )
    assert steps["intree"].backward == pytest.approx((20, 100))


def test_the_picture_of_an_iteration_is_drawn(
    figure: Any, overlap_json: Path, tmp_path: Path
) -> None:
    """The command that its docstring names draws it."""
    pytest.importorskip("matplotlib", reason="pip install 'ddpopt[benchmarks]'")
    image = tmp_path / "step.png"
    figure.main([str(overlap_json), "--image", str(image)])
    assert image.stat().st_size > 1000


def test_plots_of_benchmarks_use_readers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer has its own label, which is not its name in the code."""
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
    """Numbers are equal to a hundredth: releases of torch trace other graphs."""
    clusters = _load("clusters", monkeypatch)
    computation = clusters.profile(list(clusters.MODELS)[column])
    assert computation.num_bytes // 2 == (25_557_032, 354_823_168, 774_030_080)[column]
    page = (DOCS / "simulation.md").read_text()
    for cluster in clusters.CLUSTERS:
        (row,) = re.findall(rf"^\| {cluster.name} (\|.*)\|$", page, re.MULTILINE)
        shown = [float(n) for n in re.findall(r"\d+", row.split("|")[column + 1])]
        cell = clusters.cell(computation, cluster)
        computed = [float(n) for n in re.findall(r"\d+", str(cell))]
        assert computed == pytest.approx(shown, rel=0.01, abs=1)
        assert cell.bound_s <= cell.best_s <= min(cell.default_s, *cell.rules_s)
