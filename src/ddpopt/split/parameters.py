"""Find DDP's parameters in a graph: which nodes bring them in, and where each is first used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.reducer import Parameter
from ddpopt.split.forward.writes import find_written_memory
from ddpopt.split.nodes import attribute_of, is_differentiable


def find_parameters(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    reduced: Mapping[torch.Tensor, Parameter],
) -> tuple[dict[fx.Node, list[int]], dict[int, int]]:
    """Return the DDP parameters behind each node, and for each the argument that brings it in.

    Parameters that the graph writes to are left out of the latter. Dynamo makes parameters inputs
    of its graph; with `inline_inbuilt_nn_modules` off they are attributes of the graph, or belong
    to modules that it calls.
    """
    owners: dict[fx.Node, list[int]] = {}
    slots: dict[int, int] = {}
    written = {node for memory in find_written_memory(graph.graph) for node, _, _ in memory.values}
    for slot, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = example_inputs[slot]
        if isinstance(value, torch.Tensor) and value in reduced:
            index = reduced[value].index
            owners[node] = [index]
            if node not in written:
                slots[index] = slot
    for node in graph.graph.find_nodes(op="get_attr"):
        value = attribute_of(graph, node)
        if isinstance(value, torch.nn.Parameter) and value in reduced:
            owners[node] = [reduced[value].index]
    for node in graph.graph.find_nodes(op="call_module"):
        module = graph.get_submodule(str(node.target))
        if indices := [reduced[p].index for p in module.parameters() if p in reduced]:
            owners[node] = indices
    return owners, slots


def frame_module(names: Mapping[fx.Node, str]) -> tuple[str, ...]:
    """Return the path of the module whose forward this graph was traced from, () for the root.

    `names` gives the parameter behind each node, by its path from the root. A frame that was given
    several modules counts as the root's.
    """
    owners = set()
    for node, name in names.items():
        if node.op == "placeholder":
            path = name.split(".")[:-1]
            owners.add(tuple(path[: len(path) - _torch.depth_below_frame(node)]))
    return owners.pop() if len(owners) == 1 else ()


def has_twin(root: torch.nn.Module, path: tuple[str, ...]) -> bool:
    """Whether a module may share its graph with another one.

    Dynamo makes parameters inputs, so that one compiled frame serves all modules of a class, such
    as the blocks of a transformer whose outer loop is not compiled.
    """
    if not path:
        return False
    module = root.get_submodule(".".join(path))
    return any(
        other is not module and type(other) is type(module) and _shapes(other) == _shapes(module)
        for other in root.modules()
    )


def _shapes(module: torch.nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


def first_uses(
    calls: Sequence[fx.Node],
    parameters: Mapping[fx.Node, Sequence[int]],
    elsewhere: Collection[int],
) -> dict[int, int]:
    """Return the position of each parameter's first differentiable use, by parameter index."""
    first: dict[int, int] = {}
    for position, node in enumerate(calls):
        # all_input_nodes sees nested lists, kwargs and the operands of higher-order ops.
        for source in (node, *node.all_input_nodes):
            for index in parameters.get(source, ()):
                if index not in first and index not in elsewhere and is_differentiable(node):
                    first[index] = position
    return first
