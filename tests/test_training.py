"""Two ranks with different data train to eager DDP's gradients, parameters and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_equal_states, twins
from ranks import Ranks
from scenarios import SCENARIOS, train_steps

import ddpopt

ON_INDUCTOR = ("transformer", "conv and batch norm", "dynamic batch")


def _compare(rank: int, name: str, inner: str) -> dict[str, Any]:
    scenario = SCENARIOS[name]()
    eager, ddp = twins(scenario.model, **scenario.ddp_options)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": inner})
    expected = train_steps(eager, eager, scenario, rank)
    actual = train_steps(ddp, compiled, scenario, rank)
    assert_equal_states(actual, expected)
    for parameter in ddp.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter), "the ranks' parameters differ"
    plans = ddpopt.explain(ddp).plans
    return {
        "fallbacks": [plan.fallback for plan in plans],
        "num_graphs": scenario.num_graphs,
        "plans": plans,
        "ddp": _reported_buckets(ddp),
    }


def _reported_buckets(ddp: Any) -> list[list[int]] | None:
    """Return the Reducer's buckets by parameter index, None where it never rebuilds them."""
    reported = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    return [[int(i) for i in b.split()] for b in reported.split(",")] if reported else None


@pytest.mark.parametrize(
    ("name", "inner"),
    [*((name, "aot_eager") for name in SCENARIOS), *((name, "inductor") for name in ON_INDUCTOR)],
)
def test_training_equals_eager_ddp(ranks: Ranks, name: str, inner: str) -> None:
    """Losses, last gradients, parameters and buffers; split, and with the predicted buckets."""
    results = ranks.run(_compare, name, inner)
    assert results[0]["plans"] == results[1]["plans"], "ranks must cut at the same places"
    for result in results:
        assert set(result["fallbacks"]) == {None}
        assert len(result["plans"]) >= result["num_graphs"]
        planned = [[p.index for p in b.parameters] for b in result["plans"][0].buckets]
        assert result["ddp"] in (None, planned)
