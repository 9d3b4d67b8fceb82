"""Drift of torch: a private name that moved is a clear message, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.backends.distributed as in_tree
from torch.nn.parallel import DistributedDataParallel

import ddpopt
import ddpopt.backend
from ddpopt import Fallback, _torch
from tests.support.models import MLP, assert_equal_states, batches, train, twins


def _train_compiled(**ddp_options: Any) -> DistributedDataParallel:
    eager, ddp = twins(MLP(), **ddp_options)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    inputs = batches(0, [(2, 64)] * 3)
    assert_equal_states(train(ddp, inputs, compiled), train(eager, inputs))
    return ddp


def test_without_the_in_tree_class_to_replace_training_goes_on(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The message names the missing name and torch's version."""
    ddpopt.backend.uninstall()
    original = in_tree.DDPOptimizer
    monkeypatch.delattr(in_tree, "DDPOptimizer")
    ddpopt.backend.install()
    said = [
        r.getMessage()
        for r in caplog.records
        if "DDPOptimizer, which ddpopt needs" in r.getMessage()
    ]
    assert len(said) == 1
    assert torch.__version__ in said[0]
    monkeypatch.setattr(in_tree, "DDPOptimizer", original, raising=False)
    _train_compiled(bucket_cap_mb=1)
    ddpopt.backend.install()


@pytest.mark.parametrize("name", ["bucket_bytes_cap_list", "reducer"])
def test_a_ddp_attribute_that_moved_means_unsplit(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """With the reason on the plan, and in one warning."""
    private_of = _torch._private_of

    def without(owner: Any, attribute: str) -> Any:
        return private_of(owner, f"moved_{name}" if attribute == name else attribute)

    monkeypatch.setattr(_torch, "_private_of", without)
    ddp = _train_compiled(bucket_cap_mb=0.03)
    (plan,) = ddpopt.explain(ddp).plans
    assert plan.fallback is Fallback.TORCH_DRIFT
    assert name in plan.detail
    assert len([r for r in caplog.records if f"moved_{name}" in r.getMessage()]) == 1
