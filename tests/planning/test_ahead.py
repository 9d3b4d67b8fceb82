"""`plan`: buckets for a model before DDP exists, and DDP forms exactly those."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.planning import AllreduceCost, Device, Network
from ddpopt.planning.merging import buckets_of_caps
from ddpopt.planning.plan import DDP_DEFAULT_CAPS
from tests.support.fake_ddp import real_buckets
from tests.support.models import MLP, train

# With gradients of 97.5 KiB in all and a product of 64 x 64 x 512 in less than a millisecond.
SLOW = AllreduceCost(startup_s=1e-6, s_per_byte=5e-9)
DEVICE = Device(flops_per_s={torch.float32: 1e10}, bytes_per_s=1e10)


@pytest.mark.parametrize("backend", ["ddpopt", None], ids=["compiled", "eager"])
def test_ddp_forms_the_planned_buckets(one_rank: None, backend: str | None) -> None:
    """By its own arguments, and after it has seen the order in which gradients arrive."""
    module = MLP()
    inputs = [torch.randn(512, 64)] * 3
    plan = ddpopt.plan(module, inputs[0], network=SLOW, world_size=2, backend=None)
    assert len(plan.buckets) > 1
    ddp = DistributedDataParallel(module, **plan.ddp_kwargs())
    forward = (
        torch.compile(ddp, backend=backend, options={"inner": "aot_eager"}) if backend else ddp
    )
    train(ddp, inputs, forward)
    names = [name for name, _ in module.named_parameters()]
    formed = [{names[index] for index in bucket} for bucket in real_buckets(ddp)]
    assert formed == [set(bucket.parameters) for bucket in plan.buckets]


class Noisy(nn.Module):
    """Draws random numbers, and writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(self.first(x)))


def test_planning_leaves_no_trace(one_rank: None) -> None:
    module = Noisy()
    module.first.weight.grad = torch.ones(8, 8)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    ddpopt.plan(module, torch.randn(4, 8), network=SLOW, world_size=2, backend="aot_eager")
    after_drawing = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(4, 8)
    assert torch.equal(torch.get_rng_state(), after_drawing)
    assert torch.equal(module.first.weight.grad, torch.ones(8, 8))
    assert module.first.bias.grad is None
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_model_without_memory_is_planned_from_its_graph() -> None:
    with torch.device("meta"):
        module = MLP(depth=8, width=4096)
        x = torch.empty(256, 4096)
    network = Network(latency_s=1e-5, bytes_per_s=1e9)
    plan = ddpopt.plan(module, (x,), network=network, world_size=8, device=DEVICE)
    assert plan.profile.source == "estimated"
    assert plan.world_size == 8
    assert plan.profile.num_bytes == 8 * 4 * (4096 * 4096 + 4096)
    # Each backward layer has two products; that of the input, in the first layer, is not needed.
    flops = 2 * 256 * 4096 * 4096
    assert plan.profile.backward_s == pytest.approx(15 * flops / 1e10, rel=0.1)
    sizes = tuple(buckets_of_caps(plan.profile, DDP_DEFAULT_CAPS))
    default = dataclasses.replace(plan, sizes=sizes).timeline()
    assert plan.timeline().backward_s <= default.backward_s


def test_measured_times_are_what_the_model_takes_here(one_rank: None) -> None:
    plan = ddpopt.plan(MLP(), torch.randn(64, 64), network=SLOW, world_size=2, backend=None)
    assert plan.profile.source == "estimated, scaled"
    assert plan.profile.forward_s > 0
    assert plan.profile.cut_s > 0
    assert plan.profile.gradients[-1].ready_s <= plan.profile.backward_s


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"example_inputs": 3}, "example_inputs is a int"),
        ({"example_inputs": torch.ones(2, 3)}, "cannot be traced"),
        ({"network": Network(latency_s=0, bytes_per_s=1), "world_size": 0}, "world_size is 0"),
    ],
)
def test_bad_input_is_refused(given: dict, message: str) -> None:
    arguments = {"example_inputs": torch.ones(2, 64), "network": SLOW, "world_size": 2, **given}
    with pytest.raises(ddpopt.errors.PlanError, match=message):
        ddpopt.plan(MLP(), device=DEVICE, **arguments)
