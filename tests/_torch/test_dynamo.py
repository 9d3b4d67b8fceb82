"""Who compiles a graph, and when anew, also where a release of torch moved a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.backends.distributed as in_tree

import ddpopt.backend
from ddpopt import _torch
from ddpopt._torch import names
from ddpopt._torch.names import PrivateName
from ddpopt.errors import Reason
from tests.support.beside import Beside
from tests.support.models import MLP, batches
from tests.support.registration import uninstall


def test_without_the_in_tree_class_to_replace_training_goes_on(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning has the missing name and torch's version."""
    uninstall()
    original = in_tree.DDPOptimizer
    monkeypatch.delattr(in_tree, "DDPOptimizer")
    ddpopt.backend.install()
    lines = [record.getMessage() for record in caplog.records]
    (line,) = (line for line in lines if "DDPOptimizer, which ddpopt needs" in line)
    assert torch.__version__ in line
    monkeypatch.setattr(in_tree, "DDPOptimizer", original, raising=False)
    Beside(MLP(), ddp_options={"bucket_cap_mb": 1}).train(batches(0, [(2, 64)] * 2))
    ddpopt.backend.install()


@pytest.mark.quick("bucket_bytes_cap_list")
@pytest.mark.parametrize("name", ["bucket_bytes_cap_list", "reducer"])
def test_a_ddp_attribute_that_moved_means_unsplit(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The reason is on the cut, and in one warning."""
    read = names._read

    def without(row: PrivateName, owner: Any) -> Any:
        return getattr(owner, f"moved_{name}") if row.name == name else read(row, owner)

    monkeypatch.setattr(names, "_read", without)
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": 0.03})
    beside.train(batches(0, [(2, 64)] * 3))
    assert beside.cut.fallback is Reason.TORCH_DRIFT
    assert name in beside.cut.detail
    assert len([r for r in caplog.records if f"{name}, which" in r.getMessage()]) == 1


def test_a_guard_asks_for_checkpoints_only_where_tensors_are_saved_by_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards run at each call of compiled code, and nearly none is in a checkpoint."""
    rows_read, read = [], names._read

    def note(row: PrivateName, owner: Any) -> Any:
        rows_read.append(row)
        return read(row, owner)

    monkeypatch.setattr(names, "_read", note)
    assert _torch.checkpointed_region() is None
    assert rows_read == [names.SAVED_TENSOR_HOOKS]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.checkpointed_region() is None
    assert rows_read == [names.SAVED_TENSOR_HOOKS] * 2 + [names.CHECKPOINT_FRAME]
