"""Copies of losses that hold modules, and of modules with a forward of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpopt._copies import copy_buffers, copy_function, deep_copy, foreign_forward, shielded
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


def test_a_modules_buffers_are_afterwards_what_they_were_also_new_and_replaced_ones() -> None:
    """As where a copy's forward calls the original's, which makes a table at its first call."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    (norm,) = model
    norm.register_buffer("same_mean", norm.running_mean)
    mean = norm.running_mean
    before = copy_buffers(model)
    with shielded(model, before, OptionError, "the model"):
        mean.add_(1)
        norm.running_mean = torch.ones(3)
        norm.running_var.add_(1)
        norm.register_buffer("table", torch.ones(2))
        model.register_buffer("mask", torch.ones(2))
    assert norm.running_mean is norm.same_mean is mean
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
