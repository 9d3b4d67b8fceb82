"""How a case's model becomes a DDP module, and what is compiled of it.

`OPTIONS` are those of DDP that are on or off, and that not all releases have, and a list of caps
for the first buckets. A comm hook halves what is sent ("fp16", "bf16") or approximates it
("powerSGD"). `WRAPPINGS` are: composable `replicate`, a DDP module in the middle of another, a
compiled function that calls DDP, and a checkpoint around compiled DDP.
"""

from __future__ import annotations

import functools
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
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.system.fuzzing.building import main_of
from tests.system.fuzzing.spec import Case

Compile = Callable[..., Any]  # as torch.compile, with the backend chosen already

CAP_LIST = "bucket_cap_mb_list"
OF_SOME_RELEASES = ("batched_grad_copy", "lazy_bucket_allocation")
_TAKEN = inspect.signature(DistributedDataParallel).parameters
OPTIONS = (*(name for name in OF_SOME_RELEASES if name in _TAKEN), CAP_LIST)
WRAPPINGS = ("replicate", "nested", "function", "checkpoint")


def wrap(case: Case, model: nn.Module, group: dist.ProcessGroup) -> Any:
    """Return the DDP module, or the replicated one, which has none before its first forward."""
    options: dict[str, Any] = {
        "process_group": group,
        "static_graph": case.static_graph,
        "find_unused_parameters": case.find_unused,
        "gradient_as_bucket_view": case.bucket_view,
        "broadcast_buffers": case.broadcasts_buffers,
        **{name: True for name in case.more_options if name != CAP_LIST},
        **_caps(case),
    }
    delayed = chosen(model, case.delayed)
    if delayed:
        first = next(p for name, p in model.named_parameters() if name.endswith("first.weight"))
        options |= {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": first}
    ignored = [name for name, _ in chosen(model, case.ignored)]
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if case.wrapping == "nested":
        _wrap_one_block(model, options)
    if case.wrapping == "replicate":
        ddp: Any = replicate(model, **options)
    else:
        ddp = DistributedDataParallel(model, **options)
    if case.comm_hook:
        ddp.register_comm_hook(*_HOOKS[case.comm_hook](group))
    return ddp


def module_of(ddp: Any) -> Any:
    """Return the model in what `wrap` returned."""
    model = ddp.module if isinstance(ddp, DistributedDataParallel) else ddp
    return getattr(model, "_orig_mod", model)


def chosen(model: nn.Module, which: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the last layer, or of "most": those of the blocks too."""
    ends = {"": (), "last": ("last.weight", "last.bias"), "most": ("",)}[which]
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name.endswith(ends) and "first." not in name and parameter.dtype == torch.float32
    ]


def compile_ddp(case: Case, ddp: Any, compile_: Compile) -> Callable[..., Any]:
    """Return what is called in place of the DDP module."""
    if case.regions:
        module_of(ddp).compile_regions(compile_)
    if case.regions or case.compiles_inside:
        return ddp
    if case.runs_backward_inside:
        return compile_(_running_both(ddp))
    if case.wrapping == "function":
        return compile_(_calling(ddp))
    forward = compile_(ddp)
    if case.wrapping == "checkpoint":
        return functools.partial(checkpoint, forward, use_reentrant=False)
    return forward


def _calling(ddp: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        output = ddp(*args, **kwargs)
        return output, term(main_of(output)).detach()

    return call


def _running_both(ddp: Any) -> Callable[..., Any]:
    """A function that runs forward and, if there are gradients, the backward of its main output."""

    def run(*args: Any, **kwargs: Any) -> Any:
        output = ddp(*args, **kwargs)
        if torch.is_grad_enabled():
            loss = term(main_of(output))
            if loss.requires_grad:
                loss.backward()
        return output

    return run


def term(value: torch.Tensor) -> torch.Tensor:
    """What an output adds to a loss."""
    return value.double().square().sum() / max(1, value.numel())


def _caps(case: Case) -> dict[str, Any]:
    if case.cap_bytes is None:
        return {}
    cap_mib = case.cap_bytes / 1024 / 1024
    if CAP_LIST in case.more_options:
        return {"bucket_cap_mb_list": [cap_mib, 2 * cap_mib, 5 * cap_mib]}
    return {"bucket_cap_mb": cap_mib}


def _wrap_one_block(model: Any, options: dict[str, Any]) -> None:
    name = model.order[len(model.order) // 2]
    block = model.blocks[name]
    model.blocks[name] = DistributedDataParallel(block, **options)
    model.blocks[name].dtype = block.dtype


# DDP reads a hook's annotations, and does not understand those that are strings.
def _one_at_a_time(state, bucket):  # type: ignore[no-untyped-def]
    """PowerSGD reduces in callbacks, in any order; gloo matches by order, so each bucket waits."""
    done = powerSGD_hook(state, bucket)
    done.wait()
    return done


_HOOKS: dict[str, Callable[[dist.ProcessGroup], tuple[Any, Callable[..., Any]]]] = {
    "fp16": lambda group: (group, fp16_compress_hook),
    "bf16": lambda group: (group, bf16_compress_hook),
    "powerSGD": lambda group: (
        PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=3),
        _one_at_a_time,
    ),
}
