"""Flat copies of weights: what goes out comes back, and storage stays where it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpopt.algorithms.comm import FlatWeights


def _parameters() -> list[nn.Parameter]:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    kinds = [torch.randn(7, 3), image, torch.randn(()), torch.randn(5).double(), torch.randn(0)]
    return [nn.Parameter(value) for value in kinds]


def test_assigning_a_copy_changes_nothing_and_keeps_storage() -> None:
    parameters = _parameters()
    before = [(p.detach().clone(), p.data_ptr(), p.stride()) for p in parameters]
    weights = FlatWeights(parameters)
    flat = weights.copy()
    assert sorted((v.dtype, v.numel()) for v in flat if v.dtype == torch.float64) == [
        (torch.float64, 5)
    ]
    weights.assign(flat)
    for parameter, (value, address, stride) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value)
        assert (parameter.data_ptr(), parameter.stride()) == (address, stride)


def test_add_adds_elementwise_in_every_layout() -> None:
    parameters = _parameters()
    expected = [p.detach() * 3 for p in parameters]
    weights = FlatWeights(parameters)
    weights.add([2 * values for values in weights.copy()])
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def test_buckets_keep_their_limit_and_never_divide_a_parameter() -> None:
    parameters = [nn.Parameter(torch.randn(n)) for n in (3, 3, 100, 1, 4)]
    sizes = [v.numel() for v in FlatWeights(parameters, bucket_bytes=24).copy()]
    assert sizes == [6, 100, 5]


def test_a_copy_is_not_a_view() -> None:
    parameter = nn.Parameter(torch.ones(3))
    (values,) = FlatWeights([parameter]).copy()
    values.zero_()
    assert parameter.tolist() == [1, 1, 1]


def test_weights_in_a_graph_can_be_assigned_after_backward() -> None:
    parameter = nn.Parameter(torch.ones(3))
    weights = FlatWeights([parameter])
    loss = parameter.square().sum()
    weights.assign([torch.zeros(3)])
    with pytest.raises(RuntimeError, match="inplace"):  # so nothing is computed with wrong values
        loss.backward()
