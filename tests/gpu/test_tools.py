"""What users call beside `torch.compile`: record, verify, warmup, calibrate, plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from tests.gpu.conftest import Run
from tests.support.buckets import real_buckets
from tests.support.models import MLP, batches

_WIDTH = 64
_CAP_MB = 0.03
_SETTLED = 4  # steps, after which DDP tells its buckets
_TUNING_STEPS = 12


def _model(device: str, inner: str, **options: Any) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(MLP(bias=False).to(device), bucket_cap_mb=_CAP_MB)
    given = {"inner": inner, "split": "backward", **options}
    return ddp, torch.compile(ddp, backend="ddpopt", options=given)


def _train(rank: int, model: nn.Module, num_steps: int) -> None:
    for x in batches(rank, [(8, _WIDTH)] * num_steps):
        model(x).pow(2).mean().backward()


def _record(rank: int, device: str, inner: str) -> str:
    """The events of each recorded step, and those of each of its buckets, are in order."""
    ddp, model = _model(device, inner)
    _train(rank, model, _SETTLED)
    with ddpopt.record(model) as recording:
        _train(rank, model, 3)
    for step in recording.steps:
        times = [step.forward_start_s, step.forward_stop_s, step.backward_stop_s]
        assert times == sorted(times), times
        assert [bucket.index for bucket in step.buckets] == list(range(len(step.buckets)))
        for bucket in step.buckets:
            finished_s = bucket.launched_s if bucket.finished_s is None else bucket.finished_s
            assert bucket.ready_s <= bucket.launched_s <= finished_s <= step.backward_stop_s
    assert len(recording.steps) == 3
    assert len(recording.steps[0].buckets) > 1
    assert "as planned" in str(ddpopt.explain(ddp))
    notes = f"; notes: {' '.join(recording.notes)}" if recording.notes else ""
    return f"{len(recording.steps)} steps of {len(recording.steps[0].buckets)} buckets{notes}"


def _verify(rank: int, device: str, inner: str) -> str:
    """The verdict is that compiled steps equal eager's."""
    _, model = _model(device, inner)
    (x,) = batches(rank, [(8, _WIDTH)])
    result = ddpopt.verify(model, x)
    assert result.passed, str(result)
    return str(result)


def _warmup(rank: int, device: str, inner: str) -> str:
    """A warmup changes no weights, and the steps that follow compile nothing."""
    ddp, model = _model(device, inner)
    before = [p.detach().clone() for p in ddp.parameters()]
    (x,) = batches(rank, [(8, _WIDTH)])
    ddpopt.warmup(model, x)
    assert all(map(torch.equal, before, ddp.parameters()))
    with torch.compiler.set_stance("fail_on_recompile"):
        _train(rank, model, 3)
    return f"{len(ddpopt.explain(ddp).cuts[0].sections)} sections, no compile after it"


def _calibrate(_rank: int, device: str, _inner: str) -> str:
    """An allreduce of tensors on the device costs something."""
    cost = ddpopt.calibrate(device=device)
    assert cost.startup_s > 0
    assert cost.s_per_byte > 0
    return str(cost)


def _auto(rank: int, device: str, inner: str) -> str:
    """The tuner decides, and training goes on."""
    ddp, model = _model(device, inner, buckets="auto")
    _train(rank, model, _TUNING_STEPS)
    decision = ddpopt.explain(ddp).tuning
    assert decision, "the tuner did not decide"
    return decision


def _plan(rank: int, device: str, _inner: str) -> str:
    """A plan is made from the model on the device, and its buckets are DDP's."""
    model = MLP(bias=False).to(device)
    (x,) = batches(rank, [(8, _WIDTH)])
    network = ddpopt.planning.AllreduceCost(startup_s=1e-5, s_per_byte=1e-8)
    shared = [ddpopt.plan(model, x, network=network, world_size=8, backend=None).to_json()]
    dist.broadcast_object_list(shared)  # each rank has measured its own times
    plan = ddpopt.BucketPlan.from_json(shared[0])
    ddp = DistributedDataParallel(model, **plan.ddp_kwargs())
    for _ in range(3):
        ddp(x).pow(2).mean().backward()
    names = [name for name, _ in model.named_parameters()]
    formed = [{names[index] for index in bucket} for bucket in real_buckets(ddp)]
    assert formed == [set(bucket.parameters) for bucket in plan.buckets]
    assert len(formed) > 1
    rates = ddpopt.planning.measure_device(device)
    return f"{len(plan.buckets)} buckets; {rates}"


_TOOLS = {
    "record": _record,
    "verify": _verify,
    "warmup": _warmup,
    "plan": _plan,
    "calibrate": _calibrate,
    "buckets='auto'": _auto,
}
_BETWEEN_RANKS = ("calibrate", "buckets='auto'")


def _run_tool(rank: int, name: str, device: str, inner: str) -> str:
    if dist.get_world_size() == 1 and name in _BETWEEN_RANKS:
        pytest.skip("one rank has nobody to communicate with")
    return _TOOLS[name](rank, device, inner)


@pytest.mark.parametrize("name", _TOOLS)
def test_tools_work_on_the_device(
    run_on_ranks: Run, device: str, inner_backend: str, name: str, record_property: Any
) -> None:
    """The functions above say what is asserted of each tool."""
    said = run_on_ranks(_run_tool, name, device, inner_backend)
    record_property("said", said[0])
