"""Show that the sections of a cut graph compute what the graph computes, or refuse to run them.

Pure, and linear in the graph. It trusts neither planner nor cutter, and changes nothing.

[Note: proof]
The graph and its sections are run symbolically. A value's *expression* is the call that makes it,
with its arguments' expressions; equal ones have one number, so what sections make again, or copy,
is equal to the original. A call that writes, or is not known to be pure, is the n-th *effect*: it
is made once, in the same order. A write changes the *version* of the memory, and a value read at
another version is another argument. Sections are right if each output has its expression, effects
are equal, and each section does what the plan says of it.

Of a backward it is shown besides that no call runs behind a gradient's release before which it
stands, if it has an effect or reads memory that the program can reach; see [Note: order, as a hook
sees it] in backward_plan.py.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.errors import NotCutError, Reason
from ddpopt.split.backward_cut import SectionGraph
from ddpopt.split.backward_plan import (
    BackwardFacts,
    argument_of,
    gradient_nodes,
    read_backward,
    repeats_of,
)
from ddpopt.split.nodes import (
    IS_COPY,
    attribute_of,
    call_nodes,
    is_differentiable,
    is_pure,
    name_of,
    output_values,
    sets_mode,
    storage_keys,
    written_by,
)
from ddpopt.split.plan import SplitPlan


@dataclass(frozen=True, slots=True)
class _Value:
    """The number of an expression, and the memory that holds its tensors."""

    expression: int
    memory: tuple[Hashable, ...] = ()


@dataclass
class _Program:
    """Runs graphs symbolically, one after the other.

    `numbers` are those of the expressions so far. `memory_of` gives the memory of what a call
    returns, from the call and the values that it reads. `num_fixed` counts as plans do, for each
    graph that was run; `_modes` are those of autocast, and False under no_grad.

    Calls for which `writes_back` is true write to an argument and do nothing else: they are in
    `writes`, by memory, and not among the other effects. `events` has, in the order in which they
    were run, all effects, write-backs and reads of the memory of an argument: what it is,
    equal in equal programs, the call, and `section` as it was. A call that reads a copy of an
    argument's memory reads that when the copy is made.
    """

    numbers: dict[Hashable, int]
    memory_of: Callable[[fx.Node, Sequence[_Value]], tuple[Hashable, ...]]
    writes_back: Callable[[fx.Node, Sequence[_Value]], bool] = lambda _node, _read: False
    effects: list[Hashable] = field(default_factory=list)
    writes: dict[Hashable, list[Hashable]] = field(default_factory=dict)
    section: int = 0
    events: list[tuple[tuple[Hashable, ...], fx.Node, int]] = field(default_factory=list)
    num_fixed: list[int] = field(default_factory=list)
    _versions: collections.Counter[Hashable] = field(default_factory=collections.Counter)
    _modes: list[Hashable] = field(default_factory=list)

    def number(self, expression: Hashable) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))

    def run(self, gm: fx.GraphModule, inputs: Sequence[Any], *, is_stitched: bool = False) -> Any:
        """Return a graph's outputs; modules that one calls which `is_stitched` are sections."""
        values: dict[fx.Node, Any] = dict(
            zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
        )
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
        read = [values[source] for source in node.all_input_nodes]
        memory = self.memory_of(node, read)
        if IS_COPY in node.meta:
            if any(map(is_argument, read[0].memory)):
                memory = tuple(("snapshot", self.section, place) for place in read[0].memory)
            return _Value(read[0].expression, memory)
        if node.op == "get_attr":
            return _Value(self.number(("attribute", id(attribute_of(gm, node)))), memory)
        if sets_mode(node):
            self._set_mode(node, values)
            return _Value(self.number(node.target), memory)
        target = id(attribute_of(gm, node)) if node.op == "call_module" else node.target
        arguments = self.freeze((node.args, node.kwargs), values)
        call = (node.op, target, arguments, *self._modes)
        written, is_fixed = written_by(node), not is_pure(node)
        self.num_fixed[-1] += is_fixed
        if self.writes_back(node, read):
            written_back = self.writes.setdefault(read[0].memory, [])
            written_back.append(call)
            call = ("written back", read[0].memory, len(written_back))
            self.events.append((call, node, self.section))
        elif written or is_fixed:
            self.effects.append(call)
            call = ("effect", len(self.effects))
            self.events.append((call, node, self.section))
        elif not read or memory != read[0].memory:  # else it is a view, which reads nothing
            self._note_reads(self.number(call), node, read)
        self._versions.update({place for source in written for place in values[source].memory})
        return _Value(self.number(call), memory)

    def _note_reads(self, call: int, node: fx.Node, read: Sequence[_Value]) -> None:
        """Note each argument whose memory the call reads, now or in a snapshot."""
        for place in itertools.chain.from_iterable(value.memory for value in read):
            if is_argument(place):
                self.events.append((("read", call, place), node, self.section))
            elif isinstance(place, tuple) and place[0] == "snapshot":
                _, section, argument = place
                self.events.append((("read", call, argument), node, section))

    def _set_mode(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        is_grad_mode = _torch.sets_grad_mode(name_of(node))
        if _torch.enters_autocast(name_of(node)) or (is_grad_mode and not node.args[0]):
            self._modes.append(False if is_grad_mode else self.freeze(node.args, values))
        elif not is_grad_mode or False in self._modes:
            self._modes.pop()

    def freeze(self, value: Any, values: Mapping[fx.Node, Any] = {}) -> Hashable:
        """Return what is equal for equal arguments, read now. Nodes have these `values`."""
        if isinstance(value, fx.Node):
            constant = _torch.constant_of(_torch.dynamo_value(value))
            is_inlined = constant is not None and value.op != "placeholder"
            value = constant if is_inlined else values[value]
        if isinstance(value, _Value):
            return (value.expression, *(self._versions[place] for place in value.memory))
        if isinstance(value, list | tuple):
            return (list, *(self.freeze(item, values) for item in value))
        if isinstance(value, Mapping):
            return (dict, *((key, self.freeze(item, values)) for key, item in value.items()))
        if isinstance(value, slice):
            return (slice, self.freeze([value.start, value.stop, value.step], values))
        return (type(value), value if isinstance(value, int) else repr(value))


def is_argument(place: Hashable) -> bool:
    """Whether memory is that of an argument of the forward, which the program can reach."""
    return isinstance(place, tuple) and place[0] == "argument"


def validate_backward(
    gm: fx.GraphModule,
    plan: SplitPlan,
    sections: Sequence[SectionGraph],
    saved: Mapping[str, int],
    arguments: Mapping[int, int],
) -> None:
    """Show that a backward's sections release its gradients, each where it is planned.

    Memory that was handed out with a gradient must not be read any more, nor a parameter whose
    gradient was. `saved` is as in `read_backward`, `arguments` as in `final_positions`.

    Raises:
        NotCutError: that is not so, or cannot be shown.
    """
    places = itertools.count()
    views = {owner.graph: repeats_of(owner) for owner in (gm, *(s.graph for s in sections))}

    def memory_of(node: fx.Node, read: Sequence[_Value]) -> tuple[Hashable, ...]:
        return read[0].memory if read and node in views[node.graph] else (next(places),)

    def writes_back(node: fx.Node, read: Sequence[_Value]) -> bool:
        # Names of inputs are other ones in sections: their memory tells which argument it is.
        is_copy = node.target is torch.ops.aten.copy_.default and not node.users
        return is_copy and len(read[0].memory) == 1 and is_argument(read[0].memory[0])

    numbers: dict[Hashable, int] = {}
    whole, cut = (_Program(numbers, memory_of, writes_back) for _ in range(2))
    inputs = []
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        argument = argument_of(node, saved)
        held = next(places) if argument is None else ("argument", argument)
        inputs.append(_Value(whole.number(("input", place)), (held,)))
    made = dict(zip(output_values(gm), whole.run(gm, inputs), strict=True))
    expected = {a: whole.freeze(made[node]) for a, node in gradient_nodes(gm).items()}
    argument_by_name = {p.name: arguments[p.index] for p in plan.arrival}
    slots: dict[int, Any] = dict(enumerate(inputs))
    released: dict[int, Hashable] = {}
    released_in: dict[int, int] = {}
    handed_out: set[Hashable] = set()
    for section, planned in zip(sections, plan.sections, strict=True):
        where = f"backward section {planned.index}"
        _require(slots.keys() >= {*section.takes}, f"{where} reads a value that is not there")
        taken = [slots[slot] for slot in section.takes]
        read = {place for value in taken for place in value.memory}
        _require(read.isdisjoint(handed_out), f"{where} reads what was handed out")
        for slot in section.drops:
            slots.pop(slot, None)
        cut.section = planned.index
        returned = cut.run(section.graph, taken)
        num_kept = len(section.keeps)
        slots.update(zip(section.keeps, returned[:num_kept], strict=True))
        for argument, gradient in zip(section.releases, returned[num_kept:], strict=True):
            _require(argument not in released, f"{where} releases gradient {argument} again")
            released[argument] = cut.freeze(gradient)
            released_in[argument] = planned.index
            handed_out.update((*gradient.memory, ("argument", argument)))
        due = {argument_by_name[name] for name in planned.parameters}
        _require(due <= {*section.releases}, f"{where} does not release what is planned")
        _require(cut.num_fixed[-1] == planned.num_fixed, f"{where} has other calls with effects")
    _require(released == expected, "gradients are missing, or computed otherwise")
    _require(whole.effects == cut.effects, "calls with effects differ, or their order")
    _require(whole.writes == cut.writes, "what is written to arguments differs")
    _require_order(read_backward(gm, saved), call_nodes(gm.graph), whole, cut, released_in)


def _require_order(
    facts: BackwardFacts,
    calls: Sequence[fx.Node],
    whole: _Program,
    cut: _Program,
    released_in: Mapping[int, int],
) -> None:
    """Require that no event is behind a release before which it stands in the whole graph.

    `facts` and `calls` are the whole graph's. Gradients are released in the sections given.
    """
    ran_in: dict[Hashable, int] = {}
    for event, _, section in cut.events:
        ran_in[event] = max(section, ran_in.get(event, 0))
    place_of_call = {node: facts.bound_places.get(k, k) for k, node in enumerate(calls)}
    before_all = {
        (calls[call], ("argument", argument))
        for call, arguments in facts.forward_reads.items()
        for argument in arguments
    }
    stands_at: dict[tuple[Hashable, ...], int] = {}
    for event, node, _ in whole.events:
        _require(event in ran_in, f"{node.name} is left out")
        # Two equal reads are one event: both have to come before what the first one stands before.
        argument_read = event[-1]  # of an effect it is something else, which is not in the set
        place = -1 if (node, argument_read) in before_all else place_of_call[node]
        stands_at[event] = min(stands_at.get(event, len(calls)), place)
    ordered = sorted(stands_at, key=stands_at.__getitem__)
    places = [stands_at[event] for event in ordered]
    last_sections = list(itertools.accumulate((ran_in[e] for e in ordered), max, initial=0))
    for argument, section in released_in.items():
        num_before = bisect.bisect_right(places, facts.release_places[argument])
        _require(
            last_sections[num_before] <= section,
            f"a call that stands before the release of gradient {argument} runs behind it",
        )


def validate_forward(
    gm: fx.GraphModule, plan: SplitPlan, stitched: fx.GraphModule, arguments: Mapping[int, int]
) -> None:
    """Show that a stitched forward graph computes what `gm` does, and uses parameters as planned.

    `arguments` is as in `final_positions`.

    Raises:
        NotCutError: that is not so, or cannot be shown.
    """
    numbers: dict[Hashable, int] = {}
    whole, cut = (_Program(numbers, lambda node, _: tuple(storage_keys(node))) for _ in range(2))
    inputs = [
        _Value(whole.number(("input", place)), tuple(storage_keys(node)))
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))
    ]
    expected, returned = whole.run(gm, inputs), cut.run(stitched, inputs, is_stitched=True)
    _require(whole.freeze(expected) == cut.freeze(returned), "the sections return other values")
    _require(whole.effects == cut.effects, "calls with effects differ, or their order")
    planned = [section.num_fixed for section in plan.sections]
    _require(cut.num_fixed[1:] == planned, "calls with effects are in other sections")
    first = _first_users(stitched)
    argument_of = {p.name: arguments[p.index] for p in plan.arrival if p.index in arguments}
    for section in plan.sections:
        users = {first.get(argument_of[n]) for n in section.parameters if n in argument_of}
        where = f"section {section.index}"
        _require(users <= {section.index}, f"{where} is not the first that uses its parameters")


def _first_users(stitched: fx.GraphModule) -> dict[int, int]:
    """Return, for each input, the first section that may pass a gradient back to it."""
    places = {n: place for place, n in enumerate(stitched.graph.find_nodes(op="placeholder"))}
    found: dict[int, int] = {}
    for index, call in enumerate(stitched.graph.find_nodes(op="call_module")):
        inner = attribute_of(stitched, call).graph.find_nodes(op="placeholder")
        for node, given in zip(inner, call.args, strict=True):
            users = [user for user in node.users if user.op != "output"]
            if given in places and any(map(is_differentiable, users)):
                found.setdefault(places[given], index)
    return found


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotCutError(Reason.NOT_PROVEN, otherwise)
