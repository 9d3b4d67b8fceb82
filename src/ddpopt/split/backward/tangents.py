"""Which of a forward's outputs each gradient descends from.

AOTAutograd fills zeros in for the gradients of outputs that the loss does not use. In eager a
parameter behind nothing but such outputs has no gradient, which optimizers leave alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import fx

from ddpopt import _torch
from ddpopt.split.backward.facts import gradient_nodes

ANY = -1  # all bits: a gradient that does not depend on outputs, or outputs that all have gradients


def find_descent(backward: fx.GraphModule, places: Mapping[Hashable, int]) -> dict[int, int]:
    """Return from which outputs the gradient of each argument descends, as bits.

    `places` tells of each output of the forward, as AOTAutograd describes it, which it is. The
    result is empty where there is nothing to choose: the outputs that can have gradients are one
    besides the token, or AOTAutograd does not tell them all.
    """
    descent: dict[fx.Node, int] = {}
    for placeholder, output in _torch.tangents(backward).items():
        if output not in places:
            return {}
        descent[placeholder] = 1 << places[output]
    if len(descent) <= 2:
        return {}
    for node in backward.graph.nodes:
        for source in node.all_input_nodes:
            descent[node] = descent.get(node, 0) | descent.get(source, 0)
    return {
        argument: descent.get(node, 0) or ANY for argument, node in gradient_nodes(backward).items()
    }
