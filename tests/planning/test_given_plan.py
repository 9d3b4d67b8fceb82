"""`buckets="plan.json"`: two ranks get exactly those buckets from the third step, or an error.

The tuner reads the file, and `rebucket` changes the buckets.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan
from ddpopt.errors import PlanError, Reason
from ddpopt.inspection.explanation import Explanation
from ddpopt.planning import AllreduceCost
from tests.support.beside import Beside, compiled
from tests.support.buckets import real_buckets
from tests.support.logs import logged
from tests.support.models import MLP, batches, train
from tests.support.on_ranks import on_ranks
from tests.support.plans import SIZES_OF_MLP, plan_of
from tests.support.ranks import Ranks

NUM_STEPS = 5


def _save(tmp_path: Path, rank: int, sizes: Sequence[int] = SIZES_OF_MLP) -> str:
    """A plan for `MLP()` in a file of this rank's; its path."""
    path = tmp_path / f"{rank}.json"
    plan_of(MLP(), sizes).save(path)
    return str(path)


def _graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@on_ranks(2)
@pytest.mark.quick("auto-{}")
@pytest.mark.parametrize("ddp_options", [{}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_training_goes_on_with_the_files_buckets_and_nothing_is_compiled_twice(
    rank: int, tmp_path: Path, split: str, ddp_options: dict[str, Any]
) -> None:
    """Graphs are cut for the file's buckets before DDP has them, in the third step."""
    path = _save(tmp_path, rank)
    torch._dynamo.utils.counters.clear()
    beside = Beside(MLP(), ddp_options=ddp_options, split=split, buckets=path)
    beside.train(batches(rank, [(4, 64)] * NUM_STEPS))
    assert _graphs_compiled() == 1
    assert beside.num_sections == len(SIZES_OF_MLP)
    explained = ddpopt.explain(beside.ddp)
    assert [bucket.is_as_planned for bucket in explained.buckets] == [True] * len(SIZES_OF_MLP)
    assert explained.tuning == f"buckets are those of {path}"
    plan = BucketPlan.load(path)
    assert explained.bucket_plan == plan
    assert [set(bucket.actual) for bucket in explained.buckets] == [
        set(bucket.parameters) for bucket in plan.buckets
    ]


def _train_with_plan_for_others(rank: int, plan: BucketPlan, path: Path) -> list[Explanation]:
    """Train with a file's buckets, and then with those that the same plan gives by `rebucket`."""
    plan.save(path)
    ddp = DistributedDataParallel(MLP())
    run = compiled(ddp, buckets=str(path))
    train(ddp, batches(rank, [(4, 64)] * NUM_STEPS), run)
    explained = [ddpopt.explain(ddp)]
    ddp.zero_grad()
    with logged("info") as lines:
        ddpopt.rebucket(ddp, plan)
    assert any("buckets are those of a plan" in line for line in lines) == (rank == 0)
    train(ddp, batches(rank, [(4, 64)] * NUM_STEPS), run)
    assert len(real_buckets(ddp)) == len(SIZES_OF_MLP)
    explained.append(ddpopt.explain(ddp))
    for_two = ddpopt.explain(ddp, plan.for_ranks(2, plan.cost))
    assert for_two.predicted == plan.timeline()
    assert "extrapolated" not in for_two.basis
    return [*explained, ddpopt.explain(ddp, plan)]


@on_ranks(2)
def test_a_plan_for_eight_ranks_is_applied_on_two_and_predicts_for_two(
    rank: int, tmp_path: Path
) -> None:
    """Buckets are those of the plan; what is predicted is said to be extrapolated."""
    plan = dataclasses.replace(plan_of(MLP(), SIZES_OF_MLP), world_size=8)
    explained = _train_with_plan_for_others(rank, plan, tmp_path / f"{rank}.json")
    assert "from 8 ranks to 2" in explained[0].tuning
    for explanation in explained:
        assert explanation.predicted == plan.for_ranks(2).timeline()
        assert "from 8 ranks to 2" in explanation.basis
        assert explanation.bucket_plan == plan.for_ranks(2)


@on_ranks(2)
@pytest.mark.slow
def test_a_plan_for_one_rank_is_applied_on_two_and_predicts_nothing(
    rank: int, tmp_path: Path
) -> None:
    """From the cost of one rank, which sends nothing, none follows for two."""
    plan = dataclasses.replace(plan_of(MLP(), SIZES_OF_MLP), world_size=1)
    explained = _train_with_plan_for_others(rank, plan, tmp_path / f"{rank}.json")
    assert "nothing is predicted for 2 ranks" in explained[0].tuning
    for explanation in explained:
        assert explanation.predicted is None
        assert explanation.bucket_plan == plan
        assert "predicted: nothing" in str(explanation)


def _give_arguments(rank: int, text: str) -> list[dict[str, Any]]:
    plan = BucketPlan.from_json(text)
    return [plan.ddp_kwargs(), plan.for_ranks(2).ddp_kwargs()]


def test_ddps_arguments_are_the_plans_on_every_rank_and_before_there_are_ranks(
    ranks: Ranks,
) -> None:
    """With two dtypes the cost decides them; it is that of the plan's ranks, whoever asks."""
    plan = plan_of(MLP(), SIZES_OF_MLP)
    gradients = []
    for index, gradient in enumerate(plan.profile.gradients):
        gradients.append(dataclasses.replace(gradient, group=("float", "half")[index % 2]))
    profile = dataclasses.replace(plan.profile, gradients=tuple(gradients), backward_s=0.011)
    cost = AllreduceCost(startup_s=0.1, s_per_byte=1e-7)
    text = dataclasses.replace(plan, profile=profile, cost=cost, world_size=1024).to_json()
    expected = _give_arguments(0, text)
    assert expected[0] != expected[1]
    assert ranks.run(_give_arguments, text) == [expected] * 2


@on_ranks(2)
@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_a_plan_of_one_bucket_is_not_answered_with_advice_to_have_more(
    rank: int, tmp_path: Path, split: str
) -> None:
    beside = Beside(MLP(), split=split, buckets=_save(tmp_path, rank, (12,)))
    beside.train(batches(rank, [(4, 64)] * NUM_STEPS))
    assert [bucket.is_as_planned for bucket in ddpopt.explain(beside.ddp).buckets] == [True]
    assert beside.cuts[-1].fallback is Reason.ONE_PLANNED_BUCKET


@on_ranks(2)
def test_a_plan_is_used_where_steps_cannot_be_measured(rank: int, tmp_path: Path) -> None:
    """`buckets="auto"` cannot measure two forwards to a backward, and advises a plan there."""
    ddp = DistributedDataParallel(MLP())
    run = compiled(ddp, buckets=_save(tmp_path, rank))
    for x in batches(rank, [(4, 64)] * NUM_STEPS):
        (run(x).sum() + run(x + 1).sum()).backward()
    assert len(real_buckets(ddp)) == len(SIZES_OF_MLP)
    assert ddpopt.explain(ddp).tuning.startswith("buckets are those of")


@on_ranks(2)
def test_a_warmup_compiles_for_the_files_buckets(rank: int, tmp_path: Path) -> None:
    """So training compiles nothing, in DDP's buckets or in the file's."""
    ddp = DistributedDataParallel(MLP())
    run = compiled(ddp, buckets=_save(tmp_path, rank))
    inputs = batches(rank, [(4, 64)] * NUM_STEPS)
    ddpopt.warmup(run, inputs[0])
    torch._dynamo.utils.counters.clear()
    train(ddp, inputs, run)
    assert len(real_buckets(ddp)) == len(SIZES_OF_MLP)
    assert _graphs_compiled() == 0


@on_ranks(2)
def test_files_that_differ_are_an_error_on_all_ranks(rank: int, tmp_path: Path) -> None:
    ddp = DistributedDataParallel(MLP())
    run = compiled(ddp, buckets=_save(tmp_path, rank, [(12,), SIZES_OF_MLP][rank]))
    with pytest.raises(PlanError, match="rank 1 differs from rank 0"):
        train(ddp, batches(rank, [(4, 64)] * NUM_STEPS), run)


def _compile(ddp: DistributedDataParallel, buckets: Any) -> None:
    compiled(ddp, buckets=buckets)(torch.ones(4, 64)).sum().backward()


@pytest.mark.quick("missing")
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_text("{}"), "plan.json: .*'version'"),
        (plan_of(MLP(width=32), (2, 10)).save, "bytes, and .* in the plan; plan"),
        (plan_of(MLP(depth=2), (4,)).save, "8 parameters are not in the plan"),
    ],
    ids=["missing", "no plan", "other sizes", "other model"],
)
def test_a_file_that_cannot_be_used_is_an_error_when_it_is_asked_for(
    one_rank: None, tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "plan.json"
    write(path)
    for _ in range(2):  # an error in the first forward, and again in the next
        with pytest.raises(BackendCompilerFailed, match=f"PlanError: .*{message}"):
            _compile(DistributedDataParallel(MLP()), path)


@pytest.mark.quick("plan.txt")
@pytest.mark.parametrize("buckets", ["plan.txt", "best", "", 3])
def test_what_is_neither_a_choice_nor_a_file_is_refused(one_rank: None, buckets: Any) -> None:
    with pytest.raises(
        BackendCompilerFailed, match=r"valid values are \['ddp', 'auto', '\*.json'\]"
    ):
        _compile(DistributedDataParallel(MLP()), buckets)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("buckets", ["auto", "plan.json"])
def test_a_request_that_cannot_be_met_is_warned_of_once(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, buckets: str
) -> None:
    """A comm hook that keeps errors by bucket keeps its buckets, whatever `buckets` asks for."""
    if buckets != "auto":
        buckets = _save(tmp_path, 0)
    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            _compile(ddp, buckets)
    lines = [r for r in caplog.records if "changes nothing" in r.getMessage()]
    assert [line.levelname for line in lines] == ["WARNING"]
    assert "its comm hook" in lines[0].getMessage()
    assert "its comm hook" in ddpopt.explain(ddp).tuning
