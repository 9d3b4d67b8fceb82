"""Copies of losses, which may hold modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpopt._copies import copy_function

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
