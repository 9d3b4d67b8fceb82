"""`explain`: data and a table."""

from __future__ import annotations

import pytest
import torch
from models import MLP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt


def test_explain_tells_the_plans_as_data_and_as_a_table(one_rank: None) -> None:
    """For the compiled and the plain DDP module alike."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    compiled(torch.randn(2, 64))
    explanation = ddpopt.explain(compiled)
    assert explanation == ddpopt.explain(ddp)
    (plan,) = explanation.plans
    assert [bucket.num_bytes for bucket in plan.buckets] == [33280] * 3
    assert [section.completes for section in plan.sections] == [(2,), (1,), (0,)]
    text = str(explanation)
    assert "3 sections for 3 DDP buckets of 97.5 KiB" in text
    assert "layers.5.bias, layers.5.weight, layers.4.bias and 1 more" in text
    assert max(len(line) for line in text.splitlines()) < 100


def test_explain_of_a_model_that_has_not_run_says_what_may_be_wrong(one_rank: None) -> None:
    """Instead of printing nothing."""
    assert "has compiled no graph" in str(ddpopt.explain(DistributedDataParallel(MLP())))


def test_explain_of_something_else_is_an_error() -> None:
    """It names the type that it got."""
    with pytest.raises(TypeError, match="this is a Linear"):
        ddpopt.explain(nn.Linear(1, 1))
