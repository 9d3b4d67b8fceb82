"""Show that the sections of a cut graph compute what the graph computes, or refuse to run them.

Pure, and linear in the graph. It trusts neither who chose the sections nor who made their graphs,
and changes nothing.

[Note: proof]
    the graph                              its sections
    0  b = sigmoid(buffer)                 0:  a = mm(tangent, x)     -> released
    1  a = mm(tangent, x)    -> released   1:  b = sigmoid(buffer)
    2  c = mul(tangent, b)   -> released       c = mul(tangent, b)    -> released

Both are run symbolically. A value's *expression* is the call that makes it, with its arguments'
expressions; equal expressions have one number, so what sections make again, or copy, is equal to
the original. Above, gradients `a` and `c` have the same numbers in the graph and in the sections.
The sections are refused all the same: call 0 stands before the release of `a` and runs behind it,
where a hook may have written to the buffer.

A call that writes, or is not known to be pure, is the n-th *effect*: it is made once, in the same
order. A write changes the *version* of the memory, and a value read at another version is another
argument. Sections are right if each output has its expression, effects are equal, and each section
does what the cut says of it. An *event* is an effect, or a read of memory that the program can
reach: what a hook could notice.

Of a backward it is shown besides that
- no call runs behind a gradient's release before which it stands, if it has an effect or reads
  memory that the program can reach; see [Note: order, as a hook sees it] in facts.py. What the
  autograd node that makes a gradient does is looked for once more, by the numbers of nodes and
  Functions rather than by where autograd released the gradient.
- no call that may communicate runs before a release behind which it stands; see
  [Note: collectives] in sections.py.
- nothing is computed more often than in the graph, but for views, numbers, and constants of a
  closed list: a call that draws, and is not known to, would draw in each section.

What the proof finds in a way of its own, since the choice of sections would otherwise be trusted
twice: which values share memory (by the storages of AOTAutograd's values, where `aliases.py` goes
by operators), what may be made again (by the list `_CONSTANTS`, where `aliases.py` asks `is_pure`),
and the autograd node of each gradient.

What it trusts: AOTAutograd's trace; the strides of `as_strided` in calls with our mark `IS_COPY`;
what `nodes.py` says of single operators (`is_pure`, `may_communicate`, `written_by`); which inputs
the program can reach, which values may be made in arguments and where calls stand
(`find_reachable`, `made_in_arguments`, `read_backward`); and the compiler, which is given sections
that are right.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ddpopt import _torch
from ddpopt._indices import (
    BEFORE_ALL_CALLS,
    Argument,
    Call,
    FunctionNumber,
    ParameterIndex,
    Place,
    SectionIndex,
    Slot,
    memory_of_argument,
    numbered,
)
from ddpopt.errors import NotCutError, Reason
from ddpopt.split.aliases import Aliases, made_in_arguments
from ddpopt.split.backward import SectionGraph
from ddpopt.split.cut import Cut, Section
from ddpopt.split.facts import (
    BackwardFacts,
    ReachableMemory,
    gradient_nodes,
    read_backward,
    watched_inputs,
)
from ddpopt.split.nodes import (
    IS_COPY,
    attribute_of,
    call_nodes,
    is_differentiable,
    is_pure,
    leaves,
    may_communicate,
    name_of,
    output_values,
    sets_mode,
    storage_keys,
    written_by,
)
from ddpopt.split.releases import function_of, num_released_before_call

# By which the proof tells memory: ("reachable", its number), a storage, or a tuple or number of the
# proof's own for what calls make. A value has several, where its tensors are in several memories.
_Memory = Hashable

_FIRST_SECTION = SectionIndex(0)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
# The operators of ATen and prims that make a tensor of numbers alone, without drawing any.
_CONSTANTS = frozenset(
    {
        *("arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "iota", "linspace"),
        *("logspace", "ones", "scalar_tensor", "tril_indices", "triu_indices", "zeros"),
    }
)
# What our own copies call: clone_with_strides is in forward.py, and as_strided is how backward.py
# makes a snapshot of a tensor with gaps.
_COPIES = frozenset({"clone", "clone_with_strides", "detach", "as_strided"})


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotCutError(Reason.NOT_PROVEN, otherwise)


# ---- Backward --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Where autograd releases gradients, as `releases.py` noted it; empty where it did not."""

    # For the gradient of each argument, how many others autograd releases before it.
    num_released_before: Mapping[Argument, int] = field(default_factory=dict)
    # The arguments that go straight into each `autograd.Function`, by its number.
    function_arguments: Mapping[FunctionNumber, AbstractSet[Argument]] = field(default_factory=dict)


def prove_backward(  # noqa: PLR0913  # what is proven, and all that it is proven against
    gm: fx.GraphModule,
    cut: Cut,
    sections: Sequence[SectionGraph],
    reachable: ReachableMemory,
    argument_of: Mapping[ParameterIndex, Argument],
    *,
    unwritten: AbstractSet[Argument] = frozenset(),
    releases: Releases | None = None,
) -> None:
    """Show that a backward's sections release its gradients, each where the cut says.

    Once a gradient is released, its memory must not be read any more, since DDP writes the reduced
    gradient to it, nor its parameter, which a hook may update. No section keeps for a later one a
    value that its compiler may have put into memory of the program's. And each section checks
    whether a hook has written to the program's tensors that it reads. What else is shown is in
    [Note: proof]. This runs once for each cut backward, before its sections are compiled.

    Args:
        gm: the whole backward graph.
        cut: the record of its sections, which is to be shown right.
        sections: their graphs, in the order in which they run.
        reachable: what `find_reachable` returned for the whole graph.
        argument_of: by which argument of the forward each DDP parameter comes in.
        unwritten: the arguments that are parameters to which nobody writes before their gradients
            are released, as for `read_backward`.
        releases: where autograd released the gradients; each where it is made, if that is unknown.

    Raises:
        NotCutError: that is not so, or cannot be shown.
    """
    releases = releases or Releases()
    new_memory = itertools.count()

    def memory_made_by(node: fx.Node, read: Sequence[_Value]) -> tuple[_Memory, ...]:
        """The memory that a call returns: that of inputs of which it is a view, or new memory."""
        if _takes_new_tensor(node):
            # Two calls that take the same element get the same tensor, so its index is its memory.
            return (("element", read[0].memory, node.args[1]),)
        viewed = _viewed_inputs(node)
        memory: list[_Memory] = []
        for source, value in zip(node.all_input_nodes, read, strict=True):
            if source in viewed:
                memory += value.memory
        return tuple(dict.fromkeys(memory)) or (next(new_memory),)

    def is_epilogue_copy(node: fx.Node, read: Sequence[_Value]) -> bool:
        """Whether a call is a write with which AOTAutograd gives an input its last value."""
        # Inputs have other names in sections: their memory tells which they are, unless they are
        # tangents, which share one.
        is_copy = node.target is torch.ops.aten.copy_.default and not node.users
        return is_copy and len(read[0].memory) == 1 and _is_reachable(read[0].memory[0])

    # One numbering for both programs, so that equal numbers are equal expressions.
    numbers: dict[Hashable, int] = {}
    whole = _Program(numbers, memory_made_by, is_epilogue_copy)
    split = _Program(numbers, memory_made_by, is_epilogue_copy)

    # The whole graph: what each gradient is to be.
    placeholders = gm.graph.find_nodes(op="placeholder")
    memories = (_memory_of_input(node, reachable, new_memory) for node in placeholders)
    inputs = [_Value(whole.number(("input", k)), memory) for k, memory in enumerate(memories)]
    value_of_output = dict(zip(output_values(gm), whole.run(gm, inputs), strict=True))
    expected = {a: whole.expression_of(value_of_output[n]) for a, n in gradient_nodes(gm).items()}

    # The sections, one after the other, as they will run.
    watched = watched_inputs(gm, reachable)
    watched_slots = {slot for slot, node in numbered(Slot, placeholders) if node in watched}
    run = _Run(split, watched_slots, slots=dict(numbered(Slot, inputs)))
    argument_by_name = {p.name: argument_of[p.index] for p in cut.arrival}
    for section, recorded in zip(sections, cut.sections, strict=True):
        run.add(section, recorded, {argument_by_name[name] for name in recorded.parameters})

    _require(run.released == expected, "gradients are missing, or computed otherwise")
    _require(whole.effects == split.effects, "calls with effects differ, or their order")
    _require(
        not split.num_made - whole.num_made,  # what the sections make more often than the graph
        "a section makes a call again that is neither a view nor a constant",
    )
    _require(whole.writes == split.writes, "what is written to arguments differs")
    facts = read_backward(gm, reachable, unwritten, releases.num_released_before)
    calls = call_nodes(gm.graph)
    # The last section in which each event is. A call that computes a size from an input's is made
    # by several sections, and reads the input in each.
    ran_in: dict[Hashable, SectionIndex] = {}
    for event in split.events:
        ran_in[event.what] = max(event.section, ran_in.get(event.what, _FIRST_SECTION))
    _require_order(facts, calls, whole, ran_in, run.released_in)
    _require_whole_nodes(gm, releases, whole, ran_in, run.released_in)
    _require_collectives_behind(facts, releases, calls, whole, ran_in, run.released_in)


@dataclass
class _Run:
    """A run of a backward's sections, as `gates.Run` is one, but symbolic."""

    program: _Program
    # The slots of inputs that each section but the first has to watch if it takes them.
    watched_slots: AbstractSet[Slot]
    # The values that the next section may take, see `Flow`.
    slots: dict[Slot, _Value]
    # For each argument of the forward whose gradient was released: the gradient's expression, and
    # the section that released it.
    released: dict[Argument, Hashable] = field(default_factory=dict)
    released_in: dict[Argument, SectionIndex] = field(default_factory=dict)
    # The memory that others may write now: that of these gradients, and of their arguments.
    handed_out: set[_Memory] = field(default_factory=set)

    def add(
        self, section: SectionGraph, recorded: Section, must_release: AbstractSet[Argument]
    ) -> None:
        """Run the next section; require that it does what the cut's record of it says.

        `must_release` are the arguments of the forward that are the record's parameters. The
        section may release the gradients of others too.
        """
        flow, description = section.flow, f"backward section {recorded.index}"

        _require(
            self.slots.keys() >= {*flow.takes}, f"{description} reads a value that is not there"
        )
        taken = [self.slots[slot] for slot in flow.takes]
        read = {memory for value in taken for memory in value.memory}
        _require(read.isdisjoint(self.handed_out), f"{description} reads what was handed out")
        # The first section runs before any hook of this backward, so it watches nothing.
        watches = self.watched_slots & {*flow.takes} if recorded.index else set()
        _require(watches == {*flow.watches}, f"{description} watches other inputs")
        for slot in flow.drops:
            self.slots.pop(slot, None)  # an empty slot may be emptied again

        self.program.section = recorded.index
        returned = self.program.run(section.graph, taken)
        _require(
            self.program.num_fixed[-1] == recorded.num_fixed,
            f"{description} has other calls with effects",
        )

        num_kept = len(flow.keeps)
        self.slots.update(zip(flow.keeps, returned[:num_kept], strict=True))
        makers = {_maker_of(node) for node in output_values(section.graph)[:num_kept]}
        _require(
            makers.isdisjoint(made_in_arguments(section.graph, Aliases(section.graph))),
            f"{description} keeps what may be in memory that the program can reach",
        )

        for argument, gradient in zip(flow.releases, returned[num_kept:], strict=True):
            _require(
                argument not in self.released, f"{description} releases gradient {argument} again"
            )
            self.released[argument] = self.program.expression_of(gradient)
            self.released_in[argument] = recorded.index
            # DDP and hooks may write to the gradient, and to its parameter, from here on.
            self.handed_out.update((*gradient.memory, ("reachable", memory_of_argument(argument))))
        _require(
            must_release <= {*flow.releases}, f"{description} does not release what is planned"
        )


def _storages(node: fx.Node) -> set[int]:
    """The storages in which AOTAutograd's trace had the tensors that a node stands for."""
    tensors = [v for v in leaves(_torch.aten_value(node)) if isinstance(v, torch.Tensor)]
    return {key for tensor in tensors if (key := _torch.storage_key(tensor)) is not None}


def _viewed_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs with which a call's result shares memory."""
    storages = _storages(node)
    return [source for source in node.all_input_nodes if storages & _storages(source)]


def _takes_new_tensor(node: fx.Node) -> bool:
    """Whether a call takes a tensor from a tuple of new ones: not of views, as `split` returns."""
    return node.target is operator.getitem and not _viewed_inputs(node.all_input_nodes[0])


def _maker_of(node: fx.Node) -> fx.Node:
    """The call that made a value, or the input that brought it in, looking through views.

    Of an element of a tuple of new tensors, it is the call that takes the element.
    """
    while node.op != "placeholder" and (viewed := _viewed_inputs(node)):
        if _takes_new_tensor(node):
            break
        node = viewed[0]
    return node


def _memory_of_input(
    node: fx.Node, reachable: ReachableMemory, new_memory: Iterator[int]
) -> tuple[_Memory, ...]:
    """The memory of an input of a backward, new if the program cannot reach it.

    All tangents are in one memory besides: two may be one tensor, see [Note: order, as a hook sees
    it].
    """
    found = reachable.find(node)
    memory: _Memory = next(new_memory) if found is None else ("reachable", found)
    return (memory, "any tangent's") if _torch.is_tangent(node) else (memory,)


def _require_order(
    facts: BackwardFacts,
    calls: Sequence[fx.Node],
    whole: _Program,
    ran_in: Mapping[Hashable, SectionIndex],
    released_in: Mapping[Argument, SectionIndex],
) -> None:
    """Require that no event is behind a release before which it stands in the whole graph.

    `facts` and `calls` are the whole graph's. `ran_in` has the section in which each of its events
    ran, by `_Event.what`, and `released_in` the section in which each gradient was released.
    """
    place_of_call: dict[fx.Node, Place] = {}
    for call, node in numbered(Call, calls):
        # What a hook may see stands where `facts` has it: an epilogue copy not at its call.
        place_of_call[node] = facts.observable_calls.get(call, Place(call))
    # These calls read this memory as the forward left it: such a read stands before any release.
    reads_of_forward = {
        (calls[call], ("reachable", memory))
        for call, memories in facts.snapshot_reads.items()
        for memory in memories
    }
    stands_at: dict[Hashable, Place] = {}
    for event in whole.events:
        _require(event.what in ran_in, f"{event.node.name} is left out")
        place = place_of_call[event.node]
        if (event.node, event.memory_read) in reads_of_forward:
            place = BEFORE_ALL_CALLS
        # Two equal reads are one event: both have to come before what the first one stands before,
        # though the second may not stand there. AOTAutograd merges equal calls, so this is rare.
        stands_at[event.what] = min(stands_at.get(event.what, place), place)

    ordered = sorted(stands_at, key=stands_at.__getitem__)
    places = [stands_at[what] for what in ordered]
    # For each k: the last section in which one of the first k events runs.
    sections = (ran_in[what] for what in ordered)
    last_sections = list(itertools.accumulate(sections, max, initial=_FIRST_SECTION))
    for argument, section in released_in.items():
        # A release is behind the call at its place.
        num_before = bisect.bisect_right(places, facts.release_places[argument])
        _require(
            last_sections[num_before] <= section,
            f"a call that stands before the release of gradient {argument} runs behind it",
        )


def _require_whole_nodes(
    gm: fx.GraphModule,
    releases: Releases,
    whole: _Program,
    ran_in: Mapping[Hashable, SectionIndex],
    released_in: Mapping[Argument, SectionIndex],
) -> None:
    """Require that no event of an autograd node is behind the release of the node's gradients.

    All calls of one autograd node have one number from AOTAutograd, by which nodes are told apart
    here. But all `autograd.Function`s share the highest number, so their calls have marks of ours.
    `ran_in` has the section in which each event ran, and `released_in` that of each release.
    """
    numbers = [_torch.autograd_number(node) for node in call_nodes(gm.graph)]
    functions_number = max((number for number in numbers if number is not None), default=None)

    def node_of(call: fx.Node) -> Hashable | None:
        """The autograd node that made a call; None if that is not known, and nothing is required.

        So it is for a call with the highest number and no mark. In a graph without Functions that
        is a call of one other node, of which nothing is required either.
        """
        function = function_of(call)
        if function is not None:
            return ("Function", function)
        number = _torch.autograd_number(call)
        return None if number == functions_number else number

    last_section: dict[Hashable, SectionIndex] = {}
    for event in whole.events:
        call = event.node
        if call.target is torch.ops.aten.copy_.default:
            # AOTAutograd added this write to an argument: the node is that which made the value,
            # the copy's last input.
            call = _maker_of(call.all_input_nodes[-1])
        node = node_of(call)
        last_section[node] = max(ran_in[event.what], last_section.get(node, _FIRST_SECTION))

    for argument, gradient in gradient_nodes(gm).items():
        nodes: set[Hashable] = {node_of(_maker_of(gradient))}
        # A Function may return the gradient that it got, or a view of it, as that of its input.
        for function, arguments in releases.function_arguments.items():
            if argument in arguments:
                nodes.add(("Function", function))
        for node in nodes - {None}:
            _require(
                last_section.get(node, 0) <= released_in[argument],
                f"a call of the autograd node that makes gradient {argument} runs behind its "
                "release",
            )


def _require_collectives_behind(
    facts: BackwardFacts,
    releases: Releases,
    calls: Sequence[fx.Node],
    whole: _Program,
    ran_in: Mapping[Hashable, SectionIndex],
    released_in: Mapping[Argument, SectionIndex],
) -> None:
    """Require that no call that may communicate runs before a release behind which it stands.

    `calls` are the whole graph's. `ran_in` has the section in which each event ran, and
    `released_in` that of each release. `releases` is as for `prove_backward`.
    """
    # A call that may communicate is not pure: it is one event, an effect.
    what_of = {event.node: event.what for event in whole.events}
    for place, call in numbered(Place, calls):
        if not may_communicate(call):
            continue
        ran = ran_in[what_of[call]]
        num_released = num_released_before_call(call)
        for argument, released in released_in.items():
            if num_released is not None and argument in releases.num_released_before:
                is_behind = releases.num_released_before[argument] < num_released
            else:  # a recomputed call, one behind all releases, or nothing was noted of the graph
                is_behind = facts.release_places[argument] < place
            # A section releases its gradients behind all of its calls.
            _require(
                released < ran or not is_behind,
                f"{call.name}, which may communicate, runs before the release of gradient "
                f"{argument}, behind which it stands",
            )


# ---- Forward ---------------------------------------------------------------------------------


def prove_forward(
    gm: fx.GraphModule,
    cut: Cut,
    stitched: fx.GraphModule,
    argument_of: Mapping[ParameterIndex, Argument],
) -> None:
    """Show that a stitched forward graph computes what `gm` does, in sections as the cut has them.

    If the cut says that section 1's backward makes the last part of a parameter's gradient, no
    gradient comes to the parameter from section 0. This runs once for each cut forward, before its
    sections are compiled. `stitched` is what `make_stitched_graph` returned, and `argument_of` as
    for `prove_backward`.

    Raises:
        NotCutError: that is not so, or cannot be shown.
    """
    # One numbering for both programs. Memory is told by the storages of Dynamo's example values.
    numbers: dict[Hashable, int] = {}
    whole = _Program(numbers, lambda node, _: tuple(storage_keys(node)))
    split = _Program(numbers, lambda node, _: tuple(storage_keys(node)))
    inputs = [
        _Value(whole.number(("input", argument)), tuple(storage_keys(node)))
        for argument, node in numbered(Argument, gm.graph.find_nodes(op="placeholder"))
    ]
    expected = whole.run(gm, inputs)
    returned = split.run(stitched, inputs, is_stitched=True)
    _require(
        whole.expression_of(expected) == split.expression_of(returned),
        "the sections return other values",
    )
    _require(whole.effects == split.effects, "calls with effects differ, or their order")
    _, *num_fixed = split.num_fixed  # the first is of the calls outside of sections
    _require(
        num_fixed == [section.num_fixed for section in cut.sections],
        "calls with effects are in other sections",
    )
    first_user = _first_users(stitched)
    # Only of parameters that come in as arguments is it shown in which sections they are used.
    argument_by_name = {p.name: argument_of[p.index] for p in cut.arrival if p.index in argument_of}
    for section in cut.sections:
        names = [name for name in section.parameters if name in argument_by_name]
        # With None, and so refused, where no section passes a gradient to a parameter.
        users = {first_user.get(argument_by_name[name]) for name in names}
        _require(
            users <= {section.index},
            f"section {section.index} is not the first that uses its parameters",
        )


def _first_users(stitched: fx.GraphModule) -> dict[Argument, SectionIndex]:
    """For each argument, the first section that may pass a gradient back to it."""
    inputs = stitched.graph.find_nodes(op="placeholder")
    argument_by_node = {node: argument for argument, node in numbered(Argument, inputs)}
    first_user: dict[Argument, SectionIndex] = {}
    section_calls = stitched.graph.find_nodes(op="call_module")
    for section, call in numbered(SectionIndex, section_calls):
        placeholders = attribute_of(stitched, call).graph.find_nodes(op="placeholder")
        for placeholder, passed in zip(placeholders, call.args, strict=True):
            # The output is none: what a section hands on as it got it, a later one may use.
            users = [user for user in placeholder.users if user.op != "output"]
            if passed in argument_by_node and any(map(is_differentiable, users)):
                first_user.setdefault(argument_by_node[passed], section)
    return first_user


# ---- Running a graph symbolically ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Value:
    """The number of an expression, and the memory that holds its tensors."""

    expression: int
    memory: tuple[_Memory, ...] = ()


class _Event(NamedTuple):
    """An effect, an epilogue copy, or a read of memory that the program can reach."""

    # Equal for the same event of the whole graph and of the sections.
    what: tuple[Hashable, ...]
    node: fx.Node
    # Where it happens: for a read of a snapshot, the section that made the snapshot.
    section: SectionIndex
    # Of a read alone: what it reads, or read when the snapshot was made.
    memory_read: _Memory = None


def _is_reachable(memory: _Memory) -> bool:
    """Whether the program can reach memory, see `ReachableMemory`."""
    return isinstance(memory, tuple) and memory[0] == "reachable"


@dataclass
class _Program:
    """Runs graphs symbolically, one after the other."""

    # The numbers of the expressions so far, in this and in other programs.
    numbers: dict[Hashable, int]
    # The memory of what a call returns, from the call and the values that it reads.
    memory_of: Callable[[fx.Node, Sequence[_Value]], tuple[_Memory, ...]]
    # Whether a call writes to reachable memory and does nothing else. Such calls keep their order
    # by memory, not among the other effects.
    is_epilogue_copy: Callable[[fx.Node, Sequence[_Value]], bool] = lambda _node, _read: False
    # The section that is run, for events; `_Run` sets it before each.
    section: SectionIndex = _FIRST_SECTION

    # The calls with effects, but for epilogue copies, in order, with the expressions that they got.
    effects: list[Hashable] = field(default_factory=list)
    # Epilogue copies, by memory.
    writes: dict[tuple[_Memory, ...], list[Hashable]] = field(default_factory=dict)
    # The events, in the order in which they ran.
    events: list[_Event] = field(default_factory=list)
    # For each graph that was run, how many of its calls are not known to be pure, as
    # `Section.num_fixed` counts them.
    num_fixed: list[int] = field(default_factory=list)
    # How often each call was made that computes anything but a number, a view or a constant; by
    # its expression.
    num_made: collections.Counter[int] = field(default_factory=collections.Counter)
    # Each copy has memory of its own.
    _copy_numbers: Iterator[int] = field(default_factory=itertools.count)
    # How often each memory has been written.
    _versions: collections.Counter[_Memory] = field(default_factory=collections.Counter)
    # The modes in which calls are made now, set by calls before: the regions of autocast around
    # them, from the outermost, and whether gradients are on. A graph begins with gradients on.
    _autocasts: list[Hashable] = field(default_factory=list)
    _is_grad_on: bool = True

    def number(self, expression: Hashable) -> int:
        """The number of an expression: a new one, unless a program has had an equal expression."""
        return self.numbers.setdefault(expression, len(self.numbers))

    def run(self, gm: fx.GraphModule, inputs: Sequence[Any], *, is_stitched: bool = False) -> Any:
        """A graph's outputs, as a tuple, from the values of its inputs.

        One that `is_stitched` calls sections, and takes apart the tuples that they return.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        # `_call` counts in the last one: a stitched graph's own, up to its first section.
        self.num_fixed.append(0)
        for node in gm.graph.nodes:
            if node.op == "call_module" and is_stitched:
                section = attribute_of(gm, node)
                values[node] = self.run(section, [values[n] for n in node.args])
            elif node.op == "call_function" and is_stitched:  # takes a section's result apart
                values[node] = values[node.args[0]][node.args[1]]
            elif node.op not in ("placeholder", "output"):
                values[node] = self._call(gm, node, values)
        return fx.map_arg(tuple(output_values(gm)), values.__getitem__)

    def _call(self, gm: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> _Value:
        """What a call or an attribute is, symbolically; the call's effects and reads are noted."""
        read = [values[source] for source in node.all_input_nodes]
        memory = self.memory_of(node, read)
        if IS_COPY in node.meta:
            is_known = name_of(node).partition(".")[0] in _COPIES
            _require(is_known, f"{node.name} is marked as a copy, and may be none")
            # By its mark it is the same value in other memory. A call that reads it reads the
            # original where the copy is made. The views through which a snapshot is made are marked
            # too, but are in their base's memory.
            is_view = memory == read[0].memory
            if not is_view and any(map(_is_reachable, read[0].memory)):
                number = next(self._copy_numbers)
                memory = tuple(
                    ("snapshot", self.section, original, number) for original in read[0].memory
                )
            return _Value(read[0].expression, memory)
        if node.op == "get_attr":  # told by identity: sections may have it by another name
            return _Value(self.number(("attribute", id(attribute_of(gm, node)))), memory)
        if sets_mode(node):
            self._set_mode(node, values)
            return _Value(self.number(node.target), memory)

        target = id(attribute_of(gm, node)) if node.op == "call_module" else node.target
        arguments = self.expression_of((node.args, node.kwargs), values)
        call = (node.op, target, arguments, self._is_grad_on, *self._autocasts)
        written, is_fixed = written_by(node), not is_pure(node)
        self.num_fixed[-1] += is_fixed
        if self.is_epilogue_copy(node, read):
            # It is the n-th copy to this memory. What it copies is compared in `writes`.
            copies = self.writes.setdefault(read[0].memory, [])
            copies.append(call)
            call = ("epilogue copy", read[0].memory, len(copies))
            self.events.append(_Event(call, node, self.section))
        elif written or is_fixed:
            # Its result is that of the n-th effect. What it is called with is compared in order.
            self.effects.append(call)
            call = ("effect", len(self.effects))
            self.events.append(_Event(call, node, self.section))
        elif not {m for value in read for m in value.memory}.issuperset(memory):
            # It has new memory, so it is no view: a view reads nothing, and may be made by each
            # section, as may constants and numbers, see [Note: proof].
            self._note_reads(self.number(call), node, read)
            is_constant = not read and name_of(node).partition(".")[0] in _CONSTANTS
            is_number = isinstance(_torch.aten_value(node), _NUMBERS)
            if not is_constant and not is_number:
                self.num_made[self.number(call)] += 1
        # What it has written has another version from here on.
        self._versions.update({m for source in written for m in values[source].memory})
        return _Value(self.number(call), memory)

    def _note_reads(self, expression: int, node: fx.Node, read: Sequence[_Value]) -> None:
        """Note what reachable memory a call reads; in a snapshot, as read where that was made.

        `expression` is the number of the call's expression, and `read` the values that it takes.
        """
        for memory in itertools.chain.from_iterable(value.memory for value in read):
            section, original = self.section, memory
            if isinstance(memory, tuple) and memory[0] == "snapshot":
                _, section, original, _ = memory
            if _is_reachable(original):
                self.events.append(_Event(("read", expression, original), node, section, original))

    def _set_mode(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Note that a call enters or leaves autocast, or switches gradients on or off."""
        if _torch.sets_grad_mode(name_of(node)):
            # Not nested: what is switched off in front of an autocast may be switched on in it.
            self._is_grad_on = bool(node.args[0])
        elif _torch.enters_autocast(name_of(node)):
            self._autocasts.append(self.expression_of(node.args, values))
        else:
            self._autocasts.pop()

    def expression_of(self, argument: Any, values: Mapping[fx.Node, Any] = {}) -> Hashable:
        """An argument of a call as a hashable expression.

        Containers become tuples. A node becomes the number of its expression, with the versions of
        its memory: the same tensor read before and after a write is not the same argument. `values`
        are those of nodes.
        """
        if isinstance(argument, fx.Node):
            constant = _torch.constant_of(_torch.dynamo_value(argument))
            # A forward's sections have the number in place of such a node, see `copy_for_cutting`.
            is_inlined = constant is not None and argument.op != "placeholder"
            argument = constant if is_inlined else values[argument]
        if isinstance(argument, _Value):
            return (argument.expression, *(self._versions[memory] for memory in argument.memory))
        if isinstance(argument, list | tuple):
            return (list, *(self.expression_of(item, values) for item in argument))
        if isinstance(argument, Mapping):
            items = argument.items()
            return (dict, *((key, self.expression_of(item, values)) for key, item in items))
        if isinstance(argument, slice):
            ends = [argument.start, argument.stop, argument.step]
            return (slice, self.expression_of(ends, values))
        # By type, since 1 equals True. By text, since 0.0 equals -0.0, and not all can be hashed.
        return (type(argument), argument if isinstance(argument, int) else repr(argument))
