"""In which order gradients become final, over all graphs under one DDP module.

The Reducer forms its buckets from that order, see [Note: buckets] in `reducer.py`. A graph tells
only the order of its own gradients. The rest follows from where the graph stands: from which
module's forward it was traced, whether other modules may run the same code, and which graphs run
before and after it (as far as these were compiled before, and so are known to `DDPState`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from ddpopt import _torch
from ddpopt._indices import BEFORE_ALL_CALLS, Argument, ParameterIndex, Place
from ddpopt.reducer import Parameter
from ddpopt.split.facts import BackwardFacts


class Others(enum.Enum):
    """When gradients arrive of parameters that no known graph uses."""

    # Before all others. A graph that is not known yet uses the parameters, or else the loss, which
    # comes behind the forward: it may take the weight of an output layer, or the logarithm of a
    # policy's deviation.
    FIRST = enum.auto()
    # First as well, or where a layer is registered that is not compiled, between two graphs or in
    # front of all: layers are registered in the order of their use, as a rule. A parameter that the
    # root module has itself is registered before all layers wherever it is used, so it counts as
    # the loss's.
    AS_REGISTERED = enum.auto()
    # Nothing uses the parameters. DDP allows that only with a static graph, and its Reducer puts
    # them last.
    LAST = enum.auto()

    @classmethod
    def around(cls, *, begins: bool, ends: bool, may_be_unused: bool) -> Others:
        """The rule for a graph that begins or ends the forward, as far as that is known.

        If the graph does not end the forward, the parameters may belong to a graph behind it. If it
        does, each parameter that DDP reduces has a gradient, or DDP raises in the second step,
        unless `may_be_unused`.
        """
        if not ends:
            return cls.FIRST
        if may_be_unused:
            return cls.LAST
        return cls.FIRST if begins else cls.AS_REGISTERED


def order_arrival(
    parameters: Sequence[Parameter],
    lateness: Mapping[ParameterIndex, float],
    arrives_before: Sequence[Parameter] = (),
    arrives_after: Sequence[Parameter] = (),
    others: Others = Others.FIRST,
    of_root: Collection[ParameterIndex] = (),
) -> tuple[Parameter, ...]:
    """All parameters of a Reducer in the order in which their gradients become final.

    Args:
        parameters: all that the Reducer reduces.
        lateness: how late in backward the gradient of each of the graph's own parameters is final.
            Of equally late gradients, that of the parameter registered last comes first, as in
            eager modules.
        arrives_before: the parameters of graphs that run after this one in forward, in arrival
            order.
        arrives_after: the parameters of graphs that run before this one in forward, in arrival
            order.
        others: when the rest arrives.
        of_root: parameters that the root module has itself.
    """
    turn_before = {parameter.index: turn for turn, parameter in enumerate(arrives_before)}
    turn_after = {parameter.index: turn for turn, parameter in enumerate(arrives_after)}
    last_own_index = max(lateness, default=-1)
    first_index_after = min(turn_after, default=-1)

    def key(parameter: Parameter) -> tuple[int, float, int]:
        """The group in which a parameter arrives, from 0 to 5, and its turn in that group."""
        index = parameter.index
        # A parameter that an earlier graph uses too is final only in that graph's backward, so this
        # is asked before `lateness`.
        if index in turn_after:
            return (4, turn_after[index], 0)
        if index in lateness:
            return (2, lateness[index], -index)
        if index in turn_before:
            return (1, turn_before[index], 0)
        # No known graph uses the parameter.
        if others is Others.LAST:
            return (5, index, 0)
        if others is Others.FIRST or index > last_own_index or index in of_root:
            return (0, 0, -index)
        # The parameter is taken to be used where it is registered: in front of the earlier graphs,
        # so that it arrives last, or between them and this graph.
        return (5 if index < first_index_after else 3, 0, -index)

    return tuple(sorted(parameters, key=key))


def final_places(
    facts: BackwardFacts,
    argument_of: Mapping[ParameterIndex, Argument],
    elsewhere: Collection[ParameterIndex],
) -> dict[ParameterIndex, Place]:
    """Where in a backward graph each parameter's gradient is final.

    Parameters `elsewhere` are used again by a graph whose backward runs later, so their gradients
    are not final here. If the graph may communicate, they count as any others, as in `read_uses`.
    """
    if any(facts.communicates):
        elsewhere = ()
    return {
        index: max(map(Place, facts.gradients[argument]), default=BEFORE_ALL_CALLS)
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


def may_share_code(root: torch.nn.Module, path: tuple[str, ...]) -> bool:
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
