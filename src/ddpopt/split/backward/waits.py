"""Waits in a compiled forward, for parameters that other ranks send while it runs.

[Note: waits]
A wait is a call of `ddpopt::wait_` before the first call that reads a parameter. The operator
claims to write the parameters, so no compiler moves a reader ahead of it, and to read the result of
the preceding matrix product or convolution, so none moves it up: Inductor puts waits that depend on
nothing at the top of the graph, where nothing is computed meanwhile. Products are written to memory
in any case, so reading one costs no fusion. Parameters that are first read between the same two
products share a wait.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from ddpopt._waits import WAIT

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
    }
)


def insert_waits(forward: fx.GraphModule, parameters: Collection[fx.Node]) -> None:
    """Insert waits in a forward graph for each of these placeholders before it is read."""
    waiting = set(parameters)
    product: fx.Node | None = None
    reads: dict[fx.Node | None, tuple[fx.Node, list[fx.Node]]] = {}  # by the preceding product
    for node in forward.graph.nodes:
        if node.op in ("placeholder", "output"):  # returning a parameter is not reading it
            continue
        read = [source for source in node.all_input_nodes if source in waiting]
        if read:
            reads.setdefault(product, (node, []))[1].extend(read)
            waiting.difference_update(read)
        if node.target in _PRODUCTS:
            product = node
    for after, (reader, read) in reads.items():
        with forward.graph.inserting_before(reader):
            wait = forward.graph.call_function(WAIT, (read, after))
            wait.meta["val"] = None
    forward.recompile()
