"""The Dynamo backend `ddpopt`: what Dynamo calls, and for which graphs splitting is on.

It finds the active DDP module, or a reason not to split; `split/compiler.py` does the rest.
Importing this module, as Dynamo does when it looks up the backend, lets it take over graphs from
the in-tree DDPOptimizer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._slots import Slot
from ddpopt._text import count, shorten
from ddpopt._torch import Forward
from ddpopt.checks import first_step
from ddpopt.checks.copies import is_compiled_by_us
from ddpopt.errors import DDPOptError, NotCutError, Reason, TorchDriftError, UnsupportedModeError
from ddpopt.inspection.explain import note_uncompiled
from ddpopt.options import NO_COMPILER, Options, resolve_options
from ddpopt.planning import early, hint, rebucket, tuner
from ddpopt.split import compiler, recomputation, state
from ddpopt.split.cut import frame_of
from ddpopt.steps.forwards import (
    Subscriber,
    ask_at_first,
    subscribe_to_all,
    unsubscribe,
    watch_forwards,
)
from ddpopt.steps.numbers import number_at_first


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph, split at the bucket boundaries of the active DDP module.

    Called by Dynamo; users write `torch.compile(ddp_model, backend="ddpopt")`.

    Raises:
        OptionError: an option is unknown or has an invalid value.
        UnsupportedModeError: a mode that bypasses DDP's Reducer is on.
        RecomputationError: a checkpoint's recomputation is compiled differently from its forward.
    """
    resolved = resolve_options(mode, options)
    ddp, version, refusal = None, None, NotCutError(Reason.NO_DDP)
    try:
        ddp = recomputation.compiled_for()
        _refuse_unsupported_modes(ddp)
        _check_is_on(resolved)
        if ddp is not None:
            _see_to_buckets(resolved, ddp)
        version = _guard_on_rules(gm, example_inputs, ddp)
    except Exception as error:
        # Any error at all: a private name may exist, and not be what it was. It costs the split,
        # and is told as the reason; what users have to change is raised.
        if isinstance(error, DDPOptError) and not isinstance(error, TorchDriftError):
            raise
        refusal = NotCutError.because_of(error)
    try:
        if ddp is not None and version is not None:
            start = functools.partial(_see_to_buckets, resolved)
            compiled = compiler.compile_under_ddp(gm, example_inputs, ddp, resolved, start)
            version.is_cut = state.get(ddp).is_cut_in_forward(_torch.graph_name(gm))
            return compiled
        if refusal.reason is Reason.NO_DDP and _trains_without_ddp(example_inputs):
            _warn_of_ranks(dist.get_world_size() if dist.is_initialized() else 1)
        return compiler.compile_whole(gm, example_inputs, ddp, resolved, refusal)
    except Exception as error:
        # Inductor, or the user's inner compiler, may raise anything. It is raised on, with a
        # remedy if we know one.
        if "InvalidCxxCompiler" in str(error):  # Python 3.10 has no notes
            remedy = f"ddpopt: Inductor finds no C++ compiler; {NO_COMPILER}"
            getattr(error, "add_note", _logs.warning)(remedy)
        raise


def _see_to_buckets(options: Options, ddp: DistributedDataParallel) -> None:
    """Begin what watches or changes the buckets of a module that is about to run compiled code.

    It is the module for which code is compiled, or one with which Dynamo shares it. There may be a
    search or a hint, and a look at how early gradients leave.

    Raises:
        PlanError: the options name a plan that cannot be read, or does not fit the module.
        TorchDriftError: this release lacks a name that is needed.
    """
    rebucket.watch(ddp)
    early.watch(ddp)
    if options.buckets == "ddp":
        hint.watch(ddp)
    else:
        tuner.start(ddp, options.buckets, is_provisional=options.cuts_forward_alone)


def _trains_without_ddp(example_inputs: Sequence[Any]) -> bool:
    """Whether the graph's parameters are trained, while no DDP module is known."""
    return not state.has_modules() and any(
        isinstance(value, torch.nn.Parameter) and value.requires_grad for value in example_inputs
    )


@functools.cache
def _warn_of_ranks(num_ranks: int) -> None:
    """Warn, once, that nothing is split here, if there are several ranks."""
    if num_ranks > 1:
        _logs.warning(
            "%d ranks run this model outside DistributedDataParallel: there ddpopt splits nothing, "
            "and reduces no gradients. Wrap the model in DistributedDataParallel; with "
            "fully_shard, which reduces them itself, use backend='inductor'",
            num_ranks,
        )


def _refuse_unsupported_modes(ddp: DistributedDataParallel | None) -> None:
    mode = _torch.optimize_ddp_mode()
    if mode.startswith("python_reducer"):
        raise UnsupportedModeError(
            f"torch._dynamo.config.optimize_ddp is {mode!r}, with which DDP bypasses its C++ "
            "Reducer and has no buckets to cut at; set it to True before the DDP module is made, "
            "or use backend='inductor'"
        )
    if ddp is not None and _torch.is_compiled_autograd_on():
        raise UnsupportedModeError(
            "compiled autograd is on, which runs all of backward as one graph, so that nothing "
            "can overlap; set torch._dynamo.config.compiled_autograd = False, or use "
            "backend='inductor'"
        )
    if ddp is not None and torch.is_grad_enabled() and _torch.traces_backward_around(ddp):
        raise UnsupportedModeError(
            "torch._dynamo.config.trace_autograd_ops is on, and a compiled function calls DDP: a "
            "backward() in that function would be traced, and leave out DDP and its gradients; set "
            "it to False, or compile the DDP module in place of that function"
        )


def _check_is_on(options: Options) -> None:
    """Raise NotCutError if splitting is switched off, or TorchDriftError if it cannot work."""
    if options.drift:
        raise TorchDriftError(options.drift)
    # `optimize_ddp = False` turns off the in-tree optimizer, a workaround that stands in many
    # programs. It is none of ours: Dynamo then gives us the same graphs as if it were True.
    if not options.enabled:
        raise NotCutError(Reason.DISABLED)
    if not torch.is_grad_enabled():
        raise NotCutError(Reason.NO_GRAD)


def _guard_on_rules(
    gm: fx.GraphModule, example_inputs: Sequence[Any], ddp: DistributedDataParallel | None
) -> recomputation.Version:
    """Restrict the graph to DDP modules with equal rules (None: to runs without DDP).

    Dynamo has no guard on DDP being active, and shares code between models of one class.
    """
    version = recomputation.Version(frame_of(_torch.graph_name(gm)), state.rules_of(ddp))
    code = [] if ddp is None else state.get(ddp).code
    has_parameters = any(isinstance(value, torch.nn.Parameter) for value in example_inputs)
    recomputation.note_compiled(version, has_parameters)
    _torch.guard_on(lambda: recomputation.may_run(version), "DDP's bucket rules", code)
    return version


# ---- registration -----------------------------------------------------------------------------


def install() -> None:
    """Take over graphs under DDP from the in-tree optimizer, for this backend only. Idempotent."""
    try:
        _torch.take_over(lambda candidate: candidate is backend)
    except TorchDriftError as error:
        _logs.warning(
            "ddpopt gets graphs that the in-tree DDPOptimizer has split already, and compiles "
            "each whole: %s",
            error,
        )
    watch_forwards()
    subscribe_to_all(_Noting())
    subscribe_to_all(_Verifying())
    subscribe_to_all(_Looking())
    ask_at_first(_watch_first_forward)
    ask_at_first(number_at_first)


class _Noting(Subscriber):
    """Notes for any module which graphs run in one forward."""

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        known = state.find(ddp)
        if known is not None:
            known.begin_forward()

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        known = state.find(ddp)
        if known is not None:
            known.end_forward()


class _Verifying(Subscriber):
    """Verifies any module by itself, where `config.verify` asks for it."""

    may_raise = True

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        first_step.before_forward(ddp, forward)

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        first_step.after_forward(ddp, forward)


class _Looking(Subscriber):
    """Looks whether something of any module's forward was compiled that was to be."""

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        if forward.backend is backend:
            _warn_if_nothing_compiled(ddp, is_whole=True)


class _FirstForward(Subscriber):
    """Detects that a module with a part to be compiled ran without any compiled code."""

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        if not torch.is_grad_enabled():
            return  # a trainer may evaluate first, with a method that is not compiled
        unsubscribe(ddp, _FirstForward)
        if forward.backend is backend:
            return  # `_Looking` looks at such
        with contextlib.suppress(TorchDriftError):  # only a warning is lost
            if not state.is_copy(ddp) and is_compiled_by_us(ddp):
                _warn_if_nothing_compiled(ddp, is_whole=False)


def _watch_first_forward(_: DistributedDataParallel) -> Subscriber:
    return _FirstForward()


# Modules of which it was said that Dynamo compiles nothing of them, or need not be.
_are_warned_of: Slot[bool] = Slot(bool, is_kept_at_reset=True)


def _warn_if_nothing_compiled(ddp: DistributedDataParallel, *, is_whole: bool) -> None:
    """Warn, once per module, that Dynamo compiled nothing of a forward that ran under ddpopt.

    If the forward as a whole was to be compiled (`is_whole`), rather than parts that somebody
    chose, the parts that train and that Dynamo left out are warned of too.
    """
    known = state.get(ddp)
    is_training_to_come = known.cuts and not torch.is_grad_enabled()
    if _are_warned_of.get(ddp) or is_training_to_come:
        return
    _are_warned_of.set(ddp, True)
    if state.has_drifted:
        return
    what = _find_uncompiled(ddp, is_whole=is_whole)
    if what is not None:
        cause = _find_cause(ddp.module)
        _logs.warning("torch.compile compiled nothing of %s: %s", what, cause)
        note_uncompiled(ddp, f"torch.compile compiled nothing of {what}: {cause}")


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
    """Say which parameters train and are used by nothing that was compiled; None without any.

    `4 parameters of 0, 2`, for example, are those of modules that Dynamo skips, and reaches only
    through others that it skips.
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
    without = (Reason.NO_PARAMETERS, Reason.NO_GRAD)
    if training and all(cut.fallback in without for cut in state.get(ddp).cuts):
        return count(len(training), "parameter")
    return None


def _is_skipped(module: torch.nn.Module) -> bool:
    """Whether Dynamo does not compile this module's forward, whatever is around it."""
    if "forward" in vars(module) or _torch.is_compiled_module(module):
        return False
    return _torch.is_skipped_by_dynamo(module.forward)


backend.reset = state.forget_all  # type: ignore[attr-defined]  # called by torch._dynamo.reset()
install()
