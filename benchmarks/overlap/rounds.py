"""Measure the teams of one cell in turns.

A turn is some steps as they are, then some without communication; a round is a turn of each team,
and one reduction of the buckets alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.harness.report import Spread, ratios, spread
from benchmarks.harness.session import Session
from benchmarks.harness.teams import Team
from ddpopt.inspection.recording import RecordedStep

_MIN_ROUNDS = 3
_LONG_STEP_S = 0.3  # of such steps one is enough in a turn


class Turn(NamedTuple):
    """Medians of one turn, in seconds; `exposed_s` is what communication adds to an iteration."""

    iteration_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    alone_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One peer in one cell: the spread of each value of its turns, over the rounds.

    Ratios are those of the rounds, None where the other peer is not measured. `over_bound` is the
    time by which an iteration is longer than the bound, as a part of the bound.
    """

    times: Mapping[str, Spread]
    throughput_of_eager: Spread | None
    throughput_of_intree: Spread | None
    backward_of_intree: Spread | None
    over_bound: float
    timeline: RecordedStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What no peer with the same buckets can beat.

    `compute_s` is the best iteration without communication, that of `compute_peer`.
    `communication_s` is how long buckets of the first peer's sizes take to be reduced with nothing
    to compute, at `megabits_per_s` sent by each rank. Tuned peers may have other buckets.
    """

    compute_s: float
    compute_peer: str
    communication_s: float
    megabits_per_s: float
    num_buckets: int
    num_bytes: int

    @property
    def bound_s(self) -> float:
        return max(self.compute_s, self.communication_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model, cap and rate; a round has `num_steps` timed steps of each peer.

    `rate` is the one that was asked for, `shown_rate` says too if the network did not have it.
    """

    model: str
    cap: str
    rate: str
    shown_rate: str
    num_rounds: int
    num_steps: int
    bounds: Bounds
    peers: dict[str, Measured]


def measure(session: Session, model: str, cap: str, rate: str) -> Cell | None:
    """Measure all teams at the rate that the network has; None if all fail."""
    reducing_peer, bucket_bytes = _find_reducing_peer(session)
    num_timed, num_rounds = _plan_rounds(session, reducing_peer)
    communication_s: list[float] = []

    def reduce_alone() -> None:
        communication_s.extend(_reduce_alone(session, reducing_peer, num_timed))

    def take(name: str) -> Turn:
        return _take_turn(session.teams[name], 1, num_timed)

    turns = session.take_turns(list(session.teams), num_rounds, take, reduce_alone)
    if not turns:
        return None
    num_ranks = session.setting.emulated_ranks or session.cluster.num_ranks
    bounds = _bounds(turns, communication_s, bucket_bytes, num_ranks)
    return Cell(
        model=model,
        cap=cap,
        rate=rate,
        shown_rate=session.shown_rate(rate),
        num_rounds=num_rounds,
        num_steps=num_timed,
        bounds=bounds,
        peers={name: _measured(turns, name, bounds.bound_s) for name in turns},
    )


def _find_reducing_peer(session: Session) -> tuple[str, tuple[int, ...]]:
    """Return the first peer that has DDP's buckets, and their sizes; empty if there is none."""
    for name, team in list(session.teams.items()):
        with session.failing(name):
            if bucket_bytes := team.ask("bucket_bytes"):
                return name, bucket_bytes
    return "", ()


def _reduce_alone(session: Session, peer: str, num_times: int) -> list[float]:
    """Return the median of some reductions, nothing if there is nobody to make them."""
    if peer in session.teams:
        with session.failing(peer):
            return [statistics.median(session.teams[peer].ask("reduce_alone", num_times))]
    return []


def _plan_rounds(session: Session, reducing_peer: str) -> tuple[int, int]:
    """Return how many steps of a turn are timed, and how many rounds fit the budget.

    A first round, which does not count, tells.
    """
    communication_s = sum(_reduce_alone(session, reducing_peer, 1))
    teams = session.teams
    first_round = session.take_turns(list(teams), 1, lambda name: _take_turn(teams[name], 0, 1))
    turns = [turn for of_peer in first_round.values() for turn in of_peer]
    num_timed = 1 if any(turn.iteration_s > _LONG_STEP_S for turn in turns) else 2
    step_s = sum(turn.iteration_s + turn.alone_s for turn in turns)
    round_s = (1 + num_timed) * step_s + num_timed * communication_s
    fitting = int(session.args.budget_s / max(round_s, 1e-3))
    return num_timed, min(session.args.rounds, max(_MIN_ROUNDS, fitting))


def _take_turn(team: Team, num_untimed: int, num_timed: int) -> Turn:
    steps = team.ask("steps", num_untimed, num_timed)
    alone = team.ask("lone_steps", num_untimed, num_timed)
    medians = {
        column: statistics.median(getattr(step, column) for step in steps)
        for column in ("iteration_s", "forward_s", "backward_s", "optimizer_s")
    }
    alone_s = statistics.median(step.iteration_s for step in alone)
    return Turn(**medians, alone_s=alone_s, exposed_s=medians["iteration_s"] - alone_s)


def _bounds(
    turns: Mapping[str, Sequence[Turn]],
    communication_s: Sequence[float],
    bucket_bytes: Sequence[int],
    num_ranks: int,
) -> Bounds:
    alone = {
        name: statistics.median(turn.alone_s for turn in of_peer) for name, of_peer in turns.items()
    }
    best = min(alone, key=lambda name: alone[name])
    whole_s = statistics.median(communication_s or [0.0])
    sent_bits = 8 * sum(bucket_bytes) * 2 * (num_ranks - 1) / num_ranks
    return Bounds(
        compute_s=alone[best],
        compute_peer=best,
        communication_s=whole_s,
        megabits_per_s=sent_bits / whole_s / 1e6 if whole_s else 0.0,
        num_buckets=len(bucket_bytes),
        num_bytes=sum(bucket_bytes),
    )


def _measured(turns: Mapping[str, Sequence[Turn]], name: str, bound_s: float) -> Measured:
    def column(peer: str, what: str) -> list[float]:
        return [getattr(turn, what) for turn in turns.get(peer, ())]

    def ratio(numerator: str, denominator: str, what: str) -> Spread | None:
        above, below = column(numerator, what), column(denominator, what)
        return ratios(above, below) if above and below else None

    times = {what: spread(column(name, what)) for what in Turn._fields}
    return Measured(
        times=times,
        throughput_of_eager=ratio("eager", name, "iteration_s"),
        throughput_of_intree=ratio("intree", name, "iteration_s"),
        backward_of_intree=ratio(name, "intree", "backward_s"),
        over_bound=times["iteration_s"].median / bound_s - 1 if bound_s else 0.0,
    )
