"""A handful of the architectures of `python -m tests.system.architectures`, a hundred."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import MLP, WIDTH
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Ranks
from tests.system.architectures import document, running
from tests.system.architectures.catalogue import ARCHITECTURES, Architecture, Batch
from tests.system.architectures.running import Way, run_way
from tests.system.campaigns.sweep import Log
from tests.system.training.outcomes import EQUAL, EQUAL_TO_UNSPLIT, RAISES, Finding

HANDFUL = {
    "gpt2": Way(optimizer="backward"),
    "bert with padding": Way(optimizer="forward", is_regional=True),
    "t5": Way(optimizer="backward", is_checkpointed=True),
    "mixtral": Way(optimizer="forward"),
    "timm vit_tiny_patch16_224": Way(optimizer="backward", is_regional=True),
    "timm test_resnet": Way(optimizer="forward"),
}


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("name", HANDFUL)
def test_an_architecture_trains_as_with_eager_ddp(ranks: Ranks, name: str) -> None:
    """The model is cut; losses, gradients of three steps, parameters and buffers are equal."""
    library = ARCHITECTURES[name].library
    for package in [library, *["torchvision"] * (library == "timm")]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install transformers timm)")
    result = run_way(ranks, name, HANDFUL[name])
    assert result.outcome in (EQUAL, EQUAL_TO_UNSPLIT), result
    assert result.is_split


class Layer(MLP):
    """One of several layers, which a user would compile one by one."""


class Mine(nn.Module):
    """A model as of timm, with checkpointing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(2) for _ in range(3))
        self.is_checkpointed = False

    def set_grad_checkpointing(self) -> None:
        self.is_checkpointed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


def _draw(_architecture: Architecture, generator: torch.Generator) -> Batch:
    x = torch.randn(4, WIDTH, generator=generator)
    return Batch((x,), {}, torch.randint(WIDTH, (4,), generator=generator))


WAYS = {
    "backward": Way(optimizer="backward"),
    "layers by themselves, checkpointed": Way(
        optimizer="forward", is_regional=True, is_checkpointed=True
    ),
    "in-tree": Way(optimizer="in-tree"),
}


@pytest.mark.quick("backward")
@pytest.mark.parametrize("name", WAYS)
@on_ranks(2)
def test_a_model_of_no_library_is_trained_and_judged_alike(rank: int, name: str) -> None:
    mine = {"mine": Architecture(name="mine", model="mine")}
    with mock.patch.multiple(running, ARCHITECTURES=mine, build=lambda _: Mine(), draw_batch=_draw):
        finding = running.check(rank, "mine", WAYS[name])
    assert finding.outcome == EQUAL, finding
    assert finding.is_split == (name != "in-tree")
    assert finding.num_buckets > 1


def test_the_page_of_a_sweep_has_a_row_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page counts outcomes; the cell of a way that has not been run is empty."""
    monkeypatch.setattr(document.metadata, "version", lambda name: f"of {name}")
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "build" / "architectures.md")
    path = tmp_path / "log.jsonl"
    log = Log(path)
    equal = Finding(outcome=EQUAL, sections=(5, 1), num_buckets=5)
    raises = Finding(outcome=RAISES, detail="ValueError: a | b")
    log.add(("gpt2", str(Way(optimizer="backward"))), equal)
    log.add(("gpt2", str(Way(optimizer="forward"))), raises)
    log.add(("bert", str(Way(optimizer="default", inner="inductor"))), equal)
    log = Log(path)  # as a sweep that goes on
    document.write_document(log)
    text = document.DOCUMENT.read_text()
    assert "| gpt2 | whole | error: ValueError: a / b | 5+1/5 |  |\n" in text
    assert "| bert | 5+1/5 |  |\n" in text
    assert f"| {EQUAL} | 0 | 1 | 0 |\n" in text
