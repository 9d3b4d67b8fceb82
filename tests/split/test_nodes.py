"""What is known of a call by its name, and that it is so of all that torch has."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from ddpopt.split.nodes import call_nodes, is_pure, leaves, may_communicate, written_by
from tests.support.graphs import Capture


@pytest.mark.parametrize(
    ("kind", "target", "pure"),
    [
        ("call_method", "add", True),
        ("call_method", "add_", False),
        ("call_method", "__iadd__", False),
        ("call_module", "layer", False),  # it may draw random numbers, or have hooks
        ("call_function", torch.add, True),
    ],
)
def test_a_method_is_pure_unless_its_name_says_that_it_writes(
    kind: str, target: object, pure: bool
) -> None:
    graph = fx.Graph(nn.Module())
    x = graph.placeholder("x")
    assert is_pure(graph.create_node(kind, target, (x,))) is pure


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.sigmoid().bernoulli(),
        F.dropout,
        F.dropout2d,
        F.gumbel_softmax,
        lambda x: F.rrelu(x, training=True),
        lambda x: F.fractional_max_pool2d(x, 2, 2),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
)
def test_what_draws_random_numbers_is_not_pure(
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Nor does it communicate."""
    capture = Capture()
    torch.compile(lambda x: draw(x).sum(), backend=capture, fullgraph=True)(torch.ones(1, 2, 4, 4))
    drawing = [node for node in call_nodes(capture.gm.graph) if not is_pure(node)]
    assert drawing
    assert not any(map(may_communicate, drawing))


# ---- what calls of torch's do ------------------------------------------------------------------

# What are no calls of a tensor's values, or make no call of a graph (`module_load`).
_NO_CALLS = {
    *("backward", "module_load", "pin_memory", "record_stream", "register_hook", "set_"),
    *("share_memory_", "resize_as_sparse_", "requires_grad_", "cuda", "hpu", "ipu", "xpu", "mtia"),
    *("__class__", "__delattr__", "__dir__", "__init__", "__init_subclass__", "__new__"),
    *("__setattr__", "__setstate__", "__subclasshook__", "_functionalize_unsafe_set"),
    "_verify_batch_size",  # it takes sizes, and multiplies a tensor that is given for these
}


def _callables() -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    """Tensors' methods and torch's functions: how a graph calls each, and the callable itself."""
    for name in dir(torch.Tensor):
        if name not in _NO_CALLS and callable(function := getattr(torch.Tensor, name)):
            yield "call_method", name, function
    variable_functions: Any = torch._C._VariableFunctions
    for room in (F, operator, torch.special, torch.linalg, torch.fft, variable_functions):
        for name in dir(room):
            function = getattr(room, name)
            if name in _NO_CALLS or isinstance(function, type) or not callable(function):
                continue
            if not name.startswith(("_cu", "_fw", "_mkl", "_mps", "_sync", "import_")):
                yield "call_function", function, function


def _arguments() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """New arguments of the kinds that most functions take."""
    a, b, c = (torch.rand(4, 4) for _ in range(3))  # no views of one tensor, whose version is one
    d, e, f, g = (torch.rand(4) for _ in range(4))
    index = torch.tensor([0, 1, 2, 3])
    positional = [
        *((a,), (a, b), (a, b, c), (a, 2), (a, 0, index), (a, 0, index.expand(4, 4), b)),
        *((a, 0, index, b), (a, b.bool(), c), (a, b > 0.5, 0.0), (a, 0), (a, 0, 1), (a, (4, 4))),
        *((a, d, e, f, g, True), (a, d, e, f, g, True, 0.1, 1e-5, False), (index, a, None, 1.0)),
        *(([a, b],), ([a, b], [c, a]), ([a, b], 2.0), (a, slice(0, 2), 1.0), (a, (index,), b)),
        *((a.bool(), b.bool()), (a.int(), b.int()), (a.int(), 1), (a, d, e, None, None, True)),
    ]
    of_keywords: list[dict[str, Any]] = [{}, {"inplace": 1}, {"out": torch.zeros(4, 4)}]
    return [(args, keywords) for args in positional for keywords in of_keywords]


def _node(kind: str, target: Any, args: Any, keywords: Any) -> tuple[fx.Node, dict[int, fx.Node]]:
    """A call of a graph, and the placeholder of each tensor, by the tensor's id."""
    graph, placeholders = fx.Graph(), {}

    def to_node(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(to_node, value))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in placeholders:
            placeholders[id(value)] = graph.placeholder(f"x{len(placeholders)}")
        return placeholders[id(value)]

    keywords = {name: to_node(value) for name, value in keywords.items()}
    return graph.create_node(kind, target, to_node(args), keywords), placeholders


class _Call(NamedTuple):
    """A call that was made: its node, and what it did."""

    node: fx.Node
    written: set[fx.Node]  # the inputs whose tensors have a new version
    draws: bool  # the generator has another state


@functools.cache
def _calls() -> list[_Call]:
    """Calls that did something: one of each kind of arguments that a callable takes."""
    calls = []
    warnings.simplefilter("ignore")  # in a test, which restores what pytest has set
    for kind, target, function in _callables():
        for args, keywords in _arguments():
            tensors = {id(t): t for t in leaves([args, *keywords.values()]) if torch.is_tensor(t)}
            before = {key: tensor._version for key, tensor in tensors.items()}
            state = torch.get_rng_state()
            with contextlib.suppress(Exception):
                function(*args, **keywords)
            written = {key for key, tensor in tensors.items() if tensor._version > before[key]}
            draws = not torch.equal(state, torch.get_rng_state())
            if written or draws:
                node, placeholder_of = _node(kind, target, args, keywords)
                calls.append(_Call(node, {placeholder_of[key] for key in written}, draws))
    return calls


@pytest.mark.slow
def test_whatever_torch_writes_to_in_place_is_known() -> None:
    """The choice of sections and the proof ask the same function, which goes by names and schemas.

    So what it says of each is compared with what a call of it does.
    """
    writing = [call for call in _calls() if call.written]
    assert len(writing) > 1000
    for call in writing:
        assert call.written <= set(written_by(call.node)), call


@pytest.mark.slow
def test_whatever_torch_draws_is_known() -> None:
    drawing = [call for call in _calls() if call.draws]
    assert len(drawing) > 50
    for call in drawing:
        assert not is_pure(call.node), call
