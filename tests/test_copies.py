"""Copies of losses that hold modules, and of modules with a forward of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpopt._copies import (
    copy_buffers,
    copy_function,
    deep_copy,
    foreign_forward,
    shielded,
    written_buffers,
)
from ddpopt.errors import OptionError

SCALE = 2.0


def test_a_loss_is_copied_that_uses_a_module_and_then_a_function_with_globals() -> None:
    """What comes after the module may get the place in memory of what its copy needed no longer."""
    head = nn.Linear(2, 2)

    def scaled(values: torch.Tensor) -> torch.Tensor:
        return SCALE * values

    def loss(output: torch.Tensor) -> torch.Tensor:
        return scaled(head(output)).sum()

    output = torch.ones(1, 2)
    memo: dict[int, Any] = {}
    copied = copy_function(loss, memo)
    with torch.no_grad():
        memo[id(head)].weight.zero_()
        memo[id(head)].bias.fill_(1.0)
    assert copied(output) == 2 * SCALE
    assert loss(output) != 2 * SCALE


@pytest.mark.parametrize("holds_module", [False, True])
def test_a_forward_set_on_a_module_may_hold_tensors_but_not_the_module(holds_module: bool) -> None:
    """Whether a copy would run the original is asked of each value, whatever its truth is."""
    model = nn.Linear(2, 2)
    held = model if holds_module else torch.ones(2)
    model.forward = lambda x: x + held.weight.sum() if holds_module else x + held  # type: ignore[method-assign]
    assert bool(foreign_forward(deep_copy(model), model)) == holds_module


def test_a_modules_buffers_have_their_values_back_and_those_that_it_makes_stay() -> None:
    """As where a copy's forward calls the original's, which makes a table at its first call."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Identity())
    norm, lazy = model
    lazy.register_buffer("table", None)
    lazy.register_buffer("grown", torch.zeros(2))
    norm.register_buffer("same_mean", norm.running_mean)
    before = copy_buffers(model)
    with shielded(model, before, OptionError, "the model"):
        norm.running_mean.add_(1)
        norm.running_var = norm.running_var + 1
        lazy.table = torch.ones(2)
        lazy.grown = torch.zeros(3)
        model.append(nn.BatchNorm1d(2))
        assert written_buffers(model, before) == [
            *("0.running_mean", "0.running_var", "1.table", "1.grown"),
            *("2.running_mean", "2.running_var", "2.num_batches_tracked"),
        ]
    assert norm.running_mean is norm.same_mean
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], before[name]) for name in before if name != "1.grown")
    assert torch.equal(lazy.table, torch.ones(2))
    assert torch.equal(lazy.grown, torch.zeros(3))
    assert len(model) == 3
