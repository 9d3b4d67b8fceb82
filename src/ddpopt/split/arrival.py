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


class OthersArrive(enum.Enum):
    """When the gradients arrive of the other parameters: those that no known graph uses."""

    # In front of all. A graph that is not known yet uses the parameters, or else the loss, which
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
    def for_graph(
        cls, *, begins_forward: bool, ends_forward: bool, may_be_unused: bool
    ) -> OthersArrive:
        """The rule for a graph, which begins or ends its module's forward as far as that is known.

        If the graph does not end the forward, the parameters may belong to a graph behind it. If it
        does, each parameter that DDP reduces has a gradient, or DDP raises in the second step. Only
        with a static graph they `may_be_unused`; the Reducer then puts those without one last.
        """
        if not ends_forward:
            return cls.FIRST
        if may_be_unused:
            return cls.LAST
        # A graph that is the whole forward leaves no layer uncompiled: the loss uses the others.
        return cls.FIRST if begins_forward else cls.AS_REGISTERED


def order_arrival(
    parameters: Sequence[Parameter],
    lateness: Mapping[ParameterIndex, float],
    arrives_before: Sequence[Parameter] = (),
    arrives_after: Sequence[Parameter] = (),
    others: OthersArrive = OthersArrive.FIRST,
    of_root: Collection[ParameterIndex] = (),
) -> tuple[Parameter, ...]:
    """All parameters of a Reducer in the order in which their gradients become final.

    Args:
        parameters: all that the Reducer reduces.
        lateness: how late in backward the gradient of each of the graph's own parameters is final,
            in numbers of which only the order counts. Of equally late gradients, that of the
            parameter registered last comes first, as in eager modules.
        arrives_before: the parameters of graphs that run after this one in forward, in arrival
            order.
        arrives_after: the parameters of graphs that run before this one in forward, in arrival
            order.
        others: when the rest arrives, which no known graph uses.
        of_root: parameters that the root module has itself. They are registered before all layers
            wherever they are used, so with `AS_REGISTERED` they count as the loss's.
    """
    # A parameter of several graphs has the last turn, that of the earliest of these graphs in
    # forward: its gradient is final only in the backward of that one.
    turn_before = {parameter.index: turn for turn, parameter in enumerate(arrives_before)}
    turn_after = {parameter.index: turn for turn, parameter in enumerate(arrives_after)}
    last_own_index = max(lateness, default=-1)
    first_earlier_index = min(turn_after, default=-1)

    def key(parameter: Parameter) -> tuple[int, float, int]:
        """The group in which a parameter arrives, from 0 to 5, and its turn in that group.

        Groups 1, 2 and 4 are the parameters of later graphs, of this one and of earlier ones. The
        others arrive before (0), between (3) or behind these (5).
        """
        index = parameter.index
        # For the same reason the earlier graphs are asked first, and the later ones last.
        if index in turn_after:
            return (4, turn_after[index], 0)
        if index in lateness:
            return (2, lateness[index], -index)
        if index in turn_before:
            return (1, turn_before[index], 0)
        # No known graph uses the parameter.
        if others is OthersArrive.LAST:
            return (5, index, 0)  # as the Reducer lists them
        # Else (`AS_REGISTERED`) it is taken to be used where it is registered: behind this graph,
        # so that it arrives first; in front of the earlier ones, and arrives last; or between them.
        if others is OthersArrive.FIRST or index > last_own_index or index in of_root:
            return (0, 0, -index)
        return (5 if index < first_earlier_index else 3, 0, -index)

    return tuple(sorted(parameters, key=key))


def final_places(
    facts: BackwardFacts,
    argument_of: Mapping[ParameterIndex, Argument],
    used_before: Collection[ParameterIndex],
) -> dict[ParameterIndex, Place]:
    """Where in a backward graph the gradient of each parameter is final.

    `argument_of` has the parameters that the graph gets, and `used_before` those that a graph uses
    whose backward runs later: their gradients are not final here, and are left out. If the graph
    may communicate, they count as any others: another rank, which may have run other graphs before,
    has to cut this one equally.
    """
    if any(facts.communicates):
        used_before = ()
    places: dict[ParameterIndex, Place] = {}
    for index, argument in argument_of.items():
        if argument in facts.gradients and index not in used_before:
            # Final with the last of the calls from which it is computed; a gradient that no call
            # makes is an input of the backward, and there from the start.
            makers = facts.gradients[argument]
            places[index] = max(map(Place, makers), default=BEFORE_ALL_CALLS)
    return places


def module_path_of(parameter_paths: Mapping[fx.Node, str]) -> tuple[str, ...]:
    """The path of the module whose forward a graph was traced from, () for the root.

        a parameter `blocks.1.linear.weight`, in its frame `self.linear.weight`
        -> one module (`linear`) below the frame's, which is ("blocks", "1")

    `parameter_paths` has the path from the root of each parameter that is an input of the graph, by
    the input. A graph without any, or whose frame was given several modules, counts as the root's:
    it may then be taken for the whole forward, which decides speed alone (the predicted order of
    arrival), and for code that no other module shares.
    """
    module_paths = set()
    for placeholder, parameter_path in parameter_paths.items():
        path = parameter_path.split(".")[:-1]
        module_paths.add(tuple(path[: len(path) - _torch.depth_below_frame(placeholder)]))
    return module_paths.pop() if len(module_paths) == 1 else ()


def may_share_code(root: torch.nn.Module, path: tuple[str, ...]) -> bool:
    """Whether the module at a path may share its graph with another one below the root.

    Dynamo makes parameters inputs, so one compiled frame serves all modules of a class, such as
    the blocks of a transformer whose outer loop is not compiled. For parameters of other shapes it
    compiles the frame anew.
    """
    if not path:
        return False  # there is one root
    module = root.get_submodule(".".join(path))
    shapes = [parameter.shape for parameter in module.parameters()]
    for other in root.modules():
        is_of_same_class = other is not module and type(other) is type(module)
        if is_of_same_class and [p.shape for p in other.parameters()] == shapes:
            return True
    return False
