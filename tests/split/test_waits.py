"""Waits in a forward graph: in front of the first reader, after the product before it."""

from __future__ import annotations

import torch
from torch import fx

from ddpopt._waits import WAIT, announce, withdraw
from ddpopt.split.backward_cut import insert_waits

aten = torch.ops.aten


class Counting:
    """Counts who asks for which parameter."""

    def __init__(self) -> None:
        self.reached: list[int] = []

    def wait(self) -> None:
        self.reached.append(0)

    def reach(self, address: int) -> None:
        self.reached.append(address)


def _graph() -> fx.GraphModule:
    """Two products; the second one's weight is transposed before, its bias is added after it."""
    graph = fx.Graph()
    x, first, scale, second, bias, unused = map(
        graph.placeholder, ("x", "first", "scale", "second", "bias", "unused")
    )
    scaled = graph.call_function(aten.mul.Tensor, (x, scale))
    product = graph.call_function(aten.mm.default, (scaled, first))
    transposed = graph.call_function(aten.t.default, (second,))
    again = graph.call_function(aten.mm.default, (product, transposed))
    total = graph.call_function(aten.add.Tensor, (again, bias))
    graph.output((total, unused, second))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_waits_stand_before_first_readers_and_depend_on_the_product_before() -> None:
    """One for all parameters between the same two products; what is only returned needs none."""
    gm = _graph()
    _, *parameters = gm.graph.find_nodes(op="placeholder")
    insert_waits(gm, parameters)
    found = [
        ([p.name for p in node.args[0]], node.args[1] and node.args[1].name, node.next.name)
        for node in gm.graph.nodes
        if node.target is WAIT
    ]
    assert found == [
        (["scale", "first"], None, "mul_tensor"),
        (["second"], "mm_default", "t_default"),
        (["bias"], "mm_default_1", "add_tensor"),
    ]


def test_a_graph_with_waits_asks_for_what_was_announced_and_computes_the_same() -> None:
    """Until it is withdrawn."""
    gm = _graph()
    values = [torch.randn(4, 4) for _ in range(6)]
    expected = gm(*values)[0]
    insert_waits(gm, list(gm.graph.find_nodes(op="placeholder"))[1:])
    counting = Counting()
    arrivals = {values[3].data_ptr(): counting}
    announce(arrivals)
    assert torch.equal(gm(*values)[0], expected)
    withdraw(arrivals)
    gm(*values)
    assert counting.reached == [values[3].data_ptr()]
