"""Small questions about a graph and its nodes, which the other modules of this folder ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import _torch

_NOT_CALLS = ("placeholder", "get_attr", "output")


def call_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute something, in order."""
    return [node for node in graph.nodes if node.op not in _NOT_CALLS]


def output_values(gm: fx.GraphModule) -> Sequence[Any]:
    """Return what a graph returns: nodes, None and constants."""
    (output,) = gm.graph.find_nodes(op="output")
    values: Sequence[Any] = output.args[0]
    return values


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", "")


def leaves(value: Any) -> list[Any]:
    """Return what a nest of lists and tuples holds."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def storage_keys(node: fx.Node) -> list[int]:
    """Identify the memory of the tensors that a node stands for: equal keys share memory."""
    tensors = [t for t in leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]
    keys = (_torch.storage_key(tensor) for tensor in tensors)
    return [key for key in keys if key is not None]
