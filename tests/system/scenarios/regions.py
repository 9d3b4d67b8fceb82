"""Rows about models of which parts are compiled, each in place, and run by something eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt.errors import Reason
from tests.support.models import WIDTH
from tests.system.scenarios.scenario import CAP, Compile, Scenario, Trainer, Wrapped

_save_input = functools.partial(checkpoint, use_reentrant=False)
_CAP = CAP / 2  # MiB: a bucket for each weight


def _save_input_reentrantly(layer: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run under `no_grad`, so without gradients for a layer whose input has none."""
    return checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)


class Layer(nn.Module):
    """Its activations save their inputs, which have the shape of its weights in these rows.

    So two compiled versions can save equally many tensors of equal shapes in another order, and a
    checkpoint that mixes them up would not notice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(F.gelu(x))))


class Stack(nn.Module):
    """Layers run as `run` says: `run(layer, x)`."""

    def __init__(self, run: Callable[..., torch.Tensor], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer.__call__, x)
        return x


class _Whole(nn.Module):
    """Runs all of a compiled module as `run` says."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.stack = Stack(lambda layer, x: layer(x))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.stack.__call__, x)


def compile_in_place(module: nn.Module, compile_: Compile) -> None:
    """Compile as `module.compile(backend=...)` does; not at all where `compile_` is eager."""
    if isinstance(compile_, functools.partial):
        module.compile(*compile_.args, **compile_.keywords)


def _compile_layers(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    for layer in model.layers:
        compile_in_place(layer, compile_)
    ddp = DistributedDataParallel(model, **ddp_options)
    return Wrapped(ddp, ddp)


def _compile_stack(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    compile_in_place(model.stack, compile_)
    ddp = DistributedDataParallel(model, **ddp_options)
    return Wrapped(ddp, ddp)


def _compile_one_function(
    model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]
) -> Wrapped:
    compiled = compile_(lambda layer, x: layer(x))
    model.run = lambda call, x: _save_input(compiled, call, x)
    ddp = DistributedDataParallel(model, **ddp_options)
    return Wrapped(ddp, ddp)


def _checkpoint_ddp(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    ddp = DistributedDataParallel(model, **ddp_options)
    compile_in_place(ddp, compile_)
    return Wrapped(ddp, lambda x: _save_input(ddp, x))


def _compile_two(models: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    """Two DDP modules that share code, but not the limits of their buckets."""
    first, second = models
    for layer in [*first.layers, *second.layers]:
        compile_in_place(layer, compile_)
    ddp = DistributedDataParallel(first, **ddp_options)
    other = DistributedDataParallel(second, **{**ddp_options, "bucket_cap_mb": 1.0})
    return Wrapped(nn.ModuleList([ddp, other]), lambda x: other(ddp(x)))


def _nested(layer: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return _save_input(lambda y: _save_input(layer, y.sin()).cos(), x)


def _checkpoint_later(trainer: Trainer) -> None:
    stack = trainer.module.module
    for step, (x,) in enumerate(trainer.steps()):
        stack.run = _save_input if step >= 2 else lambda layer, x: layer(x)
        trainer.loss(x).backward()
        trainer.update()


def _beside_ddp(trainer: Trainer) -> None:
    """Each loss is also of a forward of the module inside, whose gradients come with DDP's."""
    ddp = trainer.module
    for (x,) in trainer.steps():
        (trainer.loss(x) + trainer.scenario.loss(ddp.module(2 * x))).backward()
        trainer.update()


def _scenario(run: Callable[..., Any] = _save_input, **fields: Any) -> Scenario:
    options = {"bucket_cap_mb": _CAP, **fields.pop("ddp_options", {})}
    square_input = (((WIDTH, WIDTH),),) * 4
    defaults = {"model": Stack(run), "wrap": _compile_layers, "steps": square_input}
    return Scenario(**{**defaults, **fields}, ddp_options=options)


REGIONS: dict[str, Callable[[], Scenario]] = {
    "compiled layers": lambda: _scenario(lambda layer, x: layer(x)),
    "checkpoint around compiled layers": _scenario,
    "checkpoint around compiled layers, reentrant": lambda: _scenario(
        _save_input_reentrantly,
        ddp_options={"static_graph": True},
        fallbacks=frozenset({Reason.NO_GRAD}),
    ),
    "checkpoint around compiled layers, no determinism check": lambda: _scenario(
        functools.partial(_save_input, determinism_check="none")
    ),
    "checkpoint around compiled layers, static_graph": lambda: _scenario(
        ddp_options={"static_graph": True}
    ),
    "checkpoint around compiled layers, find_unused_parameters": lambda: _scenario(
        ddp_options={"find_unused_parameters": True}
    ),
    "checkpoint around compiled layers, from the third step on": lambda: _scenario(
        train=_checkpoint_later
    ),
    "checkpoint around checkpoints of compiled layers": lambda: _scenario(_nested),
    "checkpoint around one compiled function": lambda: _scenario(wrap=_compile_one_function),
    "checkpoint around a compiled model": lambda: _scenario(
        model=_Whole(_save_input), wrap=_compile_stack
    ),
    "checkpoint around compiled DDP": lambda: _scenario(
        lambda layer, x: layer(x), wrap=_checkpoint_ddp
    ),
    "checkpoint, two DDP modules with other caps": lambda: _scenario(
        model=nn.ModuleList([Stack(_save_input, depth=2), Stack(_save_input, depth=2)]),
        wrap=_compile_two,
        fallbacks=frozenset({Reason.ONE_BUCKET}),
    ),
    "checkpoint, a forward beside DDP's": lambda: _scenario(train=_beside_ddp),
}
