"""A hint beside DDP's buckets is given where a tenth of an iteration is exposed communication.

The tests choose the times: those that DDP takes here say nothing.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt._torch import Forward, LoggedStep
from ddpopt.planning import hint
from tests.support.logs import logged
from tests.support.models import MLP, batches, train
from tests.support.plans import SIZES_OF_MLP, plan_of
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
    real = hint._torch.last_logged_step
    last_s = property(lambda _: 0.11, lambda _, _noted: None)
    with (
        logged("info") as lines,
        mock.patch.object(
            hint._torch, "last_logged_step", lambda ddp: step._replace(number=real(ddp).number)
        ),
        mock.patch.object(hint._Watch, "last_s", last_s, create=True),
    ):
        train(ddp, batches(rank, [(4, 64)] * 12), compiled)
    explained = str(ddpopt.explain(ddp)).splitlines()
    return [line for line in (*lines, *explained) if "looks for buckets" in line]


def test_one_line_on_one_rank_and_in_explain_says_how_much_is_exposed(ranks: Ranks) -> None:
    first, second = ranks.run(_train, WAITING, {})
    line, explained = first
    assert "waiting is 10% of an iteration or more" in explained
    assert not second
    assert line == (
        "of an iteration of 110.0 ms, 45.0 are spent waiting for communication (medians of steps "
        "5 to 10, by DDP's timers); options={'buckets': 'auto'} looks for buckets that hide more "
        "of it"
    )


@pytest.mark.quick("hidden")
@pytest.mark.parametrize(
    ("step", "options"),
    [(HIDDEN, {}), (WAITING, {"buckets": "auto"}), (WAITING, {"enabled": False})],
    ids=["hidden", "on already", "switched off"],
)
def test_no_hint_where_communication_is_hidden_or_tuning_is_on_or_ddpopt_is_off(
    ranks: Ranks, step: LoggedStep, options: dict[str, Any]
) -> None:
    assert ranks.run(_train, step, options) == [[], []]


def _train_without(rank: int, name: str) -> tuple[list[str], int]:
    """Train where a function of `hint` raises; return the log's lines of it, and the sections."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.05)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    with (
        logged("info") as lines,
        mock.patch(f"ddpopt.planning.hint.{name}", side_effect=KeyError("lost")),
    ):
        train(ddp, batches(rank, [(4, 64)] * 7 + [(3, 64)] * 7), compiled)  # compiled twice
    *_, cut = ddpopt.explain(ddp).cuts
    return [line for line in lines if "lost" in line], len(cut.sections)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_torch.last_logged_step", "plan_of"])
def test_an_error_costs_the_hint_and_nothing_else(ranks: Ranks, name: str) -> None:
    """Rank 0 logs the error in one line; graphs are split, and training goes on."""
    (first, sections), (second, _) = ranks.run(_train_without, name)
    assert first == ["how long iterations wait for communication is not known: KeyError('lost')"]
    assert not second
    assert sections > 1


def test_a_step_is_noted_where_the_next_begins_and_not_in_an_evaluation(one_rank: None) -> None:
    """The time of its iteration is not known before."""
    ddp = DistributedDataParallel(MLP())
    watch = hint._Watch()
    forward = Forward((), {}, None)
    with mock.patch.object(hint._torch, "last_logged_step", return_value=WAITING) as ask:
        with torch.no_grad():
            watch.before_forward(ddp, forward)
        assert not ask.called
        watch.before_forward(ddp, forward)
        assert ask.called


def test_what_was_waited_with_other_buckets_is_not_told_of_these(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP())
    hint._waits.set(ddp, hint.Wait(0.04, 0.01, 0.06, "medians of steps 5 to 10"))
    assert "medians of steps 5 to 10" in str(ddpopt.explain(ddp).hints)
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    assert hint.wait_of(ddp) is None
    assert "medians of steps 5 to 10" not in str(ddpopt.explain(ddp).hints)
