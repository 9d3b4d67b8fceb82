"""Runs a state machine of hypothesis: a few seconds of the same examples, or others for a night."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_Script = TypeVar("_Script")

# How many times as many examples to run. More than 1 also draws others in each run, and makes what
# fails small, which may take minutes.
TIMES = int(os.environ.get("MACHINE_TIMES", "1"))


def run_machine(machine: type[RuleBasedStateMachine], num_examples: int, num_steps: int) -> None:
    """Run examples of a machine, of up to this many rules each; raise for the first that fails."""
    phases = (Phase.generate,) if TIMES == 1 else (Phase.generate, Phase.shrink)
    settings = hypothesis.settings(
        max_examples=num_examples * TIMES,
        stateful_step_count=num_steps,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings)


def choose_scripts(
    drawn: Iterable[_Script], num_scripts: int, deeds_of: Callable[[_Script], set[Any]]
) -> list[_Script]:
    """Of the scripts that machines wrote, each in turn that does most that none before it does."""
    rest, chosen = list(drawn), list[_Script]()
    seen: set[Any] = set()
    while rest and len(chosen) < num_scripts * TIMES:
        best = max(rest, key=lambda script: len(deeds_of(script) - seen))
        rest.remove(best)
        seen |= deeds_of(best)
        chosen.append(best)
    return chosen
