"""The recipes for frameworks, run by the commands that they name, on two gloo processes."""

from __future__ import annotations

import importlib.util
import re
from typing import NamedTuple

import pytest

from tests.support.documents import ROOT, command_of, run_command


class Recipe(NamedTuple):
    """A program: packages that it needs, further arguments of its command, parts of its output."""

    packages: tuple[str, ...]
    arguments: str
    prints: tuple[str, ...] = ("as planned",)


ON_INDUCTOR, EAGER = "", " --inner aot_eager"  # the second takes a third of the time
LOGGED = "ddpopt.communication.exposed_ms"
RECIPES = {
    "accelerate_loop.py": Recipe(("accelerate",), ON_INDUCTOR),
    "lightning_fabric.py": Recipe(("lightning",), EAGER),
    "lightning_trainer.py": Recipe(("lightning",), EAGER, ("as planned", LOGGED)),
    "nano_gpt.py": Recipe((), EAGER),
    "ray_train.py": Recipe(("ray", "pyarrow"), EAGER),  # of ray[train]
    "regional.py": Recipe((), EAGER, ("planned alone because modules of one class share it",)),
    "trainer.py": Recipe(("accelerate", "transformers"), EAGER, ("as planned", LOGGED)),
}


@pytest.mark.quick
def test_every_recipe_is_tested() -> None:
    """A file in the folder is a row of the table."""
    assert {path.name for path in (ROOT / "examples" / "recipes").glob("*.py")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_splits_and_trains_to_its_twins_parameters(name: str) -> None:
    """Each graph that trains is cut between DDP's buckets, which are the planned ones."""
    recipe = RECIPES[name]
    for package in recipe.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'ddpopt[recipes]')")
    text = run_command(command_of(f"examples/recipes/{name}") + recipe.arguments)
    split = re.findall(r": (\d+) (?:backward )?sections for (\d+) DDP buckets", text)
    assert split
    for num_sections, num_buckets in split:
        assert 1 < int(num_sections) <= int(num_buckets)
    whole = re.findall(r"compiled whole, because (.*?) \(", text)
    assert set(whole) <= {"the graph uses no parameter that DDP reduces"}
    assert all(line in text for line in recipe.prints)
    assert "DIFFERS" not in text
    assert "parameters equal the twin's" in text


def test_accelerate_takes_no_backend_by_its_name() -> None:
    """The recipes compile by themselves for that reason."""
    accelerate = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")
    with pytest.raises(ValueError, match="DDPOPT"):
        accelerate.TorchDynamoPlugin(backend="ddpopt")
