"""Find which calls of a forward graph pass gradients back to their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ddpopt.splitting.nodes import call_nodes
from ddpopt.splitting.writes import written_by

_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def find_passing_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes from which a gradient may come back to their inputs, the output among them.

    The others detach or compare them, or make what is only used by nodes of this kind. Where that
    cannot be seen a node counts as passing.
    """
    passing = set(graph.find_nodes(op="output"))
    for node in reversed(call_nodes(graph)):
        is_used = not passing.isdisjoint(node.users)
        if (is_used and _may_require_grad(node.meta.get("example_value", node))) or written_by(
            node
        ):
            passing.add(node)  # what it wrote to may have readers of its own
    return passing


def _may_require_grad(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, list | tuple):
        return any(map(_may_require_grad, value))
    return not isinstance(value, _NUMBERS)
