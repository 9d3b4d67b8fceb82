"""Find which calls of a forward graph pass gradients back to their inputs."""

from __future__ import annotations

from torch import fx

from ddpopt.split.forward.writes import written_by
from ddpopt.split.nodes import call_nodes, is_differentiable


def find_passing_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes from which a gradient may come back to their inputs, the output among them.

    The others detach or compare them, or make what is only used by nodes of this kind. Where that
    cannot be seen a node counts as passing.
    """
    passing = set(graph.find_nodes(op="output"))
    for node in reversed(call_nodes(graph)):
        is_used = not passing.isdisjoint(node.users)
        has_other_readers = bool(written_by(node))  # of the memory that it writes to
        if has_other_readers or (is_used and is_differentiable(node)):
            passing.add(node)
    return passing
