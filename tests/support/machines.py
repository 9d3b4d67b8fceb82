"""Runs a state machine of hypothesis: a few seconds of the same examples, or others for a night."""

from __future__ import annotations

import os

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

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
