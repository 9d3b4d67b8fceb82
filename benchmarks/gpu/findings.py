"""What a line found out, on disk as soon as it is known: a line that hangs or dies loses no more.

The child writes it (`child.py`), the runner reads it (`runner.py`).
"""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.tables import table

_WHY_CHARACTERS = 600


class UnavailableError(Exception):
    """This machine has not got what a check needs; the message says what."""


@dataclass(slots=True, kw_only=True)
class Check:
    """One of the things that a line looks at; `outcome` is passed, failed, skipped or running."""

    name: str
    outcome: str = "running"
    why: str = ""
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Found:
    """All that one line found out; `error` is why it did not come to its end."""

    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    error: str = ""
    is_done: bool = False

    @classmethod
    def load(cls, path: Path) -> Found:
        """Read what a child has written; nothing where it has not."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text())
        return cls(**{**data, "checks": [Check(**check) for check in data["checks"]]})


class Findings:
    """Notes checks, figures and tables, and writes all of it after each."""

    def __init__(self, path: Path) -> None:
        self.found = Found()
        self.folder = path.parent
        self._path = path
        self.save()

    def check(self, name: str, run: Callable[[], object]) -> bool:
        """Run a check, and note its outcome: it failed if it raises; what it returns is said."""
        check = Check(name=name)
        self.found.checks.append(check)
        self.save()
        start_s = time.monotonic()
        try:
            said = run()
            check.outcome, check.why = "passed", "" if said is None else str(said)
        except UnavailableError as error:
            check.outcome, check.why = "skipped", str(error)
        except Exception as error:
            traceback.print_exc()  # into the line's log
            check.outcome, check.why = "failed", describe(error)
        check.seconds = time.monotonic() - start_s
        self.save()
        return check.outcome == "passed"

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table to the page, or replace it."""
        self.found.tables[title] = table(header, rows)
        self.save()

    def save(self) -> None:
        """Write everything, so that a reader never sees half of it."""
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(dataclasses.asdict(self.found)))
        draft.replace(self._path)


def describe(error: BaseException) -> str:
    """Return an exception in a line: a rank's traceback is told by its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "Error" in line), " ".join(lines))
    return shorten(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def shorten(text: str) -> str:
    """Return a text in a line of a table."""
    line = " ".join(text.split())
    return line if len(line) <= _WHY_CHARACTERS else f"{line[:_WHY_CHARACTERS]} ..."
