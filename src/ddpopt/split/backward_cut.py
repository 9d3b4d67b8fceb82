"""Compile a graph whole and its backward in sections: from AOTAutograd's graphs to a GatedGraph.

    saved, tangents -> [whole graph] -> all gradients

    saved, tangents -> [section 0] -> kept values, gradients of bucket 0
    saved, kept     -> [section 1] -> kept values, gradients of bucket 1
    saved, kept     -> [section 2] -> gradients of bucket 2

Each value that a section may take, an input of the graph or one that an earlier section kept, has a
*slot*: a place in the list on which the sections of one run work. A section empties the slots
that no later one reads, so that saved tensors are freed as early as in the whole graph.

AOTAutograd traces the graph with a token as an additional input, which is also returned as output.
See [Note: tokens, gates and runs] in runtime.py for what the token is for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import fx

from ddpopt import _torch
from ddpopt._events import Label
from ddpopt.errors import NotCutError, Reason
from ddpopt.split.backward_plan import (
    argument_of,
    gradient_nodes,
    memory_of,
    refuse_linked_calls,
    repeats_of,
    saved_arguments,
)
from ddpopt.split.forward_cut import SectionCompiler
from ddpopt.split.nodes import IS_COPY, call_nodes, has_ragged_sizes, output_values
from ddpopt.split.plan import BackwardCuts, SplitPlan
from ddpopt.split.runtime import TOKEN_DTYPE, CompiledSection, GatedGraph, run_first_section
from ddpopt.split.state import Nodes


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


def cut_backward(
    gm: fx.GraphModule, cuts: BackwardCuts, saved: Mapping[str, int]
) -> tuple[SectionGraph, ...]:
    """Return the section graphs, in the order in which they run. `gm` is left unchanged.

    `saved` is as in `read_backward`.
    """
    snapshots: list[fx.Node] = []
    calls = call_nodes(gm.graph)
    if cuts.late_forward_reads:
        gm, calls, snapshots = _with_snapshots(gm, cuts.late_forward_reads, saved)
    inputs = gm.graph.find_nodes(op="placeholder")
    gradients = gradient_nodes(gm)
    repeats = repeats_of(gm)
    made = [[calls[i] for i in cuts.order[s.start : s.stop]] for s in cuts.sections]
    made[0] = [*snapshots, *made[0]]
    released = [[gradients[argument] for argument in arguments] for arguments in cuts.releases]
    symbols = [node for node in inputs if isinstance(_torch.aten_value(node), torch.SymInt)]
    taken = [
        {*symbols, *_taken(nodes, gradients_of, repeats)}
        for nodes, gradients_of in zip(made, released, strict=True)
    ]
    last_taken = {node: k for k, nodes in enumerate(taken) for node in nodes}
    held = {node for node in inputs if _torch.is_held_outside(node)}
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


def _with_snapshots(
    gm: fx.GraphModule, late_reads: Mapping[int, AbstractSet[int]], saved: Mapping[str, int]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A copy of a graph in which these calls read snapshots of these arguments.

    Returns the copy, its calls, numbered as those of `gm`, and the snapshots, which come first.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(gm.graph, copies))
    (original_output,) = gm.graph.find_nodes(op="output")
    output.meta = dict(original_output.meta)
    calls = [copies[node] for node in call_nodes(gm.graph)]
    repeats = {copies[node] for node in repeats_of(gm)}
    snapshots: dict[fx.Node, fx.Node] = {}
    for placeholder in list(graph.find_nodes(op="placeholder")):
        argument = argument_of(placeholder, saved)
        if any(argument in read for read in late_reads.values()):
            with graph.inserting_before(calls[0]):
                snapshots[placeholder] = _clone(graph, placeholder)

    def snapshot_of(node: fx.Node, read: AbstractSet[int]) -> fx.Node:
        """The same value as a node's, in the memory of snapshots where it is one of `read`."""
        if node in snapshots and argument_of(node, saved) in read:
            return snapshots[node]
        if node not in repeats:
            return node
        sources = {source: snapshot_of(source, read) for source in node.all_input_nodes}
        if all(source is other for source, other in sources.items()):
            return node
        with graph.inserting_before(node):
            view = graph.node_copy(node, sources.__getitem__)
        repeats.add(view)
        return view

    for call, read in late_reads.items():
        for source in calls[call].all_input_nodes:
            calls[call].replace_input_with(source, snapshot_of(source, read))
    return _torch.graph_module(gm, graph), calls, list(snapshots.values())


def _clone(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """A copy of a value in memory of its own."""
    copied = graph.call_function(torch.ops.aten.clone.default, (value,))
    copied.meta = {**value.meta, IS_COPY: True}
    if isinstance(_torch.aten_value(value), torch.Tensor):
        _torch.set_aten_value(copied, _torch.aten_value(value).clone())
    return copied


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

    Nodes get new names, so that equal sections have equal code and are compiled once.
    """

    def __init__(
        self, gm: fx.GraphModule, takes: Sequence[fx.Node], freed: AbstractSet[fx.Node]
    ) -> None:
        self._gm = gm
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(takes):
            name = _torch.input_name(index, is_held=node not in freed)
            self._values[node] = self._graph.placeholder(name)
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
        return _clone(self._graph, value)

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        self._graph.output(tuple(outputs))
        section = _torch.graph_module(self._gm, self._graph)
        section.meta = dict(self._gm.meta)
        return section


class BackwardCut(NamedTuple):
    """How a backward graph was cut; without sections it is compiled whole.

    `nodes` are those of the sections, for people to read.
    """

    plan: SplitPlan
    nodes: Nodes
    sections: Sequence[SectionGraph]


# (backward graph, what `saved_arguments` returned for the forward) -> how it is cut
Cut = Callable[[fx.GraphModule, Mapping[str, int]], BackwardCut]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What is needed to run compiled sections, in this process or in another.

    `sections` are those fields of `CompiledSection` that are data, each with the index of its
    callable among the distinct compiled ones; `arguments` is as for `run_first_section`.
    """

    plan: SplitPlan
    nodes: Nodes
    sections: Sequence[tuple[int, dict[str, Any]]]
    arguments: Sequence[int | None]


def compile_gated(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    aot: _torch.AOTCompilerFn,
    cut: Cut,
    key: str | None,
) -> tuple[SplitPlan, Nodes, GatedGraph]:
    """Return the compiled graph, with Dynamo's signature, and gates where `cut` cuts it.

    `gm` is a copy, which is used up. `key` stands for all that `cut` depends on besides the graph:
    if an equal graph was cut with an equal key before, the result may come from torch's cache,
    with its plan and nodes. With None it is always compiled.

    Raises:
        NotCutError: this graph's backward cannot be cut, or the inner compiler raised on a section.
    """
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    is_known = all(_torch.is_plain(t) and not _torch.is_subclass(t) for t in tensors)
    if not is_known or has_ragged_sizes(gm.graph):
        raise NotCutError(Reason.SUBCLASSES)
    device = next(tensor.device for tensor in tensors if tensor.requires_grad)
    _add_token(gm)
    token = torch.zeros(1, device=device, dtype=TOKEN_DTYPE, requires_grad=True)
    cutting = _Cutting(_torch.graph_name(gm), len(example_inputs), device, cut, key)
    compiled = aot(gm, [*example_inputs, token], cutting)
    kept = cutting.kept
    assert kept is not None, "AOTAutograd returned a forward without its backward"
    gated = GatedGraph(compiled, cutting.further, device)
    return dataclasses.replace(kept.plan, graph=_torch.graph_name(gm)), kept.nodes, gated


@dataclasses.dataclass
class _Cutting(_torch.Cutting):
    """Cuts one graph's backward for AOTAutograd. `kept` and `further` are set afterwards."""

    _graph: str
    _num_inputs: int
    _device: torch.device
    _cut: Cut
    key: str | None
    kept: _Kept | None = None
    further: list[CompiledSection] = dataclasses.field(default_factory=list)
    _was_autocast_on: bool = dataclasses.field(default_factory=_torch.is_autocast_on)
    _saved: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def edit_forward(self, forward: fx.GraphModule) -> None:
        self._saved = saved_arguments(forward)
        _return_token_itself(forward)

    def compile(
        self, backward: fx.GraphModule, inputs: list[Any], compile_section: _torch.CompileSection
    ) -> tuple[Sequence[Any], _Kept]:
        _torch.check_backward(backward)
        refuse_linked_calls(backward)
        (output,) = backward.graph.find_nodes(op="output")
        arguments = _torch.gradient_arguments(backward)
        returned = zip(output_values(backward), arguments, strict=True)
        # The token's gradient, which is not a value of the graph, is the run's handle.
        output.args = (tuple(None if a == self._num_inputs else value for value, a in returned),)
        _torch.restride(backward, inputs)
        devices = {_torch.aten_value(node).device for node in gradient_nodes(backward).values()}
        if devices - {self._device}:
            raise NotCutError(Reason.DEVICES, f"they are on {sorted(map(str, devices))}")
        plan, nodes, sections = self._cut(backward, self._saved)
        if not sections:
            whole = compile_section(backward, inputs, list(range(len(inputs))))
            return [whole], _Kept(plan=plan, nodes=nodes, sections=(), arguments=arguments)
        placeholders = backward.graph.find_nodes(op="placeholder")
        saved = {k for k, n in enumerate(placeholders) if not _torch.is_tangent(n)}
        compiled, places = _compile_sections(sections, inputs, saved, compile_section, self._graph)
        flows = [
            {
                "takes": section.takes,
                "keeps": section.keeps,
                "drops": section.drops,
                "releases": section.releases,
            }
            for section in sections
        ]
        kept_sections = list(zip(places, flows, strict=True))
        return compiled, _Kept(plan=plan, nodes=nodes, sections=kept_sections, arguments=arguments)

    def run(self, sections: Sequence[Any], data: _Kept) -> Callable[[list[Any]], Any]:
        self.kept = data
        if not data.sections:
            (whole,) = sections
            return whole  # type: ignore[no-any-return]
        first, *self.further = [
            CompiledSection(
                call=sections[place],
                label=Label(self._graph, index),
                # AOTAutograd's own node does this for the first section.
                without_autocast=self._was_autocast_on and index > 0,
                **flow,
            )
            for index, (place, flow) in enumerate(data.sections)
        ]
        num_kept = sum(len(flow["keeps"]) for _, flow in data.sections)
        return run_first_section(first, data.arguments, self._num_inputs, num_kept, self._device)


def _add_token(gm: fx.GraphModule) -> None:
    """Add the token as last input and, so that it gets a gradient, a copy of it as last output."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(list(placeholders)[-1]):
        token = gm.graph.placeholder("ddpopt_token")
    _torch.mark_as_new(token)
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        # Not the method: AOTAutograd's cache takes only methods of values that Dynamo knows.
        copied = gm.graph.call_function(torch.ops.aten.clone.default, (token,))
    output.args = ((*output_values(gm), copied),)
    gm.recompile()


def _return_token_itself(forward: fx.GraphModule) -> None:
    """Remove the copy from the traced forward, where it would be a kernel of its own."""
    token = list(forward.graph.find_nodes(op="placeholder"))[-1]
    for user in list(token.users):
        if user.target is torch.ops.aten.clone.default and user.args == (token,):
            user.replace_all_uses_with(token)
            forward.graph.erase_node(user)
    forward.recompile()


def _compile_sections(
    sections: Sequence[SectionGraph],
    inputs: Sequence[Any],
    saved: Collection[int],
    compile_section: _torch.CompileSection,
    graph: str,
) -> tuple[list[Callable[..., Any]], list[int]]:
    """Compile a backward's distinct sections; return them, and for each section which one it is.

    `inputs` are the fake values of the whole graph's inputs, of which those `saved` in forward are
    at fixed addresses for Inductor; `graph` is its name.
    """
    compiled: list[Callable[..., Any]] = []
    place_of: dict[object, int] = {}
    places = []
    compiler = SectionCompiler(graph, len(sections))
    for index, section in enumerate(sections):
        placeholders = section.graph.graph.find_nodes(op="placeholder")
        origins = [slot if slot < len(inputs) else None for slot in section.takes]
        values = [
            _torch.aten_value(node) if origin is None else inputs[origin]
            for node, origin in zip(placeholders, origins, strict=True)
        ]
        key = _identity(section.graph, values, [origin in saved for origin in origins]) or index
        if key not in place_of:
            place_of[key] = len(compiled)
            compile_it = functools.partial(compile_section, section.graph, values, origins)
            where = f"backward section {index} of {len(sections)}"
            compiled.append(compiler.compile(index, where, compile_it))
        places.append(place_of[key])
    return compiled, places


def _identity(
    section: fx.GraphModule, values: Sequence[Any], are_saved: Sequence[bool]
) -> object | None:
    """Return what two sections have in common if one compiled callable can serve both.

    None if a section holds attributes, which the code does not show, or symbols. Which inputs
    `are_saved` counts too: Inductor does not look at each call whether those are aligned.
    """
    if section.graph.find_nodes(op="get_attr"):
        return None
    if not all(isinstance(v, torch.Tensor) and not _torch.free_symbols(v) for v in values):
        return None
    kinds = [(v.shape, v.stride(), v.dtype, v.device, v.storage_offset()) for v in values]
    return (section.code, tuple(kinds), tuple(are_saved))
