"""A handful of the architectures of `python -m tests.system.architectures`, a hundred."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.system.architectures import document
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


def test_the_rows_take_as_many_pages_as_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None has more words than the site allows or is left of a longer sweep; all are linked."""
    monkeypatch.setattr(document, "DOCS", tmp_path)
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "architectures.md")
    line = "| model | whole, checkpointed | rounded 5+1/5 | as unsplit 5/5 | error: it raised |\n"
    for number in (200, 100):
        rows = {f"model{k}": 4 * line for k in range(number)}
        document.write_pages("# Architectures\n", rows, {"model0": line, "model1": ""})
        pages = sorted(tmp_path.glob("architectures-*.md"))
        text = (tmp_path / "architectures.md").read_text()
        assert text.count("](architectures-") == len(pages) > 4
        assert sum(page.read_text().count(line) for page in pages) == 4 * number + 1
        assert all(len(page.read_text().split()) <= 1500 for page in pages)
