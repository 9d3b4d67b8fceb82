"""After a change of buckets DDP allows what it allows in its hundredth step.

A table: what a loop may do, in each of the first steps with a new Reducer, on one rank or on all,
with and without a static graph. Beside it DDP that keeps its Reducer does the same.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt.planning import rebucket
from tests.support.beside import compiled
from tests.support.buckets import real_buckets
from tests.support.models import assert_equal_states, batches, state_of, twins
from tests.support.on_ranks import on_ranks
from tests.support.plans import plan_of

WIDTH = 8
TIMEOUT = datetime.timedelta(seconds=60)  # of a collective that one rank alone takes part in


class Net(nn.Module):
    """Six parameters, all of them used once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Uneven(Net):
    """Gradients arrive twice, once, never, and as None.

    Those of layer 0 from two reentrant checkpoints, those of layer 1 as usual, of layer 2 never,
    and the scale has None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](_call_twice(self.layers[0], self.scale, x)).tanh()


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@torch.compiler.disable  # compiled, a checkpoint runs no backward of its own
def _call_twice(layer: nn.Module, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x = _Scale.apply(x, scale)
    x = x + torch.zeros(WIDTH, requires_grad=True)  # a checkpoint without gradients has no backward
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=True).tanh()
    return x


# ---- What a loop may do in a step ----------------------------------------------------------------

Model = Callable[[torch.Tensor], torch.Tensor]


def _loss(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def _forward_alone(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    model(x)


def _evaluate(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    """With gradients enabled, as where `torch.no_grad` was forgotten."""
    ddp.eval()
    model(x)
    ddp.train()


def _differentiate_by_input(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(_loss(model, x), x)


def _differentiate_by_parameter(
    model: Model, ddp: DistributedDataParallel, x: torch.Tensor
) -> None:
    torch.autograd.grad(_loss(model, x), ddp.module.layers[0].weight)


def _accumulate(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    with ddp.no_sync():
        _loss(model, x).backward()


def _freeze(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    """As a GAN's discriminator in its generator's step."""
    ddp.requires_grad_(False)
    model(x)
    ddp.requires_grad_(True)


def _fail_in_forward(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"size|shape"):
        model(x[:, 1:].repeat(1, 2))


def _fail_in_backward(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    output = model(x)

    def fail(_gradient: torch.Tensor) -> None:
        raise ArithmeticError

    output.register_hook(fail)
    with pytest.raises(ArithmeticError):
        output.sum().backward()


BEFORE_A_STEP = [
    _forward_alone,
    _evaluate,
    _differentiate_by_input,
    _differentiate_by_parameter,
    _accumulate,
    _freeze,
    _fail_in_forward,
    _fail_in_backward,
]


def _step(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    _loss(model, x).backward()


def _differentiate_first(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    """A saliency map, of the very forward whose gradients are reduced afterwards."""
    x = x.clone().requires_grad_()
    loss = _loss(model, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def _two_forwards(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    (_loss(model, x) + _loss(model, x + 1)).backward()


def _two_backwards(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    """DDP reduces the first one alone."""
    losses = [_loss(model, x), _loss(model, x + 1)]
    for loss in losses:
        loss.backward()


def _broadcast(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    """A collective of the program's between forward and backward."""
    loss, scale = _loss(model, x), x.sum().detach()
    dist.broadcast(scale, 0, group=ddp.process_group)
    (loss * scale).backward()


STEPS = [_step, _differentiate_first, _two_forwards, _two_backwards]


def _joined(model: Model, ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    """Rank 1 has no batch, and shadows the allreduces of rank 0's."""
    with ddp.join():
        if dist.get_rank() == 0:
            _loss(model, x).backward()


# What reentrant checkpoints refuse; and two forwards change how often their gradients arrive.
NOT_CHECKPOINTED = (
    *(_differentiate_by_input, _differentiate_by_parameter, _differentiate_first),
    _two_forwards,
)


def _actions(rank: int, kind: type[Net]) -> Iterator[tuple[str, Callable[..., None]]]:
    """What this rank does in a step, with a name: each thing on rank 0 alone, then on both."""
    left_out = NOT_CHECKPOINTED if kind is Uneven else ()
    for who in ("rank 0", "both"):
        acts = who == "both" or rank == 0
        for before in BEFORE_A_STEP:
            if before in left_out:
                continue

            def act_and_step(*model_ddp_x: Any, before: Any = before, acts: bool = acts) -> None:
                if acts:
                    before(*model_ddp_x)
                dist.barrier(group=model_ddp_x[1].process_group)
                _step(*model_ddp_x)

            yield f"{before.__name__}, {who}", act_and_step
        for step in STEPS:
            if step in left_out:
                continue
            yield f"{step.__name__}, {who}", step if acts else _step
    yield _broadcast.__name__, _broadcast


# ---- The table -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _group() -> Iterator[dist.ProcessGroup]:
    """A group that does not wait for long, where a rank does not come."""
    group = dist.new_group(timeout=TIMEOUT)
    yield group
    dist.destroy_process_group(group)


class _Twins:
    """A DDP module whose buckets change, and one whose buckets do not, in equal steps."""

    def __init__(self, kind: type[Net], group: dist.ProcessGroup, **options: Any) -> None:
        self.ddp, self.expected = twins(kind(), process_group=group, **options)
        models = (self.ddp, self.expected)
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]

    def run(self, act: Callable[..., None], x: torch.Tensor, model: Model | None = None) -> None:
        """Let both take a step, the one that changes by `model`; both have equal gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        act(self.expected, self.expected, x)
        act(self.ddp if model is None else model, self.ddp, x)
        assert_equal_states(state_of(self.ddp), state_of(self.expected))
        for optimizer in self._optimizers:
            optimizer.step()

    def run_compiled(self, inputs: list[torch.Tensor]) -> None:
        """Take the first steps, with compiled code; from there on arrivals are known."""
        for x in inputs:
            self.run(_step, x, compiled(self.ddp))


@contextlib.contextmanager
def _naming(cell: str) -> Iterator[None]:
    """Name the cell of the table in which an error arises."""
    try:
        yield
    except Exception as error:
        raise AssertionError(cell) from error


@on_ranks(2)
@pytest.mark.quick("every second cell")
@pytest.mark.parametrize(
    ("kind", "options", "is_whole"),
    [
        (Net, {}, False),
        (Net, {}, True),
        (Net, {"static_graph": True, "gradient_as_bucket_view": True}, True),
        (Uneven, {"static_graph": True, "find_unused_parameters": True}, True),
    ],
    ids=[
        "every second cell",
        "",
        "static graph",
        "static graph, of which gradients arrive twice and never",
    ],
)
def test_whatever_a_loop_does_after_a_change_of_buckets_is_as_without_it(
    rank: int, kind: type[Net], options: dict[str, Any], is_whole: bool
) -> None:
    """Gradients equal those of a Reducer that has long had its first steps, and no rank waits.

    Every second cell: an action is of one rank in the first step, and of both in the second.
    """
    num_cells = 0
    inputs = batches(rank, [(4, WIDTH)] * 3)
    with _group() as group:
        pair = _Twins(kind, group, **options)
        pair.run_compiled(inputs)
        num_others = len(list(pair.ddp.parameters())) - 4
        plans = [plan_of(pair.ddp.module, sizes) for sizes in ((1, 3, num_others), (4, num_others))]
        for acting_step in range(2):
            for name, act in _actions(rank, kind):
                if not is_whole and name.endswith("both") != bool(acting_step):
                    continue
                plan = plans[num_cells % 2]
                pair.ddp.zero_grad()  # some options ask for it
                ddpopt.rebucket(pair.ddp, plan)
                if kind is Net:  # DDP puts parameters that a static graph does not use last
                    assert [len(bucket) for bucket in real_buckets(pair.ddp)] == list(plan.sizes)
                for step in range(3):
                    with _naming(f"{name}, in step {acting_step}; in step {step}"):
                        pair.run(act if step == acting_step else _step, inputs[step])
                num_cells += 1
    assert num_cells > (2 if is_whole else 1) * 2 * len(BEFORE_A_STEP)


@on_ranks(2)
@pytest.mark.quick("{}")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_a_rank_may_run_out_of_batches_in_the_first_steps_with_a_new_reducer(
    rank: int, options: dict[str, Any]
) -> None:
    """In DDP's own first step with a static graph one may not: it reduces once more."""
    for acting_step in range(2):
        torch._dynamo.reset()
        with _group() as group:
            pair = _Twins(Net, group, **options)
            inputs = batches(rank, [(4, WIDTH)] * 3)
            pair.run_compiled(inputs)
            ddpopt.rebucket(pair.ddp, plan_of(pair.ddp.module, (1, 3, 2)))
            for x in inputs[:acting_step]:
                pair.run(_step, x)
            pair.run(_joined, inputs[2])


def test_buckets_that_are_taken_back_keep_the_order_of_their_members(one_rank: None) -> None:
    """Members have one order in the tensor that ranks add up, whatever a rank has compiled."""
    ddp = DistributedDataParallel(Net())
    run = compiled(ddp)
    for _ in range(3):
        run(torch.randn(2, WIDTH)).sum().backward()
    ddp.zero_grad()
    buckets = [[1, 5, 3, 0, 4, 2]]
    rebucket.take_back(ddp, buckets, [2**20])
    assert real_buckets(ddp) == buckets
