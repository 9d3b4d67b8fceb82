"""How results are stored and shown: spreads over rounds, JSON, tables in Markdown, plots."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float

    def shown(self, layout: str) -> str:
        """Return it as `1.2 (1.1 to 1.4)`, each number in this layout."""
        median, low, high = (format(number, layout) for number in self)
        return f"{median} ({low} to {high})"

    def times(self, factor: float) -> Spread:
        return Spread(*(factor * number for number in self))


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(own: Iterable[float], base: Iterable[float]) -> Spread:
    """Return the spread of what was measured in a round over what the base took in the same."""
    return spread([mine / theirs for mine, theirs in zip(own, base, strict=True)])


def write_run(
    stem: Path, facts: Mapping[str, str], found: Mapping[str, object], lines: Iterable[str]
) -> None:
    """Write what a run found as JSON, and as Markdown below its command and its other facts."""
    # Not `with_suffix`, which takes `overlap.tuning` for a name with a suffix.
    write_json({**facts, **found}, stem.parent / f"{stem.name}.json")
    where = "; ".join(fact for name, fact in facts.items() if name != "command")
    heading = [f"# {stem.name.capitalize()}", "", f"    {facts['command']}", "", f"{where}."]
    (stem.parent / f"{stem.name}.md").write_text("\n".join([*heading, *lines]) + "\n")


def write_json(found: object, path: Path) -> None:
    path.write_text(json.dumps(as_data(found), indent=1) + "\n")


def as_data(value: object) -> Any:
    """Return dataclasses and named tuples as dictionaries, and numbers with six decimals."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: as_data(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_data(value._asdict())
    if isinstance(value, Mapping):
        return {key: as_data(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(element) for element in value]
    return round(value, 6) if isinstance(value, float) else value


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown; all columns but the first are aligned right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def table_of(
    first: str, found: Mapping[str, Any], columns: Mapping[str, Callable[[Any], str]]
) -> list[str]:
    """Return a table with a row for each peer; a column is shown by its function."""
    rows = [(name, *(show(own) for show in columns.values())) for name, own in found.items()]
    return table((first, *columns), rows)


# ---- plots ------------------------------------------------------------------------------------


def label_of_rate(rate: str) -> str:
    """Return what a plot calls a rate: `1gbit` as 1 Gbit/s."""
    parts = re.fullmatch(r"(\d+)([kmg])bit(.*)", rate)
    if parts is None:
        return rate.replace("free", "no limit", 1)
    number, unit, rest = parts.groups()
    return f"{number} {unit.replace('m', 'M').replace('g', 'G')}bit/s{rest}"


def pyplot() -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib  # noqa: PLC0415  # optional

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot


def draw_bars(
    panel: Any, groups: Sequence[Mapping[str, Spread]], labels: Mapping[str, str]
) -> None:
    """Draw a group of bars for each rate, a bar for each peer, with its quartiles."""
    width = 0.82 / len(labels)
    for index, (name, label) in enumerate(labels.items()):
        found = [(place, group[name]) for place, group in enumerate(groups) if name in group]
        offset = (index - (len(labels) - 1) / 2) * width
        places = [place + offset for place, _ in found]
        heights = [bar.median for _, bar in found]
        quartiles = [
            [bar.median - bar.low for _, bar in found],
            [bar.high - bar.median for _, bar in found],
        ]
        panel.bar(places, heights, width, yerr=quartiles, label=label)


def save(
    figure: Any, path: Path, panel: Any, *, num_columns: int, bottom: float, legend: float = 0.0
) -> None:
    """Write a figure whose panels share a legend, which is below them.

    `legend` and `bottom` are parts of the figure's height: the legend stands above the one, and
    the panels above the other.
    """
    handles, names = panel.get_legend_handles_labels()
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, legend)}
    figure.legend(handles, names, ncols=num_columns, fontsize=8, frameon=False, **place)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
