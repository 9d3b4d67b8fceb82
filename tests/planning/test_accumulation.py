"""`rebucket`, a file's plan and the tuner change buckets only where no gradient waits.

A Reducer notes which parameters were used since its last reduction, and may hold gradients in its
buckets; a new one knows nothing of either. Loops are such as people write; each runs beside eager
DDP, step by step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan
from ddpopt.planning import rebucket
from ddpopt.planning import tuner as tuning
from ddpopt.planning.decision import Decision, Verdict
from tests.support.models import assert_equal_states, batches, state_of
from tests.support.plans import COST, plan_of
from tests.support.ranks import Ranks, error_of

WIDTH = 16


class Heads(nn.Module):
    """Two tasks: a step that trains one of them leaves the other's head unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.heads[task](x)


def _heads(ddp_options: dict[str, Any]) -> Heads:
    """A static graph has no other task: no search changes buckets if a parameter is never used."""
    module = Heads()
    module.heads[1].requires_grad_(not ddp_options.get("static_graph"))
    return module


def _plan(module: nn.Module) -> BucketPlan:
    """A plan of three buckets for `Heads`, whose second head may be frozen."""
    num_trained = sum(p.requires_grad for p in module.parameters())
    return plan_of(module, (2, 4, num_trained - 6))


class Loop:
    """A model in training: `run` is what the loop calls, `ddp` the DDP module in it.

    `number` counts its steps, and `gradients` are those that it holds on to.
    """

    def __init__(self, ddp: DistributedDataParallel, run: Any, rank: int) -> None:
        self.ddp, self.run, self.rank = ddp, run, rank
        self.optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        self.number = 0
        self.inputs = iter(batches(rank, [(8, WIDTH)] * 200))
        self.gradients: dict[str, torch.Tensor] = {}

    def backward(self, task: int = 0) -> None:
        self.run(next(self.inputs), task).square().mean().backward()

    def accumulate(self, task: int) -> None:
        with self.ddp.no_sync():
            self.backward(task)


def _with_task_heads(loop: Loop) -> None:
    """Head 0 gets gradients under no_sync alone, and head 1 in the rest of the step."""
    loop.optimizer.zero_grad()
    loop.accumulate(0)
    loop.backward(1)
    loop.optimizer.step()


def _unevenly(loop: Loop) -> None:
    """Rank 0 has no micro-batch under no_sync in every other step, rank 1 always some."""
    loop.optimizer.zero_grad()
    for _ in range(loop.rank + loop.number % 2):
        loop.accumulate(0)
    loop.backward(0)
    loop.optimizer.step()


def _locally(loop: Loop) -> None:
    """Each rank takes steps alone, and then one that is reduced."""
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.accumulate(0)
    loop.optimizer.zero_grad()
    loop.backward(0)
    loop.optimizer.step()


def _past_ddp(loop: Loop) -> None:
    """A backward of the module itself, which DDP notes and does not reduce, before the forward."""
    loop.optimizer.zero_grad()
    loop.ddp.module.heads[0](torch.ones(2, WIDTH)).sum().backward()
    loop.backward(1)
    loop.optimizer.step()


def _clipped(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.accumulate(0)
    loop.backward(0)
    nn.utils.clip_grad_norm_(loop.ddp.parameters(), 0.01)
    loop.optimizer.step()


def _skipped(loop: Loop) -> None:
    """The optimizer's step is left out at times, as by a GradScaler where gradients overflow."""
    loop.optimizer.zero_grad()
    loop.accumulate(0)
    loop.backward(0)
    if loop.number % 3:
        loop.optimizer.step()


def _never_zeroed(loop: Loop) -> None:
    loop.accumulate(0)
    loop.backward(0)
    loop.optimizer.step()


def _static(loop: Loop) -> None:
    """Every other step accumulates; a static graph's first backward cannot be under no_sync."""
    loop.optimizer.zero_grad()
    if loop.number % 2:
        loop.accumulate(0)
    loop.backward(0)
    loop.optimizer.step()


def _static_and_always_accumulating(loop: Loop) -> None:
    """All steps accumulate but the first, which a static graph cannot have under no_sync."""
    loop.optimizer.zero_grad()
    if loop.number:
        loop.accumulate(0)
    loop.backward(0)
    loop.optimizer.step()


def _held(loop: Loop) -> None:
    """Gradients are zeroed in place, and the program holds on to them once DDP has its buckets."""
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward(0)
    gradients = {name: p.grad for name, p in loop.ddp.module.named_parameters()}
    if loop.number == 1:
        loop.gradients = gradients
    for name, gradient in loop.gradients.items():
        assert gradients[name] is gradient or torch.equal(gradients[name], gradient), name
    loop.optimizer.step()


def _zeroed_late(loop: Loop) -> None:
    loss = loop.run(next(loop.inputs), 0).square().mean()
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step()


def _zeroed_early(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.accumulate(0)
    loop.backward(0)
    loop.optimizer.step()


UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True, **UNUSED}
STATIC = {"static_graph": True}
# What comes of a file's buckets: they are taken, or why they are not.
CHANGES = "change"
LIE = "gradients lie in DDP's buckets (gradient_as_bucket_view=True); call zero_"
UNREDUCED = "and has reduced none; let no backward run there"
Row = tuple[Callable[[Loop], None], dict[str, Any], str]
LOOPS: list[Row] = [
    (_with_task_heads, UNUSED, CHANGES),
    (_unevenly, UNUSED, CHANGES),
    (_locally, UNUSED, CHANGES),
    (_past_ddp, UNUSED, UNREDUCED),
    (_clipped, UNUSED, CHANGES),
    (_skipped, UNUSED, CHANGES),
    (_never_zeroed, UNUSED, CHANGES),
    (_zeroed_early, VIEWS, CHANGES),
    (_zeroed_late, UNUSED, CHANGES),
    (_zeroed_late, VIEWS, LIE),
    (_held, VIEWS, LIE),
    (_static, STATIC, CHANGES),
    (_static_and_always_accumulating, STATIC, CHANGES),
    (_static, {**STATIC, "find_unused_parameters": True}, CHANGES),
]


def _pair(rank: int, options: dict[str, Any], ddp_options: dict[str, Any]) -> tuple[Loop, Loop]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = _heads(ddp_options)
    expected = DistributedDataParallel(copy.deepcopy(module), **ddp_options)
    ddp = DistributedDataParallel(module, **ddp_options)
    run = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager", **options})
    return Loop(ddp, run, rank), Loop(expected, expected, rank)


def _step(step: Callable[[Loop], None], *loops: Loop) -> None:
    """Run a step of each loop, after which they are equal, as ranks are."""
    for loop in loops:
        step(loop)
        loop.number += 1
    assert_equal_states(*(state_of(loop.ddp.module) for loop in loops))
    for parameter in loops[0].ddp.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(gathered, parameter.detach())
        assert torch.equal(*gathered)


def _train_with_file(rank: int, folder: str, row: Row, split: str) -> tuple[str, bool]:
    step, ddp_options, _ = row
    path = f"{folder}/{rank}.json"
    _plan(_heads(ddp_options)).save(path)
    ours, eager = _pair(rank, {"buckets": path, "split": split}, ddp_options)
    for _ in range(5 if row[2] is CHANGES else 11):
        _step(step, ours, eager)
    return str(ddpopt.explain(ours.ddp)), rebucket.plan_of(ours.ddp) is not None


def _name(row: Row) -> str:
    return f"{row[0].__name__.strip('_')} {' '.join(row[1])}"


@pytest.mark.quick("with_task_heads find_unused_parameters-auto")
@pytest.mark.parametrize(
    ("row", "split"),
    [*((row, "auto") for row in LOOPS), *((row, "forward") for row in LOOPS[:2])],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
def test_a_files_buckets_come_between_accumulations_or_explain_says_why_not(
    ranks: Ranks, tmp_path: Path, row: Row, split: str
) -> None:
    """Each step is eager's, whether buckets change or not."""
    for text, is_changed in ranks.run(_train_with_file, str(tmp_path), row, split):
        assert is_changed == (row[2] is CHANGES), text
        if not is_changed:
            assert row[2] in text
            assert "(so in each of 8 steps)" in text


def _train_tuned(rank: int, row: Row, is_worse: bool) -> str:
    step, ddp_options, _ = row
    ours, eager = _pair(rank, {"buckets": "auto"}, ddp_options)
    plan = _plan(ours.ddp.module).to_json()
    decided = Decision("buckets change", plan=plan, gain=0.5, is_better=True)
    with (
        mock.patch.object(tuning, "calibrate", return_value=COST),
        mock.patch.object(tuning, "decide", return_value=decided),
        mock.patch.object(tuning, "judge", return_value=Verdict("judged", is_worse)),
    ):
        for _ in range(20):
            _step(step, ours, eager)
    assert (rebucket.plan_of(ours.ddp) is None) == is_worse
    return tuning.find_tuner(ours.ddp).outcome


@pytest.mark.quick("with_task_heads find_unused_parameters")
@pytest.mark.parametrize("row", [LOOPS[0], LOOPS[1], LOOPS[7], LOOPS[-1]], ids=_name)
def test_a_search_changes_buckets_and_takes_them_back_between_accumulations(
    ranks: Ranks, row: Row
) -> None:
    """Each step is eager's, before, between and after."""
    for outcome in ranks.run(_train_tuned, row, True):
        assert outcome == "buckets change\njudged"


# ---- rebucket -----------------------------------------------------------------------------------


def _rebucket_at(rank: int, case: str, is_compiled: bool) -> str:
    """Rebucket in the third step, and train on beside eager, whatever came of it."""
    ours, eager = _pair(rank, {}, UNUSED)
    if not is_compiled:
        ours.run = ours.ddp
    texts: list[str] = []

    def attempt(loop: Loop, at: str) -> None:
        if loop is ours and loop.number == 2 and at == case:
            plan = _plan(loop.ddp.module)
            texts.append(error_of(lambda: ddpopt.rebucket(loop.ddp, plan)))

    def step(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        attempt(loop, "at the beginning")
        loop.accumulate(0)
        attempt(loop, "in an accumulation")
        with torch.no_grad():
            loop.run(torch.ones(8, WIDTH), 1)
        attempt(loop, "in an accumulation, after an evaluation")
        loss = loop.run(next(loop.inputs), 1).square().mean()
        attempt(loop, "before the last backward")
        loss.backward()
        attempt(loop, "after backward")
        loop.optimizer.step()
        with torch.no_grad():
            loop.run(torch.ones(8, WIDTH), 1)
        attempt(loop, "after an evaluation")

    for _ in range(4):
        _step(step, ours, eager)
    (text,) = texts
    return text


WAIT = "gradients may be accumulating under no_sync; call rebucket after a backward without no_sync"
NOTED = "parameters have gradients, and DDP, which looks for unused parameters, may have noted them"


@pytest.mark.quick("at the beginning-True-nothing")
@pytest.mark.parametrize(
    ("case", "is_compiled", "text"),
    [
        ("at the beginning", True, "nothing"),
        ("at the beginning", False, "nothing"),
        ("in an accumulation", True, WAIT),
        ("in an accumulation", False, WAIT),
        ("in an accumulation, after an evaluation", True, WAIT),
        ("in an accumulation, after an evaluation", False, WAIT),
        ("before the last backward", True, WAIT),
        ("after backward", True, NOTED),
        ("after backward", False, NOTED),
        ("after an evaluation", True, NOTED),
    ],
)
def test_rebucket_refuses_on_all_ranks_where_gradients_accumulate(
    ranks: Ranks, case: str, is_compiled: bool, text: str
) -> None:
    """It refuses too where DDP may have noted gradients for a reduction to come."""
    for raised in ranks.run(_rebucket_at, case, is_compiled):
        assert text in raised


def _rebucket_with_views(rank: int) -> list[str]:
    ddp = DistributedDataParallel(Heads(), gradient_as_bucket_view=True)
    plan = _plan(ddp.module)
    (ddp(torch.ones(2, WIDTH), 0).sum() + ddp(torch.ones(2, WIDTH), 1).sum()).backward()
    texts = [error_of(lambda: ddpopt.rebucket(ddp, plan))]
    ddp.zero_grad()
    texts.append(error_of(lambda: ddpopt.rebucket(ddp, plan)))
    return texts


def test_rebucket_refuses_where_gradients_lie_in_the_buckets(ranks: Ranks) -> None:
    """It takes the plan once they are set to None."""
    for before, after in ranks.run(_rebucket_with_views):
        assert LIE in before
        assert after == "nothing"


def _rebucket_unfinished(rank: int) -> str:
    """A parameter is not used, and DDP was not told to look for it: it waits for its gradient."""
    ddp = DistributedDataParallel(Heads())
    ddp(torch.ones(2, WIDTH), 0).sum().backward()
    with pytest.raises(ddpopt.errors.PlanError) as refused:
        ddpopt.rebucket(ddp, _plan(ddp.module))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp(torch.ones(2, WIDTH), 0)
    return str(refused.value)


def test_rebucket_refuses_while_a_reduction_has_not_ended(ranks: Ranks) -> None:
    """A new Reducer would hide DDP's own error, which the next forward raises."""
    for text in ranks.run(_rebucket_unfinished):
        assert "DDP has not ended the reduction of the last backward" in text


def _rebucket_static(rank: int, is_compiled: bool) -> None:
    ours, eager = _pair(rank, {}, STATIC)
    if not is_compiled:
        ours.run = ours.ddp
    for number in range(6):
        step = _static
        if number == 3:
            ddpopt.rebucket(ours.ddp, _plan(ours.ddp.module))
            if is_compiled:
                step = _static_and_always_accumulating
            else:
                with pytest.raises(ddpopt.errors.PlanError, match="neither be under no_sync"):
                    ours.accumulate(0)
                ours.inputs = iter(batches(rank, [(8, WIDTH)] * 200)[_num_drawn(eager, rank) :])
                step = _plainly
        _step(step, ours, eager)


def _num_drawn(loop: Loop, rank: int) -> int:
    """The number of batches that a loop has had."""
    rest = list(loop.inputs)
    loop.inputs = iter(rest)
    return 200 - len(rest)


def _plainly(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.backward(0)
    loop.optimizer.step()


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_compiled", [True, False])
def test_after_rebucket_a_static_graph_that_nobody_watched_has_to_reduce_gradients_first(
    ranks: Ranks, is_compiled: bool
) -> None:
    """Under no_sync DDP would end in an internal assertion, or train on unreduced gradients.

    Of a compiled model it is known how often gradients arrive, and no_sync may come first.
    """
    ranks.run(_rebucket_static, is_compiled)


def _drop_a_local_gradient(rank: int, is_changed: bool) -> tuple[str, bool]:
    """Use a head under no_sync alone, drop its gradient, and step without it, eagerly."""
    ddp = DistributedDataParallel(Heads(), **UNUSED)
    x = torch.ones(2, WIDTH)
    with ddp.no_sync():
        ddp(x, 1).sum().backward()
    ddp.zero_grad()
    if is_changed:
        ddpopt.rebucket(ddp, _plan(ddp.module))
    error = error_of(lambda: ddp(x, 0).sum().backward())
    return error, ddp.module.heads[1].weight.grad is None


def test_after_rebucket_in_eager_training_what_no_sync_alone_used_has_no_gradient(
    ranks: Ranks,
) -> None:
    """A Reducer that noted the use raises."""
    for error, has_none in ranks.run(_drop_a_local_gradient, False):
        assert "gradient which is undefined, but still allreduced" in error
        assert has_none
    for outcome in ranks.run(_drop_a_local_gradient, True):
        assert outcome == ("nothing", True)
