"""A module may be compiled, or wrapped for checkpointing, before DDP, on one rank and not another.

Its parameters have other names there, and are the same: torch's Reducer goes by their numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan, _torch
from ddpopt.planning import tuner
from ddpopt.planning.decision import Decision
from tests.support.buckets import real_buckets
from tests.support.models import MLP, WIDTH, batches, train
from tests.support.plans import COST, plan_of
from tests.support.ranks import Ranks

OPTIONS = {"inner": "aot_eager"}
CAP = {"bucket_cap_mb": 0.02}
DEPTH = 3
SIZES = (1, 3, 2)  # of buckets that DDP does not make of the model
RAW = "_orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.bias"


def _wrapped(**options: Any) -> nn.Module:
    """An MLP of which a layer is compiled, and checkpointed, and which is compiled itself."""
    model = MLP(DEPTH)
    compiled: Any = torch.compile(model.layers[0], backend="ddpopt", options=OPTIONS)
    model.layers[0] = checkpoint_wrapper(compiled)
    return torch.compile(model, backend="ddpopt", options={**OPTIONS, **options})  # type: ignore[return-value]


def _on(rank: int, **options: Any) -> tuple[Any, Any]:
    """What to call, and its DDP module: compiled before DDP on rank 1, and after it on rank 0."""
    if rank == 1:
        ddp = DistributedDataParallel(_wrapped(**options), **CAP)
        return ddp, ddp
    ddp = DistributedDataParallel(MLP(DEPTH), **CAP)
    return torch.compile(ddp, backend="ddpopt", options={**OPTIONS, **options}), ddp


def test_a_parameter_has_one_name_whatever_is_wrapped_around_it(one_rank: None) -> None:
    ddp = DistributedDataParallel(_wrapped())
    assert RAW in _torch.names_now(ddp).values()
    expected = [name for name, _ in MLP(DEPTH).named_parameters()]
    assert [p.name for p in _torch.reducer_parameters(ddp).values()] == expected


def test_parameters_whose_names_would_become_equal_keep_theirs() -> None:
    raw = ["a.weight", "a._orig_mod.weight", "b._orig_mod.weight"]
    assert _torch.plain_names(raw) == {raw[0]: raw[0], raw[1]: raw[1], raw[2]: "b.weight"}


def _check_alike(rank: int) -> None:
    model, ddp = _on(rank)
    x = batches(rank, [(4, WIDTH)])[0]
    with ddpopt.config.patch(disagreement="error"):
        ddpopt.warmup(model, x)
    verified = ddpopt.verify(model, x)
    assert verified.passed, verified
    assert "layers.0.bias" in verified.gradients
    train(ddp, [x] * 2, model)


def test_warmup_and_verify_find_ranks_alike(ranks: Ranks) -> None:
    ranks.run(_check_alike)


def _take_plans(rank: int, folder: str) -> None:
    """Plans of the module as it is, as an older release wrote them of a wrapped one, and a file."""
    model, ddp = _on(rank)
    inputs = batches(rank, [(4, WIDTH)] * 3)
    train(ddp, inputs, model)
    plain = plan_of(MLP(DEPTH), SIZES)
    raw = plan_of(_wrapped(), SIZES)
    other = dataclasses.replace(plain, sizes=(3, 3))
    estimated = ddpopt.planning.estimate(_wrapped(), (inputs[0],))
    assert {g.name for g in estimated.gradients} == {g.name for g in plain.profile.gradients}
    for plan in (raw if rank else plain, other, raw):
        ddp.zero_grad()
        ddpopt.rebucket(ddp, plan)
        assert [len(bucket) for bucket in real_buckets(ddp)] == list(plan.sizes)
        train(ddp, inputs, model)
    path = f"{folder}/{rank}.json"
    plain.save(path)
    model, ddp = _on(rank, buckets=path)
    train(ddp, inputs, model)
    train(ddp, inputs, model)
    assert [len(bucket) for bucket in real_buckets(ddp)] == list(SIZES)


@pytest.mark.slow
def test_a_plan_fits_a_module_that_is_wrapped_on_some_ranks(ranks: Ranks, tmp_path: Any) -> None:
    ranks.run(_take_plans, str(tmp_path))


def _search(rank: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        plan: BucketPlan = plan_of(MLP(DEPTH), SIZES)
        patch.setattr(tuner, "decide", lambda *_: Decision("taken", plan.to_json(), 0.5, True))
        patch.setattr(tuner, "calibrate", lambda *_: COST)
        model, ddp = _on(rank, buckets="auto")
        train(ddp, batches(rank, [(4, WIDTH)] * 10), model)
    assert [len(bucket) for bucket in real_buckets(ddp)] == list(SIZES)
    return str(ddpopt.explain(ddp))


def test_a_search_meets_on_ranks_that_differ_in_it(ranks: Ranks) -> None:
    for text in ranks.run(_search):
        assert "taken" in text
