"""What is known of a call by its name alone."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from ddpopt.split.nodes import is_pure


@pytest.mark.parametrize(
    ("kind", "target", "pure"),
    [
        ("call_method", "add", True),
        ("call_method", "add_", False),
        ("call_module", "layer", False),  # it may draw random numbers, or have hooks
        ("call_function", torch.add, True),
    ],
)
def test_a_method_is_pure_unless_its_name_says_that_it_writes(
    kind: str, target: object, pure: bool
) -> None:
    graph = fx.Graph(nn.Module())
    x = graph.placeholder("x")
    assert is_pure(graph.create_node(kind, target, (x,))) is pure
