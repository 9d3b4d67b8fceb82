"""The page of results: Markdown for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.runner import Outcome

_MARKS = {"passed": "passed", "failed": "**FAILED**", "skipped": "skipped", "not run": "not run"}


def write(outcomes: Sequence[Outcome], facts: Mapping[str, str], folder: Path) -> None:
    """Write `gpu.md` and `gpu.json`."""
    (folder / "gpu.md").write_text("\n".join(markdown(outcomes, facts)) + "\n")
    data = {"facts": dict(facts), "lines": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (folder / "gpu.json").write_text(json.dumps(data, indent=1) + "\n")


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many lines came to what, as in `9 passed, 1 FAILED`."""
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[result]} {result}" for result in _MARKS if counts[result])


def markdown(outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"# ddpopt on {facts['device']}: {summary(outcomes)}"
    yield ""
    yield from (f"- {name}: {value}" for name, value in facts.items())
    for part in dict.fromkeys(outcome.line.part for outcome in outcomes):
        yield from ("", f"## {part}", "", "| line | result | s | why |", "|---|---|--:|---|")
        yield from (_row(outcome) for outcome in outcomes if outcome.line.part == part)
        for outcome in outcomes:
            if outcome.line.part == part:
                yield from _details(outcome)


def _row(outcome: Outcome) -> str:
    counts = Counter(check.outcome for check in outcome.found.checks)
    checks = ", ".join(f"{number} {checked}" for checked, number in counts.items())
    said = (checks and f"checks: {checks}", outcome.why, outcome.line.stands_for)
    why = "; ".join(filter(None, said))
    cells = (outcome.line.name, _MARKS[outcome.result], f"{outcome.seconds:.0f}", _cell(why))
    return f"| {' | '.join(cells)} |"


def _details(outcome: Outcome) -> Iterator[str]:
    """Yield what is under a part's table: checks that say something, tables, and logs."""
    telling = [check for check in outcome.found.checks if check.why or check.outcome != "passed"]
    if not (telling or outcome.found.tables or outcome.log):
        return
    yield from ("", f"### {outcome.line.name}", "", f"{outcome.line.shows}.")
    if telling:
        yield from ("", "| check | outcome | s | what it says |", "|---|---|--:|---|")
        for check in telling:
            cells = (_cell(check.name), check.outcome, f"{check.seconds:.1f}", _cell(check.why))
            yield f"| {' | '.join(cells)} |"
    for title, lines in outcome.found.tables.items():
        yield from ("", f"{title}:", "", *lines)
    if outcome.log:
        yield from ("", "The end of its log:", "", "```", *outcome.log, "```")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
