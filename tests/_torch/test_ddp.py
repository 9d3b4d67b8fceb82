"""DDP and process groups where a release of torch moved a name."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import TorchDriftError
from tests.support.models import MLP


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
