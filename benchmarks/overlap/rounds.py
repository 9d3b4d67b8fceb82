"""Measure the teams of one cell in turns, A B C A B C, so that the machine's drift falls on all.

A turn is some steps as they are, then some without communication; a round is a turn of each team,
and one reduction of the buckets alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from benchmarks.harness.protocol import StepTimes
from benchmarks.harness.tables import Spread, spread
from benchmarks.harness.teams import Team, TeamError
from benchmarks.overlap.results import Bounds, Measured

_MIN_ROUNDS = 3
_LONG_STEP_S = 0.3  # of such steps one is enough in a turn
_EAGER, _INTREE = "eager", "intree"

T = TypeVar("T")
OnFailure = Callable[[str, TeamError], None]


class Turn(NamedTuple):
    """Medians of one turn, in seconds."""

    iteration_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    alone_s: float


class Schedule(NamedTuple):
    """How many rounds, and how many steps a turn has."""

    num_rounds: int
    num_untimed: int
    num_timed: int


class Times(NamedTuple):
    """What was measured; each list has an entry a round."""

    schedule: Schedule
    turns: dict[str, list[Turn]]
    communication_s: list[float]
    bucket_bytes: tuple[int, ...]


def take_turns(
    teams: dict[str, Team], budget_s: float, max_rounds: int, on_failure: OnFailure
) -> Times:
    """Measure; a team that fails is taken out of `teams`, and the others go on.

    A first round, which does not count, tells how many rounds fit the budget, three at least.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in teams}
    reducer, bucket_bytes = _find_reducer(teams, on_failure)
    communication_s = [reducer.reduce_alone(1)[0]] if reducer else [0.0]
    for name in list(teams):
        _take_turn(teams, name, Schedule(1, 0, 1), turns, on_failure)
    schedule = _schedule(turns, communication_s[0], budget_s, max_rounds)
    turns, communication_s = {name: [] for name in teams}, []
    for _ in range(schedule.num_rounds):
        for name in list(teams):
            _take_turn(teams, name, schedule, turns, on_failure)
        if reducer:
            communication_s.append(statistics.median(reducer.reduce_alone(schedule.num_timed)))
    complete = {name: taken for name, taken in turns.items() if name in teams}
    return Times(schedule, complete, communication_s or [0.0], bucket_bytes)


def _find_reducer(
    teams: dict[str, Team], on_failure: OnFailure
) -> tuple[Team | None, tuple[int, ...]]:
    """Return the first team that has DDP's buckets, and their sizes."""
    for name in list(teams):
        found = _succeeding(teams, name, on_failure, lambda team: (team, team.bucket_bytes()))
        if found is not None and found[1]:
            return found
    return None, ()


def _succeeding(
    teams: dict[str, Team], name: str, on_failure: OnFailure, ask: Callable[[Team], T]
) -> T | None:
    """Return what a team answers; None, and it is taken out, if it fails."""
    try:
        return ask(teams[name])
    except TeamError as error:
        del teams[name]
        on_failure(name, error)
        return None


def _take_turn(
    teams: dict[str, Team],
    name: str,
    schedule: Schedule,
    turns: Mapping[str, list[Turn]],
    on_failure: OnFailure,
) -> None:
    numbers = (schedule.num_untimed, schedule.num_timed)

    def take(team: Team) -> Turn:
        return _turn(team.steps(*numbers), team.steps(*numbers, is_alone=True))

    turn = _succeeding(teams, name, on_failure, take)
    if turn is not None:
        turns[name].append(turn)


def _turn(steps: Sequence[StepTimes], alone: Sequence[StepTimes]) -> Turn:
    return Turn(
        iteration_s=statistics.median(step.iteration_s for step in steps),
        forward_s=statistics.median(step.forward_s for step in steps),
        backward_s=statistics.median(step.backward_s for step in steps),
        optimizer_s=statistics.median(step.optimizer_s for step in steps),
        alone_s=statistics.median(step.iteration_s for step in alone),
    )


def _schedule(
    turns: Mapping[str, Sequence[Turn]], communication_s: float, budget_s: float, max_rounds: int
) -> Schedule:
    taken = [turn for peer in turns.values() for turn in peer]
    is_long = any(turn.iteration_s > _LONG_STEP_S for turn in taken)
    num_untimed, num_timed = (1, 1) if is_long else (1, 2)
    step_s = sum(turn.iteration_s + turn.alone_s for turn in taken)
    round_s = (num_untimed + num_timed) * step_s + num_timed * communication_s
    fitting = int(budget_s / max(round_s, 1e-3))
    return Schedule(min(max_rounds, max(_MIN_ROUNDS, fitting)), num_untimed, num_timed)


# ---- from times to results --------------------------------------------------------------------


def bounds(times: Times, num_ranks: int) -> Bounds:
    """Return what no peer can beat."""
    alone = {
        name: statistics.median(turn.alone_s for turn in taken)
        for name, taken in times.turns.items()
    }
    best = min(alone, key=lambda name: alone[name])
    communication_s = statistics.median(times.communication_s)
    num_bytes = sum(times.bucket_bytes)
    sent_bits = 8 * num_bytes * 2 * (num_ranks - 1) / num_ranks
    return Bounds(
        compute_s=alone[best],
        compute_peer=best,
        communication_s=communication_s,
        megabits_per_s=sent_bits / communication_s / 1e6 if communication_s else 0.0,
        num_buckets=len(times.bucket_bytes),
        num_bytes=num_bytes,
    )


def measured(times: Times, name: str, bound_s: float) -> Measured:
    """Return the results of one peer."""
    own = times.turns[name]
    columns = {field: [getattr(turn, field) for turn in own] for field in Turn._fields}
    iteration_s = spread(columns["iteration_s"])

    def ratio(field: str, peer: str, *, is_throughput: bool) -> Spread | None:
        if peer not in times.turns:
            return None
        pairs = zip(columns[field], times.turns[peer], strict=True)
        ratios = [own_s / getattr(other, field) for own_s, other in pairs]
        return spread([1 / value for value in ratios] if is_throughput else ratios)

    return Measured(
        iteration_s=iteration_s,
        forward_s=spread(columns["forward_s"]),
        backward_s=spread(columns["backward_s"]),
        optimizer_s=spread(columns["optimizer_s"]),
        alone_s=spread(columns["alone_s"]),
        exposed_s=spread([turn.iteration_s - turn.alone_s for turn in own]),
        throughput_of_eager=ratio("iteration_s", _EAGER, is_throughput=True),
        throughput_of_intree=ratio("iteration_s", _INTREE, is_throughput=True),
        backward_of_intree=ratio("backward_s", _INTREE, is_throughput=False),
        over_bound=iteration_s.median / bound_s - 1 if bound_s else 0.0,
    )
