"""A cut backward: section graphs, how values go from one to another, and both compiled.

    saved, tangents -> [whole graph] -> all gradients

    saved, tangents -> [section 0] -> kept values, gradients of bucket 0
    saved, kept     -> [section 1] -> kept values, gradients of bucket 1
    saved, kept     -> [section 2] -> gradients of bucket 2

Each value that a section may take, an input of the graph or one that an earlier section kept, has a
*slot*: an index of the list on which the sections of one run work. A section empties the slots
that no later one reads, so that saved tensors are freed as early as in the whole graph.

The compiled sections run in gates, see `gates.py`. These need a *token*, an additional input and
output of the graph that AOTAutograd is given; `add_token` makes it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt._indices import Argument, Call, Memory, Slot, numbered
from ddpopt.split.aliases import Aliases
from ddpopt.split.facts import ReachableMemory, gradient_nodes, watched_inputs
from ddpopt.split.nodes import IS_COPY, call_nodes, clone_keeps_strides, output_values
from ddpopt.split.releases import add_end_forward, add_watch_releases
from ddpopt.split.section_compiler import SectionCompiler
from ddpopt.split.sections import BackwardSections

# ---- The token -------------------------------------------------------------------------------


def add_token(gm: fx.GraphModule, watched: Sequence[Argument]) -> None:
    """Add the token as last input and, so that it gets a gradient, a copy of it as last output.

        token -> watch_releases(token, watched ...) -> all other calls -> end_forward -> copy

    AOTAutograd would trace no gradient of an output that is an input itself. While it traces the
    graph, the two operators note when the gradients of the arguments `watched` are released: one
    stands in front of all other calls, the other behind them; see `add_watch_releases`.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    with gm.graph.inserting_after(placeholders[-1]):
        token = gm.graph.placeholder("ddpopt_token")
    _torch.mark_as_new(token)  # AOTAutograd refuses a placeholder of which Dynamo has noted nothing
    watching = add_watch_releases(token, [placeholders[argument] for argument in watched])
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        copied = add_end_forward(watching)
    output.args = ((*output_values(gm), copied),)
    gm.recompile()


def return_token_itself(forward: fx.GraphModule) -> None:
    """Remove the token's copy from the traced forward: it would be a kernel of its own.

    It is a clone, to which AOTAutograd has traced `end_forward`. The backward is traced by then, so
    the copy has served, see `add_token`.
    """
    # The forward that AOTAutograd traced takes the graph's arguments in their order.
    token = list(forward.graph.find_nodes(op="placeholder"))[-1]
    for user in list(token.users):
        if user.target is torch.ops.aten.clone.default and user.args == (token,):
            user.replace_all_uses_with(token)
            forward.graph.erase_node(user)
    forward.recompile()


def drop_token_gradient(
    backward: fx.GraphModule, token_argument: Argument
) -> list[Argument | None]:
    """Have a backward return None for the token.

    What the token gets is not a value of the graph: it is the run's handle, see `gates.py`.
    Returns for each value that the backward returns the argument whose gradient it is, the token's
    included; see `gradient_arguments`.
    """
    (output,) = backward.graph.find_nodes(op="output")
    arguments = _torch.gradient_arguments(backward)
    values = []
    for value, argument in zip(output_values(backward), arguments, strict=True):
        values.append(None if argument == token_argument else value)
    output.args = (tuple(values),)
    return arguments


# ---- Section graphs --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What goes into a section and comes out of it, by slots and arguments.

    A section takes the values in slots `takes`. It returns the values that it keeps for later ones,
    then gradients. Slots below the number of the whole graph's inputs are those inputs.
    """

    takes: tuple[Slot, ...]
    # The slots that are emptied when the section runs: no later section reads them.
    drops: tuple[Slot, ...]
    keeps: tuple[Slot, ...]
    # The arguments of the forward to which the gradients belong.
    releases: tuple[Argument, ...]
    # Of `takes`: those whose tensors no hook may have written to since this backward began. The
    # section raises if one has.
    watches: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionGraph:
    """The graph of a section, and what goes in and out."""

    graph: fx.GraphModule
    flow: Flow


def kept_values(section: SectionGraph) -> Sequence[fx.Node]:
    """What a section keeps for later ones, in the order of `flow.keeps`."""
    return output_values(section.graph)[: len(section.flow.keeps)]


def make_section_graphs(
    gm: fx.GraphModule, chosen: BackwardSections, reachable: ReachableMemory
) -> tuple[SectionGraph, ...]:
    """The section graphs, in the order in which they run. `gm` is left unchanged.

    `reachable` is what `find_reachable` returned for it. It knows inputs by their names, which a
    copy of `gm` has too.
    """
    calls = call_nodes(gm.graph)
    snapshot_calls: list[fx.Node] = []
    if chosen.snapshot_reads:
        gm, calls, snapshot_calls = _with_snapshots(gm, chosen.snapshot_reads, reachable)
    inputs = gm.graph.find_nodes(op="placeholder")
    gradients = gradient_nodes(gm)
    aliases = Aliases(gm)

    # The values that each section makes, releases, and reads from outside.
    made = [[calls[i] for i in chosen.order[s.start : s.stop]] for s in chosen.sections]
    made[0] = [*snapshot_calls, *made[0]]  # before any hook of this backward can write
    released = [[gradients[argument] for argument in arguments] for arguments in chosen.releases]
    # Sizes are inputs of each section: the shapes of other values have them.
    symbols = [node for node in inputs if isinstance(_torch.aten_value(node), torch.SymInt)]
    taken = []
    for nodes, gradients_of_section in zip(made, released, strict=True):
        taken.append({*symbols, *_read_from_outside(nodes, gradients_of_section, aliases)})

    # Which values are kept between sections, and for how long.
    last_taken = {node: k for k, nodes in enumerate(taken) for node in nodes}
    kept = [[node for node in nodes if node in last_taken] for nodes in made]
    # A run has a list with a place for each, see gates.py.
    slot_of = {node: slot for slot, node in numbered(Slot, [*inputs, *itertools.chain(*kept)])}
    # Inductor must not reuse the memory of parameters and tangents, as it does that of saved values
    # after their last use.
    held_outside = {node for node in inputs if _torch.is_held_outside(node)}
    # The program may give two outputs one gradient, or views of one tensor, so all tangents count
    # as one memory (splits.md, fault 11).
    tangents = {node for node in inputs if _torch.is_tangent(node)}
    tangents_last_taken = max((last_taken.get(node, 0) for node in tangents), default=0)
    watched = watched_inputs(gm, reachable)  # to which a section requires that no hook has written

    sections = []
    for k, nodes in enumerate(made):
        takes = sorted(taken[k], key=slot_of.__getitem__)
        freed = {node for node in takes if last_taken[node] == k and node not in held_outside}
        builder = _SectionBuilder(gm, takes, freed)
        for node in nodes:
            builder.value_of(node)  # which copies the call into the section
        outputs = [builder.value_of(node) for node in kept[k]]
        for gradient in released[k]:
            value = builder.value_of(gradient)
            # A hook may write to a gradient, so a copy is handed out if a later section reads the
            # gradient's memory.
            base = aliases.base_of(gradient)  # in whose memory the gradient is, maybe as a view
            last = tangents_last_taken if base in tangents else last_taken.get(base, k)
            outputs.append(builder.clone_of(value) if last > k else value)
        flow = Flow(
            takes=tuple(slot_of[node] for node in takes),
            # Values that nobody reads are dropped by the first section.
            drops=tuple(slot for node, slot in slot_of.items() if last_taken.get(node, 0) == k),
            keeps=tuple(slot_of[node] for node in kept[k]),
            releases=chosen.releases[k],
            # Section 0 runs before any hook of this backward, so it has nothing to compare.
            watches=tuple(slot_of[node] for node in takes if k and node in watched),
        )
        sections.append(SectionGraph(graph=builder.finish(outputs), flow=flow))
    return tuple(sections)


def _read_from_outside(
    made: Sequence[fx.Node], released: Sequence[fx.Node], aliases: Aliases
) -> set[fx.Node]:
    """What a section that makes and releases these nodes takes as its inputs.

    It makes views and constants itself, which are not in `made`, and so takes what a view reads in
    place of the view. It gets attributes from its module.
    """
    inside = set(made)
    outside: set[fx.Node] = set()
    pending = list(released)
    for node in made:
        pending.extend(node.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in inside or node in outside or node.op == "get_attr":
            continue
        outside.add(node)
        if node in aliases.views_and_constants:
            pending.extend(node.all_input_nodes)
    return outside - aliases.views_and_constants


class _SectionBuilder:
    """Builds one section's graph.

    Nodes get new names, so that equal sections have equal code and are compiled once.
    """

    def __init__(
        self, gm: fx.GraphModule, takes: Sequence[fx.Node], freed: AbstractSet[fx.Node]
    ) -> None:
        """Begin a section's graph with its inputs: the values of `gm` that it takes, in this order.

        Inductor may reuse the memory of those in `freed` once the section has read them.
        """
        self._gm = gm
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(takes):
            # By an input's name Inductor tells whether it may reuse the memory.
            name = _torch.input_name(index, is_held=node not in freed)
            self._values[node] = self._graph.placeholder(name)
            self._values[node].meta = dict(node.meta)

    def value_of(self, node: fx.Node) -> fx.Node:
        """The section's own node for a node of the whole graph.

        A call is copied here when it is asked for, and with it the views, constants and attributes
        that it reads.
        """
        if node not in self._values:
            args = fx.map_arg(node.args, self.value_of)
            kwargs = fx.map_arg(node.kwargs, self.value_of)
            copied = self._graph.create_node(node.op, node.target, args, kwargs)
            copied.meta = dict(node.meta)
            self._values[node] = copied
        return self._values[node]

    def clone_of(self, value: fx.Node) -> fx.Node:
        """A copy of one of this section's values, in memory of its own."""
        return _clone(self._graph, value)

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        self._graph.output(tuple(outputs))
        section = _torch.graph_module(self._gm, self._graph)
        section.meta = dict(self._gm.meta)
        return section


def _clone(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Add a copy of a value to a graph, at the insertion point.

    The copy's example value is in memory of its own, as the copy will be: the proof tells by
    example values which values share memory. By `IS_COPY` it takes the copy for the same value.
    """
    copied = graph.call_function(torch.ops.aten.clone.default, (value,))
    copied.meta = {**value.meta, IS_COPY: True}
    _torch.set_aten_value(copied, _torch.aten_value(value).clone())
    return copied


def _with_snapshots(
    gm: fx.GraphModule,
    snapshot_reads: Mapping[Call, AbstractSet[Memory]],
    reachable: ReachableMemory,
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A copy of a backward graph in which some calls read snapshots in place of inputs.

        0  g0 = mm(tangent, x)                 copied = clone(buffer)
        1  v = view(buffer, ...)               g0 = mm(tangent, x)
        2  s = sigmoid(v)               ->     v' = view(copied, ...)
                                               s = sigmoid(v')

    `snapshot_reads`, of `BackwardSections`, has the calls of later sections that must read memory
    as the forward left it, as call 2 here, and that memory; also calls with effects. Returns the
    copy; its calls, numbered as those of `gm`; and the calls that make snapshots, which have to run
    first of all. New views, such as v', are in neither list: each section makes those it reads.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(gm.graph, copies))
    (original_output,) = gm.graph.find_nodes(op="output")
    output.meta = dict(original_output.meta)  # it says to which arguments the gradients belong
    calls = [copies[node] for node in call_nodes(gm.graph)]
    views = {copies[node] for node in Aliases(gm).views_and_constants}
    copied_memory = frozenset[Memory]().union(*snapshot_reads.values())
    snapshot_calls: list[fx.Node] = []
    snapshots: dict[fx.Node, fx.Node] = {}
    for placeholder in list(graph.find_nodes(op="placeholder")):
        if reachable.find(placeholder) in copied_memory:  # told by its name, which the copy has too
            with graph.inserting_before(calls[0]):
                snapshots[placeholder], calls_of_snapshot = _snapshot(graph, placeholder)
            snapshot_calls += calls_of_snapshot

    def snapshot_of(node: fx.Node, read: AbstractSet[Memory]) -> fx.Node:
        """What a call reads in place of a node, if it is to read snapshots of the memory `read`.

        That is the snapshot of an input, a view like the node on a snapshot, or the node itself.
        """
        if node in snapshots and reachable.find(node) in read:
            return snapshots[node]
        if node not in views:
            return node
        sources = {source: snapshot_of(source, read) for source in node.all_input_nodes}
        if all(source is other for source, other in sources.items()):
            return node
        with graph.inserting_before(node):
            view = graph.node_copy(node, sources.__getitem__)
        # `node_copy` gave the view the example value of `node`, which is in the input's memory; as
        # `_clone` says, it has to be in the snapshot's.
        assert callable(view.target)
        arguments, keywords = fx.map_arg((view.args, view.kwargs), _value_of)
        _torch.set_aten_value(view, view.target(*arguments, **keywords))
        return view

    for call, read in snapshot_reads.items():
        for source in calls[call].all_input_nodes:
            calls[call].replace_input_with(source, snapshot_of(source, read))
    return _torch.graph_module(gm, graph), calls, snapshot_calls


def _snapshot(graph: fx.Graph, value: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Add an input's snapshot to a graph, with the input's strides, at the insertion point.

    Returns its node, and the calls that were added and are no views. A tensor that is expanded, or
    a slice of another, has strides that no copy would have: then the memory between its first and
    its last element is copied, and the copy seen with these strides.
    """
    tensor = _torch.aten_value(value)
    if clone_keeps_strides(tensor):
        copied = _clone(graph, value)
        return copied, [copied]
    made: list[fx.Node] = []

    def compute(function: Callable[..., Any], *arguments: Any) -> Any:
        """A size or a stride, or what comes of some: a constant, or a call where it is symbolic."""
        number = function(*(_value_of(argument) for argument in arguments))
        if isinstance(number, int):
            return number
        call = graph.call_function(function, arguments)
        _torch.set_aten_value(call, number)
        made.append(call)
        return call

    def view(source: fx.Node, *arguments: Any) -> fx.Node:
        """`source` with other sizes and strides; without an offset, from its first element on."""
        seen = graph.call_function(torch.ops.aten.as_strided.default, (source, *arguments))
        seen.meta = {**value.meta, IS_COPY: True}  # for the proof: it is the same value
        numbers = [fx.map_arg(argument, _value_of) for argument in arguments]
        _torch.set_aten_value(seen, torch.as_strided(_torch.aten_value(source), *numbers))
        return seen

    sizes = [compute(torch.ops.aten.sym_size.int, value, d) for d in range(tensor.dim())]
    strides = [compute(torch.ops.aten.sym_stride.int, value, d) for d in range(tensor.dim())]
    num_elements = 1  # from the first to the last; a tensor that has none was cloned above
    for size, stride in zip(sizes, strides, strict=True):
        last = compute(operator.mul, compute(operator.sub, size, 1), stride)
        num_elements = compute(operator.add, num_elements, last)
    copied = _clone(graph, view(value, [num_elements], [1]))
    made.append(copied)
    return view(copied, sizes, strides, 0), made


def _value_of(argument: Any) -> Any:
    """The example value of an argument that is a node, and any other argument itself."""
    return _torch.aten_value(argument) if isinstance(argument, fx.Node) else argument


# ---- Compiling -------------------------------------------------------------------------------


def compile_backward_sections(
    sections: Sequence[SectionGraph],
    inputs: Sequence[Any],
    saved: Collection[Slot],
    compile_section: _torch.CompileSection,
    graph: str,
) -> tuple[list[Callable[..., Any]], list[int]]:
    """Compile a backward's sections, equal ones once.

    Returns the compiled callables, and for each section the index of its own among them. `inputs`
    are the fake values of the whole graph's inputs. Inputs that were `saved` in forward may be at
    addresses that Inductor takes to be fixed, so a section that takes a saved input does not share
    code with one that takes another value there. `graph` is the whole graph's name.

    Raises:
        NotCutError: the inner compiler raised.
    """
    compiled: list[Callable[..., Any]] = []
    number_by_identity: dict[object, int] = {}
    numbers = []
    compiler = SectionCompiler(graph, len(sections))
    for index, section in enumerate(sections):
        placeholders = section.graph.graph.find_nodes(op="placeholder")
        # Which of the whole graph's inputs each input of the section is; None for a kept value. The
        # compiler is given AOTAutograd's own fake values for the former.
        origins = [slot if slot < len(inputs) else None for slot in section.flow.takes]
        values = [
            _torch.aten_value(node) if origin is None else inputs[origin]
            for node, origin in zip(placeholders, origins, strict=True)
        ]
        are_saved = [origin in saved for origin in origins]
        identity = _identity(section.graph, values, are_saved)
        if identity is None:
            identity = index  # equal to no other
        if identity not in number_by_identity:
            number_by_identity[identity] = len(compiled)
            compile_it = functools.partial(compile_section, section.graph, values, origins)
            description = f"backward section {index} of {len(sections)}"
            compiled.append(compiler.compile(index, description, compile_it))
        numbers.append(number_by_identity[identity])
    return compiled, numbers


def _identity(
    section: fx.GraphModule, values: Sequence[Any], are_saved: Sequence[bool]
) -> object | None:
    """What two sections have in common if one compiled callable can serve both.

    None, for a section that shares with no other, if it reads attributes, which its code does not
    show, or takes symbolic sizes or tensors with such. The code shows by names of inputs whose
    memory Inductor may reuse. It also matters which inputs `are_saved`: Inductor does not check at
    each call whether saved inputs are aligned.
    """
    if section.graph.find_nodes(op="get_attr"):
        return None
    if not all(isinstance(v, torch.Tensor) and not _torch.free_symbols(v) for v in values):
        return None
    kinds = [(v.shape, v.stride(), v.dtype, v.device, v.storage_offset()) for v in values]
    return (section.code, tuple(kinds), tuple(are_saved))
