"""How a rank does its part of each action, with either of its two programs."""

from __future__ import annotations

import contextlib
import functools
import time

import torch
import torch.distributed as dist

import ddpopt
from tests.system.unequal import actions
from tests.system.unequal.models import WIDTH
from tests.system.unequal.twin import COMPILED, EAGER, Twin, plan_for

_LATE_S = 0.05


class PlantedError(Exception):
    """What hooks of scripts raise."""


@functools.singledispatch
def perform(action: actions.Action, twin: Twin) -> None:
    """Do this rank's part of an action."""
    raise TypeError(f"{action} is no action")


# ---- With a backward that reduces gradients ------------------------------------------------------


@perform.register
def _(action: actions.Step, twin: Twin) -> None:
    for model in twin.models:
        model.choose(action.branches[twin.rank])
    for number in range(action.times):
        differentiates_input = twin.rank in action.differentiates_input
        x = twin.draw_batch(action.sizes[twin.rank], 10 * number)
        x.requires_grad_(differentiates_input)
        losses = _losses(twin, x)
        for other in range(1, action.num_forwards):
            batch = twin.draw_batch(action.sizes[twin.rank], 10 * number + other)
            losses = [sum(pair) for pair in zip(losses, _losses(twin, batch), strict=True)]
        if action.sums_loss:
            total = torch.stack([loss.detach() for loss in losses])
            dist.all_reduce(total, group=twin.group)
            twin.note(f"step {number}, sum of losses", total)
        if differentiates_input:
            _note_input_gradient(twin, f"step {number}", losses, x)
        _run_backward(twin, f"step {number}", losses)
        _update(twin, is_skipped=twin.rank in action.skips)


@perform.register
def _(action: actions.Join, twin: Twin) -> None:
    (ddp,) = twin.ddps
    with ddp.join():
        for number in range(action.num_batches[twin.rank]):
            losses = _losses(twin, twin.draw_batch(action.sizes[twin.rank], number))
            _run_backward(twin, f"joined step {number}", losses)
            _update(twin)


@perform.register
def _(action: actions.RaiseInBackward, twin: Twin) -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise PlantedError

    with _no_sync(twin) if action.is_under_no_sync else contextlib.nullcontext():
        output = _forward(twin, twin.draw_batch(action.sizes[twin.rank], 0))[0]
        parameters = list(twin.models[0].parameters())
        hooked = output if action.where == "output" else parameters[len(parameters) // 2]
        handle = hooked.register_hook(fail)
        with contextlib.suppress(PlantedError):
            output.square().mean().backward()
            twin.note("no hook raised", torch.ones(()))
        handle.remove()
    _clear(twin)


# ---- Without -------------------------------------------------------------------------------------


@perform.register
def _(action: actions.Accumulate, twin: Twin) -> None:
    with _no_sync(twin):
        for number in range(action.times):
            losses = _losses(twin, twin.draw_batch(action.sizes[twin.rank], number))
            _run_backward(twin, f"accumulated {number}", losses)


@perform.register
def _(action: actions.Evaluate, twin: Twin) -> None:
    if twin.rank not in action.ranks:
        return
    for ddp in twin.ddps:
        ddp.train(action.is_training)
    with torch.set_grad_enabled(action.has_gradients):
        for number, output in enumerate(
            _forward(twin, twin.draw_batch(action.sizes[twin.rank], 0))
        ):
            twin.note(f"output {number}", output)
    for ddp in twin.ddps:
        ddp.train()


@perform.register
def _(action: actions.DifferentiateInput, twin: Twin) -> None:
    if twin.rank not in action.ranks:
        return
    x = twin.draw_batch(action.sizes[twin.rank], 0).requires_grad_()
    _note_input_gradient(twin, "alone", _losses(twin, x), x, is_last=True)


@perform.register
def _(action: actions.RaiseInForward, twin: Twin) -> None:
    if twin.rank not in action.ranks:
        return
    batch = torch.ones(2, 3, WIDTH + 1, dtype=twin.parameters()[0].dtype)
    try:
        _forward(twin, batch)
    except Exception:
        # Eager raises RuntimeError, Dynamo an error of its own when it traces such a batch.
        twin.note("raised", torch.ones(()))


@perform.register
def _(action: actions.Communicate, twin: Twin) -> None:
    mine = torch.full((3,), float(twin.rank))
    if action.kind == "barrier":
        dist.barrier(twin.group)
    elif action.kind == "broadcast":
        dist.broadcast(mine, src=0, group=twin.group)
    elif action.kind == "all_reduce":
        dist.all_reduce(mine, group=twin.group)
    elif action.kind == "all_gather":
        parts = [torch.empty_like(mine) for _ in actions.ALL_RANKS]
        dist.all_gather(parts, mine, group=twin.group)
        mine = torch.cat(parts)
    twin.note(action.kind, mine)


@perform.register
def _(action: actions.BeLate, twin: Twin) -> None:
    if twin.rank in action.ranks:
        time.sleep(_LATE_S)


@perform.register
def _(action: actions.Freeze, twin: Twin) -> None:
    for parameter in twin.parameters()[::2]:
        parameter.requires_grad_(not action.is_frozen)


# ---- What concerns only the compiled program -----------------------------------------------------


@perform.register
def _(action: actions.Reset, twin: Twin) -> None:
    if twin.rank in action.ranks and twin.kind != EAGER:
        torch._dynamo.reset()


@perform.register
def _(action: actions.LimitRecompiles, twin: Twin) -> None:
    if twin.rank in action.ranks and twin.kind != EAGER:
        torch._dynamo.config.recompile_limit = action.limit  # `running.py` sets it back


@perform.register
def _(action: actions.Rebucket, twin: Twin) -> None:
    if twin.kind == COMPILED:
        for ddp in twin.ddps:
            ddpopt.rebucket(ddp, plan_for(ddp, action.num_buckets))


# ---- Parts of them -------------------------------------------------------------------------------


def _forward(twin: Twin, x: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of the DDP modules that are differentiated, each by itself."""
    outputs = [twin.runs[0](x)]
    if twin.script.second == "after":
        return [twin.runs[1](outputs[0])]
    if twin.script.second == "beside":
        outputs.append(twin.runs[1](x))
    return outputs


def _losses(twin: Twin, x: torch.Tensor) -> list[torch.Tensor]:
    return [output.square().mean() for output in _forward(twin, x)]


def _run_backward(twin: Twin, when: str, losses: list[torch.Tensor]) -> None:
    for number, loss in enumerate(losses):
        twin.note(f"{when}, loss {number}", loss)
        loss.backward()
    twin.note_gradients(when)


def _note_input_gradient(
    twin: Twin, when: str, losses: list[torch.Tensor], x: torch.Tensor, *, is_last: bool = False
) -> None:
    for number, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=not is_last)
        twin.note(f"{when}, gradient of the input by loss {number}", gradient)


def _update(twin: Twin, *, is_skipped: bool = False) -> None:
    if not is_skipped:
        twin.optimizer.step()
    _clear(twin)


def _clear(twin: Twin) -> None:
    twin.optimizer.zero_grad(set_to_none=twin.script.clears_to_none)


@contextlib.contextmanager
def _no_sync(twin: Twin):
    with contextlib.ExitStack() as stack:
        for ddp in twin.ddps:
            stack.enter_context(ddp.no_sync())
        yield
