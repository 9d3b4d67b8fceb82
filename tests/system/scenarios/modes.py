"""Rows about DDP's own options and hooks, and about ways to wrap and to compile."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import MLP, WIDTH
from tests.system.scenarios.architectures import Parts, Transformer, UnusedBranch, checkpointed
from tests.system.scenarios.scenario import CAP, Compile, Scenario, Wrapped, compile_outside, square


def _compress_to(hook: Callable[..., Any]) -> Callable[[nn.Module], None]:
    return lambda ddp: ddp.register_comm_hook(None, hook)


def _compress_by_rank(ddp: nn.Module) -> None:
    """PowerSGD reduces in callbacks, in any order; gloo matches by order, so each bucket waits."""

    def one_at_a_time(state, bucket):  # DDP does not understand annotations that are strings
        done = powerSGD_hook(state, bucket)
        done.wait()
        return done

    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    ddp.register_comm_hook(state, one_at_a_time)


def _hook_gradients(ddp: nn.Module) -> None:
    for parameter in ddp.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.5)


def _hook_accumulation(ddp: nn.Module) -> None:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def _compile_inside(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    ddp = DistributedDataParallel(compile_(model, fullgraph=True), **ddp_options)
    return Wrapped(ddp, ddp)


def _compile_function(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    ddp = DistributedDataParallel(model, **ddp_options)
    return Wrapped(ddp, compile_(lambda x: square(ddp(x * 2))))


def _replicate(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    replicate(model, **ddp_options)
    return Wrapped(model, compile_(model))


def _wrap_both(models: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    ddps = nn.ModuleList(DistributedDataParallel(model, **ddp_options) for model in models)
    first, second = (compile_(ddp) for ddp in ddps)
    return Wrapped(ddps, lambda x: second(first(x)))


class _Nesting(nn.Module):
    """A model of three parts, of which the second is wrapped by itself first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = MLP(3), MLP(3), MLP(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def _nest(model: nn.Module, compile_: Compile, ddp_options: dict[str, Any]) -> Wrapped:
    model.second = DistributedDataParallel(model.second, **ddp_options)
    return compile_outside(model, compile_, ddp_options)


def _options(**options: Any) -> dict[str, Any]:
    return {"bucket_cap_mb": CAP, **options}


# Options of DDP's that not all releases have: the page has the rows of the one it was written with.
OF_SOME_RELEASES = ("batched_grad_copy", "lazy_bucket_allocation")
_TAKEN = inspect.signature(DistributedDataParallel).parameters


def _option_row(name: str) -> Callable[[], Scenario]:
    return lambda: Scenario(MLP(), ddp_options=_options(**{name: True}))


_SIX_STEPS = (((4, WIDTH),),) * 6

MODES: dict[str, Callable[[], Scenario]] = {
    "static_graph": lambda: Scenario(MLP(), ddp_options=_options(static_graph=True)),
    "static_graph, unused branch": lambda: Scenario(
        UnusedBranch(), ddp_options=_options(static_graph=True)
    ),
    "static_graph, activation checkpointing": lambda: Scenario(
        Transformer(run=checkpointed), ddp_options=_options(static_graph=True)
    ),
    "find_unused_parameters": lambda: Scenario(
        MLP(), ddp_options=_options(find_unused_parameters=True)
    ),
    "gradient_as_bucket_view": lambda: Scenario(
        MLP(), ddp_options=_options(gradient_as_bucket_view=True)
    ),
    **{name: _option_row(name) for name in OF_SOME_RELEASES if name in _TAKEN},
    "bucket_cap_mb_list": lambda: Scenario(
        MLP(), ddp_options={"bucket_cap_mb_list": [0.01, 0.02, 0.05]}
    ),
    "unused branch, not declared": lambda: Scenario(UnusedBranch(), eager_error="RuntimeError"),
    "fp16_compress_hook": lambda: Scenario(MLP(), prepare=_compress_to(fp16_compress_hook)),
    "bf16_compress_hook": lambda: Scenario(
        MLP(),
        prepare=_compress_to(bf16_compress_hook),
        eager_error=None if dist.is_nccl_available() else "TypeError",
        note="needs NCCL",
    ),
    "powerSGD_hook": lambda: Scenario(
        MLP(),
        prepare=_compress_by_rank,
        steps=_SIX_STEPS,
        note="what it approximates depends on the buckets",
    ),
    "tensor hooks on parameters": lambda: Scenario(MLP(), prepare=_hook_gradients),
    "post-accumulate hooks on parameters": lambda: Scenario(MLP(), prepare=_hook_accumulation),
    "DDP(torch.compile(m, fullgraph=True))": lambda: Scenario(MLP(), wrap=_compile_inside),
    "DDP within a compiled function": lambda: Scenario(
        MLP(), wrap=_compile_function, loss=lambda loss: loss
    ),
    "composable replicate": lambda: Scenario(MLP(), wrap=_replicate),
    "two DDP models": lambda: Scenario(nn.ModuleList([MLP(), Parts()]), wrap=_wrap_both),
    "nested DDP": lambda: Scenario(_Nesting(), wrap=_nest),
}
