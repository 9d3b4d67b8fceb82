"""Write what works into a page: every row's outcome, ddpopt's beside the in-tree optimizer's.

python -m tests.system.compatibility

Only the two tables of docs/compatibility.md are written, of models and of what training does. Rows
whose cells are equal share a line.
"""
# test: skip, it writes the page; tests/system/test_compatibility.py runs the rows

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.ranks import RankError, Ranks
from tests.system.scenarios.rows import ON_INDUCTOR, ROWS
from tests.system.scenarios.running import Trained, run_row
from tests.system.training.outcomes import (
    BOTH_RAISE,
    ENDED_EARLY,
    OUTCOMES,
    RAISES,
    REFUSED_UNSPLIT,
)

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
_FIRST_OF_TRAINING = "static_graph"  # this row and those after it are about DDP and training

COLUMNS = ("forward", "backward", "in-tree")

_EAGER = "eager raises "  # of a cell, until its row is written
_BETWEEN = "; "  # rows of a line; a title has none

_HEADER = """\
| row | forward | backward | in-tree | note |
|---|---|---|---|---|
"""
_TABLE = re.compile(re.escape(_HEADER) + r"((?:\|.*\n)*)")


def all_rows() -> list[tuple[str, str, str]]:
    """Return title, name and inner compiler of every row."""
    rows = [(name, name, "aot_eager") for name in ROWS]
    return rows + [(f"{name}, Inductor", name, "inductor") for name in ON_INDUCTOR]


def documented_rows() -> list[str]:
    """Return the titles in the page."""
    lines = [line for table in _TABLE.findall(PAGE.read_text()) for line in table.splitlines()]
    return [title for line in lines for title in line.split("|")[1].strip().split(_BETWEEN)]


def write_tables(rows: list[tuple[str, str]]) -> None:
    """Write titles with their cells, in the order of `all_rows`, into the two tables."""
    first = [title for title, _, _ in all_rows()].index(_FIRST_OF_TRAINING)
    tables = iter([rows[:first], rows[first:]])
    PAGE.write_text(_TABLE.sub(lambda _: _HEADER + _lines_of(next(tables)), PAGE.read_text()))


def _lines_of(rows: list[tuple[str, str]]) -> str:
    titles: dict[str, list[str]] = {}
    for title, cells in rows:
        titles.setdefault(cells, []).append(title)
    return "".join(f"| {_BETWEEN.join(of)} | {cells} |\n" for cells, of in titles.items())


def _rows() -> Iterator[tuple[str, str]]:
    ranks = Ranks()
    try:
        for title, name, inner in all_rows():
            cells = [_run(ranks, name, optimizer, inner) for optimizer in COLUMNS]
            yield title, cells_of(cells, ROWS[name].note)
    finally:
        ranks.stop()


def cells_of(cells: list[str], note: str) -> str:
    """Return a row less its title; what eager DDP raises is said once, in the note."""
    raised = dict.fromkeys(cell.removeprefix(_EAGER) for cell in cells if cell.startswith(_EAGER))
    notes = [*filter(None, [note]), *map(_short, raised)]
    shown = ["eager raises" if cell.startswith(_EAGER) else cell for cell in cells]
    return " | ".join([*shown, "; ".join(notes)])


def _run(ranks: Ranks, name: str, optimizer: str, inner: str) -> str:
    try:
        trained: list[Trained] = ranks.run(run_row, name, optimizer, inner)
    except RankError as error:
        return f"error: {_short(str(error).strip().splitlines()[-1])}"
    worst = max(trained, key=lambda on_rank: OUTCOMES.index(on_rank.finding.outcome))
    if worst.finding.outcome in ENDED_EARLY:
        ranks.stop()  # a failed backward may have left DDP, or the group, in any state
    return _cell(worst)


def _cell(trained: Trained) -> str:
    finding, pieces, *_ = trained
    detail = _short(" ".join(finding.detail.split()))
    if finding.outcome == BOTH_RAISE:
        return f"{_EAGER}{finding.detail}"
    if finding.outcome in (RAISES, REFUSED_UNSPLIT):
        return f"error: {detail}"
    if finding.is_failure:
        return f"{finding.outcome}: {detail}"
    return "whole" if set(pieces) == {1} else f"{'+'.join(map(str, pieces))}/{finding.num_buckets}"


def _short(text: str, length: int = 50) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= length else f"{text[:length].rsplit(' ', 1)[0]} ..."


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_tables(list(_rows()))
