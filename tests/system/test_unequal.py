"""Ranks that differ train as with eager DDP; the fuzzer finds faults that are planted.

Thousands of scripts, for a night: `python -m tests.system.unequal --help`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks
from tests.system.campaigns import planted
from tests.system.training.outcomes import DIFFERS, EQUAL, RAISES, SILENT
from tests.system.unequal import judging
from tests.system.unequal.actions import NUM_RANKS, Communicate, Evaluate, Step
from tests.system.unequal.kept import KEPT
from tests.system.unequal.machine import draw_script
from tests.system.unequal.script import Block, Script

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
    """Cases were found by the fuzzer or by a reader, and made small."""
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
    assert finding.is_split
