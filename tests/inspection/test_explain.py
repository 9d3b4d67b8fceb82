"""`explain`: data and a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from tests.support.models import MLP
from tests.system.scenarios.rows import SCENARIOS

CAP_MB = 0.0316  # two layers fill a bucket, whether a weight or its bias comes first


def _compile(ddp: nn.Module) -> Any:
    return torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})


def test_explain_tells_the_plans_as_data_and_as_a_table(one_rank: None) -> None:
    """For the compiled and the plain DDP module alike."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    compiled = _compile(ddp)
    compiled(torch.randn(2, 64))
    explanation = ddpopt.explain(compiled)
    assert explanation == ddpopt.explain(ddp)
    (plan,) = explanation.plans
    assert [bucket.num_bytes for bucket in plan.buckets] == [33280] * 3
    assert [section.completes for section in plan.sections] == [(0,), (1,), (2,)]
    for text in (str(explanation), str(plan)):
        assert "3 backward sections for 3 DDP buckets of 97.5 KiB" in text
        assert "layers.5.weight, layers.5.bias and 2 more" in text
        assert max(len(line) for line in text.splitlines()) < 100


def test_explain_shows_ddps_own_buckets_once_it_has_formed_them(one_rank: None) -> None:
    """By parameter, and whether they are the planned ones."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    compiled = _compile(ddp)
    compiled(torch.randn(2, 64)).sum().backward()
    assert [bucket.is_as_planned for bucket in ddpopt.explain(ddp).buckets] == [None] * 3
    for _ in range(3):
        compiled(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    assert [bucket.is_as_planned for bucket in explanation.buckets] == [True] * 3
    assert [b.completed_by[-9:] for b in explanation.buckets] == [f"section {s}" for s in (0, 1, 2)]
    assert str(explanation).count("as planned") == 3


def test_explain_names_buckets_that_span_graphs(one_rank: None) -> None:
    """They are completed by the graph that runs first in forward, and no graph is cut short."""
    ddp = DistributedDataParallel(SCENARIOS["graph break"]().model, bucket_cap_mb=CAP_MB)
    compiled = _compile(ddp)
    for _ in range(4):
        compiled(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    first, second = (plan.graph for plan in explanation.plans)
    assert [bucket.graphs for bucket in explanation.buckets] == [
        (second,),
        (first, second),
        (first,),
    ]
    assert explanation.buckets[1].completed_by == f"{first} section 0"
    assert "(spans graphs)" in str(explanation)
    assert [len(plan.sections) for plan in explanation.plans] == [2, 2]
    assert all(bucket.is_as_planned for bucket in explanation.buckets)


def test_explain_shows_what_was_recorded(one_rank: None) -> None:
    """Each allreduce was launched before the next section's backward began."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    compiled = _compile(ddp)
    for _ in range(3):
        compiled(torch.randn(2, 64)).sum().backward()
    with ddpopt.record(compiled):
        compiled(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    assert [bucket.launched_after for bucket in explanation.buckets] == [1, 2, 3]
    assert "after 1 of 3" in str(explanation)


def test_explain_of_a_model_that_has_not_run_says_what_may_be_wrong(one_rank: None) -> None:
    """Instead of printing nothing."""
    assert "has compiled no graph" in str(ddpopt.explain(DistributedDataParallel(MLP())))


def test_explain_of_something_else_is_an_error() -> None:
    """It names the type that it got."""
    with pytest.raises(TypeError, match="this is a Linear"):
        ddpopt.explain(nn.Linear(1, 1))


def test_evaluation_between_steps_does_not_change_a_recompile_of_a_later_graph(
    one_rank: None,
) -> None:
    """Its plans have no parameters; those of training plans still count as used before.

    The first graph of all had to guess the order in the second, where a weight's gradient comes
    before its bias's; with this cap buckets differ by that.
    """
    ddp = DistributedDataParallel(SCENARIOS["graph break"]().model, bucket_cap_mb=0.03)
    compiled = _compile(ddp)
    for batch in (2, 3):
        compiled(torch.randn(batch, 64)).sum().backward()
        with torch.no_grad():
            compiled(torch.randn(batch, 64))
    planned = [
        [{p.index for p in bucket.parameters} for bucket in plan.buckets]
        for plan in ddpopt.explain(ddp).plans
        if plan.buckets
    ]
    assert len(planned) == 4
    assert planned[0] != planned[1] == planned[2] == planned[3]
