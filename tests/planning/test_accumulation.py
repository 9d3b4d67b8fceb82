"""`rebucket` and a file's plan change buckets only where no gradient waits.

A Reducer notes which parameters were used since its last reduction, and may hold gradients in its
buckets; a new one knows nothing of either. Most loops are those of `bucket_machine.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt._torch import new_reducer
from ddpopt.errors import PlanError
from ddpopt.planning import rebucket
from tests.planning.bucket_machine import STATIC, UNUSED, VIEWS, WIDTH, Settings
from tests.support.beside import compiled
from tests.support.models import assert_equal_states, state_of
from tests.support.on_ranks import on_ranks

Loop = tuple[DistributedDataParallel, Any, torch.optim.Optimizer]  # DDP, what is called, optimizer


def _settings(ddp_options: dict[str, Any]) -> Settings:
    return Settings(ddp_options=ddp_options, source="ddp", split="auto", is_worse=False)


def _ddp(ddp_options: dict[str, Any]) -> DistributedDataParallel:
    return DistributedDataParallel(_settings(ddp_options).module(), **ddp_options)


def _plan(ddp_options: dict[str, Any]) -> ddpopt.BucketPlan:
    return _settings(ddp_options).plan(0)


def _loss(run: Any, task: int = 0) -> torch.Tensor:
    loss: torch.Tensor = run(torch.ones(8, WIDTH), task).square().mean()
    return loss


def _past_ddp(ddp: DistributedDataParallel, run: Any) -> None:
    """A backward of the module itself, which DDP notes and does not reduce, before the forward."""
    ddp.zero_grad()
    ddp.module.heads[0](torch.ones(2, WIDTH)).sum().backward()
    _loss(run, 1).backward()


def _zeroed_late(ddp: DistributedDataParallel, run: Any) -> None:
    loss = _loss(run)
    ddp.zero_grad()
    loss.backward()


def _held(ddp: DistributedDataParallel, run: Any) -> None:
    """The program may hold on to gradients that are zeroed in place."""
    ddp.zero_grad(set_to_none=False)
    _loss(run).backward()


@on_ranks(2)
@pytest.mark.quick("past_ddp")
@pytest.mark.parametrize(
    ("step", "ddp_options", "reason"),
    [
        pytest.param(_past_ddp, UNUSED, "does not go through DDP", id="past_ddp"),
        pytest.param(_zeroed_late, {**VIEWS, **UNUSED}, "zero_grad", id="zeroed_late"),
        pytest.param(_held, {**VIEWS, **UNUSED}, "zero_grad", id="held"),
    ],
)
def test_where_gradients_wait_in_each_step_buckets_stay_and_explain_says_why(
    rank: int,
    tmp_path: Path,
    step: Callable[[DistributedDataParallel, Any], None],
    ddp_options: dict[str, Any],
    reason: str,
) -> None:
    """Each step is eager's; ranks try for eight, one at a time."""
    path = tmp_path / f"{rank}.json"
    _plan(ddp_options).save(path)
    ddp, eager = _ddp(ddp_options), _ddp(ddp_options)
    run = compiled(ddp, buckets=str(path))
    for number in range(11):
        step(ddp, run)
        step(eager, eager)
        assert_equal_states(state_of(ddp), state_of(eager))
        # They first meet before the third step.
        assert ("stay as they are" in ddpopt.explain(ddp).tuning) == (number >= 9)
    assert rebucket.plan_of(ddp) is None
    assert reason in ddpopt.explain(ddp).tuning
    assert "each of 8 steps" in ddpopt.explain(ddp).tuning


@on_ranks(2)
def test_rebucket_refuses_between_an_accumulation_and_the_last_backward(rank: int) -> None:
    ddp, eager = _ddp(UNUSED), _ddp(UNUSED)
    run = compiled(ddp)
    for number in range(4):
        for model, call in ((ddp, run), (eager, eager)):
            model.zero_grad()
            with model.no_sync():
                _loss(call).backward()
            loss = _loss(call, 1)
            if number == 2 and model is ddp:
                with pytest.raises(PlanError, match="no_sync"):
                    ddpopt.rebucket(ddp, _plan(UNUSED))
            loss.backward()
        assert_equal_states(state_of(ddp), state_of(eager))


@on_ranks(2)
def test_what_is_noted_of_no_sync_outlasts_a_recompile(rank: int) -> None:
    """The forward that is compiled anew has no backward, in which DDP would reduce its notes."""
    ddp = _ddp(UNUSED)
    run = compiled(ddp)
    with ddp.no_sync():
        _loss(run).backward()
    ddp.zero_grad()
    torch._dynamo.reset()
    _loss(run)
    with pytest.raises(PlanError, match="no_sync"):
        ddpopt.rebucket(ddp, _plan(UNUSED))


@on_ranks(2)
def test_what_is_noted_of_no_sync_ends_with_its_reducer(rank: int) -> None:
    """A change that fails gives DDP its former buckets, but in a Reducer that has noted nothing."""
    ddp = _ddp(UNUSED)
    run = compiled(ddp)
    with ddp.no_sync():
        _loss(run).backward()
    _loss(run).backward()  # DDP reduces its notes
    ddp.zero_grad()
    outcomes = [MemoryError("no memory"), None]  # on the way to the plan's buckets, and back
    with (
        mock.patch.object(new_reducer.Change, "register_hook", side_effect=outcomes),
        pytest.raises(PlanError, match="no memory"),
    ):
        ddpopt.rebucket(ddp, _plan(UNUSED))
    ddpopt.rebucket(ddp, _plan(UNUSED))
    assert rebucket.plan_of(ddp)


@on_ranks(2)
def test_rebucket_refuses_while_a_reduction_has_not_ended(rank: int) -> None:
    """A new Reducer would hide DDP's own error, which the next forward raises.

    A parameter is not used, and DDP was not told to look for it: it waits for its gradient.
    """
    ddp = DistributedDataParallel(_settings(UNUSED).module())
    _loss(ddp).backward()
    with pytest.raises(PlanError, match="has not ended"):
        ddpopt.rebucket(ddp, _plan(UNUSED))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        _loss(ddp)


@on_ranks(2)
@pytest.mark.quick("True")
@pytest.mark.parametrize("is_compiled", [True, False])
def test_after_rebucket_a_static_graph_that_nobody_watched_has_to_reduce_gradients_first(
    rank: int, is_compiled: bool
) -> None:
    """Under no_sync DDP would end in an internal assertion, or train on unreduced gradients.

    Of a compiled model it is known how often gradients arrive, and no_sync may come first.
    """
    ddp, eager = _ddp(STATIC), _ddp(STATIC)
    run = compiled(ddp) if is_compiled else ddp
    for number, (model, call) in itertools.product(range(6), ((ddp, run), (eager, eager))):
        model.zero_grad()
        if number == 3 and model is ddp:
            ddpopt.rebucket(ddp, _plan(STATIC))
        if number >= 3:
            with model.no_sync():
                if number == 3 and call is ddp:
                    with pytest.raises(PlanError, match="no_sync"):
                        _loss(call)
                elif number > 3 or is_compiled:
                    _loss(call).backward()
        _loss(call).backward()
        if model is eager:
            assert_equal_states(state_of(ddp), state_of(eager))


@on_ranks(2)
@pytest.mark.parametrize("is_changed", [False, True])
def test_after_rebucket_in_eager_training_what_no_sync_alone_used_has_no_gradient(
    rank: int, is_changed: bool
) -> None:
    """A head is used under no_sync alone, its gradient dropped. A Reducer that noted it raises."""
    ddp = _ddp(UNUSED)
    with ddp.no_sync():
        _loss(ddp, 1).backward()
    ddp.zero_grad()
    if is_changed:
        ddpopt.rebucket(ddp, _plan(UNUSED))
        _loss(ddp).backward()
    else:
        with pytest.raises(RuntimeError, match="undefined, but still allreduced"):
            _loss(ddp).backward()
    assert ddp.module.heads[1].weight.grad is None
