"""Facts of a forward, as `split/facts.py` reads them off graphs that Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem, iadd
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ddpopt import _torch
from ddpopt._indices import BEFORE_ALL_CALLS, Argument, Call, Memory
from ddpopt.errors import NotCutError
from ddpopt.reducer import Parameter
from ddpopt.split.aliases import Aliases, made_in_arguments
from ddpopt.split.facts import (
    ForwardFacts,
    ForwardOutput,
    Tie,
    _observable_calls,
    find_reachable,
    gradient_nodes,
    parameters_of,
    read_forward,
)
from ddpopt.split.forward import copy_for_cutting
from ddpopt.split.nodes import call_nodes
from tests.support.graphs import Capture, forward_of


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


@pytest.mark.parametrize("communicates", [False, True])
def test_what_a_graph_before_uses_first_is_distinguished_on_all_ranks_or_on_none(
    communicates: bool,
) -> None:
    """What ran before may differ between ranks; the order of collectives and gradients may not."""
    graph = fx.Graph()
    first, second, x = (graph.placeholder(name) for name in ("first", "second", "x"))
    target = torch.ops._c10d_functional.all_reduce.default if communicates else torch.relu
    y = graph.call_function(torch.matmul, (x, first))
    y = graph.call_function(target, (y,))
    graph.output((graph.call_function(torch.matmul, (y, second)),))
    for node in graph.nodes:
        node.meta["example_value"] = torch.ones(4, 4, requires_grad=True)
    gm = fx.GraphModule(nn.Module(), graph)
    facts = read_forward(gm, {first: (0,), second: (1,)}, used_before={1})
    assert facts.first_use == ({0: 0, 1: 2} if communicates else {0: 0})


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


def test_no_cut_where_hooks_on_saved_tensors_are_forbidden() -> None:
    """Nor in any other region between two calls that are linked by no value."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ p[0]
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            z = (y.relu() @ p[0]).relu()
        return z @ p[0]

    names, legal = _legal(forward_of(forward, (4, 4)))
    begin, end = [i for i, name in enumerate(names) if "saved_tensors_hooks" in name]
    assert legal == [*range(1, begin + 1), *range(end + 1, len(names))]


def test_no_cut_where_the_kernels_of_attention_are_chosen() -> None:
    """A section would run with the choice of the one before it, or with none."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = (x @ p[0]).relu()
        with sdpa_kernel(SDPBackend.MATH):
            z = F.scaled_dot_product_attention(y[None], y[None], y[None])[0]
            z = z @ p[0]
        return z.relu() @ p[0]

    names, legal = _legal(forward_of(forward, (4, 4)))
    begin, end = [i for i, name in enumerate(names) if "sdpa_kernel" in name]
    assert not set(legal) & set(range(begin + 1, end + 1))
    assert {begin - 1, end + 1} <= set(legal)  # between the two is the choice's own argument


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


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "method": lambda y: y.relu_(),
    "inplace=": lambda y: F.relu(y, inplace=True),
    "positional inplace": lambda y: F.dropout(y, 0.5, True, True),
    "through a view": lambda y: y[:, 0].add_(1),
    "out=": lambda y: torch.add(torch.ones(4, 4), 1, out=y.detach()),
    "setitem": lambda y: y.__setitem__(0, 1.0),
    "operator": lambda y: iadd(y, 1),
    "operator as a method": lambda y: y.__iadd__(1),
    "operator of Python 2": lambda y: y.__idiv__(2),
    "operator as an unbound method": lambda y: torch.Tensor.__imul__(y, 2),
    "list": lambda y: torch._foreach_add_([y.detach()], 1.0),
    "list of lists": lambda y: torch._foreach_copy_([y.detach()], [torch.ones(4, 4)]),
    "out= of two": lambda y: torch.max(
        torch.ones(4, 4, 4), 0, out=(y.detach(), torch.ones(4, 4).long())
    ),
    "overload with out=": lambda y: torch.ops.aten.add.out(torch.ones(4, 4), 1, out=y.detach()),
    "packet": lambda y: torch.ops.aten.mul_(y, 2),
    "later argument": lambda y: _write_later(torch.ones(4, 4), y.detach()),
    "later keyword": lambda y: _OPS.write_later(torch.ones(4, 4), out=y.detach()),
    "later list": lambda y: _OPS.write_list(torch.ones(4, 4), [y.detach()]),
    "inplace= of input=": lambda y: F.relu(input=y, inplace=True),
    "input=": lambda y: torch.relu_(input=y),
    "running average": lambda y: F.batch_norm(
        torch.ones(4, 4), y.detach()[0], torch.ones(4), training=True
    ),
    "checkpoint": lambda y: checkpoint(_add_one, y, use_reentrant=False),
}


@pytest.mark.parametrize("form", IN_PLACE)
def test_no_cut_where_two_views_are_passed_and_one_is_written_to(form: str) -> None:
    """The sharing would be lost, in whatever form the write is."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ p[0]
        z = y.t()
        IN_PLACE[form](y)
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
    assert len(facts.legal_bounds) > 3
    assert all(facts.legal_bounds[1:-1])


def test_no_cut_where_a_number_would_cross_that_another_rank_may_have_as_a_constant() -> None:
    """That rank may have a boundary there, which this one is told."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        scale = (x @ p[0]).sum().item()
        return x.sin().cos() * scale

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        facts = _facts_of(forward_of(forward, (4, 4)), X)
    before_cos = facts.call_names.index("cos")
    assert not facts.legal_bounds[before_cos]
    assert facts.legal_bounds_without_sizes[before_cos]


def test_a_backward_that_returns_more_than_gradients_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gradient = graph.call_function(torch.relu, (x,))
    graph.output((gradient, graph.call_function(torch.relu, (x,))))
    for second in (None, Argument(0)):
        of_outputs = [Argument(0), second]
        monkeypatch.setattr(_torch, "gradient_arguments", lambda _, found=of_outputs: found)
        with pytest.raises(NotCutError, match="relu_1 is such an output"):
            gradient_nodes(fx.GraphModule(nn.Module(), graph))


def test_the_program_reaches_arguments_what_was_returned_to_it_and_tangents() -> None:
    """A forward returns a view of `relu`, and saves the first argument, `relu` and a mask.

    Memory of arguments has their numbers, from 0 on; other memory has numbers below.
    """
    graph = fx.Graph()
    for name in ("primals_1", "relu", "mask", "tangents_1"):
        graph.placeholder(name).meta["val"] = torch.ones(2)
    graph.output(())
    outputs = [
        ForwardOutput(name=name, memory=Memory(memory), may_be_in_argument=False)
        for name, memory in (("view", -1), ("primals_1", 0), ("relu", -1), ("mask", -2))
    ]
    reachable = find_reachable(outputs, fx.GraphModule(nn.Module(), graph))
    assert reachable.memory_of == {"primals_1": 0, "relu": -1, "tangents_1": -3}


def test_what_inductor_makes_in_place_is_known() -> None:
    """All operators of its tables, on an input that the graph writes."""
    reinplace = pytest.importorskip("torch._inductor.fx_passes.reinplace")
    tables = [reinplace.inplaceable_ops, reinplace.inplaceable_foreach_ops]
    operators = [op for table in tables for op in table if isinstance(op, torch._ops.OpOverload)]
    assert torch.ops.aten.index_put.default in operators
    assert torch.ops.aten._foreach_mul.Scalar in operators
    # The one function among them replaces these.
    operators += [torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default]
    operators += list(reinplace.inplaceable_triton_ops)
    operators.append(torch.ops.higher_order.auto_functionalized_v2)
    for operator in operators:
        graph = fx.Graph()
        written = graph.placeholder("written")
        made = graph.call_function(operator, (written,))
        element = graph.call_function(getitem, (made, 0))
        last = graph.call_function(torch.ops.aten.neg.default, (element,))
        graph.call_function(torch.ops.aten.copy_.default, (written, last))
        graph.output(())
        gm = fx.GraphModule(nn.Module(), graph)
        assert made_in_arguments(gm, Aliases(gm)) == {made, element}, operator


@pytest.mark.parametrize(
    ("makers", "earlier", "place"),
    [((2,), (1,), 2), ((1,), (2,), 2), ((2,), (), 2), ((), (2,), 2), ((), (), BEFORE_ALL_CALLS)],
)
def test_an_epilogue_copy_stands_behind_its_value_and_the_calls_with_its_memory(
    makers: tuple[int, ...], earlier: tuple[int, ...], place: int
) -> None:
    """Of a value that is an input, for memory that no call has before, it stands before all."""
    copy, memory = Call(3), Memory(0)
    needs = [{}, {}, {}, dict.fromkeys(map(Call, makers), Tie.NONE)]
    memory_users = {memory: [*map(Call, earlier), copy]}
    places = _observable_calls(needs, [False] * 4, memory_users, {copy: memory})
    assert places == {copy: place, **{Call(call): call for call in earlier}}
