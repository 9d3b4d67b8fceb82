"""A property of all of `split`: collectives and releases have the program's order on every rank.

Whatever a rank compiled for: other sizes, other buckets, anew, or not at all. Each case trains a
model with collectives of its own on two ranks that differ, eagerly and compiled. With another order
ranks would wait for each other, or add up tensors of the model and of DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt import explain
from ddpopt.errors import DisagreementError, NotCutError, Reason
from ddpopt.split import compiler, sections
from ddpopt.split.nodes import call_nodes, is_pure, may_communicate
from tests.support.beside import Beside, compiled
from tests.support.communicating import Exchange, Normed, SumBackward, mean_of_ranks
from tests.support.cuts import only_cut
from tests.support.graphs import Capture
from tests.support.on_ranks import on_ranks

WIDTH = 16
BATCH, LENGTH = 6, 8


class Norms(nn.Module):
    """Layers with a collective each; DDP registers the last two in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleList(Normed(WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.early:
            x = layer(x)
        return self.last(self.middle(x))


class BrokenNorms(Norms):
    """DDP forms other buckets than one would predict of the first graph alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.early:
            x = layer(x)
        torch._dynamo.graph_break()
        return self.last(self.middle(x))


class Checkpointed(nn.Module):
    """Layers whose collective is made again in backward, and which read a table of positions."""

    def __init__(self, *, is_expanded: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed(WIDTH) for _ in range(3))
        self.outer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        table = torch.randn(WIDTH).expand(64, WIDTH) if is_expanded else torch.randn(64, WIDTH)
        self.register_buffer("positions", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, outer in zip(self.layers, self.outer, strict=True):
            x = checkpoint(self.step, inner, outer, x, use_reentrant=False)
        return x

    def step(self, inner: nn.Module, outer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(outer(torch.sigmoid(inner(x) + self.positions[: x.shape[1]])))


class Experts(nn.Module):
    """Rows go to other ranks and back, as those of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, expert in zip(self.gates, self.experts, strict=True):
            # All ranks send equally many rows, whatever the length of the rest.
            rows = gate(x)
            sent = Exchange.apply(rows[:BATCH, 0])
            x = torch.tanh(rows + Exchange.apply(torch.tanh(expert(sent)))[:, None])
        return x


class Biased(nn.Module):
    """Each layer's bias is added behind a collective, and so released before it in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.biases = nn.ParameterList(torch.randn(1, 1, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row, bias in zip(self.rows, self.biases, strict=True):
            part = row(self.enter(x))
            x = torch.tanh(mean_of_ranks(part.mean((0, 1))) + part.sin() + bias)
        return x

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Parallel(Biased):
    """Blocks of which each rank has a part."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return SumBackward.apply(x)


class NumberOfSize(Norms):
    """A number that comes of a size crosses the places at which forward would be cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(x.shape[1]) / 8
        for layer in self.early:
            x = layer(x) * scale
        return self.last(self.middle(x))


def _equal(_rank: int, _step: int) -> tuple[int, int]:
    return BATCH, LENGTH


def _differ(rank: int, _step: int) -> tuple[int, int]:
    return BATCH, LENGTH + 40 * rank


def _one_compiles_anew(rank: int, step: int) -> tuple[int, int]:
    return BATCH, LENGTH + (3 * (step - 3) if rank == 1 and step >= 3 else 0)


def _batch_of_one(rank: int, _step: int) -> tuple[int, int]:
    """A size of 1 is compiled for in particular: nothing is summed over the batch."""
    return (1, 1) if rank == 1 else (BATCH, LENGTH)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    shape: Callable[[int, int], tuple[int, int]]
    options: dict[str, Any] = field(default_factory=dict)
    cap_mb: float = 0.0011  # about a layer
    # What rank 1 does before the third step.
    change: Callable[[Beside], object] = lambda _: None


def _forget_code(_: Beside) -> None:
    torch._dynamo.reset()


def _become_eager(beside: Beside) -> None:
    beside.run = beside.ddp


def _compile_with_a_search(beside: Beside) -> None:
    beside.run = compiled(beside.ddp, buckets="auto")


CASES = {
    "one rank compiles anew, for buckets that DDP has formed by then": Case(
        BrokenNorms, _one_compiles_anew
    ),
    "one rank compiles anew while buckets are searched": Case(
        Norms, _one_compiles_anew, {"buckets": "auto"}
    ),
    "lengths differ, and calls made again read a table": Case(Checkpointed, _differ),
    "strides differ, and no plain copy has them": Case(
        functools.partial(Checkpointed, is_expanded=True), _one_compiles_anew
    ),
    "rows are exchanged": Case(Experts, _one_compiles_anew),
    "blocks are parallel, and one rank forgets its code": Case(
        Parallel, _equal, {"buckets": "auto"}, change=_forget_code
    ),
    "one rank has a batch of one": Case(Biased, _batch_of_one),
    "all is one bucket, on one rank for other code": Case(
        Norms, _equal, cap_mb=25, change=_compile_with_a_search
    ),
    "one rank reaches its limit of compiles, and is eager": Case(
        Norms, _equal, cap_mb=25, change=_become_eager
    ),
    "one rank forgets its code": Case(BrokenNorms, _equal, change=_forget_code),
    "forward is cut, with sizes that are symbols on one rank": Case(
        NumberOfSize, _one_compiles_anew, {"split": "forward"}
    ),
    "forward is cut": Case(Experts, _differ, {"split": "forward"}),
    "forward is cut, in checkpoints": Case(Checkpointed, _differ, {"split": "forward"}),
}


@on_ranks(2)
@pytest.mark.quick("one rank compiles anew, for buckets that DDP has formed by then")
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_differ_train_as_in_eager(rank: int, name: str) -> None:
    """Some graph is cut on both ranks: the order is not kept by giving up."""
    case = CASES[name]
    ddp_options = {"bucket_cap_mb": case.cap_mb, "broadcast_buffers": False}
    beside = Beside(case.model(), ddp_options=ddp_options, **case.options)
    for step in range(6):
        if step == 2 and rank == 1:
            case.change(beside)
        torch.manual_seed(10 * step + rank)
        beside.step(torch.randn(*case.shape(rank, step), WIDTH))
    assert max(len(cut.sections) for cut in beside.cuts) >= 3, beside.cuts


def _leave_collectives_apart(facts: Any, bucket_parts: Any, argument_of: Any) -> Any:
    return [
        sections._Part(parameters=part, arguments=[argument_of[p.index] for p in part])
        for part in bucket_parts
    ]


def test_an_order_by_buckets_is_refused(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner finds it out itself; without its check the proof does, and it is an error.

    Other ranks may cut what this one cannot.
    """
    ddp = DistributedDataParallel(Norms(), bucket_cap_mb=0.004)
    monkeypatch.setattr(sections, "_choose_parts", _leave_collectives_apart)
    model = compiled(ddp)
    model(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
    assert only_cut(ddp).fallback is Reason.COLLECTIVES

    torch._dynamo.reset()
    monkeypatch.setattr(sections, "_require_order_of_collectives", lambda *_: None)
    with pytest.raises(Exception, match="before the release of gradient") as raised:
        model(torch.randn(BATCH, LENGTH, WIDTH))
    assert DisagreementError.__name__ in str(raised.value)


def test_a_rank_that_cannot_cut_where_others_may_says_so(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph without collectives would be compiled whole, with a warning."""

    def fail(*_: Any, **__: Any) -> Any:
        raise NotCutError(Reason.SECTION_FAILED, "planted")

    monkeypatch.setattr(compiler, "compile_backward_sections", fail)
    model = compiled(DistributedDataParallel(Norms(), bucket_cap_mb=0.0011))
    with pytest.raises(Exception, match="SECTION_FAILED, planted"):
        model(torch.randn(BATCH, LENGTH, WIDTH))


def test_a_part_with_collectives_that_releases_nothing_is_left_whole(one_rank: None) -> None:
    """As a frozen part that is compiled by itself: it has no order, and no backward."""
    ddp = DistributedDataParallel(Norms(), bucket_cap_mb=0.0011)
    for layer in ddp.module.early:
        layer.requires_grad_(False)
        layer.compile(backend="ddpopt", options={"inner": "aot_eager"})
    ddp(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
    assert {cut.fallback for cut in explain(ddp).cuts} == {Reason.NO_PARAMETERS}


def test_what_is_done_to_a_dtensor_may_communicate(one_rank: None) -> None:
    """Its operators are ATen's, and call collectives where it is not looked into."""
    capture = Capture()
    x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])
    torch.compile(torch.sin, backend=capture)(x)
    (call,) = call_nodes(capture.gm.graph)
    assert is_pure(call)
    assert may_communicate(call)
