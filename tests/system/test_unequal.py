"""Ranks that differ train as with eager DDP; the fuzzer finds faults that are planted.

Thousands of scripts, for a night: `python -m tests.system.unequal --help`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.documents import ROOT, environment
from tests.support.ranks import Ranks
from tests.system.unequal import judging, planted
from tests.system.unequal.actions import (
    NUM_RANKS,
    BeLate,
    Communicate,
    Evaluate,
    Step,
)
from tests.system.unequal.campaign import Campaign
from tests.system.unequal.judging import DIFFERS, EQUAL, RAISES, SILENT, Finding
from tests.system.unequal.kept import KEPT
from tests.system.unequal.machine import draw_script
from tests.system.unequal.script import Block, Script, script_of

NUM_SCRIPTS = 6  # about half a minute
PLANTED_LIMIT_S = 5  # the ranks of a planted hang wait so long

_SIZES = ((2, 3), (3, 5), (2, 3))
_SCRIPT = Script(
    blocks=(Block(kind="linear"),) * 3,
    actions=(
        Step(sizes=_SIZES, times=3),
        Evaluate(ranks=(0,), sizes=_SIZES, has_gradients=True),
        Communicate(kind="barrier"),
        Step(sizes=_SIZES),
    ),
    is_dynamic=True,
)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    """Three processes for this module alone: scripts that raise have them started anew."""
    workers = Ranks(NUM_RANKS, is_forked=True)
    yield workers
    workers.stop()


@pytest.mark.quick("0")
@pytest.mark.parametrize("number", range(NUM_SCRIPTS))
def test_ranks_that_differ_train_as_with_eager_ddp(three_ranks: Ranks, number: int) -> None:
    """Losses, gradients after each backward, parameters and buffers are eager DDP's."""
    script = draw_script(number)
    finding = judging.judge(three_ranks, script)
    assert not finding.is_failure, (
        f"{finding.outcome}; to make it small, and keep it in unequal/kept.py:\n"
        f"python -m tests.system.unequal --replay '{script}'\n{finding.detail}"
    )


@pytest.mark.parametrize("name", KEPT)
def test_what_once_failed_stays_right(three_ranks: Ranks, name: str) -> None:
    """Each was found by the fuzzer or by a reader, and made small."""
    finding = judging.judge(three_ranks, KEPT[name])
    assert finding.outcome == EQUAL, f"{finding.outcome}: {finding.detail}"


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (planted.LOSES_GRADIENTS, DIFFERS),
        (planted.LONE_COLLECTIVE, RAISES),
        (planted.RAISES_IN_EAGER, SILENT),
    ],
)
def test_planted_faults_are_found(three_ranks: Ranks, fault: str, outcome: str) -> None:
    """Wrong numbers, a hang, and a training that eager DDP does not do."""
    finding = judging.run(three_ranks, _SCRIPT, limit_s=PLANTED_LIMIT_S, plant=fault)
    assert finding.outcome == outcome, finding.detail


def test_nothing_is_found_where_no_fault_is_planted(three_ranks: Ranks) -> None:
    """The script of the planted faults trains as with eager DDP, in several sections."""
    finding = judging.judge(three_ranks, _SCRIPT)
    assert finding.outcome == EQUAL, finding.detail
    assert max(finding.sections) > 1


def test_a_failing_script_is_made_small() -> None:
    """Only what it takes to fail is left: here a rank that is late."""

    def fails(script: Script) -> Finding:
        is_late = any(isinstance(action, BeLate) for action in script.actions)
        return Finding(outcome=DIFFERS if is_late else EQUAL)

    campaign = Campaign(fails, fails, simplify_s=60)
    tried = (campaign.try_script(name, script) for name, script in campaign.draw(range(1000)))
    failure = next(failure for _, failure in tried if failure is not None)
    (late,) = failure.script.actions
    assert isinstance(late, BeLate)
    assert failure.script == Script(blocks=(Block(kind="linear"),), actions=(late,))
    assert campaign.tally.num_simpler > 0


def test_a_script_is_printed_as_the_source_that_makes_it() -> None:
    """It can be kept so, and replayed."""
    for number in range(10):
        script = draw_script(number)
        assert script_of(str(script)) == script


def test_a_script_has_the_same_number_everywhere() -> None:
    """So it can be run again by its number, in a process that orders sets otherwise, for one."""
    assert draw_script(7) != draw_script(8)
    code = "from tests.system.unequal.machine import draw_script; print(draw_script(7))"
    drawn_elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(), "PYTHONHASHSEED": "7"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert drawn_elsewhere.strip() == str(draw_script(7))
