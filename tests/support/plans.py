"""Bucket plans for a module that nobody has measured: with gradients that arrive in turn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ddpopt import BucketPlan
from ddpopt.planning import AllreduceCost, Gradient, Profile

COST = AllreduceCost(startup_s=1e-4, s_per_byte=1e-9)
SIZES_OF_MLP = (1, 4, 5, 2)  # buckets of `MLP()`, whose twelve parameters have no such caps


def plan_of(module: nn.Module, sizes: Sequence[int]) -> BucketPlan:
    """A plan for two ranks with buckets of these many parameters, last registered first.

    That is the order in which backward makes the gradients of layers that are called as they are
    registered. One is ready each millisecond. Frozen parameters are left out, as DDP does.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    gradients = tuple(
        Gradient(name=name, num_bytes=p.numel() * p.element_size(), ready_s=place * 1e-3)
        for place, (name, p) in enumerate(reversed(trained))
    )
    profile = Profile(gradients=gradients, backward_s=1.0)
    return BucketPlan(profile=profile, cost=COST, world_size=2, sizes=tuple(sizes))
