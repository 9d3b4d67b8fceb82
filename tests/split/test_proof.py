"""No cut graph is accepted that computes something else: each property is broken on purpose."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._torch import names
from ddpopt.errors import NotCutError, Reason
from ddpopt.split import compiler
from ddpopt.split.arrival import final_places
from ddpopt.split.backward import SectionGraph, make_section_graphs
from ddpopt.split.cut import Cut
from ddpopt.split.facts import ReachableMemory, Tie, read_backward
from ddpopt.split.nodes import IS_COPY, call_nodes, name_of
from ddpopt.split.proof import prove_backward, prove_forward
from ddpopt.split.sections import choose_backward_sections
from tests.support.beside import compiled
from tests.support.cuts import only_cut
from tests.support.graphs import buckets_of, cut_from_sections
from tests.support.models import MLP, WIDTH

_aten = torch.ops.aten


@torch.library.custom_op("ddpopt_validate::tell", mutates_args=())
def _tell(x: torch.Tensor) -> torch.Tensor:
    """Do something that nobody is told of, as an operator that communicates does."""
    return x.clone()


_tell.register_fake(torch.empty_like)
_TELL = torch.ops.ddpopt_validate.tell.default


class Backward(NamedTuple):
    """A backward graph with its sections, as they are validated."""

    gm: fx.GraphModule
    cut: Cut
    sections: Sequence[SectionGraph]
    reachable: ReachableMemory
    arguments: dict[int, int]

    def with_sections(self, sections: Sequence[SectionGraph]) -> Backward:
        return self._replace(sections=tuple(sections))

    def validate(self) -> None:
        prove_backward(*self)


# A call reads values by their number; the first `num_inputs` are the graph's inputs.
Call = tuple[Callable[..., Any], tuple[int, ...]]


def _cut_backward(
    calls: Sequence[Call],
    gradients: Sequence[int],
    buckets: Sequence[Sequence[int]],
    num_inputs: int = 3,
    saved: dict[str, int] | None = None,
    maybe_in_arguments: Collection[int] = (),
    **forgotten: Any,
) -> Backward | None:
    """Make a backward graph whose k-th gradient is value `gradients[k]`, and cut it at buckets.

    It is planned with these facts in place of the true ones.
    """
    graph = fx.Graph()
    values = [graph.placeholder(f"saved_{i}") for i in range(num_inputs)]
    tensors = [torch.randn(4, 4) for _ in values]
    for function, sources in calls:
        values.append(graph.call_function(function, tuple(values[i] for i in sources)))
        tensors.append(function(*(tensors[i] for i in sources)))
    for value, tensor in zip(values, tensors, strict=True):
        value.meta["val"] = tensor
    output = graph.output(tuple(values[i] for i in gradients))
    plain = [descriptors.PlainAOTInput(a) for a in range(len(gradients))]
    output.meta["desc"] = [descriptors.GradAOTOutput(a) for a in plain]
    gm = fx.GraphModule(nn.Module(), graph)
    reachable = ReachableMemory(
        memory_of=saved or {}, maybe_in_arguments=frozenset(maybe_in_arguments)
    )
    arguments = {a: a for a in range(len(gradients))}
    parameters, made = buckets_of(arguments, buckets)
    facts = dataclasses.replace(read_backward(gm, reachable), **forgotten)
    try:
        cuts = choose_backward_sections(facts, made, arguments, final_places(facts, arguments, ()))
    except NotCutError:
        return None
    cut = cut_from_sections(cuts, arrival=tuple(parameters.values()))
    sections = make_section_graphs(gm, cuts, reachable)
    return Backward(gm, cut, sections, reachable, arguments)


def _example() -> Backward:
    """Three sections; the last two have a collective, and read what the first kept and released."""
    calls: list[Call] = [
        (_aten.mm.default, (0, 1)),
        (_aten.relu.default, (3,)),
        (_TELL, (4,)),
        (_aten.mm.default, (5, 2)),
        (_aten.neg.default, (6,)),
        (_TELL, (6,)),
        (_aten.add.Tensor, (8, 4)),
    ]
    backward = _cut_backward(calls, [4, 7, 9], [[0], [1], [2]], saved={"saved_0": 2})
    assert backward is not None
    assert len(backward.sections) == 3
    return backward


def _edited(backward: Backward, place: int, edit: Callable[[fx.GraphModule], None]) -> Backward:
    """Return the backward with a copy of one section's graph changed by `edit`."""
    section = backward.sections[place]
    graph = fx.Graph()
    graph.output(graph.graph_copy(section.graph.graph, val_map={}))
    gm = fx.GraphModule(section.graph, graph)
    edit(gm)
    gm.recompile()
    sections = list(backward.sections)
    sections[place] = dataclasses.replace(section, graph=gm)
    return backward.with_sections(sections)


def _changed(backward: Backward, place: int, **changes: Any) -> Backward:
    sections = list(backward.sections)
    flow = dataclasses.replace(sections[place].flow, **changes)
    sections[place] = dataclasses.replace(sections[place], flow=flow)
    return backward.with_sections(sections)


def _first(gm: fx.GraphModule, target: Any) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def _drop(gm: fx.GraphModule, target: Any) -> None:
    node = _first(gm, target)
    node.replace_all_uses_with(node.all_input_nodes[0])
    gm.graph.erase_node(node)


def _repeat(gm: fx.GraphModule, target: Any) -> None:
    node = _first(gm, target)
    with gm.graph.inserting_after(node):
        gm.graph.node_copy(node, lambda n: n)


def _skip_copies(gm: fx.GraphModule) -> None:
    copies = [node for node in gm.graph.nodes if IS_COPY in node.meta]
    assert copies
    for node in copies:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def _copy_by(target: Callable[..., Any]) -> Callable[[fx.GraphModule], None]:
    def change(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if IS_COPY in node.meta:
                node.target = target

    return change


def _move_collective(backward: Backward) -> Backward:
    """Make the second section's collective in the third, from the value that it reads."""
    second, third = backward.sections[1:]
    slot = second.flow.keeps[0]

    def leave(gm: fx.GraphModule) -> None:
        _drop(gm, _TELL)

    def arrive(gm: fx.GraphModule) -> None:
        taken = gm.graph.find_nodes(op="placeholder")
        moved = list(taken)[third.flow.takes.index(slot)]
        with gm.graph.inserting_before(call_nodes(gm.graph)[0]):
            announced = gm.graph.call_function(_TELL, (moved,))
        moved.replace_all_uses_with(announced, delete_user_cb=lambda user: user is not announced)

    return _edited(_edited(backward, 1, leave), 2, arrive)


def _swap_outputs(gm: fx.GraphModule) -> None:
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(reversed(output.args[0])),)


_MUTATIONS: dict[str, tuple[Callable[[Backward], Backward], str]] = {
    "drop a call": (lambda b: _edited(b, 0, lambda gm: _drop(gm, _aten.relu.default)), "otherwise"),
    "drop a collective": (lambda b: _edited(b, 1, lambda gm: _drop(gm, _TELL)), "other calls"),
    "repeat a collective": (lambda b: _edited(b, 1, lambda gm: _repeat(gm, _TELL)), "other calls"),
    "repeat another call": (
        lambda b: _edited(b, 0, lambda gm: _repeat(gm, _aten.relu.default)),
        "makes? a call again",
    ),
    "move a collective": (_move_collective, "other calls"),
    "swap what is kept and released": (lambda b: _edited(b, 1, _swap_outputs), "otherwise"),
    "copy by another call": (lambda b: _edited(b, 0, _copy_by(_aten.neg.default)), "may be none"),
    "hand out what is read later": (lambda b: _edited(b, 0, _skip_copies), "handed out"),
    "wire a slot wrongly": (
        lambda b: _changed(
            b, 1, takes=(b.sections[1].flow.takes[0],) * len(b.sections[1].flow.takes)
        ),
        "effects differ",
    ),
    "drop a slot early": (lambda b: _changed(b, 0, drops=b.sections[1].flow.takes), "not there"),
    "release in another section": (
        lambda b: _changed(_changed(b, 1, releases=(2,)), 2, releases=(1,)),
        "what is planned",
    ),
    "watch another input": (lambda b: _changed(b, 1, watches=(2,)), "watches other inputs"),
    "release twice": (lambda b: _changed(b, 1, releases=(0,)), "again"),
    "release a parameter that is read later": (
        lambda b: b._replace(reachable=ReachableMemory(memory_of={"saved_2": 0})),
        "handed",
    ),
}


@pytest.mark.parametrize("mutation", _MUTATIONS)
def test_wrong_sections_of_a_backward_are_not_proven(mutation: str) -> None:
    """The sections before the change are accepted."""
    right = _example()
    right.validate()
    mutate, message = _MUTATIONS[mutation]
    with pytest.raises(NotCutError, match=message):
        mutate(right).validate()


def test_a_call_of_an_autograd_node_behind_the_release_of_its_gradient_is_found() -> None:
    """Here a collective, of the node that makes gradient 0.

    AOTAutograd numbers nodes; the highest number says nothing, as all Functions share it.
    """
    backward = _example()
    backward.validate()
    relu, tell, last = (call_nodes(backward.gm.graph)[place] for place in (1, 2, -1))
    for call, number in ((relu, 1), (tell, 1), (last, 2)):
        call.meta[names.AUTOGRAD_NUMBER.text] = number
    with pytest.raises(NotCutError, match="autograd node that makes gradient 0"):
        backward.validate()


def _noting(**forgotten: Any) -> Backward:
    """A backward that reads a buffer, then overwrites it with what stands before gradient 1.

    Only gradient 2 needs what is read.
    """
    calls: list[Call] = [
        (_aten.relu.default, (1,)),
        (_aten.neg.default, (3,)),  # gradient 0
        (_aten.mul.Tensor, (3, 0)),  # reads the buffer
        (_aten.neg.default, (2,)),  # gradient 1
        (_aten.mm.default, (5, 2)),  # gradient 2
        (_aten.copy_.default, (0, 3)),
    ]
    backward = _cut_backward(calls, [4, 6, 7], [[0], [1], [2]], saved={"saved_0": 9}, **forgotten)
    assert backward is not None
    return backward


def test_what_stands_before_a_release_runs_before_it_and_that_is_proven() -> None:
    """A read and a write that a planner leaves behind a release are found."""
    right = _noting()
    right.validate()
    assert len(right.sections) == 3
    (copied,) = (k for k, s in enumerate(right.sections) if _has(s.graph, _aten.copy_.default))
    assert copied == 1
    with pytest.raises(NotCutError, match="stands before the release of gradient 1"):
        _noting(observable_calls={}).validate()
    read_alone = {2: 2}
    with pytest.raises(NotCutError, match="stands before the release of gradient 1"):
        _noting(observable_calls=read_alone).validate()


def _write_another(gm: fx.GraphModule) -> None:
    copied = _first(gm, _aten.copy_.default)
    target, value = copied.args
    copied.args = (target, next(n for n in gm.graph.nodes if n not in {target, value}))


def test_a_section_that_writes_another_value_to_a_buffer_is_found() -> None:
    """All gradients are right then."""
    right = _noting()
    (copied,) = (k for k, s in enumerate(right.sections) if _has(s.graph, _aten.copy_.default))
    with pytest.raises(NotCutError, match="written to arguments"):
        _edited(right, copied, _write_another).validate()


def test_a_read_that_is_left_out_is_found() -> None:
    """No gradient needs it, so all of them are right; it might have been noted elsewhere."""
    calls: list[Call] = [
        (_aten.relu.default, (1,)),
        (_aten.neg.default, (3,)),  # gradient 0
        (_aten.abs.default, (0,)),  # reads a buffer
        (_aten.mm.default, (3, 2)),  # gradient 1
    ]
    right = _cut_backward(calls, [4, 6], [[0], [1]], saved={"saved_0": 9})
    assert right is not None
    right.validate()
    (reading,) = (k for k, s in enumerate(right.sections) if _has(s.graph, _aten.abs.default))
    with pytest.raises(NotCutError, match="left out"):
        _edited(right, reading, lambda gm: _drop(gm, _aten.abs.default)).validate()


@pytest.mark.parametrize("copies", ["the value", "what is made of it"])
def test_a_value_that_may_be_made_in_a_buffer_is_not_kept_for_a_later_section(copies: str) -> None:
    """Inductor writes a part of a buffer in place, and then has the new value there."""
    calls: list[Call] = [
        (_aten.mm.default, (1, 2)),
        (_aten.slice_scatter.default, (0, 3)),  # a new value of the buffer
        (_aten.neg.default, (4,)),
        (_aten.copy_.default, (0, 4 if copies == "the value" else 5)),
        (_aten.relu.default, (3,)),  # gradient 0
        (_aten.mm.default, (4, 2)),  # gradient 1
    ]
    cut = functools.partial(_cut_backward, calls, [7, 8], [[0], [1]], saved={"saved_0": 9})
    assert cut() is None
    plain = Tie.NONE
    copied = 1 if copies == "the value" else 2
    reads = [{}, {0: plain}, {1: plain}, {copied: plain}, {0: plain}, {1: plain}]
    unsafe = cut(reads=reads)
    assert unsafe is not None
    with pytest.raises(NotCutError, match="in memory that the program can reach"):
        unsafe.validate()


@pytest.mark.parametrize("operator", [_aten.rand_like.default, _TELL])
def test_an_effect_keeps_its_place_though_it_reads_a_snapshot(operator: Any) -> None:
    """A hook on the first gradient can tell whether a number was drawn before."""
    calls: list[Call] = [
        (operator, (0,)),  # reads a value that may be in a buffer's memory
        (_aten.mm.default, (1, 2)),  # gradient 0
        (_aten.mm.default, (3, 2)),  # gradient 1
    ]
    backward = _cut_backward(
        calls, [4, 5], [[0], [1]], saved={"saved_0": -1}, maybe_in_arguments=[-1]
    )
    assert backward is not None
    backward.validate()


def _mistaken(
    monkeypatch: pytest.MonkeyPatch, operator: Any, calls: list[Call], gradients: list[int]
) -> Backward:
    """A backward that is cut where it is not known whether an operator's results are views."""
    is_view = _torch.is_view
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "is_view", lambda target: is_view(target) != (target is operator))
        backward = _cut_backward(calls, gradients, [[0], [1]])
    assert backward is not None
    return backward


def test_what_is_wrongly_taken_for_a_view_is_not_made_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof goes by the memory of values, and not by the list of operators."""
    calls: list[Call] = [(_aten.exp.default, (0,)), (_aten.mm.default, (3, 1)), (_TELL, (4,))]
    backward = _mistaken(
        monkeypatch, _aten.exp.default, [*calls, (_aten.mm.default, (3, 2))], [5, 6]
    )
    with pytest.raises(NotCutError, match="a call again"):
        backward.validate()


def test_a_view_that_is_not_known_as_one_does_not_share_what_was_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is smaller than what it shows, and so kept for the later section."""
    calls: list[Call] = [(_TELL, (0,)), (_aten.diagonal.default, (3,)), (_aten.mul.Tensor, (2, 4))]
    backward = _mistaken(monkeypatch, _aten.diagonal.default, calls, [3, 5])
    with pytest.raises(NotCutError, match="handed out"):
        backward.validate()


def _has(gm: fx.GraphModule, target: Any) -> bool:
    return any(node.target is target for node in gm.graph.nodes)


_FUNCTIONS = (
    (_aten.mm.default, 2),
    (_aten.add.Tensor, 2),
    (_aten.relu.default, 1),
    (_aten.t.default, 1),
    (_TELL, 1),
    (_aten.mul.Tensor, 2),
)


@st.composite
def _backwards(draw: st.DrawFn) -> Backward:
    num_inputs = draw(st.integers(1, 4))
    calls: list[Call] = []
    for _ in range(draw(st.integers(2, 14))):
        number = num_inputs + len(calls)
        function, arity = draw(st.sampled_from(_FUNCTIONS))
        sources = st.integers(max(0, number - 6), number - 1)
        call = (function, tuple(draw(sources) for _ in range(arity)))
        if call not in calls:  # AOTAutograd merges equal calls; the proof refuses equal reads
            calls.append(call)
    made = st.integers(num_inputs, num_inputs + len(calls) - 1)
    gradients = draw(st.lists(made, min_size=2, max_size=6))
    order = draw(st.permutations(range(len(gradients))))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=4))), len(order)]
    buckets = [list(order[a:b]) for a, b in itertools.pairwise(cuts)]
    read = st.dictionaries(st.integers(0, num_inputs - 1), st.sampled_from(order), max_size=2)
    saved = {f"saved_{place}": argument for place, argument in draw(read).items()}
    memory = list(range(num_inputs))
    for function, sources in calls:
        is_view = function is _aten.t.default
        memory.append(memory[sources[0]] if is_view else len(memory))
    # A gradient that is a parameter itself would not be proven; no derivative is one.
    assume(not any(f"saved_{memory[value]}" in saved for value in gradients))
    backward = _cut_backward(calls, gradients, buckets, num_inputs, saved)
    assume(backward is not None)
    assert backward is not None
    return backward


def _run(backward: Backward, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Run the sections as gates do; writing to a gradient that was released spoils nothing."""
    slots: dict[int, Any] = {k: value.clone() for k, value in enumerate(inputs)}
    released: dict[int, torch.Tensor] = {}
    for section in backward.sections:
        taken = [slots[slot] for slot in section.flow.takes]
        for slot in section.flow.drops:
            del slots[slot]
        returned = section.graph(*taken)
        slots.update(zip(section.flow.keeps, returned, strict=False))
        gradients = returned[len(section.flow.keeps) :]
        released.update(
            {a: g.clone() for a, g in zip(section.flow.releases, gradients, strict=True)}
        )
        for gradient in gradients:
            gradient.fill_(7)
    return released


def _are_equal(backward: Backward) -> bool:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4) for _ in backward.gm.graph.find_nodes(op="placeholder")]
    expected = dict(enumerate(backward.gm(*inputs)))
    released = _run(backward, inputs)
    return released.keys() == expected.keys() and all(
        torch.equal(released[a], expected[a]) for a in expected
    )


@given(_backwards())
def test_any_cut_of_a_backward_is_proven_and_computes_the_same(backward: Backward) -> None:
    backward.validate()
    assert len({a for s in backward.sections for a in s.flow.releases}) == len(backward.arguments)
    views = {id(node.target) for node in backward.gm.graph.nodes}
    if id(_aten.t.default) not in views:  # writing to a view of a released gradient is caught apart
        assert _are_equal(backward)


@given(_backwards(), st.data())
def test_any_change_of_a_value_is_found(backward: Backward, data: st.DataObject) -> None:
    """A call reads another value, is replaced, or an output is: if numbers differ, it is found."""
    place = data.draw(st.integers(0, len(backward.sections) - 1))

    def edit(gm: fx.GraphModule) -> None:
        nodes = [n for n in gm.graph.nodes if n.op != "placeholder" and n.all_input_nodes]
        node = data.draw(st.sampled_from(nodes))
        earlier = list(itertools.takewhile(lambda n: n is not node, gm.graph.nodes))
        old, new = (
            data.draw(st.sampled_from(node.all_input_nodes)),
            data.draw(st.sampled_from(earlier)),
        )
        node.replace_input_with(old, new)

    changed = _edited(backward, place, edit)
    if not _are_equal(changed):
        with pytest.raises(NotCutError):
            changed.validate()


class _Model(MLP):
    """Has all that a forward cut has to carry over: a collective, a write, draws, two modes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            total = x * 0
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = F.dropout(layer(x).relu(), 0.1)
                total.add_(x.float())
        return _tell(x.detach()).float() + x.float() + total


class Forward(NamedTuple):
    """A forward graph with its sections, as they are validated."""

    gm: fx.GraphModule
    cut: Cut
    stitched: fx.GraphModule
    arguments: dict[int, int]


@pytest.fixture
def forward(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Forward:
    """The forward of `_Model` with its sections, which are proven."""
    proven: list[Forward] = []
    monkeypatch.setattr(compiler, "prove_forward", lambda *cut: proven.append(Forward(*cut)))
    ddp = DistributedDataParallel(_Model(), bucket_cap_mb=0.03)
    monkeypatch.setattr(compiler, "compile_forward_sections", lambda graph, *_: graph.forward)
    compiled(ddp, "eager", split="forward")(torch.randn(2, WIDTH))
    (captured,) = proven
    prove_forward(*captured)
    return captured


def _calls(forward: Forward) -> list[tuple[fx.GraphModule, fx.Node]]:
    """All calls of all sections, each with its section."""
    sections = [
        forward.stitched.get_submodule(f"submod_{k}") for k in range(len(forward.cut.sections))
    ]
    return [(gm, node) for gm in sections for node in call_nodes(gm.graph)]


def _first_call(forward: Forward, name: str) -> tuple[fx.GraphModule, fx.Node]:
    return next((gm, node) for gm, node in _calls(forward) if name_of(node).startswith(name))


def _drop_named(forward: Forward, name: str) -> None:
    """Drop the first call of this name, and what only ends what it begins."""
    gm, node = _first_call(forward, name)
    if name == "_enter_autocast":
        gm.graph.erase_node(next(iter(node.users)))
    elif node.all_input_nodes:
        node.replace_all_uses_with(node.all_input_nodes[0])
    gm.graph.erase_node(node)


def _rewire(forward: Forward) -> None:
    """Give a section two of its arguments the other way round."""
    call = list(forward.stitched.graph.find_nodes(op="call_module"))[1]
    call.args = (*reversed(call.args),)


def _call_again(forward: Forward, name: str) -> None:
    """Make a call with effects once more, and use what it returns nowhere."""
    gm, called = _first_call(forward, name)
    with gm.graph.inserting_after(called):
        gm.graph.node_copy(called)


def _return_another(forward: Forward) -> None:
    (output,) = forward.stitched.graph.find_nodes(op="output")
    first = next(iter(forward.stitched.graph.find_nodes(op="placeholder")))
    output.args = ((first,),)


AGAIN = ("tell", "dropout")
DROPPED = ("relu", "add_", "tell", "_enter_autocast", "_set_grad_enabled")


@pytest.mark.quick("relu", "tell again", "return another")
@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        *((functools.partial(_drop_named, name=name), "other values|differ") for name in DROPPED),
        (_rewire, "other values|differ"),
        (_return_another, "other values"),
        *((functools.partial(_call_again, name=name), "other values|differ") for name in AGAIN),
    ],
    ids=[*DROPPED, "rewire", "return another", *(f"{name} again" for name in AGAIN)],
)
def test_wrong_sections_of_a_forward_are_not_proven(
    forward: Forward, mutate: Callable[[Forward], None], message: str
) -> None:
    mutate(forward)
    with pytest.raises(NotCutError, match=message):
        prove_forward(*forward)


def test_a_forward_whose_sections_use_other_parameters_than_planned_is_found(
    forward: Forward,
) -> None:
    first, second, *others = forward.cut.sections
    exchanged = (
        dataclasses.replace(first, parameters=second.parameters),
        dataclasses.replace(second, parameters=first.parameters),
        *others,
    )
    cut = dataclasses.replace(forward.cut, sections=exchanged)
    with pytest.raises(NotCutError, match="uses its parameters"):
        prove_forward(*forward._replace(cut=cut))


def test_a_forward_with_effects_in_another_section_than_the_cut_says_is_found(
    forward: Forward,
) -> None:
    """The sections are right; by the record, a collective would be in the first."""
    first, *others = forward.cut.sections
    told = dataclasses.replace(first, num_fixed=first.num_fixed + 1)
    cut = dataclasses.replace(forward.cut, sections=(told, *others))
    with pytest.raises(NotCutError, match="in other sections"):
        prove_forward(*forward._replace(cut=cut))


class _GradientsOnInAutocast(MLP):
    """Gradients are off from before a region under autocast until somewhere in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        scale = x.mean()
        with torch.autocast("cpu", torch.bfloat16):
            torch.set_grad_enabled(True)
            y = super().forward(x * scale)
        return super().forward(y.float())


def test_gradients_may_be_switched_on_within_an_autocast_that_began_without(one_rank: None) -> None:
    ddp = DistributedDataParallel(_GradientsOnInAutocast(), bucket_cap_mb=0.03)
    compiled(ddp, "eager", split="forward")(torch.randn(2, WIDTH))
    assert only_cut(ddp).sections, only_cut(ddp)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_what_is_not_proven_is_compiled_whole_with_a_warning(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, split: str
) -> None:
    """The warning names the difference, and asks for a report."""

    def refuse(*_: Any) -> None:
        raise NotCutError(Reason.NOT_PROVEN, "section 3 is another's")

    monkeypatch.setattr(compiler, "prove_forward", refuse)
    monkeypatch.setattr(compiler, "prove_backward", refuse)
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    compiled(ddp, split=split)(torch.randn(2, WIDTH)).sum().backward()
    cut = only_cut(ddp)
    assert cut.fallback is Reason.NOT_PROVEN
    (record,) = [r for r in caplog.records if Reason.NOT_PROVEN.value in r.getMessage()]
    assert record.levelname == "WARNING"
    assert "section 3 is another's" in record.getMessage()
