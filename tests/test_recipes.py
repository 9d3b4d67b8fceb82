"""The recipes for frameworks, run as a user runs them, on two gloo processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = {
    "accelerate_loop.py": ("accelerate",),
    "lightning_fabric.py": ("lightning",),
    "trainer.py": ("accelerate", "transformers"),
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_splits_and_trains_to_its_twins_parameters(name: str) -> None:
    """Each graph that trains is cut at DDP's buckets, which are the planned ones."""
    for package in RECIPES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'ddpopt[recipes]')")
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "examples" / "recipes" / name), "--inner", "aot_eager",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    split = re.findall(r": (\d+) sections for (\d+) DDP buckets", done.stdout)
    assert split
    for num_sections, num_buckets in split:
        assert num_sections == num_buckets != "1"
    whole = re.findall(r"compiled whole, because (.*?) \(", done.stdout)
    assert set(whole) <= {"the graph uses no parameter that DDP reduces"}
    assert "as planned" in done.stdout
    assert "DIFFERS" not in done.stdout
    assert "parameters equal the twin's" in done.stdout


def test_accelerate_takes_no_backend_by_its_name() -> None:
    """Which is why the recipes compile by themselves."""
    accelerate = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")
    with pytest.raises(ValueError, match="DDPOPT"):
        accelerate.TorchDynamoPlugin(backend="ddpopt")


def test_every_recipe_is_tested() -> None:
    """A file in the folder is a row of the table."""
    assert {path.name for path in (ROOT / "examples" / "recipes").glob("*.py")} == set(RECIPES)
