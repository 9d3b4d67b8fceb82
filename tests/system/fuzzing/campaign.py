"""Run many cases, count what came of them, and make failing ones small.

[Note: one run of hypothesis a case]
Hypothesis draws variations of what it drew before, which costs a compile each and tests little
more. So each case is a run of its own, with its number as the seed: hypothesis tries its simplest
example, which is left out, and a random one. A case can be run again by its number.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
from hypothesis import HealthCheck, Phase

from tests.system.fuzzing.checking import FAILURES, OUTCOMES, Finding
from tests.system.fuzzing.simplifying import simplify
from tests.system.fuzzing.spec import Case
from tests.system.fuzzing.strategies import cases

Run = Callable[[Case], Finding]


@dataclass(slots=True)
class Tally:
    """What came of all cases so far. `num_split` have a graph of two sections or more.

    `reasons` counts the cases with a graph that is whole, or cut in forward instead, by why.
    """

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    features: collections.Counter[str] = field(default_factory=collections.Counter)
    most_sections: collections.Counter[int] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    num_simpler: int = 0
    num_codes: int = 0

    def add(self, case: Case, finding: Finding) -> None:
        """Count one case."""
        self.outcomes[finding.outcome] += 1
        self.features.update(case.features())
        self.num_codes += finding.num_codes
        if not finding.is_discarded:
            self.most_sections[max(finding.sections, default=1)] += 1
            self.reasons.update(set(finding.reasons))

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.outcomes += other.outcomes
        self.features += other.features
        self.most_sections += other.most_sections
        self.reasons += other.reasons
        self.num_simpler += other.num_simpler
        self.num_codes += other.num_codes

    @property
    def num_cases(self) -> int:
        """How many were run."""
        return self.outcomes.total()

    @property
    def num_failures(self) -> int:
        """How many failed."""
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
        lines = [f"{self.num_cases} cases, and {self.num_simpler} while making failures simpler"]
        lines += [f"  {self.outcomes[o]:6d}  {o}" for o in OUTCOMES if self.outcomes[o]]
        lines.append(f"{self.num_split} of {self.num_compared} compared were split ({share:.0%})")
        if self.num_codes:
            lines.append(f"code of {self.num_codes} sections was compared with their graphs")
        lines.append(f"most sections of a graph: number of cases: {sections}")
        lines += [f"  {count:6d}  {name}" for name, count in sorted(self.reasons.items())]
        lines += [f"  {count:6d}  {name}" for name, count in sorted(self.features.items())]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that failed, as simple as was found within the time."""

    number: int
    case: Case
    finding: Finding

    def __str__(self) -> str:
        return (
            f"case {self.number}: {self.finding.outcome}, with sections {self.finding.sections}\n"
            f"    {self.case},\n{self.finding.detail}"
        )


class Campaign:
    """Runs cases by their numbers, with `run`, and makes those that fail simpler.

    `simplify_s` is how long that may take for each. `inner` is the inner compiler of all cases, if
    given, and `feature` what those that are run have in common; see `Case.features`. With
    `cuts_finely` as many sections are made of each case as can be, and each graph once.
    """

    def __init__(
        self,
        run: Run,
        *,
        simplify_s: float,
        inner: str = "",
        feature: str = "",
        cuts_finely: bool = False,
    ) -> None:
        self.tally = Tally()
        self._run = run
        self._simplify_s = simplify_s
        self._inner = inner
        self._feature = feature
        self._cuts_finely = cuts_finely

    def try_case(self, number: int) -> Failure | None:
        """Run the case of a number."""
        case = draw_case(number)
        if self._inner:
            case = with_inner(case, self._inner)
        if self._cuts_finely:
            case = dataclasses.replace(
                case, split="backward", cap_bytes=200, copied="", has_second=False
            )
        if self._feature and self._feature not in case.features():
            return None
        finding = self._run(case)
        self.tally.add(case, finding)
        if not finding.is_failure:
            return None
        stop_s = time.monotonic() + self._simplify_s
        findings = {case: finding}

        def fails(simpler: Case) -> bool:
            if simpler in findings or time.monotonic() > stop_s:
                return False
            self.tally.num_simpler += 1
            findings[simpler] = self._run(simpler)
            return findings[simpler].outcome == finding.outcome

        case = simplify(case, fails)
        return Failure(number=number, case=case, finding=findings[case])


def with_inner(case: Case, inner: str) -> Case:
    """Return a case with another inner compiler.

    Inductor rounds otherwise than eager, and otherwise where a graph is cut. Most optimizers make
    an update of any size of a gradient that is nothing but rounding (Rprop goes by its sign), and
    then nothing can be compared any more. So Inductor's cases are trained by SGD.
    """
    optimizer = "SGD" if inner == "inductor" else case.optimizer
    return dataclasses.replace(case, inner=inner, optimizer=optimizer)


def draw_case(number: int) -> Case:
    """Return the case of a number; see [Note: one run of hypothesis a case]."""
    drawn: list[Case] = []

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=2,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases())
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    return drawn[-1]
