"""`warmup`: compile a DDP model's forward and backward before the first step, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ddpopt import agreement, records
from ddpopt.errors import OptionError
from ddpopt.meeting import Meeting
from ddpopt.rehearsal import (
    Batch,
    LossFn,
    Rehearsal,
    as_batch,
    check_model,
    default_loss,
    rehearse,
    run_locally,
    same_randomness,
    take_after,
)

SILENCE_S = 60.0


def warmup(
    ddp_model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    silence_s: float = SILENCE_S,
) -> None:
    """Compile forward and backward of a compiled DDP model, and wait until all ranks have.

    A step is run on a copy, which communicates nothing: parameters, gradients, buffers, random
    number state and DDP's Reducer stay as they are. So does the optimizer. Training then runs the
    code that was compiled here. Ranks wait for each other by the store of DDP's process group as
    long as any of them compiles, whatever the group's timeout; every 30 s a warning says which are
    missing and in which phase. A collective call: every rank has to make it. It takes memory for a
    second set of parameters, gradients and buckets.

    Args:
        ddp_model: `torch.compile(DistributedDataParallel(module), backend="ddpopt")`, or
            `DistributedDataParallel(torch.compile(module, backend="ddpopt"))`.
        batch: A tensor, a tuple of positional arguments, or a mapping of keyword arguments, of the
            shapes to be trained with; warm up with each shape that is to be compiled.
        loss_fn: Makes a scalar of the model's output. Default: the output's `loss` (an attribute or
            a key), or else one that depends on all its floating point tensors.
        silence_s: After how many seconds without a sign of life a rank counts as lost.

    Raises:
        PeerError: another rank raised, ended, hangs, or did not make this call.
        DisagreementError: ranks have different models, with `config.disagreement = "error"`.
        OptionError: the model is not compiled with `backend="ddpopt"`, or cannot be copied; or the
            loss is no scalar.
        TypeError: there is no DistributedDataParallel in `ddp_model`.
    """
    loss_fn = loss_fn or default_loss
    compile_ahead(ddp_model, as_batch(batch), loss_fn, "warmup", silence_s)


def compile_ahead(
    model: torch.nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    name: str,
    silence_s: float,
    find_out: Callable[[], bool] = lambda: False,
) -> Rehearsal:
    """As `warmup`, for a caller that is called `name`; return the copy.

    `find_out` says whether the copy is to be compiled apart; see `rehearse`.
    """
    if not (isinstance(silence_s, int | float) and 0 < silence_s < math.inf):
        raise OptionError(f"silence_s is {silence_s!r}; give a number of seconds above 0")
    ddp = check_model(model)
    device = next(ddp.parameters()).device
    with Meeting(ddp.process_group, name, silence_s) as meeting, torch.enable_grad():
        rehearsal = rehearse(model, is_apart=find_out())
        with same_randomness(device), rehearsal.drawing():
            run_locally(rehearsal, batch, loss_fn, meeting.enter)
        if not records.plans_of(rehearsal.ddp):
            raise OptionError(
                "torch.compile compiled nothing of this model; "
                "TORCH_LOGS=graph_breaks,recompiles says why Dynamo gave up"
            )
        if not rehearsal.is_apart:
            take_after(model, rehearsal)
        agreement.tell(ddp, records.plans_of(rehearsal.ddp))
    agreement.settle(ddp)
    return rehearsal
