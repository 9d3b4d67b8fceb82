"""What a graph is like, as far as it matters where the graph is cut.

`read_forward` reads Dynamo's graph, `read_backward` AOTAutograd's backward. What they return holds
no node and no tensor, so that choosing sections (`sections.py`) is a function of plain data.

A graph's *calls* are all nodes but placeholders, attributes and the output. They are numbered from
0 in graph order.

[Note: calls, views and constants]
A backward graph is functional: its calls, and an output that lists a gradient for each argument of
the forward. Views and constants cost next to nothing, so each section that needs one makes its own.
Hence no view goes from one section to another, and no two values that do share memory. `reads`
looks through views.

[Note: order, as a hook sees it]
    0  s = sigmoid(buffer)          a call of the forward, recomputed; call 3 needs it
    1  g0 = mm(tangent, x)          gradient of bucket 0 -> released: a hook may write to `buffer`
    2  n = add(count, 1)            the new value of another buffer, `count`
    3  g1 = mul(tangent, s)         gradient of bucket 1 -> released
    4  copy_(count, n)              epilogue copy

The program ran call 0 in its forward, before any hook. In section 1, where `s` is needed, call 0
would read what the hook wrote; so section 0 makes a copy of `buffer`, a *snapshot*, and call 0
reads the snapshot. The program wrote `count` between the two releases, where call 2 stands: a hook
on `g0` finds the old value, one on `g1` the new one. So call 4, too, runs in section 1.

A hook runs where a gradient is released, and may read and write all that the program can reach:
parameters, buffers, inputs, what the forward returned, and the gradients of that. Their memory is
called reachable. In eager all writes that stand before a release have been made by then, and all
reads have happened. So each call that has effects, or reads reachable memory, and stands before a
release in the graph, runs before it: it is *observable*. Only pure computation on the graph's own
values may move behind a release. A call that stands behind a release may run before it: so it does
in the unsplit compile, which runs the whole graph before all releases.

A release stands behind the last call of the autograd node that makes the gradient (splits.md's
table: "a gradient was released where it was made"). A call stands where it is in the graph, but for
epilogue copies: AOTAutograd makes a graph functional, and puts the writes to its arguments at the
end. In the program such a write came no earlier than the last call that makes its value or that
reads the old one, so that is where it stands.

Calls that need no gradient of an output are the forward's, and *recomputed*: the partitioner has
them made again, rather than save their values. The program made them before any release, wherever
they stand here. To run all of them first would take the memory that recomputing saves, so one that
reads a buffer, an input or an output in a later section reads a snapshot. Where no copy is like the
original, as of a sparse tensor, or what the call returns is smaller than the copy, the first
section makes the call itself. (Sizes decide nothing where a graph may communicate: on other ranks
they may differ.)

Parameters need no snapshot: as far as we know no program writes to a parameter in a backward before
the parameter's own gradient is there, and to a frozen parameter none writes at all. (Snapshots of
all frozen parameters might take more memory than there is.) A parameter whose gradient another
graph makes is like a buffer: that gradient may be there already, and a hook update the parameter
(the row "a section computed again what comes of a parameter that another graph trains").

All other calls that read reachable memory behind a release need a gradient of an output, and eager
has saved for them the tensors that they read. If a hook writes to a saved tensor, autograd raises
in eager. Of a compiled graph autograd cannot notice such a write: the graph unpacks its saved
tensors once, before any hook. So each section compares the versions of the tensors that it reads,
see `watched_inputs`, and raises. A section raises also where eager would read a copy that the
program has made, if the compiler has left that copy out.

Two tangents may be one tensor, or views of one. So if a gradient is a tangent itself, and any
tangent is read later, it is released as a copy (the row "gradients of two outputs were views of one
tensor").

A compiler may make a value in the memory of an argument that the graph writes, see
`made_in_arguments`. For the program that value and the argument are two tensors, of which it may
write one. So all calls that read such a value of the forward's read it in snapshots, and one that a
backward makes is not kept for a later section (the row "a saved value was in the memory of a
buffer").
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt._indices import (
    BEFORE_ALL_CALLS,
    Argument,
    Call,
    Memory,
    ParameterIndex,
    Place,
    memory_of_argument,
    numbered,
)
from ddpopt.errors import NotCutError, Reason
from ddpopt.reducer import Parameter
from ddpopt.split.aliases import Aliases, made_in_arguments
from ddpopt.split.nodes import (
    attribute_of,
    call_nodes,
    find_written_memory,
    has_ragged_sizes,
    is_composite,
    is_differentiable,
    is_pure,
    may_be_fused,
    may_communicate,
    mutation_spans,
    name_of,
    num_bytes_of,
    output_values,
    uses_streams,
    written_by,
)
from ddpopt.split.releases import num_released_before_call

# ---- Forward ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFacts:
    """A forward graph as `sections.py` sees it.

    A *boundary* at p separates the calls before p from p and those after it.
    """

    num_calls: int
    # The first differentiable use of each DDP parameter: the call after which, in backward, its
    # gradient is final.
    first_use: Mapping[ParameterIndex, Call]
    # Whether a boundary at p is possible, for p from 0 to `num_calls`.
    legal_bounds: Sequence[bool]
    # Whether a boundary at p would be possible if all sizes were constants, as they may be on
    # another rank. So an error can say whether sizes are why none is possible.
    legal_bounds_without_sizes: Sequence[bool]
    # For each call: the last call that uses what it returns, or the value to which it writes;
    # `num_calls` if that is the output. It tells whether a section passes anything on.
    needed_until: Sequence[Call]
    call_names: Sequence[str]
    # For each call: whether it may have effects, that is, `is_pure` does not know it as pure.
    has_effects: Sequence[bool]
    # For each call: whether it may exchange data with other ranks, or its backward may.
    communicates: Sequence[bool]


def parameters_of(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    parameter_of: Mapping[torch.Tensor, Parameter],
) -> dict[fx.Node, list[ParameterIndex]]:
    """For each node of Dynamo's graph that brings in DDP parameters: the indices of these.

    `parameter_of` has the DDP parameters by their tensors; a node without any is left out. Dynamo
    makes parameters inputs of its graph, each with one of `example_inputs`. With
    `inline_inbuilt_nn_modules` off they are attributes of the graph, or belong to modules that it
    calls, which may have several.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = dict(zip(placeholders, example_inputs, strict=True))
    indices_of: dict[fx.Node, list[ParameterIndex]] = {}
    for node in graph.graph.nodes:
        if node in inputs:
            values = [inputs[node]]
        elif node.op == "get_attr":
            values = [attribute_of(graph, node)]
        elif node.op == "call_module":
            values = list(graph.get_submodule(str(node.target)).parameters())
        else:
            continue
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        indices = [parameter_of[tensor].index for tensor in tensors if tensor in parameter_of]
        if indices:
            indices_of[node] = indices
    return indices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUses:
    """Where a forward graph uses parameters first and where it communicates, as `ForwardFacts`."""

    first_use: Mapping[ParameterIndex, Call]
    communicates: Sequence[bool]


def read_uses(
    gm: fx.GraphModule,
    indices_of: Mapping[fx.Node, Sequence[ParameterIndex]],
    used_before: Collection[ParameterIndex] = (),
) -> ParameterUses:
    """The facts about a forward graph that the cut of its backward needs as well.

    `indices_of` is what `parameters_of` returned. The parameters that were `used_before`, in a
    graph that runs before this one in forward, are left out: backward comes to that graph later, so
    their gradients are not final here. In a graph that may communicate they count as any others:
    another rank may have run other graphs before, and has to cut this one equally, see
    [Note: collectives] in sections.py.
    """
    calls = call_nodes(gm.graph)
    communicates = [may_communicate(node) for node in calls]
    if any(communicates):
        used_before = ()
    first_use: dict[ParameterIndex, Call] = {}
    for call, node in numbered(Call, calls):
        # all_input_nodes sees nested lists, kwargs and the operands of higher-order operators. A
        # call of a module has its parameters itself.
        for source in (node, *node.all_input_nodes):
            for index in indices_of.get(source, ()):
                # No part of a gradient comes from a use that is not differentiable.
                if index not in used_before and is_differentiable(node):
                    first_use.setdefault(index, call)
    return ParameterUses(first_use=first_use, communicates=communicates)


def read_forward(
    gm: fx.GraphModule,
    indices_of: Mapping[fx.Node, Sequence[ParameterIndex]],
    used_before: Collection[ParameterIndex] = (),
) -> ForwardFacts:
    """The facts about a forward graph that is to be cut; the arguments are as for `read_uses`."""
    calls = call_nodes(gm.graph)
    call_of = {node: call for call, node in numbered(Call, calls)}
    output = Call(len(calls))  # behind all of them
    last_use: list[Call] = []  # of what each call returns
    needed_until: list[Call] = []  # or, if it writes in place, the last use of what it writes to
    for call, node in numbered(Call, calls):
        users = [call_of.get(user, output) for user in node.users]  # what is no call is the output
        last_use.append(max(users, default=call))
        for target in written_by(node):
            users += [call_of.get(user, output) for user in target.users]
        needed_until.append(max(users, default=call))

    uses = read_uses(gm, indices_of, used_before)
    # A span, (first, last), has the boundaries from `first` to `last`, all of them impossible: for
    # what would cross, inside a region under some state, or for memory written behind them.
    spans, spans_of_sizes = _uncrossable_spans(gm, calls, last_use)
    spans += [*_region_spans(calls), *mutation_spans(find_written_memory(gm.graph))]
    return ForwardFacts(
        num_calls=len(calls),
        first_use=uses.first_use,
        legal_bounds=_bounds_outside([*spans, *spans_of_sizes], len(calls)),
        legal_bounds_without_sizes=_bounds_outside(spans, len(calls)),
        needed_until=needed_until,
        call_names=[node.name for node in calls],
        has_effects=[not is_pure(node) for node in calls],
        communicates=uses.communicates,
    )


def _bounds_outside(spans: Iterable[tuple[int, int]], num_calls: int) -> list[bool]:
    """Whether each boundary p in [0, num_calls] is in no span (first, last), ends included.

    A boundary at either end of the graph would separate nothing, so both are False.
    """
    # Spans that begin and end at p, counted as +1 and -1, so that the running sum at p is the
    # number of spans around it.
    change = [0] * (num_calls + 2)
    for first, last in spans:
        if first <= last:  # else the span is empty, see `mutation_spans`
            change[first] += 1
            change[last + 1] -= 1
    num_around = list(itertools.accumulate(change))
    return [num_around[p] == 0 and 0 < p < num_calls for p in range(num_calls + 1)]


def _uncrossable_spans(
    gm: fx.GraphModule, calls: Sequence[fx.Node], last_use: Sequence[Call]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Spans of the boundaries which a value would have to cross that no section can take as input.

        2  pair = split(x)        a tuple
        3  a = pair[0]            -> the span (3, 4): no boundary before call 3 or 4
        4  b = pair[1]

    A span reaches from the call behind the value to the value's last use. Tuples, generators,
    contexts and numbers cannot cross a boundary. Tensors and symbolic integers can, but only if
    each symbol in them has a node that binds it, because a section gets its symbols as inputs.
    Composite ones, as of a subclass, cannot: AOTAutograd would have to guess the class of their
    gradients.

    Returns two lists, the second of which has the spans that are there only because a size is a
    symbol.
    """
    spans: list[tuple[int, int]] = []
    spans_of_sizes: list[tuple[int, int]] = []
    # Then no boundary is possible. Streams order calls by more than values. Ragged sizes have
    # symbols of the tensors inside of nested and other composite ones, which no section gets.
    if uses_streams(gm.graph) or has_ragged_sizes(gm.graph):
        spans.append((0, len(calls)))
    bound_symbols = {
        symbol
        for node in gm.graph.nodes
        if isinstance(_torch.dynamo_value(node), torch.SymInt | torch.SymFloat)
        for symbol in _torch.free_symbols(_torch.dynamo_value(node))
    }
    for call, node in numbered(Call, calls):
        if last_use[call] <= call:
            continue  # nothing uses it
        if _torch.enters_autocast(name_of(node)):
            continue  # split_module closes and reopens autocast regions
        value = _torch.dynamo_value(node)
        can_cross = isinstance(value, torch.Tensor | torch.SymInt) and not is_composite(value)
        if can_cross and _torch.free_symbols(value) <= bound_symbols:
            continue
        # As a rule a number is computed from sizes. If these were constants, Dynamo would have
        # computed it, and written no call.
        is_number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
        span = call + 1, last_use[call]
        if is_number or can_cross:
            spans_of_sizes.append(span)
        else:
            spans.append(span)
    return spans, spans_of_sizes


def _region_spans(calls: Sequence[fx.Node]) -> Iterable[tuple[int, int]]:
    """Spans of the boundaries inside of regions under a global state, which no boundary may divide.

        2  _vmap_increment_nesting(...)
        3  y = x * 2                        -> the span (3, 4): no boundary before call 3 or 4
        4  _vmap_decrement_nesting()

    The calls that begin and end a region are linked by the state, and by no value: a section that
    began inside of one would be compiled without the state. Such regions are functorch's, no_grad,
    those without hooks on saved tensors, and those in which the program has chosen attention's
    kernels. Autocast is none: split_module closes and reopens it at a boundary.
    """
    end_of = _torch.region_partners()  # the name of the call that ends what another begins
    # The regions that are open at a call: the name of the call that will end each, and the call
    # that began it.
    opened: list[tuple[str, Call]] = []
    choices_of_attention: list[Call] = []
    no_grad_since: Call | None = None
    for call, node in numbered(Call, calls):
        name = name_of(node)
        if _torch.sets_grad_mode(name):
            if no_grad_since is not None:
                yield no_grad_since + 1, call
            no_grad_since = None if node.args[0] else call  # the argument: on or off
        elif _torch.chooses_attention(name):
            choices_of_attention.append(call)
        elif name in end_of:
            opened.append((end_of[name], call))
        elif opened and name == opened[-1][0]:  # regions are nested: the last one ends first
            yield opened.pop()[1] + 1, call
    # Regions that are never closed reach to the end.
    for _, call in opened:
        yield call + 1, len(calls)
    if no_grad_since is not None:
        yield no_grad_since + 1, len(calls)
    # The beginning and the end of a region are equal calls, so that nobody knows which are which.
    if choices_of_attention:
        is_closed = len(choices_of_attention) > 1
        yield choices_of_attention[0] + 1, choices_of_attention[-1] if is_closed else len(calls)


# ---- Backward --------------------------------------------------------------------------------


class Tie(enum.Enum):
    """What a boundary between a value and its reader would lose, besides keeping the value."""

    NONE = "nothing: they are separate kernels anyway"
    FUSED = "a fusion: the value would not exist in memory"
    UNROUNDED = "digits: fused, the value is not rounded to what can be stored"
    TUPLE = "everything: the value is a tuple, which only exists to be taken apart"
    MADE_IN_ARGUMENT = (
        "the value: a later section would find it in memory that the program may write"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardFacts:
    """A backward graph as `sections.py` sees it; see [Note: calls, views and constants]."""

    call_names: Sequence[str]
    is_view_or_constant: Sequence[bool]
    # For each call: whether it may have effects, as in `ForwardFacts`.
    has_effects: Sequence[bool]
    # For each call: whether it may exchange data with other ranks. If any does, nothing below
    # depends on sizes or strides; see [Note: collectives] in sections.py.
    communicates: Sequence[bool]
    # For each call: the calls whose values it uses, looking through views, and what a boundary in
    # between would lose. Views and constants are said to use nothing.
    reads: Sequence[Mapping[Call, Tie]]
    # For each call: the size of what it returns.
    num_bytes: Sequence[int]
    # The calls from which the gradient of each argument is computed; none if it is an input of the
    # graph that is passed through.
    gradients: Mapping[Argument, tuple[Call, ...]]
    # For each reachable memory (see `ReachableMemory`): the calls that read it or write it.
    memory_users: Mapping[Memory, Sequence[Call]]
    # The calls with effects that do nothing but write reachable memory, and which memory. All other
    # calls with effects keep their order.
    epilogue_copies: Mapping[Call, Memory]
    # The next three are explained in [Note: order, as a hook sees it].
    # The calls of which a hook can observe whether they have run, with the place of each. If a call
    # stands before a release, it must run before that release.
    observable_calls: Mapping[Call, Place]
    # Where the gradient of each argument is released.
    release_places: Mapping[Argument, Place]
    # The calls that have to read some reachable memory as the forward left it, and that memory: in
    # a section behind a release they read snapshots of it. One that has effects, or reads other
    # reachable memory (a parameter's) besides, is among `observable_calls` too.
    snapshot_reads: Mapping[Call, frozenset[Memory]]


def refuse_linked_calls(gm: fx.GraphModule) -> None:
    """Raise NotCutError if a backward's calls depend on each other by more than values."""
    if uses_streams(gm.graph):
        raise NotCutError(Reason.STREAMS)
    if any(_torch.links_effects(node.target) for node in gm.graph.nodes):
        raise NotCutError(Reason.EFFECTS)


def gradient_nodes(gm: fx.GraphModule) -> dict[Argument, fx.Node]:
    """The node of each gradient that a backward graph returns, by the gradient's argument.

    Raises:
        NotCutError: the graph returns something else as well, or two values for one argument.
    """
    node_of: dict[Argument, fx.Node] = {}
    for node, argument in zip(output_values(gm), _torch.gradient_arguments(gm), strict=True):
        if not isinstance(node, fx.Node):
            continue  # None, for an argument that gets no gradient
        if argument is None or argument in node_of:  # None: what is returned is no gradient
            raise NotCutError(Reason.OTHER_OUTPUTS, f"{node} is such an output")
        node_of[argument] = node
    return node_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """A value that AOTAutograd's forward returns, to the program or for the backward."""

    # The node's name; the backward's input for a saved value has the same name.
    name: str
    # Equal for values that share memory.
    memory: Memory
    # Whether the compiler may make the value in an argument's memory, see the function
    # `made_in_arguments`.
    may_be_in_argument: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableMemory:
    """Which inputs of a backward graph are in memory that the program can reach, and may write."""

    # By the input's name.
    memory_of: Mapping[str, Memory] = field(default_factory=dict)
    # The memory of the forward's values that the function `made_in_arguments` names: they are no
    # tensors of the program's, but the compiler may have put them in the memory of one.
    maybe_in_arguments: AbstractSet[Memory] = frozenset()

    def find(self, node: fx.Node) -> Memory | None:
        """An input's memory; None if the program cannot reach it."""
        return self.memory_of.get(node.name) if node.op == "placeholder" else None


def forward_outputs(forward: fx.GraphModule) -> tuple[ForwardOutput, ...]:
    """The values that AOTAutograd's forward returns, in this order, without None and constants.

    They are read when AOTAutograd has traced the graph, and wait for `find_reachable`, which needs
    them when the backward is cut: then the forward's graph is gone.
    """
    aliases = Aliases(forward)
    in_arguments = made_in_arguments(forward, aliases)
    memory_by_maker: dict[fx.Node, Memory] = {}
    for placeholder, argument in _torch.argument_placeholders(forward).items():
        memory_by_maker[placeholder] = memory_of_argument(argument)
    outputs = []
    for node in output_values(forward):
        if isinstance(node, fx.Node):
            made_by = aliases.base_of(node)
            # Memory that is no argument's has a number below zero. The length only grows, so no
            # number comes twice.
            memory = memory_by_maker.setdefault(made_by, Memory(-1 - len(memory_by_maker)))
            outputs.append(
                ForwardOutput(
                    name=node.name, memory=memory, may_be_in_argument=made_by in in_arguments
                )
            )
    return tuple(outputs)


def find_reachable(outputs: Sequence[ForwardOutput], backward: fx.GraphModule) -> ReachableMemory:
    """The inputs of a backward graph that the program can reach, given the forward's `outputs`.

    These are saved values in the memory of arguments, of values that the forward returned to the
    program, or of values that the compiler may have made in an argument's memory; and tangents,
    which the program may have passed in or got in a hook.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    tensors = {n.name for n in placeholders if isinstance(_torch.aten_value(n), torch.Tensor)}
    #   the forward returns   out, loss, | h, mask     to the program, and then what it saves
    #   the backward takes                 h, mask, | tangents_1, tangents_2
    # Each saved value comes once in each graph, so that their number tells where they begin among
    # the outputs. Names would not: states of random number generators have others in the backward.
    saved_inputs = itertools.takewhile(lambda node: not _torch.is_tangent(node), placeholders)
    saved_names = {node.name for node in saved_inputs}
    num_returned = len(outputs) - len(saved_names)
    returned = {output.memory for output in outputs[:num_returned]}
    saved = outputs[num_returned:]
    common_names = saved_names & {output.name for output in outputs}
    assert common_names <= {output.name for output in saved}, "a forward returns what it saves last"
    memory_by_name: dict[str, Memory] = {}
    in_arguments = {output.memory for output in saved if output.may_be_in_argument}
    for output in saved:
        is_argument = output.memory >= 0
        # A hook may write to what the forward returned (splits.md, fault 6), and to a buffer in
        # whose memory Inductor has made a value (splits.md, fault 7).
        if is_argument or output.memory in returned or output.memory in in_arguments:
            memory_by_name[output.name] = output.memory
    # Each tangent gets a number that no other memory has. Where two tangents may be in one memory,
    # that is seen to without these numbers, see [Note: order, as a hook sees it].
    lowest_number = min([0, *(output.memory for output in outputs)])
    tangents = filter(_torch.is_tangent, placeholders)
    for number, node in enumerate(tangents, start=1):
        memory_by_name[node.name] = Memory(lowest_number - number)
    return ReachableMemory(
        # A size is in nobody's memory.
        memory_of={name: memory for name, memory in memory_by_name.items() if name in tensors},
        maybe_in_arguments=in_arguments,
    )


def watched_inputs(backward: fx.GraphModule, reachable: ReachableMemory) -> set[fx.Node]:
    """The inputs of which sections after the first check, in each step, that no hook wrote to them.

    In eager autograd checks each saved tensor when its node runs, and raises. A compiled graph's
    saved tensors it checks once, before the first section. Left out are tangents, which autograd
    does not check in eager either, and inputs that the graph itself writes: sections could not tell
    that write from a hook's.
    """
    aliases = Aliases(backward)
    written: set[Memory | None] = {None}  # None: the program cannot reach it, nor can a hook
    for node in call_nodes(backward.graph):
        written |= {reachable.find(aliases.base_of(target)) for target in written_by(node)}
    return {
        node
        for node in backward.graph.find_nodes(op="placeholder")
        if not _torch.is_tangent(node) and reachable.find(node) not in written
    }


def read_backward(
    gm: fx.GraphModule,
    reachable: ReachableMemory,
    unwritten: AbstractSet[Argument] = frozenset(),
    num_released_before: Mapping[Argument, int] = {},
) -> BackwardFacts:
    """The facts about a backward graph: for the choice of its sections, and again for the proof.

    Args:
        gm: the graph.
        reachable: what `find_reachable` returned for it.
        unwritten: the arguments that are a parameter, frozen or with a gradient in this graph:
            nobody writes to these before their gradients are released.
        num_released_before: for the gradient of each argument how many others autograd releases
            before it; see `releases.py`. A gradient that is left out counts as released when it is
            made.
    """
    calls = call_nodes(gm.graph)
    aliases = Aliases(gm)
    has_effects = [not is_pure(node) for node in calls]
    communicates = [may_communicate(node) for node in calls]
    in_arguments = made_in_arguments(gm, aliases)
    # The origin of each value, looking through views and constants: the calls that made it, and the
    # reachable memory in which it may be. A view of two values has several.
    makers_of: dict[fx.Node, tuple[Call, ...]] = {}
    memories_of: dict[fx.Node, set[Memory]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        memory = reachable.find(node)
        if memory is not None:
            memories_of[node] = {memory}
    reads: list[dict[Call, Tie]] = []
    memories_read_by: list[set[Memory]] = []  # the reachable memory that each call reads
    memory_users: dict[Memory, list[Call]] = {}
    epilogue_copies: dict[Call, Memory] = {}
    for call, node in numbered(Call, calls):
        ties: dict[Call, Tie] = {}  # to the makers of the values that this call uses
        memories_read: set[Memory] = set()
        for source in node.all_input_nodes:
            memories_read |= memories_of.get(source, set())
            for maker in makers_of.get(source, ()):
                ties[maker] = _tie(calls[maker], node, in_arguments)
        memories_read_by.append(memories_read)
        if node in aliases.views_and_constants:
            # Whoever uses the view uses what it is made of, in that section.
            makers_of[node], memories_of[node] = tuple(ties), memories_read
            reads.append({})
            continue
        makers_of[node] = (call,)
        reads.append(ties)
        for memory in memories_read:
            memory_users.setdefault(memory, []).append(call)
        written = _memory_of_epilogue_copy(node, reachable)
        if written is not None:
            epilogue_copies[call] = written
    gradients = {argument: makers_of.get(node, ()) for argument, node in gradient_nodes(gm).items()}
    observable_calls = _observable_calls(reads, has_effects, memory_users, epilogue_copies)
    snapshot_reads, made_first = _snapshot_reads(
        gm, aliases, reachable, unwritten, may_compare_sizes=not any(communicates)
    )
    # As if they stood in front of all calls, so that the first section makes them.
    observable_calls.update(dict.fromkeys(made_first, BEFORE_ALL_CALLS))
    for call, in_snapshots in snapshot_reads.items():
        # A pure call that reads nothing but snapshots may run at any time: no hook writes to them.
        if memories_read_by[call] == in_snapshots and not has_effects[call]:
            del observable_calls[call]
    return BackwardFacts(
        call_names=[node.name for node in calls],
        is_view_or_constant=[node in aliases.views_and_constants for node in calls],
        has_effects=has_effects,
        communicates=communicates,
        reads=reads,
        num_bytes=[num_bytes_of(_torch.aten_value(node)) for node in calls],
        gradients=gradients,
        memory_users=memory_users,
        epilogue_copies=epilogue_copies,
        observable_calls=observable_calls,
        release_places=_release_places(calls, gradients, num_released_before),
        snapshot_reads=snapshot_reads,
    )


def _memory_of_epilogue_copy(node: fx.Node, reachable: ReachableMemory) -> Memory | None:
    """The memory to which an epilogue copy writes; None for any other call.

    An epilogue copy is one of AOTAutograd's last calls, which write the new values of arguments.
    """
    # A call whose result is used does more than to write.
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return None
    return reachable.find(node.all_input_nodes[0])  # the first of these is what it writes to


def _observable_calls(
    reads: Sequence[Mapping[Call, Tie]],
    has_effects: Sequence[bool],
    memory_users: Mapping[Memory, Sequence[Call]],
    epilogue_copies: Mapping[Call, Memory],
) -> dict[Call, Place]:
    """The calls of which a hook can tell whether they have run, with the place of each.

    They are the calls with effects, and those that read reachable memory. The arguments are the
    fields of `BackwardFacts` that have these names.
    """
    places = {call: Place(call) for call, has_some in numbered(Call, has_effects) if has_some}
    for calls in memory_users.values():
        # Behind a release a call might read what a hook wrote (splits.md, fault 5).
        places.update((call, Place(call)) for call in calls)
    for call, memory in epilogue_copies.items():
        # The copy stands behind what makes its value, and behind what reads or writes the memory
        # before it. That may be another epilogue copy, which has got its place here already.
        makers = [Place(maker) for maker in reads[call]]
        others = [places[other] for other in memory_users[memory] if other < call]
        places[call] = max([*makers, *others], default=BEFORE_ALL_CALLS)
    return places


def _snapshot_reads(
    gm: fx.GraphModule,
    aliases: Aliases,
    reachable: ReachableMemory,
    unwritten: AbstractSet[Argument],
    *,
    may_compare_sizes: bool,
) -> tuple[dict[Call, frozenset[Memory]], list[Call]]:
    """Calls that have to read reachable memory as the forward left it.

    One kind are recomputed calls of the forward that read anything but parameters. (A graph without
    a tangent among its inputs does not tell which calls are recomputed.) The other kind are calls
    that read a value of the forward's that was no tensor of the program's, but that the compiler
    may have made in an argument's memory.

    Returns the calls that can read snapshots, with the memory that each has to read there; and the
    calls that the first section is to make instead. These read memory that can have no snapshot, or
    return less than the snapshots would take, if `may_compare_sizes`: where the graph may
    communicate, other ranks may have other sizes.
    """
    needs_tangent: set[fx.Node] = set()  # and so is no call of the forward
    # The memory in which a value is, unless it is a tangent's, or of an argument of `unwritten`.
    memories_of: dict[fx.Node, frozenset[Memory]] = {}
    unwritten_memory = set(map(memory_of_argument, unwritten))
    without_copy: set[Memory] = set()  # what can have no snapshot
    num_bytes: dict[Memory, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        memory = reachable.find(node)
        if _torch.is_tangent(node):
            needs_tangent.add(node)
        elif memory is not None and memory not in unwritten_memory:
            memories_of[node] = frozenset([memory])
            num_bytes[memory] = num_bytes_of(_torch.aten_value(node))
            if _torch.aten_value(node).layout is not torch.strided:
                without_copy.add(memory)
    has_tangents = bool(needs_tangent)
    snapshot_reads: dict[Call, frozenset[Memory]] = {}
    made_first: list[Call] = []
    for call, node in numbered(Call, call_nodes(gm.graph)):
        if not needs_tangent.isdisjoint(node.all_input_nodes):
            needs_tangent.add(node)
        read = frozenset[Memory]().union(*(memories_of.get(n, ()) for n in node.all_input_nodes))
        if node in aliases.views_and_constants:
            memories_of[node] = read  # a view reads nothing: who reads it does
            if name_of(node).startswith("as_strided"):
                # It may read memory in front of the input, or behind it, which no snapshot has.
                without_copy |= read
            continue
        is_recomputed = has_tangents and node not in needs_tangent and is_pure(node)
        if not is_recomputed:
            # What else such a call reads eager has saved for it, see `watched_inputs`.
            read &= reachable.maybe_in_arguments
        if not read:
            continue
        num_copied_bytes = sum(num_bytes[memory] for memory in read)
        returns_less = num_bytes_of(_torch.aten_value(node)) < num_copied_bytes
        # A call with effects would take along, into the first section, all effects before it.
        is_worth_copies = not (returns_less and may_compare_sizes and is_pure(node))
        if without_copy.isdisjoint(read) and is_worth_copies:
            snapshot_reads[call] = read
        else:
            made_first.append(call)
    return snapshot_reads, made_first


def _release_places(
    calls: Sequence[fx.Node],
    gradients: Mapping[Argument, tuple[Call, ...]],
    num_released_before: Mapping[Argument, int],
) -> dict[Argument, Place]:
    """Where the gradient of each argument is released: behind the autograd node that makes it.

    A hook on the gradient then sees all that the node did (splits.md, fault 15), see [Note: order,
    as a hook sees it]. Calls that autograd made before it released the gradient have marks, see
    `releases.py`: a mark is how many gradients had been released when the call was made. The
    arguments are `BackwardFacts.gradients` and that of `read_backward`.
    """
    marked: list[tuple[int, Call]] = []
    for call, node in numbered(Call, calls):
        mark = num_released_before_call(node)
        if mark is not None:
            marked.append((mark, call))
    marked.sort()
    marks = [mark for mark, _ in marked]
    # For each k: behind the last of the k calls that autograd made first.
    last_places = [BEFORE_ALL_CALLS]
    for _, call in marked:
        last_places.append(max(last_places[-1], Place(call)))
    places: dict[Argument, Place] = {}
    for argument, makers in gradients.items():
        # An input of the graph is there from the start.
        places[argument] = max(map(Place, makers), default=BEFORE_ALL_CALLS)
        if argument in num_released_before:
            num_made = bisect.bisect_right(marks, num_released_before[argument])
            places[argument] = max(places[argument], last_places[num_made])
    return places


def _tie(value: fx.Node, reader: fx.Node, in_arguments: AbstractSet[fx.Node]) -> Tie:
    """What a boundary between a value and a call that reads it would lose.

    `in_arguments` are the values of the graph that a compiler may make in an argument's memory.
    """
    made = _torch.aten_value(value)
    if not isinstance(made, torch.Tensor | torch.SymInt | torch.SymFloat):
        return Tie.TUPLE
    if value in in_arguments:
        return Tie.MADE_IN_ARGUMENT
    is_product = name_of(value).partition(".")[0] in ("mm", "bmm", "addmm", "baddbmm")
    if is_product and name_of(reader).startswith("add."):
        return Tie.UNROUNDED  # the library's product can add to a tensor
    if not isinstance(made, torch.Tensor) or not may_be_fused(value, reader):
        return Tie.NONE
    # Compilers compute with more bits than a tensor of short floats stores.
    is_short = made.dtype.is_floating_point and made.dtype.itemsize < torch.float32.itemsize
    return Tie.UNROUNDED if is_short else Tie.FUSED
