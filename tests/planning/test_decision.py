"""With DDP's buckets: a hint where a tenth of an iteration is exposed communication, else none.

The times are given: those that DDP takes here say nothing.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt._torch import LoggedStep
from ddpopt.planning import AllreduceCost, decision
from ddpopt.planning.stopwatch import Measured
from tests.support.models import MLP, batches, train
from tests.support.ranks import Ranks

# Forward and backward of 60 ms; 50 of allreduces, of which DDP's buckets hide 5.
WAITING = LoggedStep(
    number=0, forward_s=0.02, backward_s=0.04, communication_s=0.05, overlap_s=0.005, num_bytes=0
)
HIDDEN = WAITING._replace(communication_s=0.01, overlap_s=0.009)


def _train(rank: int, step: LoggedStep, options: dict[str, Any]) -> list[str]:
    """Return what is said in the log and by `explain`, of twelve steps that begin 110 ms apart."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.05)
    options = {"inner": "aot_eager", **options}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    lines: list[str] = []
    real = decision._torch.last_logged_step
    last_s = property(lambda _: 0.11, lambda _, _noted: None)
    with (
        mock.patch.object(decision._logs, "info", lambda text, *args: lines.append(text % args)),
        mock.patch.object(
            decision._torch, "last_logged_step", lambda ddp: step._replace(number=real(ddp).number)
        ),
        mock.patch.object(decision._Watch, "last_s", last_s, create=True),
    ):
        train(ddp, batches(rank, [(4, 64)] * 12), compiled)
    lines += str(ddpopt.explain(ddp)).splitlines()
    return [line for line in lines if "looks for buckets" in line]


def test_one_line_on_one_rank_and_in_explain_says_how_much_is_exposed(ranks: Ranks) -> None:
    first, second = ranks.run(_train, WAITING, {})
    logged, explained = first
    assert logged == explained
    assert not second
    assert logged == (
        "of an iteration of 110.0 ms, 45.0 are spent waiting for communication; "
        "options={'buckets': 'auto'} looks for buckets that hide more of it"
    )


@pytest.mark.parametrize(
    ("step", "options"),
    [(HIDDEN, {}), (WAITING, {"buckets": "auto"}), (WAITING, {"enabled": False})],
    ids=["hidden", "on already", "switched off"],
)
def test_nothing_is_said_otherwise(ranks: Ranks, step: LoggedStep, options: dict[str, Any]) -> None:
    assert ranks.run(_train, step, options) == [[], []]


def _train_without(rank: int, name: str) -> tuple[list[str], int]:
    """Train where a function of `decision` raises; return what is said of it, and the sections."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.05)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    lines: list[str] = []
    with (
        mock.patch.object(decision._logs, "info", lambda text, *args: lines.append(text % args)),
        mock.patch(f"ddpopt.planning.decision.{name}", side_effect=KeyError("lost")),
    ):
        train(ddp, batches(rank, [(4, 64)] * 7 + [(3, 64)] * 7), compiled)  # compiled twice
    *_, plan = ddpopt.explain(ddp).cuts
    return [line for line in lines if "lost" in line], len(plan.sections)


@pytest.mark.parametrize("name", ["_torch.last_logged_step", "plan_of"])
def test_an_error_costs_the_hint_and_nothing_else(ranks: Ranks, name: str) -> None:
    """One line on rank 0 has it; graphs are split, and training goes on."""
    (first, sections), (second, _) = ranks.run(_train_without, name)
    assert first == ["how long iterations wait for communication is not known: KeyError('lost')"]
    assert not second
    assert sections > 1


def _decide(_rank: int, left_s: float, allreduce_s: float) -> decision.Decision:
    """Decide for one bucket, whose allreduce follows 40 ms of backward, and `left_s` more."""
    ddp = DistributedDataParallel(MLP())
    num_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters())
    measured = Measured(
        buckets=(tuple(reversed(range(12))),),
        ready_s=tuple(k * 0.04 / 12 for k in range(1, 13)),
        forward_s=0.06,
        backward_s=0.04 + allreduce_s + left_s,
    )
    cost = AllreduceCost(startup_s=0.0, s_per_byte=allreduce_s / num_bytes)
    return decision.decide(ddp, [measured] * 2, cost)


def test_a_small_gain_has_to_exceed_the_predictions_error(ranks: Ranks) -> None:
    """A gain of some 5 % does not, if as much of the iteration is unexplained; 20 % is large."""
    sure, _ = ranks.run(_decide, 0.0, 0.007)
    unsure, _ = ranks.run(_decide, 0.008, 0.007)
    large, _ = ranks.run(_decide, 0.03, 0.05)
    assert sure.is_better
    assert 0.03 < sure.gain < 0.1
    assert not unsure.is_better
    assert 0.03 < unsure.gain < 0.1
    assert "7.0%, since the prediction leaves 7.0% of one unexplained" in unsure.text
    assert large.is_better
