"""`buckets="plan.json"`: two ranks get exactly those buckets from the third step, or an error.

The tuner reads the file, and `rebucket` changes the buckets.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan
from ddpopt.errors import Reason
from ddpopt.planning import AllreduceCost
from tests.support.buckets import real_buckets
from tests.support.logs import logged
from tests.support.models import MLP, assert_equal_states, batches, train
from tests.support.plans import SIZES_OF_MLP, plan_of
from tests.support.ranks import Ranks

NUM_STEPS = 5


@pytest.fixture
def plan_path(tmp_path: Path) -> str:
    """The path of a plan for `MLP()`."""
    path = tmp_path / "plan.json"
    plan_of(MLP(), SIZES_OF_MLP).save(path)
    return str(path)


def _train(rank: int, path: str, split: str, ddp_options: dict[str, Any]) -> dict[str, Any]:
    """Train beside eager DDP, step by step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    module = MLP()
    expected = DistributedDataParallel(copy.deepcopy(module), **ddp_options)
    ddp = DistributedDataParallel(module, **ddp_options)
    options = {"inner": "aot_eager", "split": split, "buckets": path}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    for x in batches(rank, [(4, 64)] * NUM_STEPS):
        assert_equal_states(train(ddp, [x], compiled), train(expected, [x]))
    names = [name for name, _ in module.named_parameters()]
    explained = ddpopt.explain(ddp)
    return {
        "buckets": [{names[i] for i in bucket} for bucket in real_buckets(ddp)],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "as_planned": [b.is_as_planned for b in explained.buckets],
        "sections": len(explained.cuts[-1].sections),
        "fallback": explained.cuts[-1].fallback,
        "tuning": explained.tuning,
        "hash": explained.bucket_plan.hash if explained.bucket_plan else None,
    }


@pytest.mark.quick("auto-{}")
@pytest.mark.parametrize("ddp_options", [{}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_training_goes_on_with_the_files_buckets_and_nothing_is_compiled_twice(
    ranks: Ranks, plan_path: str, split: str, ddp_options: dict[str, Any]
) -> None:
    """Graphs are cut for the file's buckets before DDP has them, in the third step."""
    plan = BucketPlan.load(plan_path)
    for result in ranks.run(_train, plan_path, split, ddp_options):
        assert result["buckets"] == [set(bucket.parameters) for bucket in plan.buckets]
        assert result["graphs"] == 1
        assert result["as_planned"] == [True] * len(SIZES_OF_MLP)
        assert result["sections"] == len(SIZES_OF_MLP)
        assert result["tuning"] == f"buckets are those of {plan_path}"
        assert result["hash"] == plan.hash


def _train_with_plan_for_others(rank: int, text: str, folder: str) -> dict[str, Any]:
    """Train with a file's buckets, then give the same plan to `rebucket`."""
    path = f"{folder}/{rank}.json"
    plan = BucketPlan.from_json(text)
    plan.save(path)
    ddp = DistributedDataParallel(MLP())
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager", "buckets": path})
    train(ddp, batches(rank, [(4, 64)] * NUM_STEPS), compiled)
    by_file = ddpopt.explain(ddp)
    ddp.zero_grad()
    with logged("info") as lines:
        ddpopt.rebucket(ddp, plan)
    train(ddp, batches(rank, [(4, 64)] * NUM_STEPS), compiled)
    return {
        "buckets": len(real_buckets(ddp)),
        "logged": [line for line in lines if "buckets are those of a plan" in line],
        "tuning": by_file.tuning,
        "explained": [by_file, ddpopt.explain(ddp)],
        "with plan": ddpopt.explain(ddp, plan),
        "for two": ddpopt.explain(ddp, plan.for_ranks(2, plan.cost)),
    }


def test_a_plan_for_eight_ranks_is_applied_on_two_and_predicts_for_two(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Buckets are those of the plan; what is predicted is said to be extrapolated."""
    plan = dataclasses.replace(plan_of(MLP(), SIZES_OF_MLP), world_size=8)
    results = ranks.run(_train_with_plan_for_others, plan.to_json(), str(tmp_path))
    assert [len(result["logged"]) for result in results] == [1, 0]
    assert "extrapolated from 8 ranks to 2" in results[0]["logged"][0]
    for result in results:
        assert result["buckets"] == len(SIZES_OF_MLP)
        assert "extrapolated from 8 ranks to 2" in result["tuning"]
        for explanation in (*result["explained"], result["with plan"]):
            assert explanation.predicted == plan.for_ranks(2).timeline()
            assert "extrapolated from 8 ranks to 2" in explanation.basis
            assert explanation.bucket_plan == plan.for_ranks(2)
        assert result["for two"].predicted == plan.timeline()
        assert "extrapolated" not in result["for two"].basis


def test_a_plan_for_one_rank_is_applied_on_two_and_predicts_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    """From the cost of one rank, which sends nothing, none follows for two."""
    plan = dataclasses.replace(plan_of(MLP(), SIZES_OF_MLP), world_size=1)
    for result in ranks.run(_train_with_plan_for_others, plan.to_json(), str(tmp_path)):
        assert result["buckets"] == len(SIZES_OF_MLP)
        assert "nothing is predicted for 2 ranks" in result["tuning"]
        for explanation in result["explained"]:
            assert explanation.predicted is None
            assert explanation.bucket_plan == plan
            assert "predicted: nothing; the cost is that of 1 rank" in str(explanation)
        assert result["for two"].predicted == plan.timeline()


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


def test_a_plan_of_one_bucket_is_not_answered_with_advice_to_have_more(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan_of(MLP(), (12,)).save(path)
    for split in ("auto", "forward"):
        for result in ranks.run(_train, str(path), split, {}):
            assert result["as_planned"] == [True]
            assert result["fallback"] is Reason.ONE_PLANNED_BUCKET


def _train_with_two_forwards(rank: int, path: str) -> dict[str, Any]:
    ddp = DistributedDataParallel(MLP())
    options = {"inner": "aot_eager", "buckets": path}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    for x in batches(rank, [(4, 64)] * NUM_STEPS):
        (compiled(x).sum() + compiled(x + 1).sum()).backward()
    explained = ddpopt.explain(ddp)
    return {"num_buckets": len(real_buckets(ddp)), "tuning": explained.tuning}


def test_a_plan_is_used_where_steps_cannot_be_measured(ranks: Ranks, plan_path: str) -> None:
    """`buckets="auto"` cannot measure two forwards to a backward, and advises a plan there."""
    expected = {
        "num_buckets": len(SIZES_OF_MLP),
        "tuning": f"buckets are those of {plan_path}",
    }
    for result in ranks.run(_train_with_two_forwards, plan_path):
        assert result == expected


def _train_after_warmup(rank: int, path: str) -> dict[str, Any]:
    """Warm up, and count what is compiled after that."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP())
    options = {"inner": "aot_eager", "buckets": path}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    inputs = batches(rank, [(4, 64)] * NUM_STEPS)
    ddpopt.warmup(compiled, inputs[0])
    torch._dynamo.utils.counters.clear()
    train(ddp, inputs, compiled)
    return {
        "num_buckets": len(real_buckets(ddp)),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def test_a_warmup_compiles_for_the_files_buckets(ranks: Ranks, plan_path: str) -> None:
    """So training compiles nothing, in DDP's buckets or in the file's."""
    for result in ranks.run(_train_after_warmup, plan_path):
        assert result == {"num_buckets": len(SIZES_OF_MLP), "graphs": 0}


def _train_with_file_of_rank(rank: int, folder: str) -> str:
    with pytest.raises(ddpopt.errors.PlanError) as refused:
        _train(rank, f"{folder}/{rank}.json", "auto", {})
    return str(refused.value)


def test_files_that_differ_are_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    plan_of(MLP(), SIZES_OF_MLP).save(tmp_path / "0.json")
    plan_of(MLP(), (12,)).save(tmp_path / "1.json")
    for text in ranks.run(_train_with_file_of_rank, str(tmp_path)):
        assert "rank 1 differs from rank 0: the plan is " in text


def _compile(ddp: DistributedDataParallel, buckets: Any) -> None:
    options = {"inner": "aot_eager", "buckets": buckets}
    torch.compile(ddp, backend="ddpopt", options=options)(torch.ones(4, 64)).sum().backward()


@pytest.mark.quick("missing")
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.write_text("{}"), "plan.json: it has no 'version'"),
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
    one_rank: None, plan_path: str, caplog: pytest.LogCaptureFixture, buckets: str
) -> None:
    """A comm hook that keeps errors by bucket keeps its buckets, whatever `buckets` asks for."""
    if buckets != "auto":
        buckets = plan_path
    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            _compile(ddp, buckets)
    lines = [r for r in caplog.records if "changes nothing" in r.getMessage()]
    assert [line.levelname for line in lines] == ["WARNING"]
    assert "its comm hook" in lines[0].getMessage()
    assert "its comm hook" in ddpopt.explain(ddp).tuning
