"""What promises to change nothing: the whole world is the same before and after each such call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.planning import AllreduceCost, Device, estimate
from tests.support.beside import compiled
from tests.support.models import batches
from tests.support.on_ranks import on_ranks
from tests.support.world import changes, world_of

NETWORK = AllreduceCost(startup_s=1e-4, s_per_byte=1e-9)
DEVICE = Device(flops_per_s={torch.float32: 1e10}, bytes_per_s=1e10, launch_s=1e-6)


class Model(nn.Module):
    """It keeps in its attributes whatever models keep there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("center", torch.zeros(32))
        self.generator = torch.Generator()
        self.table: torch.Tensor | None = None  # as rotary embeddings are kept
        self.last: dict[str, Any] = {"losses": []}
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(32, device=x.device) / 32
        self.num_calls += 1
        for layer in self.layers:
            x = layer(x).tanh() + self.table
        self.center = self.center * 0.9 + x.detach().mean(0) * 0.1
        self.last["output"] = x.detach()
        return self.norm(x - self.center)


class Loss(nn.Module):
    """As ArcFace's, or one whose weights are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4)
        self.register_buffer("center", torch.zeros(32))
        self.values: list[float] = []

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.center.lerp_(output.mean(0), 0.1)
        loss = self.head(output - self.center).square().mean()
        self.values.append(0.0)
        return loss


class Trainer:
    """Its method is the loss, as trainers have it."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def compute(self, output: torch.Tensor) -> torch.Tensor:
        return self.loss(output)


def _as_lambda(loss: Loss) -> Callable[..., torch.Tensor]:
    return lambda output: loss(output) * 1.0


def _scaled(loss: Loss, scale: float, output: torch.Tensor) -> torch.Tensor:
    return loss(output) * scale


_global_loss: Loss


def _by_global_name(output: torch.Tensor) -> torch.Tensor:
    return _global_loss(output)


def _as_global(loss: Loss) -> Callable[..., torch.Tensor]:
    global _global_loss  # noqa: PLW0603  # as in a script
    _global_loss = loss
    return _by_global_name


LOSSES: dict[str, Callable[[Loss], Callable[..., torch.Tensor]]] = {
    "module": lambda loss: loss,
    "method": lambda loss: loss.forward,
    "lambda": _as_lambda,
    "partial": lambda loss: functools.partial(_scaled, loss, 1.0),
    "global name": _as_global,
    "method of a trainer": lambda loss: Trainer(loss).compute,
}


def _record(model: nn.Module, x: torch.Tensor, loss: Any) -> None:
    with ddpopt.record(model):
        pass


def _verify(model: nn.Module, x: torch.Tensor, loss: Any) -> None:
    assert ddpopt.verify(model, x, loss).passed


def _plan(backend: str | None, model: nn.Module, x: torch.Tensor, loss: Any) -> None:
    ddpopt.plan(model, x, network=NETWORK, world_size=2, backend=backend, loss_fn=loss)


CALLS: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "warmup": ddpopt.warmup,
    "verify": _verify,
    "plan, eager": functools.partial(_plan, None),
    "plan, compiled": functools.partial(_plan, "aot_eager"),
    "estimate": lambda model, x, loss: estimate(model, x, device=DEVICE, loss_fn=loss),
    "record": _record,
    "calibrate": lambda model, x, loss: ddpopt.calibrate(),
    "explain": lambda model, x, loss: str(ddpopt.explain(model)),
    "metrics": lambda model, x, loss: ddpopt.metrics(model),
}
ON_ONE_RANK = frozenset(CALLS) - {"warmup", "verify", "calibrate"}


def _shrink(parameter: torch.Tensor) -> None:
    parameter.data.mul_(0.9)


def _train(
    rank: int,
    calls: Sequence[str],
    losses: Sequence[str],
    steps_before: int,
    options: Any,
    compile_model: Callable[[Any], Any] = compiled,
) -> tuple[dict[str, list[str]], list[torch.Tensor]]:
    """What each call before some step changed, and the parameters after two more steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    loss = Loss()
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.004, **options)
    optimizer = torch.optim.SGD([*ddp.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    # Another optimizer steps in a hook, as torchtune has it.
    weight = ddp.module.layers[0].weight
    own = torch.optim.SGD([weight], lr=0.01)
    weight.register_post_accumulate_grad_hook(lambda _: own.step() and None)
    loss.head.weight.register_post_accumulate_grad_hook(_shrink)
    model = compile_model(ddp)
    changed = {}
    for step, x in enumerate(batches(rank, [(8, 32)] * (steps_before + 2))):
        for call, how in itertools.product(calls, losses):
            if step == steps_before and (rank == 0 or call not in ON_ONE_RANK):
                roots = {"ddp": ddp, "loss": loss, "optimizers": [optimizer, own], "batch": x}
                before = world_of(**roots)
                CALLS[call](model, x, LOSSES[how](loss))
                changed[f"{call}, {how}"] = changes(before, world_of(**roots))
        loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return changed, [p.detach().clone() for p in [*ddp.parameters(), *loss.parameters()]]


def _assert_unchanged(rank: int, calls: Sequence[str], losses: Sequence[str], *how: Any) -> None:
    """No call changed what is reached from module, loss and optimizers, or what training does."""
    _, expected = _train(rank, (), (), *how)
    changed, parameters = _train(rank, calls, losses, *how)
    assert changed
    assert not any(changed.values()), changed
    assert all(map(torch.equal, parameters, expected))


@pytest.mark.quick("0-options0")
@pytest.mark.parametrize(
    ("steps_before", "options"),
    [
        (0, {}),
        (0, {"static_graph": True}),
        (2, {}),
        (2, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    ],
)
@on_ranks(2)
def test_a_call_that_promises_to_change_nothing_changes_nothing(
    rank: int, steps_before: int, options: dict[str, Any]
) -> None:
    _assert_unchanged(rank, tuple(CALLS), ("module",), steps_before, options)


def test_a_loss_may_hold_its_modules_in_any_way(one_rank: None) -> None:
    """All calls copy a loss by one function; this one compiles nothing, nor does the training."""
    _assert_unchanged(0, ("plan, eager",), tuple(LOSSES), 0, {}, lambda ddp: ddp)
