"""Plans are data: what they say, how they are saved, and that DDP forms what they plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_ddp import assigned_by_torch

import ddpopt
from ddpopt import AllreduceCost, BucketPlan, Gradient, Profile
from ddpopt.bucket_plan import plan_buckets

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: "{", "no plan that ddpopt saved"),
        (lambda plan: "[]", "no plan that ddpopt saved"),
        (lambda plan: json.dumps({**plan, "version": 99}), "version 99"),
        (lambda plan: json.dumps({**plan, "sizes": [6, 6]}), "plan again rather than edit"),
        (lambda plan: json.dumps({**plan, "sizes": [6, 5]}), "add up to the number of gradients"),
        (lambda plan: json.dumps({**plan, "cost": {"startup_s": 1}}), "no plan that ddpopt"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(change, message: str) -> None:
    with pytest.raises(ddpopt.PlanError, match=message):
        BucketPlan.from_json(change(json.loads(make_plan().to_json())))


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
    assert all(len({int(name[1:]) % 2 for name in b.parameters}) == 1 for b in plan.buckets)
    assert set(plan.ddp_kwargs()) == {"bucket_cap_mb"}


def test_a_plan_prints_its_buckets_and_what_they_gain() -> None:
    plan = make_plan()
    text = str(plan)
    assert f"{len(plan.buckets)} buckets for 2 ranks" in text
    assert "DDP's default buckets" in text
    assert text.count("MiB") == len(plan.buckets)
    assert plan.timeline().backward_s < plan.timeline_of_caps().backward_s
