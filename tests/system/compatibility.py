"""Write what works into two pages: every row's outcome, ddpopt's beside the in-tree optimizer's.

python -m tests.system.compatibility
"""
# test: skip, it writes the pages; tests/system/test_compatibility.py runs the rows

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.ranks import RankError, Ranks
from tests.system.scenarios.rows import ON_INDUCTOR, SCENARIOS
from tests.system.scenarios.running import Outcome, run_row

_DOCS = Path(__file__).parents[2] / "docs"
MODELS, TRAINING = _DOCS / "compatibility.md", _DOCS / "compatibility-training.md"
_FIRST_OF_TRAINING = "static_graph"  # this row and those after it are about DDP and training

COLUMNS = ("forward", "backward", "in-tree")

_EAGER = "eager raises "  # of a cell, until its row is written

_INTRODUCTION = """\
# What works

Each row trains a small model on two gloo processes, with different data on each, for at least three
steps, and compares losses, gradients, parameters and buffers with eager DDP. Gradients are clipped
in every row without sparse ones. The inner compiler is `aot_eager`, or Inductor where a row says
so. `python -m tests.system.compatibility` writes this page, here with torch {torch};
`tests/system/test_training.py` checks ddpopt's columns: *forward* and *backward* are its two
splits. The rows here cover models; [What works in training](compatibility-training.md) covers DDP's
options, hooks and the loop, [Architectures](architectures.md) tiny models from transformers and
timm. [Releases of torch](releases.md) says what was run on which.

- *3/4*: equal to eager DDP, with the graph in three sections, for the Reducer's four buckets. With
  graph breaks and recompiles, there is one number of sections per graph: *2+2/8*. *whole* is equal
  too, but was not split; `explain` and the log say why.
- The in-tree optimizer is PyTorch's own, with `backend="aot_eager"` or `"inductor"`. It refuses
  caps below its first bucket's, 1 MiB; for these models that is lowered to the row's cap. Its
  buckets may differ from ddpopt's: they follow the order in which gradients first arrive, which is
  arbitrary within one of its sections, so it can have more of them.
- *eager raises*: eager DDP raises the error in the note; so does the compiled model.

"""

_INTRODUCTION_OF_TRAINING = """\
# What works in training

DDP's options, hooks, training loops, and rows on Inductor. [What works](compatibility.md) says what
is compared and what the cells mean: *3/4* is equal to eager DDP, three sections for four buckets.

"""

_HEADER = """\
| row | forward | backward | in-tree | note |
|---|---|---|---|---|
"""


def all_rows() -> list[tuple[str, str, str]]:
    """Return title, name and inner compiler of every row."""
    rows = [(name, name, "aot_eager") for name in SCENARIOS]
    return rows + [(f"{name}, Inductor", name, "inductor") for name in ON_INDUCTOR]


def documented_rows() -> list[str]:
    """Return the titles in the pages."""
    tables = [path.read_text().partition(_HEADER)[2] for path in (MODELS, TRAINING)]
    return [line.split("|")[1].strip() for table in tables for line in table.splitlines()]


def write_pages(lines: list[str]) -> None:
    """Write the rows, in the order of `all_rows`, into the two pages."""
    first = [title for title, _, _ in all_rows()].index(_FIRST_OF_TRAINING)
    pages = {
        MODELS: (_INTRODUCTION.format(torch=torch.__version__), lines[:first]),
        TRAINING: (_INTRODUCTION_OF_TRAINING, lines[first:]),
    }
    for path, (introduction, rows) in pages.items():
        path.write_text("\n".join([introduction + _HEADER + rows[0], *rows[1:], ""]))


def _lines() -> Iterator[str]:
    ranks = Ranks()
    try:
        for title, name, inner in all_rows():
            cells = [_run(ranks, name, optimizer, inner) for optimizer in COLUMNS]
            yield row(title, cells, SCENARIOS[name]().note)
    finally:
        ranks.stop()


def row(title: str, cells: list[str], note: str) -> str:
    """Return a line of the table; what eager DDP raises is said once, in the note."""
    raised = dict.fromkeys(cell.removeprefix(_EAGER) for cell in cells if cell.startswith(_EAGER))
    notes = [*filter(None, [note]), *map(_short, raised)]
    shown = ["eager raises" if cell.startswith(_EAGER) else cell for cell in cells]
    return f"| {' | '.join([title, *shown, '; '.join(notes)])} |"


def _run(ranks: Ranks, name: str, optimizer: str, inner: str) -> str:
    try:
        outcomes: list[Outcome] = ranks.run(run_row, name, optimizer, inner)
    except RankError as error:
        return f"error: {_short(str(error).strip().splitlines()[-1])}"
    if any(outcome.error for outcome in outcomes):
        ranks.stop()  # a failed backward may have left DDP, or the group, in any state
    return next((text for text in map(_failure, outcomes) if text), _splits(outcomes[0]))


def _failure(outcome: Outcome) -> str | None:
    if outcome.eager_error is not None and outcome.error == outcome.eager_error:
        return f"{_EAGER}{outcome.error}"
    if outcome.error is not None:
        return f"error: {_short(outcome.error)}"
    if outcome.difference is not None:
        return f"differs: {_short(outcome.difference)}"
    return None


def _splits(outcome: Outcome) -> str:
    if set(outcome.pieces) == {1}:
        return "whole"
    return f"{'+'.join(map(str, outcome.pieces))}/{outcome.num_buckets}"


def _short(text: str, length: int = 100) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= length else f"{text[:length].rsplit(' ', 1)[0]} ..."


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_pages(list(_lines()))
