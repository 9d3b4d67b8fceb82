"""Random models train as with eager DDP; the fuzz finds bugs that are planted.

Thousands of cases, for a night: `python -m tests.system.fuzzing --help`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks
from tests.system.campaigns import planted
from tests.system.campaigns.campaign import Campaign, Failure, Tally
from tests.system.fuzzing.__main__ import PROGRAM
from tests.system.fuzzing.checking import run_case
from tests.system.fuzzing.kept import COMPLEX, KEPT
from tests.system.fuzzing.simplifying import simpler_cases
from tests.system.fuzzing.spec import Block, Case
from tests.system.fuzzing.strategies import draw_case
from tests.system.training.outcomes import CODE_DIFFERS, DIFFERS, EQUAL, RAISES, Finding

NUM_CASES = 16
NUM_PLANTED = 48  # a planted fault shows in one of so many cases


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[Ranks]:
    """Two processes for cases that raise, which have them started anew, many times."""
    workers = Ranks(is_forked=True)
    yield workers
    workers.stop()


# By the number of the case: its first result, and the counts of its run.
_findings: dict[int, Finding] = {}
_tallies: dict[int, Tally] = {}


def _campaign(ranks: Ranks, plant: str = "", *, simplify_s: float = 0) -> Campaign[Case]:
    run = functools.partial(run_case, ranks, plant=plant)
    return Campaign(PROGRAM, run, simpler_cases, simplify_s=simplify_s)


def _try_case(ranks: Ranks, number: int) -> Failure[Case] | None:
    """Run the case of a number, without a planted fault, and keep its result for other tests."""
    campaign = _campaign(ranks, simplify_s=60)
    _findings[number], failure = campaign.try_case(f"case {number}", draw_case(number))
    _tallies[number] = campaign.tally
    return failure


@pytest.mark.quick("11")  # which compiles least
@pytest.mark.parametrize("number", range(NUM_CASES))
def test_random_models_train_as_with_eager_ddp(ranks: Ranks, number: int) -> None:
    """Outputs, losses, gradients, parameters and buffers are eager DDP's, on two ranks."""
    failure = _try_case(ranks, number)
    assert failure is None, f"keep this in fuzzing/kept.py:\n{failure}"


def test_most_random_models_are_split(ranks: Ranks) -> None:
    """The cases above say something: few are discarded, and two in five others are in sections.

    One in four may be discarded: some layers raise in eager with others' dtypes or wrappings.
    """
    total = Tally()
    for number in range(NUM_CASES):
        if number not in _tallies:  # not chosen, by `-k` or a set of tests
            _try_case(ranks, number)
        total.merge(_tallies[number])
    assert total.num_cases == NUM_CASES
    assert total.num_compared >= 0.75 * NUM_CASES, str(total)
    assert total.num_split >= 0.4 * total.num_compared, str(total)


@pytest.mark.parametrize("name", KEPT)
def test_what_once_failed_stays_right(ranks: Ranks, name: str) -> None:
    """Cases were found by the fuzz, and made small by it."""
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
def test_planted_bugs_are_found(fresh_ranks: Ranks, bug: str) -> None:
    """A planted bug shows within `NUM_PLANTED` cases; a graph that stays whole has none."""
    numbers = [n for n in range(NUM_PLANTED) if n not in _findings or _findings[n].is_split]
    failure = _campaign(fresh_ranks, bug).first_failure(map(draw_case, numbers))
    assert failure is not None
    assert failure.finding.outcome in (DIFFERS, RAISES)


def test_code_that_does_not_compute_what_its_graph_does_is_found(fresh_ranks: Ranks) -> None:
    """Of Inductor's, with a fault of torch's that sections are compiled without."""
    finding = run_case(
        fresh_ranks, KEPT[COMPLEX], planted.WRITES_COMPLEX_IN_PLACE, checks_code=True
    )
    assert finding.outcome == CODE_DIFFERS
    assert "output 1: relative error" in finding.detail
    assert "aten.slice_scatter" in finding.detail


def test_a_rank_left_alone_does_not_hang_the_fuzz(fresh_ranks: Ranks) -> None:
    """One rank raises in backward, the other waits in an allreduce until its group's limit."""
    case = Case(blocks=(Block(kind="linear"),))
    finding = run_case(fresh_ranks, case, planted.RAISES_ON_ONE_RANK)
    assert finding.outcome == RAISES
    assert run_case(fresh_ranks, case).outcome == EQUAL
