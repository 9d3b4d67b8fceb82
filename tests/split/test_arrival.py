"""In which order gradients arrive, as `split/arrival.py` assumes it, and as they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.split import state
from ddpopt.split.arrival import OthersArrive, final_places, order_arrival
from ddpopt.split.cut import Cut, GraphText
from tests.support.beside import Beside
from tests.support.buckets import real_buckets
from tests.support.graphs import parameters
from tests.support.logs import logged

SIZE = 32
CAP = {"bucket_cap_mb": 0.004}  # each layer's own bucket


def test_gradients_arrive_in_reverse_order_of_first_use() -> None:
    """A parameter used at 0 and again later arrives last; ties go to the last registered."""
    first_use = {0: 0, 1: 3, 2: 3, 3: 7}
    arrival = order_arrival(parameters(4), {index: -use for index, use in first_use.items()})
    assert [p.index for p in arrival] == [3, 2, 1, 0]


def test_parameters_of_other_graphs_arrive_around_this_graphs() -> None:
    """First those of graphs not seen yet, then of later graphs, this graph's, and earlier graphs'.

    Those of later and of earlier graphs keep the order that they are listed in.
    """
    p = parameters(8)
    arrival = order_arrival(
        p, {1: 0, 2: -5}, arrives_before=(p[4], p[5]), arrives_after=(p[0], p[3])
    )
    assert [p.index for p in arrival] == [7, 6, 4, 5, 2, 1, 0, 3]


def test_where_all_have_gradients_parameters_of_no_graph_arrive_first() -> None:
    """The loss takes them, behind the only graph; with a static graph they are unused, and last."""
    place = {1: 0, 2: -5}
    rule = OthersArrive.for_graph(begins_forward=True, ends_forward=True, may_be_unused=False)
    assert [p.index for p in order_arrival(parameters(4), place, others=rule)] == [3, 0, 2, 1]
    rule = OthersArrive.for_graph(begins_forward=True, ends_forward=True, may_be_unused=True)
    assert [p.index for p in order_arrival(parameters(4), place, others=rule)] == [2, 1, 0, 3]


def test_behind_a_graph_break_parameters_of_no_graph_arrive_as_they_are_registered() -> None:
    """Layers that are not compiled may have run in between; the root's own belong to none."""
    p = parameters(8)
    rule = OthersArrive.for_graph(begins_forward=False, ends_forward=True, may_be_unused=False)
    arrival = order_arrival(p, {5: 0, 6: -5}, arrives_after=(p[3], p[2]), others=rule, of_root=[0])
    assert [p.index for p in arrival] == [7, 0, 6, 5, 4, 3, 2, 1]


# ---- What runs before a graph, and what uses a parameter outside --------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Policy(nn.Module):
    """Returns the weight of its output layer; the loss takes it, and a deviation of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(SIZE))
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, _: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x, self.head.weight, self


class PartlyEager(Policy):
    """The same behind a layer that is not compiled; layers are registered as they are used."""

    def __init__(self) -> None:
        super().__init__()
        head = self.head
        del self.head
        self.layers.insert(0, Layer())
        self.head = head

    def forward(self, x: torch.Tensor, _: Any) -> Any:
        x = torch._dynamo.disable(self.layers[0])(x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x, self.head.weight, self


def _policy_loss(output: Any) -> torch.Tensor:
    hidden, weight, model = output
    return ((hidden @ weight.t() + model.log_std.exp()) ** 2).mean()


class Body(nn.Module):
    """Six layers; in some steps there is a break behind the second, as where a value is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(6))

    def forward(self, x: torch.Tensor, breaks: Any) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x).relu()
        if breaks:
            torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x).relu()
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, breaks: Any) -> torch.Tensor:
        return self.head(self.body(x, breaks))


class Blocks(nn.Module):
    """Blocks that share one graph, since the loop around them breaks, and a head behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Layer()) for _ in range(4))
        self.head = Net()

    def forward(self, x: torch.Tensor, _: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block[0](x)
            torch._dynamo.graph_break()
        return self.head(x, False)


def _train(beside: Beside, steps: Sequence[bool | None]) -> None:
    """Train; each step is what the forward takes beside its input.

    A step is followed by a forward without gradients, of a batch of another size, if it is None.
    """
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        beside.step(torch.randn(8, SIZE), bool(step))
        if step is None:
            with torch.no_grad():
                beside.run(torch.randn(5, SIZE), bool(number % 2))


def _assert_buckets_are(cut: Cut, ddp: Any) -> None:
    planned = [{p.index for p in bucket.parameters} for bucket in cut.buckets]
    assert planned == [set(bucket) for bucket in real_buckets(ddp)]


@pytest.mark.quick("Policy-backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
@pytest.mark.parametrize("kind", [Policy, PartlyEager])
def test_buckets_of_parameters_that_only_the_loss_uses_are_as_planned(
    one_rank: None, kind: Callable[[], Any], split: str
) -> None:
    """Their gradients are the first; those of a layer that runs eagerly before come last."""
    beside = Beside(kind(), ddp_options=CAP, loss_of=_policy_loss, split=split)
    with logged("warning") as warnings:
        _train(beside, [False] * 4)
    cut = beside.cut
    _assert_buckets_are(cut, beside.ddp)
    assert {p.name for p in cut.buckets[0].parameters} == {"log_std", "head.weight"}
    assert len(cut.sections) == 4
    assert not warnings


def test_buckets_that_differ_for_parameters_of_no_graph_have_a_warning_that_names_them(
    one_rank: None,
) -> None:
    """It says nothing of a first step that ran eagerly."""

    class RegisteredFirst(PartlyEager):
        def __init__(self) -> None:
            super().__init__()
            self.layers = self._modules.pop("layers")  # behind the head

    with logged("warning") as warnings:
        beside = Beside(RegisteredFirst(), ddp_options=CAP, loss_of=_policy_loss)
        _train(beside, [False] * 4)
    (warning,) = warnings
    assert "No compiled graph uses" in warning
    assert "first step" not in warning


def test_parameters_of_blocks_that_share_a_graph_have_run_before_what_follows(
    one_rank: None,
) -> None:
    """The graph has those of one block; the others' are known from its calls in this forward."""
    beside = Beside(Blocks(), ddp_options=CAP)
    _train(beside, [False] * 4)
    *of_blocks, last = beside.cuts
    assert len(of_blocks) > 1
    assert all(cut.is_shared and cut.arrival for cut in of_blocks)
    _assert_buckets_are(last, beside.ddp)


def _cuts_of_last_step(beside: Beside) -> list[Any]:
    """What is known of the graphs that ran, in their order."""
    cuts = state.get(beside.ddp).last_cuts
    return [(len(cut.sections), cut.fallback, {p.name for p in cut.arrival}) for cut in cuts]


@pytest.mark.quick("before0-backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
@pytest.mark.parametrize("before", [[False], [False, None], [True, False], [False, True, None]])
def test_graphs_are_cut_alike_whatever_was_compiled_before(
    one_rank: None, before: list[bool | None], split: str
) -> None:
    """A graph that was compiled first, and no longer runs, does not count as one that runs before.

    Before, there are steps without the break, and forwards without gradients.
    """
    found = []
    for steps in ([True] * 3, [*before, True, True]):
        torch._dynamo.reset()
        beside = Beside(Net(), ddp_options=CAP, split=split)
        _train(beside, steps)
        found.append(_cuts_of_last_step(beside))
    assert found[0] == found[1]
    assert [num_sections for num_sections, _, _ in found[0]] == [2, 4, 0]


def test_another_model_of_the_class_changes_nothing_of_what_ran_before(one_rank: None) -> None:
    """Models of one class share code objects, and each has its own forwards."""
    first, second = (Beside(Net(), ddp_options=CAP) for _ in range(2))
    _train(first, [False] * 2)
    _train(second, [True] * 3)
    _train(first, [True] * 2)
    assert _cuts_of_last_step(first) == _cuts_of_last_step(second)
    assert [num_sections for num_sections, _, _ in _cuts_of_last_step(first)] == [2, 4, 0]


def test_a_graph_of_a_recomputation_stands_where_its_code_ran_in_the_forward(
    one_rank: None,
) -> None:
    """It is compiled in backward, when all graphs of the forward have run."""
    known = state.get(DistributedDataParallel(Net(), **CAP))
    p = parameters(3)
    for index, graph in enumerate(("4/0", "5/0", "6/0")):
        cut = Cut(graph=graph, inner="eager", num_nodes=1, arrival=(p[index],))
        known.keep(cut, GraphText)
    known.begin_forward()
    for graph in ("4/0", "5/0", "6/0"):
        known.note_run(graph)
    known.end_forward()
    later, earlier = known.arrival_around("5/1")
    assert (later, earlier) == ((p[2], p[1]), (p[0],))


def test_a_gradient_is_final_behind_the_last_call_that_makes_it() -> None:
    """Or from the start, if no call does; a parameter of a graph whose backward is later is not."""
    facts: Any = SimpleNamespace(communicates=[False], gradients={0: (1, 3), 1: (), 2: (2,)})
    arguments: Any = {10: 0, 11: 1, 12: 2}
    assert final_places(facts, arguments, used_before={12}) == {10: 3, 11: -1}
    facts.communicates = [True]  # then every rank counts it, whatever ran before there
    assert final_places(facts, arguments, used_before={12}) == {10: 3, 11: -1, 12: 2}
