"""Copies of losses that hold modules, and of modules with a forward of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpopt._copies import copy_function, deep_copy, foreign_forward

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
