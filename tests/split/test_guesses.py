"""A property of all of `split`: models in which a guess would cut wrongly train as eager's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt._torch.names import installed_release
from ddpopt.errors import NotCutError, Reason
from ddpopt.split.backward import Flow, SectionGraph, compile_backward_sections
from ddpopt.split.facts import (
    ReachableMemory,
    read_backward,
    read_forward,
    refuse_linked_calls,
)
from tests.support.algorithms import flat_weights
from tests.support.beside import Beside, compiled
from tests.support.cuts import assert_as_planned, only_cut
from tests.support.models import assert_equal_states, state_of
from tests.support.on_ranks import gather, on_ranks
from tests.support.releases import needs_delayed_parameters

SIZE = 16
CAP = {"bucket_cap_mb": 0.0005}  # each layer's own bucket

drawn: list[int] = []


@torch.library.custom_op("ddpopt_proof::draw", mutates_args=())
def _draw(size: int, number: int) -> torch.Tensor:
    """Return other values at each call, of which neither name nor schema tells."""
    drawn.append(number)
    return torch.full((size, size), float(len(drawn)))


_draw.register_fake(lambda size, _: torch.empty(size, size))


class _TimesDrawn(torch.autograd.Function):
    """The identity, whose gradient is multiplied by what is drawn in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ _draw(SIZE, ctx.number) / SIZE, None


class _Solved(torch.autograd.Function):
    """The identity, whose backward calls operators that torch registers as effects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        matrix = torch.eye(SIZE) * 2 + 0.1 * gradient.T @ gradient
        return torch.linalg.solve(matrix, gradient @ torch.linalg.inv(matrix), left=False)


class Layers(nn.Module):
    """Three layers; returns a loss, and the last activations beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> Any:
        y = self.c(self.between(self.b(self.a(x).relu())))
        return y.pow(2).mean(), y


class _Checked(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.linalg.inv(self.b.weight @ self.b.weight.T + torch.eye(SIZE))


class _CheckedInBackward(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return _Solved.apply(x)


class _ReturnsJagged(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        loss, y = super().forward(x)
        offsets = torch.tensor([0, len(y) // 2, len(y)])
        return loss, torch.nested.nested_tensor_from_jagged(y, offsets)


class _ReturnsJaggedBesideEffect(_ReturnsJagged):
    """A model that torch can compile only once: its sizes have other symbols the second time."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return _Solved.apply(x)


class _TakesJagged(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.c(self.b(self.a(x).relu()).relu())
        return y.values().pow(2).mean(), y.values()


class _Clamps(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.c.weight.clamp_(-0.2, 0.2)
        return x


class _Derived(nn.Parameter):
    pass


class _HoldsDerived(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.c.weight = _Derived(self.c.weight.data)


class _Array(torch.Tensor):
    """A subclass without a `__torch_dispatch__` of its own, as image libraries have."""


def _input(step: int) -> torch.Tensor:
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step))


def _jagged(step: int) -> torch.Tensor:
    parts = [torch.randn(n, SIZE, generator=torch.Generator().manual_seed(step)) for n in (3, 5)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def _array(step: int) -> torch.Tensor:
    return _input(step).as_subclass(_Array)


def _beside(model: nn.Module, **options: Any) -> Beside:
    return Beside(model, ddp_options=CAP, loss_of=lambda output: output[0], **options)


# Before torch 2.13 AOTAutograd does not link effects in a backward by tokens.
_IN_BACKWARD = Reason.EFFECTS if installed_release() >= (2, 13) else "backward"

_MODELS = {
    "effect": (_Checked, _input, "backward", "forward"),
    "effect in backward": (_CheckedInBackward, _input, _IN_BACKWARD, "forward"),
    "jagged output": (_ReturnsJagged, _input, Reason.NO_LEGAL_CUT, Reason.NO_LEGAL_CUT),
    "jagged output, effect in backward": (
        _ReturnsJaggedBesideEffect,
        _input,
        Reason.NO_LEGAL_CUT,
        Reason.NO_LEGAL_CUT,
    ),
    "jagged input": (_TakesJagged, _jagged, Reason.NO_LEGAL_CUT, Reason.NO_LEGAL_CUT),
    "derived input": (Layers, _array, Reason.SUBCLASSES, "forward"),
    "parameter written to": (_Clamps, _input, "backward", "forward"),
    "derived parameter": (_HoldsDerived, _input, "backward", "forward"),
}


@pytest.mark.quick("effect-auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
@pytest.mark.parametrize("name", _MODELS)
def test_gradients_are_those_of_eager_ddp(
    one_rank: None, name: str, split: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the graph is cut, buckets are as planned; where it is not, a reason is named."""
    model, make_input, backward, forward = _MODELS[name]
    beside = _beside(model(), split=split)
    for step in range(3):
        beside.step(make_input(step))
    cut = beside.cut
    reasons = (cut.backward_fallback, cut.fallback)
    expected = backward if split == "auto" else forward
    assert expected in ((cut.split,) if reasons == (None, None) else reasons)
    if cut.fallback is None:
        assert len(cut.sections) == 3
        assert_as_planned(beside.ddp)
        records = [r for r in caplog.records if "ddpopt" in r.name]
        assert not [r for r in records if r.levelno >= logging.WARNING]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["effect", "effect in backward"])
def test_gradients_are_those_of_eager_ddp_with_inductor(one_rank: None, name: str) -> None:
    """Inductor takes effect tokens out of the graphs."""
    model, make_input, expected, _ = _MODELS[name]
    beside = _beside(model(), inner="inductor")
    for step in range(3):
        beside.step(make_input(step))
    assert expected in (beside.cut.backward_fallback, beside.cut.split)


def test_descriptions_that_do_not_match_are_a_named_reason(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is cut then, whose sections need none."""
    read = fx.Graph.find_nodes

    def with_stale_description(graph: fx.Graph, **wanted: Any) -> Any:
        nodes = read(graph, **wanted)
        for node in nodes if wanted["op"] == "output" else ():
            if "desc" in node.meta:
                node.meta["desc"] = [*node.meta["desc"], *node.meta["desc"][:1]]
        return nodes

    monkeypatch.setattr(fx.Graph, "find_nodes", with_stale_description)
    beside = _beside(Layers())
    beside.step(_input(0))
    assert beside.cut.backward_fallback is Reason.NOT_DESCRIBED


@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_an_operator_that_only_draws_is_called_as_often_as_unsplit(
    one_rank: None, split: str
) -> None:
    """It has no inputs, but it is no constant that each section could make for itself."""

    class Drawing(Layers):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return _TimesDrawn.apply(_TimesDrawn.apply(x, 1), 2)

    states, draws = [], []
    for is_enabled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        drawn.clear()
        ddp = DistributedDataParallel(Drawing(), **CAP)
        model = compiled(ddp, split=split, enabled=is_enabled)
        for step in range(3):
            model(_input(step))[0].backward()
        states.append(state_of(ddp))
        draws.append(list(drawn))
        assert len(only_cut(ddp).sections) == (3 if is_enabled else 0)
    assert_equal_states(*states)
    assert draws[0] == draws[1] == [2, 1] * 3


@on_ranks(2)
@pytest.mark.quick("delayed0-a.weight-auto")
@needs_delayed_parameters
@pytest.mark.parametrize("split", ["auto", "forward"])
@pytest.mark.parametrize(
    ("delayed", "awaited"),
    [(("c.weight", "b.bias"), "a.weight"), (("b.weight",), "a.bias"), (("c.weight",), "b.weight")],
)
def test_delayed_gradients_are_final_before_ddp_reduces_them(
    rank: int, split: str, delayed: tuple[str, ...], awaited: str
) -> None:
    """The gradient that DDP waits for arrives last, whichever section makes it."""
    states = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = Layers()
        parameters = dict(model.named_parameters())
        ddp = DistributedDataParallel(
            model,
            delay_all_reduce_named_params=[(name, parameters[name]) for name in delayed],
            param_to_hook_all_reduce=parameters[awaited],
            **CAP,
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        run = compiled(ddp, split=split) if is_compiled else ddp
        for step in range(3):
            optimizer.zero_grad()
            run(_input(10 * step + rank))[0].backward()
            dist.barrier()  # DDP does not wait for the delayed allreduce
            optimizer.step()
        states.append(flat_weights(model))
    assert torch.equal(*states)
    one, other = gather(states[0])
    assert torch.equal(one, other), "ranks have drifted apart"


def test_calls_on_streams_of_their_own_are_not_cut(one_rank: None) -> None:
    """Each keeps its place: a backward has a named reason, and no cut of a forward is legal."""
    torch._dynamo.variables.streams  # noqa: B018  # which defines the operators
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.streams.fork.default, (0, 1))
    graph.output((graph.call_function(torch.relu, (graph.call_function(torch.relu, (x,)),)),))
    gm = fx.GraphModule(nn.Module(), graph)
    assert set(read_forward(gm, {}).legal_bounds) == {False}
    with pytest.raises(NotCutError, match="stream"):
        refuse_linked_calls(gm)


def test_what_is_not_known_to_be_pure_keeps_its_place() -> None:
    """An operator of ATen is pure; one of another library may do anything."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 2)
    targets = (torch.ops.aten.relu.default, torch.ops.aten.rand_like.default, dist.all_reduce)
    calls = [graph.call_function(target, (x,)) for target in targets]
    calls.append(graph.call_function(torch.ops.ddpopt_proof.draw.default, (2, 1)))
    for call in calls:
        call.meta["val"] = torch.ones(2, 2)
    graph.output(()).meta["desc"] = []
    facts = read_backward(fx.GraphModule(nn.Module(), graph), ReachableMemory())
    assert list(facts.has_effects) == [False, True, True, True]
    assert list(facts.is_view_or_constant) == [False] * len(calls)


def test_sections_share_a_compile_only_if_the_same_inputs_are_saved_tensors() -> None:
    """Inductor looks at each call whether other inputs are aligned, but not those."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (x, y)),))
    gm = fx.GraphModule(nn.Module(), graph)
    sections = [
        SectionGraph(graph=gm, flow=Flow(takes=takes, keeps=(), drops=(), releases=(), watches=()))
        for takes in ((0, 1), (1, 2), (2, 1), (1, 2))
    ]
    values = [torch.ones(2, 2) for _ in range(3)]
    _, places = compile_backward_sections(sections, values, {0, 1}, lambda *_: gm.forward, "0/0")
    assert places == [0, 1, 2, 1]
