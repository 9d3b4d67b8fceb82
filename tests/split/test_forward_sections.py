"""Cuts of a forward (`split/sections.py`): on facts by hand, and on those of traced graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpopt.errors import NotCutError, Reason
from ddpopt.reducer import Bucket, Parameter, ReducerRules, predict_buckets
from ddpopt.split.arrival import order_arrival
from ddpopt.split.cut import Cut, Section
from ddpopt.split.facts import ForwardFacts, parameters_of, read_forward
from ddpopt.split.forward import copy_for_cutting
from ddpopt.split.nodes import call_nodes
from ddpopt.split.sections import choose_forward_sections
from tests.support.graphs import Capture, forward_of


def _parameters(count: int) -> list[Parameter]:
    return [Parameter(index=i, name=f"p{i}", num_bytes=10, group="f32") for i in range(count)]


def _facts(
    first_use: dict[int, int], num_calls: int = 10, illegal: tuple[int, ...] = ()
) -> ForwardFacts:
    return ForwardFacts(
        num_calls=num_calls,
        first_use=first_use,
        legal_bounds=[0 < p < num_calls and p not in illegal for p in range(num_calls + 1)],
        last_effect=[position + 1 for position in range(num_calls)],
        call_names=[f"n{position}" for position in range(num_calls)],
        is_fixed=[False] * num_calls,
    )


def _buckets(arrival: tuple[Parameter, ...], *caps: int) -> tuple[Bucket, ...]:
    return predict_buckets(arrival, ReducerRules(caps_bytes=caps, is_rebuilt=True))


def _reason(facts: ForwardFacts, buckets: tuple[Bucket, ...]) -> Reason:
    with pytest.raises(NotCutError) as raised:
        choose_forward_sections(facts, buckets)
    return raised.value.reason


def _sections(facts: ForwardFacts, buckets: tuple[Bucket, ...]) -> tuple[Section, ...]:
    sections = choose_forward_sections(facts, buckets)
    cut = Cut(graph="0/0", inner="eager", num_nodes=facts.num_calls, sections=sections)
    return cut.with_buckets(buckets).sections


def _arrive(parameters: Any, first_use: dict[int, int]) -> tuple[Parameter, ...]:
    """Order parameters as their gradients arrive: backward passes a parameter's first use last."""
    return order_arrival(parameters, {i: -use for i, use in first_use.items()})


def _starts(facts: ForwardFacts, buckets: tuple[Bucket, ...]) -> list[int]:
    return [section.start for section in _sections(facts, buckets)]


def test_cuts_stand_in_front_of_the_use_that_completes_a_bucket() -> None:
    """Two parameters a bucket: the cut is at the first use of the second."""
    facts = _facts({0: 0, 1: 2, 2: 5, 3: 8})
    buckets = _buckets(_arrive(_parameters(4), facts.first_use), 20)
    sections = _sections(facts, buckets)
    assert [(s.start, s.stop) for s in sections] == [(0, 5), (5, 10)]
    assert [s.completes for s in sections] == [(1,), (0,)]
    assert [s.parameters for s in sections] == [("p1", "p0"), ("p3", "p2")]


def test_a_bucket_that_waits_for_another_completes_with_it() -> None:
    """Registration-order buckets whose parameters are used out of order: launch order decides."""
    parameters = _parameters(3)
    facts = _facts({0: 9, 1: 5, 2: 1})
    buckets = predict_buckets(parameters, ReducerRules(caps_bytes=(10,), is_rebuilt=False))
    assert [b.parameters[0].index for b in buckets] == [2, 1, 0]
    assert _reason(facts, buckets) is Reason.COMPLETE_TOGETHER


def test_an_illegal_cut_moves_towards_the_start() -> None:
    """So the bucket is complete at it still; two cuts may become one."""
    uses = {0: 0, 1: 3, 2: 6}
    buckets = _buckets(_arrive(_parameters(3), uses), 10)
    assert _starts(_facts(uses), buckets) == [0, 3, 6]
    assert _starts(_facts(uses, illegal=(5, 6)), buckets) == [0, 3, 4]
    assert _starts(_facts(uses, illegal=(4, 5, 6)), buckets) == [0, 3]
    nowhere = _facts(uses, illegal=tuple(range(10)))
    assert _reason(nowhere, buckets) is Reason.NO_LEGAL_CUT


def test_a_section_that_hands_nothing_on_is_merged() -> None:
    """`split_module` would lose it."""
    uses = {0: 0, 1: 3, 2: 6}
    facts = _facts(uses)
    last_effect = [*facts.last_effect]
    last_effect[5] = 5  # what [3, 6) computes is used inside it only
    facts = ForwardFacts(
        num_calls=10,
        first_use=uses,
        legal_bounds=facts.legal_bounds,
        last_effect=last_effect,
        call_names=facts.call_names,
        is_fixed=facts.is_fixed,
    )
    assert _starts(facts, _buckets(_arrive(_parameters(3), uses), 10)) == [0, 3]


def test_a_bucket_that_spans_graphs_is_not_cut_short() -> None:
    """Half of the bucket belongs to another graph, so this graph alone does not fill it."""
    uses = {0: 1, 1: 5}
    arrival = _arrive(_parameters(3), uses)
    assert _starts(_facts(uses), _buckets(arrival, 20)) == [0, 5]
    assert _reason(_facts(uses), _buckets(arrival, 30)) is Reason.ONE_BUCKET


def test_a_graph_without_parameters_stays_whole() -> None:
    """All parameters belong to other graphs here."""
    arrival = _arrive(_parameters(3), {})
    assert _reason(_facts({}), _buckets(arrival, 10)) is Reason.NO_PARAMETERS


@given(st.lists(st.integers(0, 49), min_size=1, max_size=30), st.integers(1, 100))
def test_sections_tile_the_graph_and_complete_each_bucket_once(uses: list[int], cap: int) -> None:
    """This holds for any uses and caps; and an equal input gives equal sections."""
    facts = _facts(dict(enumerate(uses)), num_calls=50)
    buckets = _buckets(_arrive(_parameters(len(uses)), facts.first_use), cap)
    if len({min(uses[p.index] for p in bucket.parameters) for bucket in buckets}) == 1:
        assert _reason(facts, buckets) in (Reason.ONE_BUCKET, Reason.COMPLETE_TOGETHER)
        return
    sections = _sections(facts, buckets)
    assert sections == _sections(facts, buckets)
    assert [s.start for s in sections] == [0, *(s.stop for s in sections[:-1])]
    assert sections[-1].stop == 50
    completed = [k for section in reversed(sections) for k in section.completes]
    assert completed == [bucket.index for bucket in buckets]
    for section in sections:
        for k in section.completes:
            assert all(uses[p.index] >= section.start for p in buckets[k].parameters)


def _facts_of(module: nn.Module, *inputs: torch.Tensor, **compile_options: Any) -> ForwardFacts:
    """Trace a module with Dynamo and read its facts, its parameters numbered as registered."""
    capture = Capture()
    torch.compile(module, backend=capture, fullgraph=True, **compile_options)(*inputs)
    reduced = {
        p: Parameter(index=i, name=n, num_bytes=4, group="")
        for i, (n, p) in enumerate(module.named_parameters())
        if p.requires_grad
    }
    copied = copy_for_cutting(capture.gm)
    owners = parameters_of(copied, capture.example_inputs, reduced)
    return read_forward(copied, owners)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("function", "uses"),
    [
        (lambda p, x: F.linear(input=x, weight=p[0]).relu() @ p[1], {0: 0, 1: 2}),
        (lambda p, x: torch.cat([x.relu(), p[0], *[p[1]]]), {0: 1, 1: 1}),
        (lambda p, x: (x @ p[0]).relu() @ p[0] @ p[1], {0: 0, 1: 3}),
        (lambda p, x: ((x @ p[0].detach()) @ p[0]) @ p[1].t(), {0: 2, 1: 3}),
        (
            lambda p, x: torch.cond(x.sum() > 0, lambda: x @ p[0], lambda: x @ p[1]),
            {0: 2, 1: 2},
        ),
    ],
    ids=["kwargs", "nested list", "reused", "detached", "higher-order op"],
)
def test_the_first_differentiable_use_is_found_wherever_it_is(
    function: Callable[..., Any], uses: dict[int, int]
) -> None:
    """It is seen in kwargs, in lists, in operands of a higher-order op; and not behind detach."""
    assert _facts_of(forward_of(function, (4, 4), (4, 4)), X).first_use == uses


def test_parameters_of_called_modules_and_attributes_are_found() -> None:
    """Torch 2.11 with inline_inbuilt_nn_modules off does not make parameters inputs."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    gm = torch.fx.symbolic_trace(Module())
    reduced = {
        p: Parameter(index=i, name=n, num_bytes=4, group="")
        for i, (n, p) in enumerate(gm.named_parameters())
    }
    owners = parameters_of(gm, [X], reduced)
    names = [p.name for p in reduced.values()]
    assert {n.name: [names[i] for i in owned] for n, owned in owners.items()} == {
        "scale": ["scale"],
        "inner": ["inner.weight", "inner.bias"],
    }


def _legal(module: nn.Module) -> tuple[list[str], list[int]]:
    facts = _facts_of(module, X)
    return list(facts.call_names), [p for p, legal in enumerate(facts.legal_bounds) if legal]


def test_no_cut_inside_a_no_grad_region() -> None:
    """The cut moves to one side of it."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ p[0]
        with torch.no_grad():
            z = y.relu() + 1
        return (y + z) @ p[0]

    names, legal = _legal(forward_of(forward, (4, 4)))
    off, on = [i for i, name in enumerate(names) if "set_grad_enabled" in name]
    assert not set(legal) & set(range(off + 1, on + 1))
    assert {off, on + 1} <= set(legal)


def test_autocast_regions_can_be_cut() -> None:
    """`split_module` closes and reopens them."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ((x @ p[0]).relu() @ p[0]).relu()

    names, legal = _legal(forward_of(forward, (4, 4)))
    assert legal == list(range(1, len(names)))


def test_tuples_cannot_cross_but_their_elements_can() -> None:
    """Getitem nodes move next to the call that made the tuple."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        parts = (x @ p[0]).split(2, dim=1)
        y = parts[0].relu().sum()
        return y + parts[1].sum()

    capture = Capture()
    torch.compile(forward_of(forward, (4, 4)), backend=capture)(X)
    names = [node.name for node in call_nodes(copy_for_cutting(capture.gm).graph)]
    split = names.index("split")
    assert [name.split("_")[0] for name in names[split + 1 : split + 3]] == ["getitem", "getitem"]
    names, legal = _legal(forward_of(forward, (4, 4)))
    assert split not in [p - 1 for p in legal]
    assert split + 3 in legal


@torch.library.custom_op("ddpopt_test::write_later", mutates_args=("out",))
def _write_later(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


@torch.library.custom_op("ddpopt_test::write_list", mutates_args=("out",))
def _write_list(x: torch.Tensor, out: list[torch.Tensor]) -> None:
    for tensor in out:
        tensor.copy_(x)


for _operator in (_write_later, _write_list):
    _operator.register_fake(lambda x, out: None)
_OPS = torch.ops.ddpopt_test


def _add_one(y: torch.Tensor) -> torch.Tensor:
    y.add_(1)
    return y * 2


@pytest.mark.parametrize(
    "in_place",
    [
        lambda y: y.relu_(),
        lambda y: F.relu(y, inplace=True),
        lambda y: F.dropout(y, 0.5, True, True),
        lambda y: y[:, 0].add_(1),
        lambda y: torch.add(torch.ones(4, 4), 1, out=y.detach()),
        lambda y: y.__setitem__(0, 1.0),
        lambda y: torch._foreach_add_([y.detach()], 1.0),
        lambda y: torch._foreach_copy_([y.detach()], [torch.ones(4, 4)]),
        lambda y: torch.max(torch.ones(4, 4, 4), 0, out=(y.detach(), torch.ones(4, 4).long())),
        lambda y: torch.ops.aten.add.out(torch.ones(4, 4), 1, out=y.detach()),
        lambda y: torch.ops.aten.mul_(y, 2),
        lambda y: _write_later(torch.ones(4, 4), y.detach()),
        lambda y: _OPS.write_later(torch.ones(4, 4), out=y.detach()),
        lambda y: _OPS.write_list(torch.ones(4, 4), [y.detach()]),
        lambda y: F.relu(input=y, inplace=True),
        lambda y: torch.relu_(input=y),
        lambda y: F.batch_norm(torch.ones(4, 4), y.detach()[0], torch.ones(4), training=True),
        lambda y: checkpoint(_add_one, y, use_reentrant=False),
    ],
    ids=[
        "method",
        "inplace=",
        "positional inplace",
        "through a view",
        "out=",
        "setitem",
        "list",
        "list of lists",
        "out= of two",
        "overload with out=",
        "packet",
        "later argument",
        "later keyword",
        "later list",
        "inplace= of input=",
        "input=",
        "running average",
        "checkpoint",
    ],
)
def test_no_cut_where_two_views_are_passed_and_one_is_written_to(
    in_place: Callable[..., Any],
) -> None:
    """The sharing would be lost, in whatever form the write is."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ p[0]
        z = y.t()
        in_place(y)
        return (z * y).sin()

    names, legal = _legal(forward_of(forward, (4, 4)))
    viewed, read = names.index("z"), names.index("mul")
    assert set(legal) == {viewed, read, len(names) - 1} - {0}, (names, legal)


def test_symbolic_sizes_can_cross() -> None:
    """A dynamic batch does not stop a cut."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = (x @ p[0]).reshape(x.shape[0] * 2, 2)
        return y.reshape(x.shape[0], 4) @ p[0]

    facts = _facts_of(forward_of(forward, (4, 4)), X, dynamic=True)
    assert all(facts.legal_bounds[1:-1])
