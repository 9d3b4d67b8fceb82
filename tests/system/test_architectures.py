"""A handful of the architectures of `python -m tests.system.architectures`, a hundred."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.ranks import Ranks
from tests.system.architectures.catalogue import ARCHITECTURES
from tests.system.architectures.running import Way, run_way
from tests.system.fuzzing.checking import EQUAL, EQUAL_TO_UNSPLIT

HANDFUL = {
    "gpt2": Way(optimizer="backward"),
    "bert with padding": Way(optimizer="forward", is_regional=True),
    "t5": Way(optimizer="backward", is_checkpointed=True),
    "mixtral": Way(optimizer="forward"),
    "timm vit_tiny_patch16_224": Way(optimizer="backward", is_regional=True),
    "timm test_resnet": Way(optimizer="forward"),
}


@pytest.mark.parametrize("name", HANDFUL)
def test_an_architecture_trains_as_with_eager_ddp(ranks: Ranks, name: str) -> None:
    """It is cut, and losses, gradients of three steps, parameters and buffers are equal."""
    library = ARCHITECTURES[name].library
    for package in [library, *["torchvision"] * (library == "timm")]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install transformers timm)")
    result = run_way(ranks, name, HANDFUL[name])
    assert result.outcome in (EQUAL, EQUAL_TO_UNSPLIT), result
    assert max(result.sections) > 1
