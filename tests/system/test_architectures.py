"""A handful of the architectures of `python -m tests.system.architectures`, a hundred."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.system.architectures import document
from tests.system.architectures.catalogue import ARCHITECTURES
from tests.system.architectures.log import Log
from tests.system.architectures.running import Result, Way, run_way
from tests.system.fuzzing.checking import EQUAL, EQUAL_TO_UNSPLIT, RAISES

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
    """It is cut, and losses, gradients of three steps, parameters and buffers are equal."""
    library = ARCHITECTURES[name].library
    for package in [library, *["torchvision"] * (library == "timm")]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install transformers timm)")
    result = run_way(ranks, name, HANDFUL[name])
    assert result.outcome in (EQUAL, EQUAL_TO_UNSPLIT), result
    assert max(result.sections) > 1


def test_the_page_of_a_sweep_has_a_row_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts outcomes; the cell of a way that has not been run is empty."""
    monkeypatch.setattr(document.metadata, "version", lambda name: f"of {name}")
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "build" / "architectures.md")
    log = Log(tmp_path / "log.jsonl")
    equal = Result(outcome=EQUAL, sections=(5, 1), num_buckets=5)
    log.add("gpt2", Way(optimizer="backward"), equal)
    log.add("gpt2", Way(optimizer="forward"), Result(outcome=RAISES, detail="ValueError: a | b"))
    log.add("bert", Way(optimizer="default", inner="inductor"), equal)
    document.write_document(log)
    text = document.DOCUMENT.read_text()
    assert "| gpt2 | whole | error: ValueError: a / b | 5+1/5 |  |\n" in text
    assert "| bert | 5+1/5 |  |\n" in text
    assert f"| {EQUAL} | 0 | 1 | 0 |\n" in text
