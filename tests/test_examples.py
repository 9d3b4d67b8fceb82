"""The examples, run as a user runs them; small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_minimal_trains_two_ranks_to_equal_parameters() -> None:
    """The line that says so is printed after a comparison."""
    text = _run("examples/minimal.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert losses == sorted(losses, reverse=True)
    assert "all 2 ranks hold the same 110 parameters" in text


def test_train_gpt_learns_and_equals_its_eager_twin() -> None:
    """Plan table, falling loss, equal ranks, sample, and a loss difference of rounding size."""
    text = _run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "examples/train_gpt.py", "--steps", "30", "--layers", "2", "--width", "64", "--heads", "2",
        "--context", "64", "--bucket-cap-mb", "0.1", "--inner", "aot_eager", "--compare", "eager",
        "--sample", "20",
    )  # fmt: skip
    assert re.search(r"\d+ sections for \d+ DDP buckets", text)
    assert "loss fell" in text
    assert float(re.search(r"\n([\d.e-]+); in the first", text).group(1)) < 1e-3
    assert "sample:\ndef " in text
    assert "all ranks hold bitwise equal parameters" in text


def test_data_parallel_trains_as_one_device() -> None:
    """Two replicas end with the parameters of one device, up to rounding."""
    text = _run("examples/data_parallel.py")
    assert float(re.search(r"differ by at most ([\d.e+-]+)", text).group(1)) < 1e-3


@pytest.mark.parametrize(
    "algorithm",
    ["decentralized", "shift_one", "low-precision", "async", "bytegrad", "qadam"],
)
def test_train_gpt_learns_with_every_algorithm_and_ends_with_equal_ranks(algorithm: str) -> None:
    """Ranks whose weights were different in training have equal ones when it is detached."""
    text = _run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "examples/train_gpt.py", "--algorithm", algorithm, "--steps", "40", "--layers", "1",
        "--width", "32", "--heads", "2", "--context", "32", "--inner", "aot_eager",
        "--sync-interval-ms", "20", "--warmup-steps", "5", "--sample", "0",
    )  # fmt: skip
    assert "loss fell" in text
    assert "all ranks hold bitwise equal parameters" in text
