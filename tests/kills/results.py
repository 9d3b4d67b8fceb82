"""What came of each fault: kept in a file, as a table, and compared with an earlier one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.kills.equal import EQUAL
from tests.kills.running import SURVIVES, TOO_SLOW, Outcome

FOUND = Path(__file__).with_name("found.json")


def load(path: Path) -> dict[str, Outcome]:
    """The outcomes in a file, by fault; none if there is no file."""
    if not path.exists():
        return {}
    return {name: Outcome(*outcome) for name, outcome in json.loads(path.read_text()).items()}


def save(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    path.write_text(json.dumps(dict(sorted(outcomes.items())), indent=0) + "\n")


def survivors(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The faults that no test finds, but for those that change nothing."""
    return [n for n, own in outcomes.items() if own.found_by == SURVIVES and n not in EQUAL]


def lost(before: Mapping[str, Outcome], after: Mapping[str, Outcome]) -> list[str]:
    """The faults that were found before, are still there, and are not found any more."""
    return [
        name
        for name, own in after.items()
        if not own.is_found and name in before and before[name].is_found
    ]


def summarize(outcomes: Mapping[str, Outcome]) -> list[str]:
    """How many faults of each family were found, and by which files most."""
    families: dict[str, Counter[str]] = {}
    files: Counter[str] = Counter()
    for name, own in outcomes.items():
        counts = families.setdefault(family_of(name), Counter())
        counts["faults"] += 1
        if own.is_found:
            counts["found"] += 1
            files[own.found_by.partition("::")[0]] += 1
        else:
            counts["equal" if name in EQUAL else own.found_by] += 1
    lines = [
        "| family | faults | found | equal | survive | too slow |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for family, counts in sorted(families.items()):
        numbers = (counts[column] for column in ("faults", "found", "equal", SURVIVES, TOO_SLOW))
        lines.append(f"| {family} | {' | '.join(map(str, numbers))} |")
    lines += ["", "| found by | faults |", "|---|--:|"]
    lines += [f"| {file} | {count} |" for file, count in files.most_common()]
    return lines


def family_of(name: str) -> str:
    """The family of a fault, which its name begins with."""
    for family in ("not proven", "not refused"):
        if name.startswith(f"{family}: "):
            return family
    return "mutants" if ".py: `" in name else "by name"
