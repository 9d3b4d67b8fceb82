"""How results are stored and shown: spreads over rounds, JSON, tables in Markdown."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Spread(NamedTuple):
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of some values."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def write_json(run: object, path: Path) -> None:
    """Write everything that a run found out."""
    path.write_text(json.dumps(_as_data(run), indent=1) + "\n")


def _as_data(value: object) -> object:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _as_data(getattr(value, field.name)) for field in fields}
    if isinstance(value, Spread):
        return {name: round(number, 6) for name, number in value._asdict().items()}
    if isinstance(value, dict):
        return {key: _as_data(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_as_data(element) for element in value]
    return round(value, 6) if isinstance(value, float) else value


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown; all columns but the first are numbers."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
