"""`warmup`: compile a DDP model's forward and backward before the first step, on all ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.checks.dry_run import (
    Batch,
    LossFn,
    Rehearsal,
    Stage,
    as_batch,
    copy_batch,
    default_loss,
    is_compiled_by_us,
    rehearse,
    run_locally,
    same_randomness,
    take_after,
)
from ddpopt.errors import OptionError
from ddpopt.ranks import agreement
from ddpopt.ranks.rendezvous import Meeting
from ddpopt.split import state

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
        ddp_model: A DistributedDataParallel module in whose forward something is compiled with
            `backend="ddpopt"`, by `torch.compile` or in place by `compile()`: the DDP module, its
            module, parts of that, functions. Or what `torch.compile` made of a DDP module.
        batch: A tensor, a tuple of positional arguments, or a mapping of keyword arguments, of the
            shapes to be trained with; warm up with each shape that is to be compiled.
        loss_fn: Makes a scalar of the model's output. Default: the output's `loss` (an attribute or
            a key), or else one that depends on all its floating point tensors.
        silence_s: After how many seconds without a sign of life a rank counts as lost.

    Raises:
        PeerError: another rank raised, ended, hangs, or did not make this call.
        DisagreementError: ranks have different models, with `config.disagreement = "error"`.
        OptionError: nothing is compiled with `backend="ddpopt"`, model or batch cannot be copied,
            all parameters are frozen, or the loss is no scalar.
        TypeError: there is no DistributedDataParallel in `ddp_model`.
    """
    loss_fn = loss_fn or default_loss
    stage = stages(state.ddp_of(ddp_model), "warmup", silence_s)
    compile_ahead(ddp_model, as_batch(batch), loss_fn, stage)


def stages(ddp: DistributedDataParallel, name: str, silence_s: float) -> Stage:
    """Return what ends a block on all ranks, or on none, for a caller that is called `name`."""
    if not (isinstance(silence_s, int | float) and 0 < silence_s < math.inf):
        raise OptionError(f"silence_s is {silence_s!r}; give a number of seconds above 0")

    @contextlib.contextmanager
    def stage(phase: str) -> Iterator[None]:
        with Meeting(ddp.process_group, name, silence_s) as meeting:
            meeting.enter(phase)
            yield

    return stage


def compile_ahead(
    model: torch.nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    stage: Stage,
    find_out: Callable[[], bool] = lambda: False,
) -> Rehearsal:
    """As `warmup`; return the copy. `find_out` says whether it is compiled apart, see `rehearse`.

    A forward may communicate by itself, so none begins while another rank may find that it cannot.
    """
    ddp = state.ddp_of(model)
    with torch.enable_grad():
        with stage("copying"):
            rehearsal, own_batch = rehearse(model, is_apart=find_out()), copy_batch(batch)
        with same_randomness(ddp), rehearsal.drawing():
            run_locally(model, rehearsal, own_batch, loss_fn, stage)
        with stage("comparing"):
            _check_compiled(model, rehearsal)
            if not rehearsal.is_apart:
                take_after(model, rehearsal)
            agreement.tell(ddp, state.of(rehearsal.ddp).plans)
    agreement.settle(ddp)
    return rehearsal


def _check_compiled(model: torch.nn.Module, rehearsal: Rehearsal) -> None:
    if state.of(rehearsal.ddp).plans:
        return
    if is_compiled_by_us(model):
        raise OptionError(
            "torch.compile compiled nothing of this model; "
            "TORCH_LOGS=graph_breaks,recompiles says why Dynamo gave up"
        )
    raise OptionError(
        "nothing in this model is compiled with backend='ddpopt'; give the result of "
        "torch.compile(DistributedDataParallel(module), backend='ddpopt'), or a "
        "DistributedDataParallel that is compiled itself, ddp.compile(backend='ddpopt'), or in "
        "whose forward something is"
    )
