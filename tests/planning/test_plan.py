"""Plans are data: they are saved, read and printed, and DDP forms the buckets that they have."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan
from ddpopt.errors import PlanError
from ddpopt.planning import AllreduceCost, Device, Gradient, Network, Profile, estimate, estimates
from ddpopt.planning.merging import buckets_of_caps, uniform_buckets
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, plan_buckets
from ddpopt.planning.timeline import predict
from ddpopt.steps import clock
from tests.support.beside import compiled
from tests.support.buckets import assigned_by_torch, real_buckets
from tests.support.fake_clock import FakeClock
from tests.support.models import MLP, train

MIB = 1024 * 1024


def make_plan(groups: tuple[str, ...] = ("float",)) -> BucketPlan:
    gradients = tuple(
        Gradient(
            name=f"p{k}", num_bytes=MIB + 4 * k, ready_s=k * 0.01, group=groups[k % len(groups)]
        )
        for k in range(12)
    )
    profile = Profile(gradients=gradients, backward_s=0.12, forward_s=0.06)
    return plan_buckets(profile, AllreduceCost(startup_s=1e-3, s_per_byte=1e-8), 2)


def test_a_plan_survives_being_saved(tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    again = BucketPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.hash == plan.hash
    assert again.to_json() == plan.to_json()


def test_the_hash_tells_buckets_apart_and_nothing_else() -> None:
    plan = make_plan()
    others = BucketPlan(profile=plan.profile, cost=plan.cost, world_size=2, sizes=(6, 6))
    elsewhere = BucketPlan(profile=plan.profile, cost=plan.cost, world_size=8, sizes=plan.sizes)
    assert others.hash != plan.hash
    assert elsewhere.hash == plan.hash


# ---- for another number of ranks ------------------------------------------------------------


def test_a_plan_for_other_ranks_has_the_same_buckets_and_says_what_is_extrapolated() -> None:
    """What it was extrapolated from is saved with it, and the way back is the plan."""
    plan = dataclasses.replace(make_plan(), world_size=8)
    there = plan.for_ranks(16)
    assert there.sizes == plan.sizes
    assert there.hash == plan.hash
    assert (there.world_size, there.cost) == (16, plan.cost.extrapolated(8, 16))
    assert there.extrapolation == "extrapolated from 8 ranks to 16"
    assert there.extrapolation in str(there)
    assert BucketPlan.from_json(there.to_json()) == there
    assert plan.for_ranks(8) is plan
    assert_same_up_to_rounding(there.for_ranks(8), plan)


def assert_same_up_to_rounding(first: BucketPlan, second: BucketPlan) -> None:
    costs = [dataclasses.asdict(plan.cost) for plan in (first, second)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)
    assert dataclasses.replace(first, cost=second.cost) == second


@given(st.lists(st.integers(2, 100_000), min_size=3, max_size=3))
def test_it_does_not_matter_by_which_number_of_ranks_a_plan_comes(numbers: list[int]) -> None:
    """Up to rounding."""
    first, second, third = numbers
    plan = dataclasses.replace(make_plan(), world_size=first)
    assert_same_up_to_rounding(plan.for_ranks(second).for_ranks(third), plan.for_ranks(third))


def test_a_network_gives_a_plan_its_cost_for_other_ranks() -> None:
    """By hand: 4 nodes of 8 ranks, rings of 14 steps within and 6 between; then a cost as it is."""
    links = Network(
        latency_s=1e-3,
        bytes_per_s=1e6,
        algorithm="hierarchical",
        ranks_per_node=8,
        node_latency_s=1e-5,
        node_bytes_per_s=1e9,
    )
    plan = make_plan().for_ranks(16).for_ranks(32, links)
    assert plan.cost.startup_s == pytest.approx(14 * 1e-5 + 6 * 1e-3)
    assert plan.cost.s_per_byte == pytest.approx(14 / 8 * 1e-9 + 6 / 4 * 1e-6)
    assert not plan.extrapolation
    cost = AllreduceCost(startup_s=1.0, s_per_byte=2.0)
    assert make_plan().for_ranks(2, cost).cost == cost


@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        (8, (0,), "num_ranks is 0"),
        (8, (10**400,), "num_ranks is .* below"),
        (8, (16, 1e-3), r"network is 0.001, a float"),
        (1, (2,), "of 1 rank"),
    ],
)
def test_ranks_for_which_no_cost_follows_are_refused(
    world_size: int, arguments: tuple[Any, ...], message: str
) -> None:
    plan = dataclasses.replace(make_plan(), world_size=world_size)
    with pytest.raises(ddpopt.errors.PlanError, match=message):
        plan.for_ranks(*arguments)


# ---- what is no plan --------------------------------------------------------------------------


def _changed(place: tuple[str | int, ...], value: Any) -> Callable[[Any], str]:
    """Return a function that gives a plan's text with `value` put at a place of it."""

    def change(plan: Any) -> str:
        inner = plan
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        return json.dumps(plan)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: "{", " is not JSON: Expecting"),
        (lambda plan: "[]", ": it has no 'version'"),
        (lambda plan: '{"version": 1}', ": the plan has no 'profile'"),
        (_changed(("version",), 99), ": its version is 99, and this ddpopt reads 1; plan again"),
        (_changed(("sizes",), 12), ": sizes is 12; it must be a list"),
        (_changed(("sizes",), [6, 5]), ": the sizes of .* gradients, 12; they add up to 11"),
        (_changed(("sizes",), [12.0]), r": sizes\[0\] is 12.0, a float; it must be a whole number"),
        (_changed(("sizes",), [13, -1]), r": sizes\[1\] is -1; it must be a whole number, 1 or"),
        (
            _changed(("world_size",), "2"),
            ": world_size is '2', a str; it must be a whole number",
        ),
        (_changed(("cost",), {"startup_s": 1}), ": cost has no 's_per_byte'"),
        (_changed(("cost",), 0.1), ": cost is 0.1; it must be an object"),
        (
            _changed(("cost", "startup_s"), "fast"),
            ": cost: AllreduceCost.startup_s is 'fast', a str; it must be 0 or more",
        ),
        (_changed(("cost", "startup_s"), math.nan), r": cost: .*startup_s is nan; it must be 0"),
        (_changed(("cost", "interference"), 1), ": cost: .*interference is 1; .* below 1"),
        (_changed(("cost", "other"), 1), ": cost has a key 'other'; its keys are startup_s"),
        (
            _changed(("profile", "backward_s"), 1e300),
            r": profile: .*backward_s is 1e\+300; .* below",
        ),
        (_changed(("profile", "backward_s"), 0), ": profile: .* before the last gradient"),
        (
            _changed(("profile", "source"), None),
            ": profile: Profile.source is None; it must be text",
        ),
        (_changed(("profile", "gradients"), []), ": profile: a profile has no gradients"),
        (_changed(("profile", "gradients"), {}), r": profile.gradients is \{\}; it must be a list"),
        (
            _changed(("profile", "gradients", 3), None),
            r": profile.gradients\[3\] is None; it must be an object",
        ),
        (
            _changed(("profile", "gradients", 3, "num_bytes"), "x"),
            r": profile.gradients\[3\]: Gradient.num_bytes is 'x', a str; it must be",
        ),
        (
            _changed(("profile", "gradients", 3, "num_bytes"), -4),
            r": profile.gradients\[3\]: Gradient.num_bytes is -4; it must be a whole number",
        ),
        (_changed(("profile", "gradients", 3, "name"), ["p3"]), r".*name is \['p3'\]; .* text"),
        (_changed(("profile", "gradients", 3, "name"), "p2"), ": two gradients have the same name"),
    ],
)
def test_what_is_no_plan_is_refused(
    change: Callable[[Any], str], message: str, tmp_path: Path
) -> None:
    """A file's name is in the message, before the place in it; of a text it says "the text"."""
    path = tmp_path / "plan.json"
    path.write_text(change(json.loads(make_plan().to_json())))
    with pytest.raises(ddpopt.errors.PlanError, match=f"^the text{message}"):
        BucketPlan.from_json(path.read_text())
    with pytest.raises(ddpopt.errors.PlanError, match=f"^{re.escape(str(path))}{message}"):
        BucketPlan.load(path)


def test_a_file_that_is_no_text_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ddpopt.errors.PlanError, match="is not JSON"):
        BucketPlan.load(tmp_path / "plan.json")


def test_a_plan_that_was_saved_before_fields_were_added_is_read() -> None:
    """A field with a default may be missing; an old plan's digest of its buckets may be there."""
    plan = make_plan()
    older = json.loads(plan.to_json())
    del older["cost"]["launch_s"]
    older |= {"communication": "allreduce", "hash": "0"}
    assert BucketPlan.from_json(json.dumps({**older, "hash": "0123456789abcdef"})) == plan


def test_a_plan_of_many_parameters_is_read(tmp_path: Path) -> None:
    """A plan has no limit of size or depth: here twenty thousand parameters with long names."""
    gradients = tuple(
        Gradient(name=f"layers.{k}{'.a_long_name' * 5}", num_bytes=4, ready_s=k * 1e-5)
        for k in range(20_000)
    )
    plan = BucketPlan(
        profile=Profile(gradients=gradients, backward_s=1.0),
        cost=AllreduceCost(startup_s=1e-3, s_per_byte=1e-8),
        world_size=2,
        sizes=(20_000,),
    )
    plan.save(tmp_path / "plan.json")
    assert BucketPlan.load(tmp_path / "plan.json") == plan


def _places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Return all places of a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield (key,)
        if isinstance(inner, dict | list):
            yield from ((key, *place) for place in _places(inner))


PLAN = json.loads(make_plan().to_json())
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 12, 1e308, 5e-324])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(_places(PLAN), key=str)), VALUES)
def test_a_plan_that_was_edited_is_a_plan_or_is_refused(
    place: tuple[str | int, ...], value: Any
) -> None:
    """Any value is written at any place; all that is computed from a plan is finite."""
    try:
        plan = BucketPlan.from_json(_changed(place, value)(copy.deepcopy(PLAN)))
    except ddpopt.errors.PlanError:
        return
    assert BucketPlan.from_json(plan.to_json()) == plan
    assert math.isfinite(plan.timeline().iteration_s)
    assert plan.ddp_kwargs()
    assert str(plan)


def test_the_list_of_caps_makes_the_reducer_form_these_buckets() -> None:
    """Torch's own function, fed with the caps, returns the planned buckets."""
    plan = make_plan()
    caps = [int(cap * MIB) for cap in plan.ddp_kwargs()["bucket_cap_mb_list"]]
    tensors = [torch.empty(g.num_bytes // 4, device="meta") for g in plan.profile.gradients]
    names = [g.name for g in plan.profile.gradients]
    formed = assigned_by_torch(tensors, caps, list(range(len(tensors))))
    assert [[names[index] for index in bucket] for bucket in formed] == [
        list(bucket.parameters) for bucket in plan.buckets
    ]


def test_several_dtypes_make_buckets_of_their_own_and_one_cap() -> None:
    plan = make_plan(groups=("float", "half"))
    assert {len({int(name[1:]) % 2 for name in b.parameters}) for b in plan.buckets} == {1}
    assert set(plan.ddp_kwargs()) == {"bucket_cap_mb"}


def test_the_one_cap_forms_the_best_buckets_that_one_cap_can() -> None:
    """Also where the first of these is larger than others, which a cap of its size would merge."""
    sizes_mib, groups = (30, 25, 25, 25, 1), ("float", "float", "float", "float", "half")
    gradients = tuple(
        Gradient(name=f"p{k}", num_bytes=size * MIB, ready_s=1.0 + k, group=group)
        for k, (size, group) in enumerate(zip(sizes_mib, groups, strict=True))
    )
    profile = Profile(gradients=gradients, backward_s=5.0)
    cost = AllreduceCost(startup_s=1e-4, s_per_byte=1 / (40 * MIB))
    cap = plan_buckets(profile, cost, 2).ddp_kwargs()["bucket_cap_mb"]
    formed = buckets_of_caps(profile, (int(cap * MIB),))
    best_s = min(predict(profile, sizes, cost).iteration_s for sizes in uniform_buckets(profile))
    assert predict(profile, formed, cost).iteration_s == best_s


def test_the_caps_that_a_plan_is_compared_with_are_ddps_own(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(1))
    assert (dist._DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap) == DDP_DEFAULT_CAPS


def test_plans_with_equal_hashes_give_ddp_equal_arguments() -> None:
    """With several dtypes the cost decides them, and so the number of ranks."""
    plan = make_plan(groups=("float", "half"))
    there = plan.for_ranks(1024)
    assert there.buckets == plan.buckets
    assert there.ddp_kwargs() != plan.ddp_kwargs()
    assert there.hash != plan.hash


def test_a_plan_prints_its_buckets_and_what_they_gain() -> None:
    plan = make_plan()
    text = str(plan)
    assert f"{len(plan.buckets)} buckets for 2 ranks" in text
    assert "DDP's default buckets" in text
    assert text.count("MiB") == len(plan.buckets)
    sizes = tuple(buckets_of_caps(plan.profile, DDP_DEFAULT_CAPS))
    default = dataclasses.replace(plan, sizes=sizes).timeline()
    assert plan.timeline().backward_s < default.backward_s


# ---- Made before DDP exists ---------------------------------------------------------------------

# With gradients of 97.5 KiB in all and a product of 64 x 64 x 512 in less than a millisecond.
SLOW = AllreduceCost(startup_s=1e-6, s_per_byte=5e-9)
DEVICE = Device(flops_per_s={torch.float32: 1e10}, bytes_per_s=1e10)


@pytest.mark.quick("compiled")
@pytest.mark.parametrize("call", [compiled, lambda ddp: ddp], ids=["compiled", "eager"])
def test_ddp_forms_the_planned_buckets(one_rank: None, call: Callable[..., Any]) -> None:
    """The plan gives its arguments; gradients then arrive in the order that it expects."""
    module = MLP()
    inputs = [torch.randn(512, 64)] * 3
    plan = ddpopt.plan(module, inputs[0], network=SLOW, world_size=2, backend=None)
    assert len(plan.buckets) > 1
    ddp = DistributedDataParallel(module, **plan.ddp_kwargs())
    train(ddp, inputs, call(ddp))
    names = [name for name, _ in module.named_parameters()]
    formed = [{names[index] for index in bucket} for bucket in real_buckets(ddp)]
    assert formed == [set(bucket.parameters) for bucket in plan.buckets]


class Hollow(nn.Module):
    """Its `hollow` places, of seven, are parameters without elements."""

    def __init__(self, hollow: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(0 if k in hollow else 64, 64) for k in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + (x @ part.t()).sum(dim=-1, keepdim=True)
        return x


@pytest.mark.quick("hollow0-")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "unused"])
@pytest.mark.parametrize("hollow", [(0,), (6,), (2, 3), (0, 1, 5, 6), tuple(range(7))])
def test_parameters_without_elements_are_planned(
    one_rank: None, hollow: tuple[int, ...], options: dict[str, Any]
) -> None:
    """They follow in the bucket after a full one, as the Reducer has it, and are saved too."""
    module, inputs = Hollow(hollow), [torch.randn(512, 64)] * 3
    for cost in (SLOW, dataclasses.replace(SLOW, contention=1.1)):
        plan = ddpopt.plan(module, inputs[0], network=cost, world_size=2, device=DEVICE)
        assert BucketPlan.from_json(plan.to_json()) == plan
        ddp = DistributedDataParallel(module, **plan.ddp_kwargs(), **options)
        train(ddp, inputs, ddp)
        if not options:  # else buckets follow the order of registration, and plans that of arrival
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


class Dropping(Noisy):
    """Drops a layer, as Python's and numpy's random numbers have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if random.random() < numpy.random.rand() / 2 else super().forward(x)


@pytest.mark.parametrize("call", ["plan", "plan from its graph", "estimate"])
def test_planning_draws_no_random_number(call: str) -> None:
    """Layer drop asks for torch's, Python's and numpy's while the model is traced or timed."""
    module, x = Dropping(), torch.randn(4, 8)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    if call == "estimate":
        estimate(module, x, device=DEVICE)
    else:
        device = None if call == "plan" else DEVICE
        ddpopt.plan(module, x, network=SLOW, world_size=2, backend=None, device=device)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(map(numpy.array_equal, numpy.random.get_state(), before[2]))


def test_planning_leaves_gradients_buffers_and_randomness_as_they_were(one_rank: None) -> None:
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


def test_a_ddp_module_is_planned_as_what_it_wraps(one_rank: None) -> None:
    """Also one whose Reducer takes notes of what backwards use."""
    ddp: Any = DistributedDataParallel(Noisy(), find_unused_parameters=True)
    x = torch.randn(4, 8)
    names = []
    for model in (ddp, ddp.module, torch.compile(ddp, backend="eager")):
        plan = ddpopt.plan(model, x, network=SLOW, world_size=2, backend=None, device=DEVICE)
        names.append([gradient.name for gradient in plan.profile.gradients])
        assert plan.profile.source == "estimated"  # a device's rates are given, so nothing is run
    assert names[0] == names[1] == names[2]


def test_what_a_static_graph_leaves_unused_is_planned_last(one_rank: None) -> None:
    """Without it DDP allows nothing unused: a loss that the plan does not know uses the head."""
    module = MLP(depth=2)
    module.head = nn.Linear(64, 64, bias=False)
    for static_graph, position in ((False, 0), (True, -1)):
        ddp = DistributedDataParallel(module, static_graph=static_graph)
        plan = ddpopt.plan(ddp, torch.ones(2, 64), network=SLOW, world_size=2, device=DEVICE)
        assert plan.profile.gradients[position].name == "head.weight"


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


class _Timed(MLP):
    """By `_CLOCK`, its forward takes 2 s and its backward 3 s."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _CLOCK.pass_time(2.0)
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda _: _CLOCK.pass_time(3.0))
        return output


_CLOCK = FakeClock()  # not an attribute of the model, which is copied


def test_without_a_device_times_are_scaled_to_measured_ones() -> None:
    """Each gradient keeps its part of backward, and cuts have a cost, as they are not traced."""
    x = torch.randn(64, 64)
    with (
        mock.patch.object(estimates, "measure_device", return_value=DEVICE),
        _CLOCK.replacing_time_of(clock),
    ):
        plan = ddpopt.plan(_Timed(), x, network=SLOW, world_size=2, backend=None)
    profile, estimated = plan.profile, estimate(MLP(), x, device=DEVICE)
    assert (profile.forward_s, profile.backward_s) == (2.0, 3.0)
    assert profile.source == "estimated, scaled"
    assert profile.cut_s > 0
    parts = [g.ready_s / estimated.backward_s for g in estimated.gradients]
    assert [g.ready_s / 3.0 for g in profile.gradients] == pytest.approx(parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 3}, "batch is a int"),
        ({"batch": torch.ones(2, 3)}, "cannot be traced"),
        ({"network": Network(latency_s=0, bytes_per_s=1), "world_size": 0}, "world_size is 0"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"batch": torch.ones(2, 64), "network": SLOW, "world_size": 2, **changes}
    with pytest.raises(ddpopt.errors.PlanError, match=message):
        ddpopt.plan(MLP(), device=DEVICE, **arguments)


def test_a_plan_with_a_key_twice_is_refused_by_its_name() -> None:
    """Python's parser would take the second value."""
    text = '{"world_size": 2, "world_size": 4}'
    with pytest.raises(PlanError, match="'world_size' twice"):
        BucketPlan.from_json(text)


def test_without_a_process_group_the_number_of_ranks_has_to_be_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # other tests' group lives on
    with pytest.raises(PlanError, match="world_size is None"):
        ddpopt.plan(MLP(), torch.randn(2, 64), network=SLOW, backend=None, device=DEVICE)
