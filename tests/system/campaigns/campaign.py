"""Run many drawn cases, count what came of them, and make failing ones small.

[Note: one run of hypothesis a case]
Hypothesis draws variations of what it drew before, which costs a compile each and tests little
more. So each case is a run of its own, with its number as the seed: hypothesis tries its simplest
example, which is left out, and a random one. A case can be run again by its number.
"""

from __future__ import annotations

import collections
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase

from tests.system.campaigns.simplifying import simplify
from tests.system.training.outcomes import FAILURES, OUTCOMES, Finding


class Drawn(Protocol):
    """A case: a model and how it is trained, as plain data that prints as its source."""

    @property
    def num_steps(self) -> int: ...

    def features(self) -> Iterable[str]:
        """Give what can be counted of it."""
        ...


T = TypeVar("T", bound=Drawn)


@dataclass(slots=True)
class Tally:
    """What came of all cases so far. `num_simpler` ran while failing ones were made simpler."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    features: collections.Counter[str] = field(default_factory=collections.Counter)
    most_sections: collections.Counter[int] = field(default_factory=collections.Counter)
    remarks: collections.Counter[str] = field(default_factory=collections.Counter)
    num_steps: int = 0
    num_simpler: int = 0
    num_codes: int = 0

    def add(self, case: Drawn, finding: Finding) -> None:
        """Count one case."""
        self.outcomes[finding.outcome] += 1
        self.features.update(case.features())
        self.num_steps += case.num_steps
        self.num_codes += finding.num_codes
        if not finding.is_discarded:
            self.most_sections[max(finding.sections, default=1)] += 1
            self.remarks.update(set(finding.remarks))

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in (member.name for member in dataclasses.fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def num_cases(self) -> int:
        return self.outcomes.total()

    @property
    def num_failures(self) -> int:
        return sum(self.outcomes[outcome] for outcome in FAILURES)

    @property
    def num_compared(self) -> int:
        """How many were not discarded."""
        return self.most_sections.total()

    @property
    def num_split(self) -> int:
        """How many of those had a graph in two sections or more."""
        return sum(count for number, count in self.most_sections.items() if number > 1)

    def __str__(self) -> str:
        share = self.num_split / max(1, self.num_compared)
        sections = ", ".join(f"{n}: {count}" for n, count in sorted(self.most_sections.items()))
        lines = [
            f"{self.num_cases} cases of {self.num_steps} steps, and {self.num_simpler} cases while "
            "making failures simpler"
        ]
        lines += [f"  {self.outcomes[o]:6d}  {o}" for o in OUTCOMES if self.outcomes[o]]
        lines.append(f"{self.num_split} of {self.num_compared} compared were split ({share:.0%})")
        if self.num_codes:
            lines.append(f"code of {self.num_codes} sections was compared with their graphs")
        lines.append(f"most sections of a graph: number of cases: {sections}")
        for counts in (self.remarks, self.features):
            lines += [f"  {count:6d}  {name}" for name, count in sorted(counts.items())]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Generic[T]):
    """A case that failed, as simple as was found within the time."""

    name: str
    case: T
    finding: Finding
    program: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.finding.outcome}, with sections {self.finding.sections}\n"
            f"python -m {self.program} --replay {shlex.quote(str(self.case))}\n"
            f"    {self.case},\n{self.finding.detail}"
        )


class Campaign(Generic[T]):
    """Judges cases, and makes those that fail simpler.

    `run` runs a case once; `judge` may run a failing one again, to be sure. `simpler_cases` gives
    what lacks one thing of a case, and `simplify_s` is how long that may take for each. `program`
    is the module that can run a case again.
    """

    def __init__(
        self,
        program: str,
        run: Callable[[T], Finding],
        simpler_cases: Callable[[T], Iterator[T]],
        *,
        simplify_s: float,
        judge: Callable[[T], Finding] | None = None,
    ) -> None:
        self.tally = Tally()
        self._program = program
        self._run, self._judge = run, judge or run
        self._simpler_cases = simpler_cases
        self._simplify_s = simplify_s

    def try_case(self, name: str, case: T) -> tuple[Finding, Failure[T] | None]:
        """Judge a case, count it, and make it simpler if it fails."""
        finding = self._judge(case)
        self.tally.add(case, finding)
        if not finding.is_failure:
            return finding, None
        stop_s = time.monotonic() + self._simplify_s
        findings = {case: finding}

        def fails(simpler: T) -> bool:
            if simpler in findings or time.monotonic() > stop_s:
                return False
            self.tally.num_simpler += 1
            findings[simpler] = self._run(simpler)
            return findings[simpler].kind == finding.kind

        case = simplify(case, self._simpler_cases, fails)
        failure = Failure(name=name, case=case, finding=findings[case], program=self._program)
        return finding, failure

    def first_failure(self, cases: Iterable[T]) -> Failure[T] | None:
        """Try cases up to the first that fails."""
        tried = (self.try_case("a case", case)[1] for case in cases)
        return next(filter(None, tried), None)


def one_example(**settings: Any) -> hypothesis.settings:
    """Settings with which hypothesis draws once; see [Note: one run of hypothesis a case]."""
    return hypothesis.settings(
        max_examples=2,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        **settings,
    )
