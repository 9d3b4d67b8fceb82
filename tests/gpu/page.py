"""The page of results: Markdown for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.notes import Note

if TYPE_CHECKING:
    from tests.gpu.lines import Line

_MARKS = {"passed": "passed", "failed": "**FAILED**", "skipped": "skipped", "not run": "not run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a line; `result` is passed, failed, skipped or not run, and `why` says why."""

    line: Line
    result: str
    why: str = ""
    seconds: float = 0.0
    notes: Sequence[Note] = ()
    log: Sequence[str] = ()


def judge(notes: Sequence[Note], status: int, late: str) -> tuple[str, str]:
    """Return the result of a line, and why; `late` says that it was killed."""
    by_outcome = {outcome: [n for n in notes if n.outcome == outcome] for outcome in _MARKS}
    running = [note.name for note in notes if note.outcome == "running"]
    failed, skipped = by_outcome["failed"], by_outcome["skipped"]
    if late:
        return "failed", f"{late}, in {running[0]}" if running else late
    if failed:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return "failed", f"{failed[0].name}: {failed[0].why}{others}"
    if status or running or not notes:
        return "failed", f"pytest ended with status {status}"
    if len(skipped) == len(notes):
        return "skipped", skipped[0].why
    return "passed", ""


def write(outcomes: Sequence[Outcome], facts: Mapping[str, str], folder: Path) -> None:
    """Write `gpu.md` and `gpu.json`."""
    (folder / "gpu.md").write_text("\n".join(_markdown(outcomes, facts)) + "\n")
    data = {"facts": dict(facts), "lines": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (folder / "gpu.json").write_text(json.dumps(data, indent=1) + "\n")


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many lines came to what, as in `9 passed, 1 failed`."""
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[result]} {result}" for result in _MARKS if counts[result])


def _markdown(outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> Iterator[str]:
    yield f"# ddpopt on {facts['device']}: {summary(outcomes)}"
    yield ""
    yield from (f"- {name}: {value}" for name, value in facts.items())
    for part in dict.fromkeys(outcome.line.part for outcome in outcomes):
        of_part = [outcome for outcome in outcomes if outcome.line.part == part]
        yield from ("", f"## {part}", "", "| line | result | s | why |", "|---|---|--:|---|")
        yield from map(_row, of_part)
        for outcome in of_part:
            yield from _details(outcome)


def _row(outcome: Outcome) -> str:
    counts = Counter(note.outcome for note in outcome.notes)
    tests = ", ".join(f"{number} {result}" for result, number in counts.items())
    why = "; ".join(filter(None, (tests and f"tests: {tests}", outcome.why)))
    cells = (outcome.line.name, _MARKS[outcome.result], f"{outcome.seconds:.0f}", _cell(why))
    return f"| {' | '.join(cells)} |"


def _details(outcome: Outcome) -> Iterator[str]:
    """Yield what is under a part's table: tests that say something, their tables, and logs."""
    telling = [note for note in outcome.notes if note.why or note.outcome != "passed"]
    pages = [note.page for note in outcome.notes if note.page]
    if not (telling or pages or outcome.log):
        return
    yield from ("", f"### {outcome.line.name}", "", f"{outcome.line.shows}.")
    if telling:
        yield from ("", "| test | outcome | s | what it says |", "|---|---|--:|---|")
        for note in telling:
            cells = (_cell(note.name), note.outcome, f"{note.seconds:.1f}", _cell(note.why))
            yield f"| {' | '.join(cells)} |"
    for page in pages:
        yield from ("", re.sub("^#", "###", page, flags=re.MULTILINE))
    if outcome.log:
        yield from ("", "The end of its log:", "", "```", *outcome.log, "```")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
