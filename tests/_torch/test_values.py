"""Tensors in graphs: which share memory, and which AOTAutograd takes apart."""

from __future__ import annotations

import gc

import torch
from torch.testing._internal.two_tensor import TwoTensor

from ddpopt import _torch


def test_tensors_that_share_memory_have_equal_keys_as_long_as_one_lives() -> None:
    """Torch's object for the memory may be gone meanwhile; a sparse tensor has no key."""
    tensors = [torch.empty(4) for _ in range(100)]
    keys = list(map(_torch.storage_key, tensors))
    gc.collect()
    assert [_torch.storage_key(tensor[1:]) for tensor in tensors] == keys
    assert len(set(keys)) == 100
    assert _torch.storage_key(torch.empty(4).to_sparse()) is None


def test_only_a_tensor_that_can_be_taken_apart_is_a_subclass() -> None:
    """No parameter is, nor is a tensor of a class that keeps no others."""
    assert _torch.is_subclass(TwoTensor(torch.ones(1), torch.ones(1)))
    relabeled = torch.ones(1).as_subclass(type("Relabeled", (torch.Tensor,), {}))
    for value in (torch.ones(1), torch.nn.Parameter(torch.ones(1)), relabeled, 1, None):
        assert not _torch.is_subclass(value)
