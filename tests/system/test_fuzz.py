"""Random models train as with eager DDP; the fuzz finds bugs that are planted.

Thousands of cases, for a night: `python -m tests.system.fuzzing --help`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.ranks import Ranks
from tests.system.fuzzing import planted
from tests.system.fuzzing.campaign import Campaign, Tally, draw_case
from tests.system.fuzzing.checking import FAILURES, Finding, relative_error, run_case
from tests.system.fuzzing.kept import KEPT
from tests.system.fuzzing.spec import Block, Case

NUM_CASES = 16


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes of this module's own: cases that raise have them started anew, many times."""
    workers = Ranks(is_forked=True)
    yield workers
    workers.stop()


_clean: dict[int, Finding] = {}  # by the number of the case


@pytest.fixture(scope="module")
def tally() -> Tally:
    """Counts of all the cases of this module."""
    return Tally()


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_random_models_train_as_with_eager_ddp(ranks: Ranks, tally: Tally, number: int) -> None:
    """Outputs, losses, gradients, parameters and buffers are eager DDP's, on two ranks."""

    def run(case: Case) -> Finding:
        finding = run_case(ranks, case)
        _clean.setdefault(number, finding)
        return finding

    campaign = Campaign(run, simplify_s=60)
    failure = campaign.try_case(number)
    tally.merge(campaign.tally)
    assert failure is None, f"keep this in fuzzing/kept.py:\n{failure}"


def test_most_random_models_are_split(tally: Tally) -> None:
    """The cases above say something: few are discarded, and two in five others are in sections."""
    assert tally.num_cases >= NUM_CASES / 2, "run this module as a whole"
    assert tally.num_compared >= 0.8 * tally.num_cases, str(tally)
    assert tally.num_split >= 0.4 * tally.num_compared, str(tally)


@pytest.mark.parametrize("name", KEPT)
def test_what_once_failed_stays_right(ranks: Ranks, name: str) -> None:
    """Each was found by the fuzz, and made small by it."""
    finding = run_case(ranks, KEPT[name])
    assert not finding.is_failure, f"{finding.outcome}: {finding.detail}"
    assert not finding.is_discarded, finding.detail


@pytest.mark.parametrize(
    "bug",
    [
        planted.BUGS[-1],
        *(pytest.param(bug, marks=pytest.mark.nightly) for bug in planted.BUGS[:-1]),
    ],
)
def test_planted_bugs_are_found(ranks: Ranks, bug: str) -> None:
    """Within the number of cases that are run here; what is not split has none of them."""
    campaign = Campaign(lambda case: run_case(ranks, case, bug), simplify_s=0)
    whole = {number for number, found in _clean.items() if max(found.sections, default=1) == 1}
    failures = (campaign.try_case(number) for number in set(range(NUM_CASES)) - whole)
    found = next((failure for failure in failures if failure is not None), None)
    assert found is not None
    assert found.finding.outcome in ("differs", "raises")


def test_a_rank_left_alone_does_not_hang_the_fuzz(ranks: Ranks) -> None:
    """One rank raises in backward, the other waits in an allreduce until its group's limit."""
    case = Case(blocks=(Block(kind="linear"),))
    finding = run_case(ranks, case, planted.RAISES_ON_ONE_RANK)
    assert finding.outcome == "raises"
    assert run_case(ranks, case).outcome == "equal"


def test_a_failing_case_is_made_small() -> None:
    """What is left is what it takes to fail: here a dropout, in forward's split."""

    def fails(case: Case) -> Finding:
        kinds = {block.kind for block in case.all_blocks()}
        is_wrong = "dropout" in kinds and case.split == "forward"
        return Finding(outcome=FAILURES[0] if is_wrong else "equal")

    campaign = Campaign(fails, simplify_s=60)
    failures = (campaign.try_case(number) for number in range(1000))
    found = next(failure for failure in failures if failure is not None)
    assert found.case == Case(blocks=(Block(kind="dropout"),), split="forward")
    assert campaign.tally.num_failures == 1
    assert campaign.tally.num_simpler > 0


def test_a_case_is_printed_as_the_source_that_makes_it() -> None:
    """So that it can be kept."""
    case = Case(
        blocks=(Block(kind="residual", inner=(Block(kind="linear", choice=2),)),),
        outputs=("same", "view"),
        cap_bytes=None,
    )
    assert eval(str(case)) == case
    assert "seed" not in str(case)


def test_a_case_has_the_same_number_everywhere() -> None:
    """It can be run again by its number."""
    assert draw_case(7) == draw_case(7) != draw_case(8)


def test_relative_errors() -> None:
    """Relative to the largest element; what is of another kind, or not finite, differs."""
    ones = torch.ones(2)
    assert relative_error(ones, ones.clone()) == 0.0
    assert relative_error(ones, 2 * ones) == 0.5
    assert relative_error(ones, ones.double()) == float("inf")
    assert relative_error(ones, ones * float("nan")) == float("inf")
    assert relative_error(ones * float("nan"), ones * float("nan")) == 0.0
