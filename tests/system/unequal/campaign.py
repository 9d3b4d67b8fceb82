"""Run many scripts, count what came of them, and make failing ones small."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.system.unequal.judging import OUTCOMES, Finding
from tests.system.unequal.machine import draw_script
from tests.system.unequal.script import Script
from tests.system.unequal.simplifying import simplify


@dataclass(slots=True)
class Tally:
    """What came of all scripts so far, and what was in them.

    `num_split` have a graph of two sections or more, `num_changed` got other buckets, and
    `num_simpler` were run to make failing ones simpler.
    """

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    actions: collections.Counter[str] = field(default_factory=collections.Counter)
    features: collections.Counter[str] = field(default_factory=collections.Counter)
    num_steps: int = 0
    num_split: int = 0
    num_changed: int = 0
    num_simpler: int = 0

    @property
    def num_scripts(self) -> int:
        return self.outcomes.total()

    def add(self, script: Script, finding: Finding) -> None:
        self.outcomes[finding.outcome] += 1
        self.actions.update(type(action).__name__ for action in script.actions)
        self.features.update(script.features())
        self.num_steps += script.num_steps
        self.num_split += max(finding.sections, default=1) > 1
        self.num_changed += finding.changed_buckets

    def __str__(self) -> str:
        lines = [
            f"{self.num_scripts} scripts of {self.num_steps} steps, and {self.num_simpler} scripts "
            f"while making failures simpler; {self.num_split} were split, {self.num_changed} got "
            "other buckets"
        ]
        lines += [f"  {self.outcomes[o]:6d}  {o}" for o in OUTCOMES if self.outcomes[o]]
        for counts in (self.actions, self.features):
            lines += [f"  {count:6d}  {name}" for name, count in sorted(counts.items())]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A script that failed, as simple as was found within the time."""

    name: str
    script: Script
    finding: Finding

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.finding.outcome}\n"
            f"python -m tests.system.unequal --replay '{self.script}'\n{self.finding.detail}"
        )


class Campaign:
    """Judges scripts with `judge`, and makes those that fail simpler, with `run`.

    `judge` runs a failing script several times, to be sure; `run` once. `simplify_s` is how long
    making one simpler may take.
    """

    def __init__(
        self,
        judge: Callable[[Script], Finding],
        run: Callable[[Script], Finding],
        *,
        simplify_s: float,
        avoided: frozenset[str] = frozenset(),
    ) -> None:
        self.tally = Tally()
        self._judge, self._run = judge, run
        self._simplify_s = simplify_s
        self._avoided = avoided

    def draw(self, numbers: Iterable[int]) -> Iterator[tuple[str, Script]]:
        """The scripts of these numbers, with names that say the number."""
        for number in numbers:
            yield f"script {number}", draw_script(number, self._avoided)

    def try_script(self, name: str, script: Script) -> tuple[Finding, Failure | None]:
        """Judge a script, count it, and make it simpler if it fails."""
        finding = self._judge(script)
        self.tally.add(script, finding)
        if not finding.is_failure:
            return finding, None
        return finding, self._simplified(name, script, finding)

    def _simplified(self, name: str, script: Script, finding: Finding) -> Failure:
        stop_s = time.monotonic() + self._simplify_s
        findings = {script: finding}

        def fails(simpler: Script) -> bool:
            if simpler in findings or time.monotonic() > stop_s:
                return False
            self.tally.num_simpler += 1
            findings[simpler] = self._run(simpler)
            return findings[simpler].kind == finding.kind

        script = simplify(script, fails)
        return Failure(name=name, script=script, finding=findings[script])
