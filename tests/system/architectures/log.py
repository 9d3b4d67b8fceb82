"""A sweep's results in a file: a line of JSON for each run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.system.architectures.running import Result, Way


class Log:
    """`results` has the last one of each run, by the architecture's name and the way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: dict[tuple[str, Way], Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                result = Result(**{**row["result"], "sections": tuple(row["result"]["sections"])})
                self.results[row["name"], Way(**row["way"])] = result

    def add(self, name: str, way: Way, result: Result) -> None:
        """Append a result, so that it is kept whatever comes next."""
        self.results[name, way] = result
        row = {"name": name, "way": dataclasses.asdict(way), "result": dataclasses.asdict(result)}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
