"""What is known of a call by its name alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from ddpopt.split.nodes import call_nodes, is_pure, may_communicate
from tests.support.graphs import Capture


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


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.sigmoid().bernoulli(),
        F.dropout,
        F.dropout2d,
        F.gumbel_softmax,
        lambda x: F.rrelu(x, training=True),
        lambda x: F.fractional_max_pool2d(x, 2, 2),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
)
def test_what_draws_random_numbers_is_not_pure(
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Nor does it communicate."""
    capture = Capture()
    torch.compile(lambda x: draw(x).sum(), backend=capture, fullgraph=True)(torch.ones(1, 2, 4, 4))
    drawing = [node for node in call_nodes(capture.gm.graph) if not is_pure(node)]
    assert drawing
    assert not any(map(may_communicate, drawing))
