"""The recipes for frameworks, run by the commands that they name, on two gloo processes."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from tests.support.beside import compiled, mean_square
from tests.support.cuts import only_cut
from tests.support.documents import ROOT, command_of, run_command
from tests.support.models import MLP, WIDTH, batches
from tests.support.on_ranks import on_ranks

Way = Callable[[MLP], tuple[nn.Module, Any]]
CAP_MB = 0.02  # a bucket for each layer


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


class _Task(nn.Module):
    """As timm has it: what calls the DDP module, and takes the loss of its output."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__()
        self.ddp = ddp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(self.ddp(x))


def _as_torchtitan(model: MLP) -> tuple[nn.Module, Any]:
    for name, layer in model.layers.named_children():
        model.layers.register_module(name, compiled(layer))
    ddp = replicate(model, bucket_cap_mb=CAP_MB)
    return ddp, lambda x: mean_square(ddp(x))


def _as_timm_since_1_0_23(model: MLP) -> tuple[nn.Module, Any]:
    task = _Task(DistributedDataParallel(model, bucket_cap_mb=CAP_MB))
    return task.ddp, compiled(task)


def _as_timm_since_1_0_27(model: MLP) -> tuple[nn.Module, Any]:
    ddp = DistributedDataParallel(compiled(model), bucket_cap_mb=CAP_MB)
    return ddp, lambda x: mean_square(ddp(x))


def _as_composer(model: MLP) -> tuple[nn.Module, Any]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    ddp.forward = compiled(ddp).dynamo_ctx(ddp.forward)
    return ddp, lambda x: mean_square(ddp(x))


@on_ranks(2)
@pytest.mark.quick("_as_torchtitan")
@pytest.mark.parametrize(
    "way", [_as_torchtitan, _as_timm_since_1_0_23, _as_timm_since_1_0_27, _as_composer]
)
def test_programs_that_take_a_backends_name_train_as_in_eager(rank: int, way: Way) -> None:
    """A program compiles and wraps a model by its own code; docs/recipes.md says which was read."""
    model = MLP()
    eager = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=CAP_MB)
    trained, loss_of = way(model)
    for x in batches(rank, [(4, WIDTH)] * 4):
        eager.zero_grad()
        trained.zero_grad()
        mean_square(eager(x)).backward()
        loss_of(x).backward()
        expected = [p.grad for p in eager.parameters()]
        assert all(map(torch.equal, [p.grad for p in trained.parameters()], expected))
    if way is not _as_torchtitan:  # a layer of its is in one bucket
        assert len(only_cut(trained).sections) > 1


def test_accelerate_takes_no_backend_by_its_name() -> None:
    """The recipes compile by themselves for that reason."""
    accelerate = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")
    with pytest.raises(ValueError, match="DDPOPT"):
        accelerate.TorchDynamoPlugin(backend="ddpopt")
