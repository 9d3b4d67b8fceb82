"""What Dynamo left uncompiled in a forward that ran under ddpopt, why, and what to do about it.

Dynamo gives up frames silently: a model may train eagerly, and its user believe that it is
compiled. So each module's forwards are looked at, and one warning says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._text import count, shorten
from ddpopt._torch import Forward
from ddpopt.checks.copies import is_compiled_by_us
from ddpopt.errors import Reason, TorchDriftError
from ddpopt.split import state
from ddpopt.steps.forwards import Subscriber, ask_at_first, subscribe_to_all, unsubscribe


def watch(backend: Callable[..., Any]) -> None:
    """Look at the forwards of DDP modules that `backend` is to compile, as a whole or in part."""
    subscribe_to_all(_WholeForwards(backend))
    ask_at_first(_first_forward_of(backend))


@functools.cache  # `ask_at_first` asks a function once, however often it is given
def _first_forward_of(
    backend: Callable[..., Any],
) -> Callable[[DistributedDataParallel], Subscriber]:
    return lambda _: _FirstForward(backend)


class _WholeForwards(Subscriber):
    """Warns if nothing was compiled of a forward that was to be compiled as a whole."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        if forward.backend is self._backend:
            _warn_if_nothing_compiled(ddp, is_whole=True)


class _FirstForward(Subscriber):
    """Warns if the first forward of a module with a part to be compiled ran no compiled code."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        if not torch.is_grad_enabled():
            return  # a trainer may evaluate first, with a method that is not compiled
        unsubscribe(ddp, _FirstForward)
        if forward.backend is self._backend:
            return  # `_WholeForwards` looks at it
        with contextlib.suppress(TorchDriftError):  # only a warning is lost
            if not state.is_copy(ddp) and is_compiled_by_us(ddp):
                _warn_if_nothing_compiled(ddp, is_whole=False)


# Whether there was a warning about a module, or all was compiled that was to be.
_are_settled: ModuleSlot[bool] = ModuleSlot(bool, Lifetime.MODULE)
# What the warning said, "" where there was none.
_warnings: ModuleSlot[str] = ModuleSlot(str, Lifetime.MODULE)


def warning_of(ddp: DistributedDataParallel) -> str:
    """The warning about a module of which Dynamo compiled nothing; "" if there was none."""
    return _warnings.get(ddp)


def _warn_if_nothing_compiled(ddp: DistributedDataParallel, *, is_whole: bool) -> None:
    """Warn, once per module, that Dynamo compiled nothing of a forward that ran under ddpopt.

    If the forward as a whole was to be compiled (`is_whole`), rather than parts that somebody
    chose, the parts that train and that Dynamo left out are warned of too.
    """
    if _are_settled.get(ddp):
        return
    if state.get(ddp).cuts and not torch.is_grad_enabled():
        return  # an evaluation with its own graphs says nothing of those for training
    _are_settled.set(ddp, True)
    if state.has_drifted:
        return  # graphs were compiled, of which it is not known for which module
    what = _find_uncompiled(ddp, is_whole=is_whole)
    if what is not None:
        warning = f"torch.compile compiled nothing of {what}: {_find_cause(ddp.module)}"
        _logs.warning("%s", warning)
        _warnings.set(ddp, warning)  # `explain` shows it


def _find_uncompiled(ddp: DistributedDataParallel, *, is_whole: bool) -> str | None:
    """Say what Dynamo left out: the whole module, or what uses some parameters; None if nothing."""
    module = f"this DistributedDataParallel({type(ddp.module).__name__})"
    if not state.get(ddp).cuts:
        return module
    left_out = None
    if is_whole:
        with contextlib.suppress(TorchDriftError):  # only a warning is lost
            left_out = _find_left_out(ddp)
    return None if left_out is None else f"what uses the {left_out} in {module}"


def _find_cause(module: torch.nn.Module) -> str:
    """Say why Dynamo compiled nothing of a module, or how to find out, and what to do."""
    why = (
        "TORCH_LOGS=graph_breaks,recompiles says why Dynamo gave up; before torch 2.15, "
        "part.compile() compiles nothing of modules of torch.nn, but torch.compile(part) does"
    )
    try:
        if mode := _torch.find_dispatch_mode():
            why = (
                f"{mode}, a TorchDispatchMode, is on, and Dynamo compiles nothing under one; leave "
                "it before the forward (modes that count or log operators belong around steps "
                "that run eagerly)"
            )
        elif limit := _torch.find_reached_limit(module):
            why = (
                f"Dynamo has compiled {limit}, and leaves other models with it alone; raise that "
                "limit, or call torch._dynamo.reset() before the next model"
            )
        elif _is_skipped(module):
            name = type(module).__name__
            why = (
                f"Dynamo skips frames of {type(module).__module__}, and the first frame under "
                "DDP is one. Compile before wrapping, DDP(torch.compile(model, backend='ddpopt')), "
                f"or wrap a module of your own that calls the {name}"
            )
        elif hooked := _torch.modules_with_backward_hooks(_torch.unwrap_compiled(module)):
            why = (
                "Dynamo breaks the graph at the call of a module with full backward hooks (here "
                f"{shorten(hooked)}), and gives up a function that calls one in a loop; remove "
                "these hooks, or have hooks on tensors in their place (Tensor.register_hook)"
            )
    except TorchDriftError as error:
        why = f"{why}; {error}"
    return why


def _find_left_out(ddp: DistributedDataParallel) -> str | None:
    """Say which trained parameters no compiled graph uses, such as `4 parameters of 0, 2`.

    They are the parameters of modules that Dynamo skips, and that it reaches only through modules
    that it skips too. None if there are none.
    """
    training = {p for p in _torch.reducer_parameters(ddp) if p.requires_grad}
    num_left_out, paths = 0, []
    pending = [("", ddp.module)]
    while pending:
        path, module = pending.pop(0)
        if not _is_skipped(module):
            continue
        own = training.intersection(module.parameters(recurse=False))
        if own:
            num_left_out += len(own)
            paths.append(path or type(module).__name__)
        pending += [(f"{path}.{n}".lstrip("."), child) for n, child in module.named_children()]
    if paths:
        return f"{count(num_left_out, 'parameter')} of {shorten(paths)}"
    # No module that Dynamo skips has parameters, but each use of one may lie outside of graphs.
    trains_none = (Reason.NO_PARAMETERS, Reason.NO_GRAD)
    if training and all(cut.fallback in trains_none for cut in state.get(ddp).cuts):
        return count(len(training), "parameter")
    return None


def _is_skipped(module: torch.nn.Module) -> bool:
    """Whether Dynamo does not compile this module's forward, whatever is around it."""
    if "forward" in vars(module) or _torch.is_compiled_module(module):
        return False
    return _torch.is_skipped_by_dynamo(module.forward)
