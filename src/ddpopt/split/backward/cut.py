"""Cut AOTAutograd's backward graph into section graphs, and describe the values between them.

    saved, tangents -> [whole graph] -> all gradients

    saved, tangents -> [section 0] -> kept values, gradients of bucket 0
    saved, kept     -> [section 1] -> kept values, gradients of bucket 1
    saved, kept     -> [section 2] -> gradients of bucket 2

Each value that a section may take, an input of the graph or one that an earlier section kept, has a
*slot*: a place in the list on which the sections of one run work. A section empties the slots
that no later one reads, so that saved tensors are freed as early as in the whole graph.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.split.backward.facts import gradient_nodes, memory_of, repeats_of
from ddpopt.split.nodes import IS_COPY, call_nodes
from ddpopt.split.plan import BackwardCuts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SectionGraph:
    """One section: takes the values in slots `takes`; returns kept values, then gradients.

    `keeps` are the slots of the kept values; `releases` the arguments of the forward that the
    gradients belong to. The slots `drops` are emptied when the section runs. Slots below the number
    of the whole graph's inputs are those inputs.
    """

    graph: fx.GraphModule
    takes: tuple[int, ...]
    keeps: tuple[int, ...]
    drops: tuple[int, ...]
    releases: tuple[int, ...]


def cut_backward(gm: fx.GraphModule, cuts: BackwardCuts) -> tuple[SectionGraph, ...]:
    """Return the section graphs, in the order in which they run. `gm` is left unchanged."""
    calls = call_nodes(gm.graph)
    inputs = gm.graph.find_nodes(op="placeholder")
    gradients = gradient_nodes(gm)
    repeats = repeats_of(gm)
    made = [[calls[i] for i in cuts.order[s.start : s.stop]] for s in cuts.sections]
    released = [[gradients[argument] for argument in arguments] for arguments in cuts.releases]
    symbols = [node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)]
    taken = [
        {*symbols, *_taken(nodes, gradients_of, repeats)}
        for nodes, gradients_of in zip(made, released, strict=True)
    ]
    last_taken = {node: k for k, nodes in enumerate(taken) for node in nodes}
    # Held by somebody outside the run: parameters and inputs, tangents.
    held = {n for n in inputs if n.name.startswith(("primals_", "tangents_"))}
    kept = [[node for node in nodes if node in last_taken] for nodes in made]
    slots = {node: slot for slot, node in enumerate([*inputs, *itertools.chain(*kept)])}
    sections = []
    for k, nodes in enumerate(made):
        takes = sorted(taken[k], key=slots.__getitem__)
        freed = {node for node in takes if last_taken[node] == k and node not in held}
        builder = _Builder(gm, takes, freed)
        for node in nodes:
            builder.value_of(node)
        outputs = [builder.value_of(node) for node in kept[k]]
        for gradient in released[k]:
            value = builder.value_of(gradient)
            # A hook may write to a gradient, so memory that is still needed is not handed out.
            is_needed = last_taken.get(memory_of(gradient, repeats), k) > k
            outputs.append(builder.clone_of(value) if is_needed else value)
        sections.append(
            SectionGraph(
                graph=builder.finish(outputs),
                takes=tuple(slots[node] for node in takes),
                keeps=tuple(slots[node] for node in kept[k]),
                drops=tuple(slot for node, slot in slots.items() if last_taken.get(node, 0) == k),
                releases=cuts.releases[k],
            )
        )
    return tuple(sections)


def _taken(
    made: Sequence[fx.Node], released: Sequence[fx.Node], repeats: AbstractSet[fx.Node]
) -> set[fx.Node]:
    """Return what a section that makes and releases these nodes reads from outside."""
    inside = set(made)
    pending = [*released, *itertools.chain.from_iterable(n.all_input_nodes for n in made)]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in inside and node not in found and node.op != "get_attr":
            found.add(node)
            pending.extend(node.all_input_nodes if node in repeats else ())
    return found - repeats


class _Builder:
    """Builds one section's graph.

    Nodes get new names, so that equal sections have equal code and are compiled once. Inductor
    tells by an input's name whether its memory is free after its last use: that of an `arg` is not.
    """

    def __init__(
        self, gm: fx.GraphModule, takes: Sequence[fx.Node], freed: AbstractSet[fx.Node]
    ) -> None:
        self._gm = gm
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(takes):
            name = "saved" if node in freed else "arg"
            self._values[node] = self._graph.placeholder(f"{name}{index}")
            self._values[node].meta = dict(node.meta)

    def value_of(self, node: fx.Node) -> fx.Node:
        """Return the node's value in this section; a repeat or an attribute is made on demand."""
        if node not in self._values:
            args = fx.map_arg(node.args, self.value_of)
            kwargs = fx.map_arg(node.kwargs, self.value_of)
            copied = self._graph.create_node(node.op, node.target, args, kwargs)
            copied.meta = dict(node.meta)
            self._values[node] = copied
        return self._values[node]

    def clone_of(self, value: fx.Node) -> fx.Node:
        """Return a copy of one of this section's values, in memory of its own."""
        copied = self._graph.call_function(torch.ops.aten.clone.default, (value,))
        copied.meta = {**value.meta, IS_COPY: True}
        if isinstance(value.meta.get("val"), torch.Tensor):
            copied.meta["val"] = _torch.own_memory(value.meta["val"])
        return copied

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        self._graph.output(tuple(outputs))
        section = _torch.graph_module(self._gm, self._graph)
        section.meta = dict(self._gm.meta)
        return section
