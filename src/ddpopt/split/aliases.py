"""Which values of a graph of AOTAutograd's share memory, and which may be in memory of an argument.

    0  t = t(w)            a view: in the memory of w
    1  m = mm(x, t)        memory of its own
    2  v = view(m, ...)    in the memory of call 1
    3  z = zeros(4)        a constant

Such a graph is functional, so a value is in the memory of the first input of the view that returns
it, or in memory of its own. Dynamo's graphs have writes in place, and what these reach is told from
the storages of example values: see `find_written_memory` in nodes.py. (AOTAutograd's values have
storages too, by which the proof finds out for itself what this module concludes from operators.)
"""

from __future__ import annotations

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.split.nodes import call_nodes, is_pure, name_of


class Aliases:
    """The views and constants of a graph, and whose memory a value is in."""

    def __init__(self, gm: fx.GraphModule) -> None:
        """Read the graph's operators, and none of its values."""
        # They cost next to nothing: each section makes its own, see
        # [Note: calls, views and constants] in facts.py.
        self.views_and_constants: set[fx.Node] = set()
        for node in call_nodes(gm.graph):
            is_constant = not node.all_input_nodes
            # What draws random numbers, or does anything else, is made once: it is not pure.
            if is_pure(node) and (is_constant or self._is_view(node)):
                self.views_and_constants.add(node)

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a call returns a view; the calls before it have been asked."""
        if name_of(node) == "getitem":  # of the tuple of views that a split returns, for example
            return node.args[0] in self.views_and_constants
        return _torch.is_view(node.target)

    def base_of(self, node: fx.Node) -> fx.Node:
        """The call, or the input, in whose memory a node's value is: itself, if it is no view."""
        while node in self.views_and_constants and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node


def made_in_arguments(gm: fx.GraphModule, aliases: Aliases) -> set[fx.Node]:
    """Values that a compiler may make in the memory of an argument that the graph writes.

        0  v1 = index_put(buffer, ...)      Inductor writes to `buffer`, and has `v1` there
        1  v2 = index_put(v1, ...)          and `v2`
        2  copy_(buffer, v2)                then nothing is left to do

    A functional graph makes a new value for a buffer of which it writes a part, and copies the
    buffer's last value to it at its end, as above.
    """
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    # Arguments that are written, and then values that may be made in their memory.
    in_arguments = {node.args[0] for node in copies if node.args[0].op == "placeholder"}
    if not in_arguments:
        return set()  # as of most graphs
    values: set[fx.Node] = set()  # of these, without the arguments
    for node in call_nodes(gm.graph):
        sources = {aliases.base_of(source) for source in node.all_input_nodes}
        # An element of a tuple is where the call that returned the tuple made it.
        is_element = name_of(node) == "getitem" and node not in aliases.views_and_constants
        may_be_in_place = is_element or _torch.may_become_in_place(node.target)
        if may_be_in_place and not in_arguments.isdisjoint(sources):
            values.add(node)
            in_arguments.add(node)
    return values
