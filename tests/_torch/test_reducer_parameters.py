"""The parameters and hooks of a DDP module's Reducer, as `_torch` reads them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch


def test_reducer_parameters_leave_out_what_ddp_leaves_out(one_rank: None) -> None:
    """Frozen and ignored parameters are not reduced, a shared one counts once, sparse is marked."""
    model = nn.ModuleDict(
        {
            "first": nn.Linear(4, 4),
            "tied": nn.Linear(4, 4),
            "frozen": nn.Linear(4, 4),
            "ignored": nn.Linear(4, 4),
            "table": nn.Embedding(4, 4, sparse=True),
        }
    )
    model["tied"].weight = model["first"].weight
    model["frozen"].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["ignored.weight", "ignored.bias"]
    )
    parameters = _torch.reducer_parameters(DistributedDataParallel(model)).values()
    names = ["first.weight", "first.bias", "tied.bias", "table.weight"]
    assert [p.name for p in parameters] == names
    assert [p.is_sparse for p in parameters] == [False, False, False, True]
    assert [p.index for p in parameters] == [0, 1, 2, 3]


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_reducer_parameters_stay_when_others_are_frozen(one_rank: None, is_sparse: bool) -> None:
    """Reducer parameters required gradients when DDP was made; a gradient may be sparse."""
    model = nn.Sequential(nn.Embedding(4, 4, sparse=is_sparse), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    ddp(torch.arange(4)).sum().backward()
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    names = [p.name for p in _torch.reducer_parameters(ddp).values()]
    assert names == ["0.weight", "2.weight", "2.bias"]


def test_a_copy_has_no_comm_hook(one_rank: None) -> None:
    """DDP copies the list of hooks, and registers none of them with the new Reducer."""
    original = DistributedDataParallel(nn.Linear(2, 2))
    state: list[int] = []
    original.register_comm_hook(state, default_hooks.fp16_compress_hook)
    assert _torch.has_comm_hook(original)
    assert _torch.hook_states(original) == [state]
    ddp = copy.deepcopy(original)
    assert not _torch.has_comm_hook(ddp)
    assert _torch.hook_states(ddp) == []
