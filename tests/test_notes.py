"""Each `[Note: ...]` that is referred to is defined, once; each fault of the table has its line."""

from __future__ import annotations

import collections
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests")
NOTE = re.compile(r"\[Note:\s+([^\].]+)\]")  # a name may be wrapped


def _texts() -> dict[Path, str]:
    paths = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        paths += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".md", ".py")]
    return {path: path.read_text() for path in paths if path != Path(__file__)}


def test_every_reference_to_a_note_leads_to_one_definition() -> None:
    """A note that is renamed takes its references along."""
    defined = collections.defaultdict(list)
    referred = collections.defaultdict(list)
    for path, text in _texts().items():
        for match in NOTE.finditer(text):
            name = " ".join(match[1].split())
            begins_line = match.start() == 0 or text[match.start() - 1] == "\n"
            places_of = defined if begins_line and path.suffix == ".py" else referred
            places_of[name].append(path.relative_to(ROOT).as_posix())
    assert len(defined) > 10
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}
    assert {name: places for name, places in referred.items() if name not in defined} == {}


def test_each_fault_that_there_was_has_its_line_of_code() -> None:
    """The table of docs/splits.md numbers them, and a line refers to each: no more and no fewer."""
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "splits.md").read_text(), re.MULTILINE)
    numbers = [int(row) for row in rows]
    assert numbers == list(range(1, len(rows) + 1))
    assert len(rows) > 10
    referred: set[int] = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = re.sub(r"\n *(# )?", " ", path.read_text())  # a reference may be wrapped
        referred |= set(map(int, re.findall(r"\(splits\.md, fault (\d+)\)", text)))
    assert referred == set(numbers)
