"""The benchmarks of communication algorithms run and write all rows. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.algorithms.peers import PEERS, find_peer  # noqa: E402
from benchmarks.algorithms.report import Turn, straggler  # noqa: E402
from benchmarks.harness import cluster  # noqa: E402

TIMEOUT_S = 1800
NOT_EMULATED = cluster.why_not_emulated()
# One of each kind; convergence has the others.
ALGORITHMS, STRAGGLING = ("eager", "ddpopt", "async"), ("eager", "async")
CONVERGING = (
    "ddpopt", "decentralized", "shift_one", "low_precision", "async", "bytegrad", "qadam",
    "fp16", "powersgd", "post_local_sgd",
)  # fmt: skip


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def _measure(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Return what the benchmark writes, as data and as text."""
    _run("-m", "benchmarks.algorithms", "--quick", *options, "--output", str(folder))
    text = (folder / "algorithms.md").read_text()
    return json.loads((folder / "algorithms.json").read_text()), text


@pytest.mark.quick
def test_an_algorithm_is_named_with_its_options() -> None:
    """Values are JSON."""
    peer, options = find_peer("async:sync_interval_ms=20")
    assert (peer, options) == (PEERS["async"], {"sync_interval_ms": 20})
    with pytest.raises(ValueError, match="there are eager"):
        find_peer("nobody")


@pytest.mark.nightly
def test_quick_measures_algorithms_and_what_a_straggler_costs(tmp_path: Path) -> None:
    """A row each; on loopback bytes are not counted, and the table says so."""
    options = ("--algorithms", ",".join(ALGORITHMS), "--straggling", ",".join(STRAGGLING))
    found, text = _measure(tmp_path, *options, "--loopback")
    (cell,) = found["cells"]
    assert tuple(cell["peers"]) == ALGORITHMS
    assert not found["failures"]
    assert all(peer["samples_per_s"]["low"] > 0 for peer in cell["peers"].values())
    assert all(peer["sent_bytes"] is None for peer in cell["peers"].values())
    assert "bytes were not counted" in text.lower()
    assert "UNSHAPED" in text
    rates, stragglers = text.split("## With a straggler")
    assert all(f"\n| {name} |" in rates for name in ALGORITHMS)
    assert all(f"\n| {name} | 1gbit (not applied) |" in stragglers for name in STRAGGLING)


@pytest.mark.skipif(bool(NOT_EMULATED), reason=NOT_EMULATED)
def test_bytes_are_counted_at_the_interface_of_each_rank(tmp_path: Path) -> None:
    """Two ranks send a model's size in allreduce, and a quarter of it in codes of one byte."""
    options = ("--algorithms", "eager,bytegrad", "--straggling", "")
    found, text = _measure(tmp_path, *options)
    (cell,) = found["cells"]
    gradient_bytes = 4 * 470_784  # of the model `small`
    sent = {name: peer["sent_bytes"] / gradient_bytes for name, peer in cell["peers"].items()}
    assert 1 < sent["eager"] < 1.1
    assert 0.25 < sent["bytegrad"] < 0.35
    assert "UNSHAPED" not in text
    assert "With a straggler" not in text


def test_a_straggler_is_compared_with_turns_before_it() -> None:
    """Fast ranks by what each did in its own time; the last rank is the slow one."""
    without = Turn(num_steps=10, times_s=(1.0, 1.0, 1.0), sent_bytes=(), num_exchanges=0)
    with_one = Turn(num_steps=10, times_s=(1.0, 1.25, 2.0), sent_bytes=(), num_exchanges=0)
    found = straggler("async", "1gbit", [(without, with_one)], num_samples=4)
    assert found.undisturbed_per_s == pytest.approx(120)
    assert found.fast.median == pytest.approx(0.9)
    assert found.slow.median == pytest.approx(0.5)


@pytest.mark.nightly
def test_convergence_compares_algorithms_on_the_same_samples(tmp_path: Path) -> None:
    """All begin with the same loss, torch's hooks too, and there is a row each."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--steps", "8", "--seeds", "1", "--algorithms", ",".join(CONVERGING))
    _run(*torchrun, "-m", "benchmarks.algorithms.convergence", *options, "--output", str(tmp_path))
    found = json.loads((tmp_path / "convergence.json").read_text())
    results = {result["peer"]: result for result in found["results"]}
    assert tuple(results) == CONVERGING
    assert len({round(result["losses"][0], 4) for result in results.values()}) == 1
    table = (tmp_path / "convergence.md").read_text()
    assert all(f"\n| {name} |" in table for name in CONVERGING)
