"""Drift of torch: a private name that moved is a clear message, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.backends.distributed as in_tree
from torch.nn.parallel import DistributedDataParallel

import ddpopt
import ddpopt.backend
from ddpopt import _torch
from ddpopt._torch import names
from ddpopt._torch.names import ModuleName, Need, PrivateName
from ddpopt.errors import Reason, TorchDriftError
from tests.support.models import MLP, assert_equal_states, batches, train, twins
from tests.support.registration import uninstall


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
    uninstall()
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
    read = names._read

    def without(row: PrivateName, owner: Any) -> Any:
        return getattr(owner, f"moved_{name}") if row.name == name else read(row, owner)

    monkeypatch.setattr(names, "_read", without)
    ddp = _train_compiled(bucket_cap_mb=0.03)
    (plan,) = ddpopt.explain(ddp).plans
    assert plan.fallback is Reason.TORCH_DRIFT
    assert name in plan.detail
    assert len([r for r in caplog.records if f"{name}, which" in r.getMessage()]) == 1


@pytest.mark.parametrize("name", ["_has_rebuilt_buckets", "bucket_bytes_cap_list"])
def test_an_attribute_that_is_only_written_is_missed_too(one_rank: None, name: str) -> None:
    """A Reducer is replaced where DDP can be told of it, or else stays; no name is created."""
    ddp = DistributedDataParallel(MLP(1))
    before = ddp.reducer
    delattr(ddp, name)
    with pytest.raises(TorchDriftError, match=f"DistributedDataParallel.{name}, which"):
        _torch.replace_reducer(ddp, [[0], [1]], [1, 1])
    assert not hasattr(ddp, name)
    assert ddp.reducer is before


def test_a_function_of_a_module_that_moved_is_not_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is replaced in a block."""
    monkeypatch.delattr("torch.distributed.distributed_c10d._process_group_name")
    with (
        pytest.raises(TorchDriftError, match="_process_group_name"),
        _torch.making_groups_apart("mine"),
    ):
        pass
    assert not hasattr(torch.distributed.distributed_c10d, "_process_group_name")


def test_an_unknown_setting_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any other is changed."""
    moved = ModuleName("torch._dynamo.config", "moved", Need.SPLIT)
    with (
        pytest.raises(TorchDriftError, match=r"torch\._dynamo\.config\.moved"),
        names.settings({names.RECOMPILE_LIMIT: 99, moved: 1}),
    ):
        pass
    assert names.RECOMPILE_LIMIT.get() != 99


def test_a_guard_asks_for_checkpoints_only_where_tensors_are_saved_by_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards run at each call of compiled code, and nearly none is in a checkpoint."""
    asked, read = [], names._read

    def note(row: PrivateName, owner: Any) -> Any:
        asked.append(row)
        return read(row, owner)

    monkeypatch.setattr(names, "_read", note)
    assert _torch.checkpointed_region() is None
    assert asked == [names.SAVED_TENSOR_HOOKS]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.checkpointed_region() is None
    assert asked == [names.SAVED_TENSOR_HOOKS] * 2 + [names.CHECKPOINT_FRAME]
