"""Public functions are given what they do not take: the error names it, and what to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan, planning
from ddpopt.planning import AllreduceCost, Device, Gradient, Network, Profile, simulation
from tests.support.models import MLP
from tests.support.plans import COST, plan_of

X = torch.ones(2, 64)
HUGE = 10**5000  # which Python itself refuses to write
PLAN = plan_of(MLP(2), (1, 2, 1))
LINK = Network(latency_s=1e-6, bytes_per_s=1e9)


class _Rude:
    """It does not say what it is."""

    def __repr__(self) -> str:
        raise ArithmeticError


def _plan(**arguments: Any) -> Any:
    given = {"model": MLP(1), "batch": (X,), "network": COST, "world_size": 2}
    return ddpopt.plan(**{**given, "backend": None, **arguments})  # type: ignore[arg-type]


def _ddp() -> Any:
    options = {"inner": "eager"}
    return torch.compile(DistributedDataParallel(MLP(1)), backend="ddpopt", options=options)


# What is called, and a text of its error: the value, or what there is to do.
ANY: Any = None
CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: _plan(model=None), "model is None"),
    (lambda: _plan(model=nn.Linear), "give what DDP is to wrap"),
    (lambda: _plan(batch=None), "a NoneType; it must be a tensor"),
    (lambda: _plan(batch=5), "a int; it must be"),
    (lambda: _plan(network=None), "network is None"),
    (lambda: _plan(network="10gbit"), "'10gbit'"),
    (lambda: _plan(network=_Rude()), "a _Rude; give"),
    (lambda: _plan(world_size=0), "1 or more"),
    (lambda: _plan(world_size="2"), "'2'"),
    (lambda: _plan(world_size=2.5), "2.5"),
    (lambda: _plan(world_size=HUGE), "bits"),
    (lambda: _plan(backend=5), "give the name of a backend"),
    (lambda: _plan(device="cuda"), "planning.Device"),
    (lambda: _plan(loss_fn=5), "loss_fn is 5"),
    (lambda: _plan(model=nn.ReLU()), "nothing to reduce"),
    (lambda: planning.estimate(ANY, (X,)), "model is None"),
    (lambda: planning.estimate(MLP(1), (X,), device=torch.device("cpu")), "planning.Device"),  # type: ignore[arg-type]
    (lambda: planning.simulate(ANY, world_size=2), "give what ddpopt.plan returned"),
    (lambda: planning.simulate(PLAN, world_size=HUGE), "bits"),
    (lambda: planning.simulate(PLAN, world_size=4, network=9.5), "network is 9.5"),  # type: ignore[arg-type]
    (lambda: simulation.sweep(PLAN, [2], [0.0], LINK), "bytes_per_s is 0.0"),
    (lambda: simulation.sweep(PLAN, [2], [1e9], COST), "planning.Network"),  # type: ignore[arg-type]
    (lambda: simulation.parse_bandwidth("9" * 5000), "such as 10gbit"),
    (lambda: BucketPlan.from_json(ANY), "NoneType"),
    (lambda: BucketPlan.load(ANY), "NoneType"),
    (lambda: BucketPlan(profile=ANY, cost=COST, world_size=2, sizes=(1,)), "profile is None"),
    (
        lambda: BucketPlan(profile=PLAN.profile, cost=ANY, world_size=2, sizes=(4,)),
        "cost is None",
    ),
    (
        lambda: BucketPlan(profile=PLAN.profile, cost=COST, world_size=2, sizes="4"),  # type: ignore[arg-type]
        "sizes is '4'",
    ),
    (lambda: Profile(gradients=ANY, backward_s=1.0), "give a tuple of Gradient"),
    (lambda: Profile(gradients=(ANY,), backward_s=1.0), "give a tuple of Gradient"),
    (lambda: Gradient(name=ANY, num_bytes=4, ready_s=0.0), "must be text"),
    (lambda: Gradient(name="x" * 10_000, num_bytes=-HUGE, ready_s=0.0), "bits"),
    (lambda: AllreduceCost(startup_s=X, s_per_byte=0.0), "a Tensor"),  # type: ignore[arg-type]
    (lambda: Device(flops_per_s=1e12, bytes_per_s=1e9), "rates by dtype"),  # type: ignore[arg-type]
    (lambda: ddpopt.warmup(ANY, X), "this is a NoneType"),
    (lambda: ddpopt.warmup(MLP(1), X), "this is a MLP"),
    (lambda: ddpopt.warmup(_ddp(), None), "the batch is None"),
    (lambda: ddpopt.warmup(_ddp(), X, 3), "loss_fn is 3"),  # type: ignore[arg-type]
    (lambda: ddpopt.warmup(_ddp(), X, X), "give them as one batch"),  # type: ignore[arg-type]
    (lambda: ddpopt.verify(_ddp(), X, X), "give them as one batch"),  # type: ignore[arg-type]
    (lambda: _plan(loss_fn=X), "give them as one batch"),
    (lambda: ddpopt.warmup(_ddp(), X, silence_s=float("nan")), "silence_s is nan"),
    (lambda: ddpopt.verify(MLP(1), X), "this is a MLP"),
    (lambda: ddpopt.verify(_ddp(), X, tolerances=0.1), "tolerances is 0.1"),  # type: ignore[arg-type]
    (lambda: ddpopt.verify(_ddp(), X, tolerances={"float32": 0.1}), "'float32'"),  # type: ignore[dict-item]
    (lambda: ddpopt.verify(_ddp(), X, tolerances={torch.float32: "1"}), "is '1'"),  # type: ignore[dict-item]
    (lambda: ddpopt.rebucket(ANY, PLAN), "this is a NoneType"),
    (lambda: ddpopt.rebucket(_ddp(), ANY), "plan is None"),
    (lambda: ddpopt.rebucket(_ddp(), b"plan.json"), "b'plan.json'"),  # type: ignore[arg-type]
    (lambda: ddpopt.rebucket(_ddp(), "no such file"), "no such file"),
    (lambda: ddpopt.rebucket(_ddp(), PLAN), "plan for this very model"),
    (lambda: ddpopt.explain(MLP(1)), "this is a MLP"),
    (lambda: ddpopt.explain(_ddp(), "plan.json"), "'plan.json'"),  # type: ignore[arg-type]
    (lambda: ddpopt.metrics(ANY), "this is a NoneType"),
    (lambda: ddpopt.record(ANY).__enter__(), "this is a NoneType"),
    (lambda: ddpopt.calibrate(3), "group is 3"),  # type: ignore[arg-type]
    (lambda: ddpopt.config.patch(nothing=1).__enter__(), "its flags are"),
    (lambda: ddpopt.config.patch(split="x" * 5000).__enter__(), "its flags are"),
    (lambda: ddpopt.config.patch(buckets="x" * 5000).__enter__(), "valid values are"),
    (lambda: ddpopt.DataParallel(MLP(1), devices="cpu"), "give a list"),
]


@pytest.mark.quick("model is None0")
@pytest.mark.parametrize(("call", "text"), CALLS, ids=[text for _, text in CALLS])
def test_an_error_names_what_was_given_and_is_short(
    one_rank: None, call: Callable[[], object], text: str
) -> None:
    """The error is one of ours, or a TypeError."""
    with pytest.raises((ddpopt.DDPOptError, TypeError)) as refused:
        call()
    message = str(refused.value)
    assert text in message
    assert len(message) < 600
