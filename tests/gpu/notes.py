"""A plugin of pytest, `-p tests.gpu.notes`: what came of each test, as soon as it is known.

So a line that hangs or dies loses no more. A test tells the page something by `record_property`:
`said` is a sentence, `page` Markdown.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

PATH = "GPU_NOTES"  # the variable that has the file's name
_WHY_CHARACTERS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One test; `outcome` is passed, failed, skipped or running."""

    name: str
    outcome: str
    why: str = ""
    seconds: float = 0.0
    page: str = ""


def read(path: Path) -> list[Note]:
    """Return the last note of each test, in their order."""
    lines = path.read_text().splitlines() if path.exists() else []
    notes = [Note(**json.loads(line)) for line in lines]
    return list({note.name: note for note in notes}.values())


def folder_for(name: str, otherwise: Path) -> Path:
    """Return where a line leaves its figures: beside its notes, if somebody takes any."""
    return Path(os.environ[PATH]).parent / name if PATH in os.environ else otherwise


def shorten(text: str) -> str:
    """Return a text in a line of a table; of a rank's traceback, its last line."""
    if "Traceback" in text:
        text = [line for line in text.splitlines() if "Error" in line][-1]
    line = " ".join(text.split())
    return line if len(line) <= _WHY_CHARACTERS else f"{line[:_WHY_CHARACTERS]} ..."


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, outcome="running")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    properties = dict(report.user_properties)
    why = str(properties.get("said", ""))
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = getattr(crash, "message", "") or str(report.longrepr) or "error"
    elif report.skipped:
        why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "skipped"
    _write(
        report.nodeid,
        outcome=report.outcome,
        why=shorten(why),
        seconds=report.duration,
        page=str(properties.get("page", "")),
    )


def _write(nodeid: str, **fields: object) -> None:
    with open(os.environ[PATH], "a") as file:
        file.write(json.dumps({"name": nodeid.partition("::")[2], **fields}) + "\n")
