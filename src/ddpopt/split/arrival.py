"""In which order gradients become final, over all graphs under one DDP module.

The Reducer forms its buckets from that order, see [Note: buckets] in `reducer.py`. One graph tells
only the order of its own gradients. So it is asked where it stands: which module's forward it was
traced from, whether others may run the same code, and which graphs run before and after it (of
those `DDPState` knows the ones that were compiled before).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.reducer import Parameter
from ddpopt.split.facts import BackwardFacts


def order_arrival(
    parameters: Sequence[Parameter],
    place: Mapping[int, float],
    later: Sequence[Parameter] = (),
    earlier: Sequence[Parameter] = (),
    ends_forward: bool = False,
) -> tuple[Parameter, ...]:
    """All parameters of a Reducer in the order in which their gradients become final.

    Args:
        parameters: those of the Reducer.
        place: how late in backward the gradient of each of the graph's own parameters is final, by
            index. Of equally late ones the one registered last comes first, as in eager modules.
        later: parameters of graphs that run after this one in forward, in arrival order. They
            arrive before the graph's own.
        earlier: the same of graphs that run before this one. They arrive after the graph's own.
        ends_forward: no other graph can follow this one in forward.
    """
    place_later = {parameter.index: position for position, parameter in enumerate(later)}
    place_earlier = {parameter.index: position for position, parameter in enumerate(earlier)}

    def key(parameter: Parameter) -> tuple[int, float, int]:
        index = parameter.index
        if index in place_earlier:
            return (3, place_earlier[index], 0)
        if index in place:
            return (2, place[index], -index)
        if index in place_later:
            return (1, place_later[index], 0)
        # No known graph uses it. It is assumed to belong to a graph not seen yet, if one can
        # follow. Else it is unused, and the Reducer of a static graph puts it last.
        return (4, index, 0) if ends_forward else (0, 0, -index)

    return tuple(sorted(parameters, key=key))


def final_positions(
    facts: BackwardFacts, argument_of: Mapping[int, int], elsewhere: Collection[int]
) -> dict[int, int]:
    """The call of a backward graph after which each parameter's gradient is final, by index.

    `argument_of` gives each parameter's position among the forward's arguments. Parameters
    `elsewhere` are used again by a graph whose backward runs later, so theirs are not final here.
    """
    return {
        index: max(facts.gradients[argument], default=-1)
        for index, argument in argument_of.items()
        if argument in facts.gradients and index not in elsewhere
    }


def frame_module(names: Mapping[fx.Node, str]) -> tuple[str, ...]:
    """The path of the module whose forward a graph was traced from, () for the root.

    `names` gives the parameter behind each node, by its path from the root. A frame that was given
    several modules counts as the root's.
    """
    paths = set()
    for node, name in names.items():
        if node.op == "placeholder":
            path = name.split(".")[:-1]
            paths.add(tuple(path[: len(path) - _torch.depth_below_frame(node)]))
    return paths.pop() if len(paths) == 1 else ()


def has_twin(root: torch.nn.Module, path: tuple[str, ...]) -> bool:
    """Whether the module at a path may share its graph with another one below the root.

    Dynamo makes parameters inputs, so one compiled frame serves all modules of a class, such as
    the blocks of a transformer whose outer loop is not compiled.
    """
    if not path:
        return False
    module = root.get_submodule(".".join(path))
    shapes = [parameter.shape for parameter in module.parameters()]
    for other in root.modules():
        is_of_same_class = other is not module and type(other) is type(module)
        if is_of_same_class and [p.shape for p in other.parameters()] == shapes:
            return True
    return False
