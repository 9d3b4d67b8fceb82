"""Random models train as with eager DDP; the fuzz finds bugs that are planted.

Thousands of cases, for a night: `python -m tests.system.fuzzing --help`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.support.documents import ROOT, environment
from tests.support.ranks import Ranks
from tests.system.fuzzing import planted
from tests.system.fuzzing.campaign import Campaign, Failure, Tally, draw_case
from tests.system.fuzzing.checking import CODE_DIFFERS, FAILURES, Finding, run_case
from tests.system.fuzzing.kept import COMPLEX, KEPT
from tests.system.fuzzing.rounding import relative_error
from tests.system.fuzzing.spec import Block, Case

NUM_CASES = 16
NUM_PLANTED = (
    48  # a planted bug shows in one of so many cases; the first in which it does is enough
)


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[Ranks]:
    """Two processes for this module alone: cases that raise have them started anew, many times."""
    workers = Ranks(is_forked=True)
    yield workers
    workers.stop()


# By the number of the case: its first result, and the counts of its run.
_findings: dict[int, Finding] = {}
_tallies: dict[int, Tally] = {}


def _try_case(ranks: Ranks, number: int) -> Failure | None:
    """Run the case of a number, without a planted bug, and keep its result for other tests."""

    def run(case: Case) -> Finding:
        finding = run_case(ranks, case)
        _findings.setdefault(number, finding)
        return finding

    campaign = Campaign(run, simplify_s=60)
    failure = campaign.try_case(number)
    _tallies[number] = campaign.tally
    return failure


@pytest.mark.quick("0")
@pytest.mark.parametrize("number", range(NUM_CASES))
def test_random_models_train_as_with_eager_ddp(fresh_ranks: Ranks, number: int) -> None:
    """Outputs, losses, gradients, parameters and buffers are eager DDP's, on two ranks."""
    failure = _try_case(fresh_ranks, number)
    assert failure is None, f"keep this in fuzzing/kept.py:\n{failure}"


def test_most_random_models_are_split(fresh_ranks: Ranks) -> None:
    """The cases above say something: few are discarded, and two in five others are in sections."""
    total = Tally()
    for number in range(NUM_CASES):
        if number not in _tallies:  # not chosen, by `-k` or a set of tests
            _try_case(fresh_ranks, number)
        total.merge(_tallies[number])
    assert total.num_cases == NUM_CASES
    assert total.num_compared >= 0.8 * NUM_CASES, str(total)
    assert total.num_split >= 0.4 * total.num_compared, str(total)


@pytest.mark.parametrize("name", KEPT)
def test_what_once_failed_stays_right(fresh_ranks: Ranks, name: str) -> None:
    """Each was found by the fuzz, and made small by it."""
    finding = run_case(fresh_ranks, KEPT[name])
    assert not finding.is_failure, f"{finding.outcome}: {finding.detail}"
    assert not finding.is_discarded, finding.detail


@pytest.mark.parametrize(
    "bug",
    [
        planted.BUGS[-1],
        *(pytest.param(bug, marks=pytest.mark.nightly) for bug in planted.BUGS[:-1]),
    ],
)
def test_planted_bugs_are_found(fresh_ranks: Ranks, bug: str) -> None:
    """They are, within `NUM_PLANTED` cases; a graph that is whole has none."""
    campaign = Campaign(lambda case: run_case(fresh_ranks, case, bug), simplify_s=0)
    numbers = [n for n in range(NUM_PLANTED) if n not in _findings or _is_split(_findings[n])]
    failures = (campaign.try_case(number) for number in numbers)
    failure = next((failure for failure in failures if failure is not None), None)
    assert failure is not None
    assert failure.finding.outcome in ("differs", "raises")


def test_code_that_does_not_compute_what_its_graph_does_is_found(fresh_ranks: Ranks) -> None:
    """Of Inductor's, with a fault of torch's that sections are compiled without."""
    finding = run_case(
        fresh_ranks, KEPT[COMPLEX], planted.WRITES_COMPLEX_IN_PLACE, checks_code=True
    )
    assert finding.outcome == CODE_DIFFERS
    assert "output 1: relative error" in finding.detail
    assert "aten.slice_scatter" in finding.detail


def _is_split(finding: Finding) -> bool:
    return max(finding.sections, default=1) > 1


def test_a_rank_left_alone_does_not_hang_the_fuzz(fresh_ranks: Ranks) -> None:
    """One rank raises in backward, the other waits in an allreduce until its group's limit."""
    case = Case(blocks=(Block(kind="linear"),))
    finding = run_case(fresh_ranks, case, planted.RAISES_ON_ONE_RANK)
    assert finding.outcome == "raises"
    assert run_case(fresh_ranks, case).outcome == "equal"


def test_a_failing_case_is_made_small() -> None:
    """Only what it takes to fail is left: here a dropout, in forward's split."""

    def fails(case: Case) -> Finding:
        kinds = {block.kind for block in case.all_blocks()}
        is_wrong = "dropout" in kinds and case.split == "forward"
        return Finding(outcome=FAILURES[0] if is_wrong else "equal")

    campaign = Campaign(fails, simplify_s=60)
    failures = (campaign.try_case(number) for number in range(1000))
    failure = next(failure for failure in failures if failure is not None)
    assert failure.case == Case(blocks=(Block(kind="dropout"),), split="forward")
    assert campaign.tally.num_failures == 1
    assert campaign.tally.num_simpler > 0


def test_a_case_is_printed_as_the_source_that_makes_it() -> None:
    """It can be kept so."""
    case = Case(
        blocks=(Block(kind="residual", inner=(Block(kind="linear", choice=2),)),),
        outputs=("same", "view"),
        cap_bytes=None,
    )
    assert eval(str(case)) == case
    assert "seed" not in str(case)


def test_a_case_has_the_same_number_everywhere() -> None:
    """So it can be run again by its number, in a process that orders sets otherwise, for one."""
    assert draw_case(7) != draw_case(8)
    script = "from tests.system.fuzzing.campaign import draw_case; print(draw_case(7))"
    drawn_elsewhere = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment(), "PYTHONHASHSEED": "7"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert drawn_elsewhere.strip() == str(draw_case(7))


def test_errors_are_relative_to_the_largest_element() -> None:
    """Tensors of another dtype, or with another element that is not finite, differ infinitely."""
    ones = torch.ones(2)
    assert relative_error(ones, ones.clone()) == 0.0
    assert relative_error(ones, 2 * ones) == 0.5
    assert relative_error(ones, ones.double()) == float("inf")
    assert relative_error(ones, ones * float("nan")) == float("inf")
    assert relative_error(ones * float("nan"), ones * float("nan")) == 0.0
    assert relative_error(ones * (1 + 1j), ones * (1 + 2j)) == 0.5
