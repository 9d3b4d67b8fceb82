"""Findings of a list that is run through once, kept in a file so that a sweep can be continued."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.system.training.outcomes import Finding

Key = tuple[str | int, ...]


class Log:
    """`findings` has the last one of each run; a file, if there is one, a line of JSON for each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.findings: dict[Key, Finding] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.findings[tuple(row["run"])] = Finding.of(row["finding"])

    def add(self, run: Key, finding: Finding) -> None:
        """Append a finding, so that it is kept whatever comes next."""
        self.findings[run] = finding
        if self._path is not None:
            row = {"run": run, "finding": dataclasses.asdict(finding)}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
