"""Rows about the training loop around forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddpopt.errors import Reason
from tests.support.device import DEVICE
from tests.support.models import MLP, WIDTH
from tests.system.scenarios.architectures import ConvNet, Transformer
from tests.system.scenarios.scenario import CAP, Scenario, Trainer, train


def _join(trainer: Trainer) -> None:
    """Rank 1 has two batches more than rank 0."""
    with trainer.module.join():
        for (x,) in list(trainer.steps())[: 3 + 2 * trainer.rank]:
            trainer.loss(x).backward()
            trainer.update()


def _shard_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)


def _scale(trainer: Trainer) -> None:
    """In the second step the gradients overflow on one rank, and both must skip it."""
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    for i, (x,) in enumerate(trainer.steps()):
        overflow = float("inf") if (i, trainer.rank) == (1, 1) else 1.0
        scaler.scale(trainer.loss(x) * overflow).backward()
        scaler.unscale_(trainer.optimizer)
        trainer.update(lambda: scaler.step(trainer.optimizer))
        scaler.update()
        trainer.note("scale", torch.tensor(scaler.get_scale()))


def _autocast(trainer: Trainer) -> None:
    for (x,) in trainer.steps():
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = trainer.loss(x)
        loss.backward()
        trainer.update()


def _two_forwards(trainer: Trainer) -> None:
    for x, y in trainer.steps():
        (trainer.loss(x) + 2 * trainer.loss(y)).backward()
        trainer.update()


def _backward_twice(trainer: Trainer) -> None:
    """DDP reduces only in the first backward; the second adds each rank's own gradients."""
    for (x,) in trainer.steps():
        loss = trainer.loss(x)
        loss.backward(retain_graph=True)
        loss.backward()
        trainer.update()


def _grad_of_some(trainer: Trainer) -> None:
    """As for a gradient penalty's weight: some gradients first, then all."""
    for (x,) in trainer.steps():
        loss = trainer.loss(x)
        for gradient in torch.autograd.grad(loss, trainer.trained[3:6], retain_graph=True):
            trainer.note("some gradient", gradient)
        loss.backward()
        trainer.update()


def _detect_anomalies(trainer: Trainer) -> None:
    with torch.autograd.set_detect_anomaly(True):
        train(trainer)


def _evaluate_between(trainer: Trainer) -> None:
    for (x,) in trainer.steps():
        trainer.module.eval()
        with torch.no_grad():
            trainer.loss(x)
        trainer.module.train()
        trainer.loss(x).backward()
        trainer.update()


def _load_what_was_saved(trainer: Trainer) -> None:
    """Two steps, saved; two more, which loading undoes; two more."""
    saved = None
    for i, (x,) in enumerate(trainer.steps()):
        if i == 2:
            saved = copy.deepcopy((trainer.module.state_dict(), trainer.optimizer.state_dict()))
        if i == 4:
            trainer.module.load_state_dict(saved[0])
            trainer.optimizer.load_state_dict(saved[1])
        trainer.loss(x).backward()
        trainer.update()


def _reset_dynamo(trainer: Trainer) -> None:
    for i, (x,) in enumerate(trainer.steps()):
        if i == 2:
            torch._dynamo.reset()
        trainer.loss(x).backward()
        trainer.update()


_ONE, _TWO, _THREE = (((4, WIDTH),) * n for n in (1, 2, 3))
_CONV_CAP = {"bucket_cap_mb": 0.001}

LOOPS: dict[str, Callable[[], Scenario]] = {
    "no_sync": lambda: Scenario(MLP(), steps=(_THREE,) * 3),
    "no_sync, gradient_as_bucket_view": lambda: Scenario(
        MLP(),
        steps=(_THREE,) * 3,
        ddp_options={"bucket_cap_mb": CAP, "gradient_as_bucket_view": True},
    ),
    "join with uneven inputs": lambda: Scenario(MLP(), steps=(_ONE,) * 5, train=_join),
    "ZeroRedundancyOptimizer": lambda: Scenario(MLP(), optimizer=_shard_optimizer),
    "GradScaler": lambda: Scenario(MLP(), steps=(_ONE,) * 5, train=_scale),
    "autocast": lambda: Scenario(
        Transformer(),
        train=_autocast,
        is_exact_on_inductor=False,
        note="Inductor rounds less often than eager, unsplit too",
    ),
    "two forwards before one backward": lambda: Scenario(
        MLP(), steps=(_TWO,) * 4, train=_two_forwards
    ),
    "backward twice (retain_graph)": lambda: Scenario(
        MLP(),
        # Of a size of its own: compiled for one backward, a cached graph refuses a second.
        steps=(((6, WIDTH),),) * 4,
        train=_backward_twice,
        note="DDP does not reduce the second backward",
    ),
    "torch.autograd.grad on a subset": lambda: Scenario(MLP(), train=_grad_of_some),
    "anomaly mode": lambda: Scenario(MLP(), train=_detect_anomalies),
    "eval between steps": lambda: Scenario(
        ConvNet(),
        ddp_options=_CONV_CAP,
        train=_evaluate_between,
        fallbacks=frozenset({Reason.NO_GRAD}),
    ),
    "state_dict round trip": lambda: Scenario(MLP(), steps=(_ONE,) * 6, train=_load_what_was_saved),
    "torch._dynamo.reset": lambda: Scenario(MLP(), steps=(_ONE,) * 5, train=_reset_dynamo),
}
