"""The Dynamo backend `ddpopt`: what Dynamo calls, and for which graphs splitting is on.

It finds the active DDP module, or a reason not to split; `split/compiler.py` does the rest.
Importing this module, as Dynamo does when it looks up the backend, lets it take over graphs from
the in-tree DDPOptimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._torch import Forward
from ddpopt.checks import first_step, uncompiled
from ddpopt.errors import DDPOptError, NotCutError, Reason, TorchDriftError, UnsupportedModeError
from ddpopt.options import NO_COMPILER, Options, resolve_options
from ddpopt.planning import early, hint, rebucket, tuner
from ddpopt.split import compiler, recomputation, state
from ddpopt.split.cut import frame_of
from ddpopt.steps.forwards import (
    Subscriber,
    ask_at_first,
    subscribe_to_all,
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
        PlanError: the options name a plan that cannot be read, or does not fit the module.
        UnsupportedModeError: torch is in a mode that leaves DDP, or any overlap, out.
        RecomputationError: a checkpoint's recomputation is compiled differently from its forward.
        Exception: what the inner compiler raises.
    """
    resolved = resolve_options(mode, options)
    # At each compile: a reset of Dynamo's calls `backend.reset`, and forgets to do so at the next.
    _torch.tell_of_reset(backend)
    # Code without the guard may run for a module with other buckets, and so is not cut.
    ddp, is_guarded = None, False
    refusal = NotCutError(Reason.NO_DDP)  # the reason if there is no module, nor an error below
    try:
        ddp = recomputation.ddp_to_compile_for()
        _refuse_unsupported_modes(ddp)
        _check_is_on(resolved)
        if ddp is not None:
            _start_on_module(resolved, ddp)
        _guard_on_rules(gm, example_inputs, ddp)
        is_guarded = True
    except Exception as error:
        # Any error at all: a private name of torch may still exist, and be something else. Then the
        # graph stays whole, with the error as the reason. Errors that users can mend are raised: a
        # NotCutError is no DDPOptError.
        if isinstance(error, DDPOptError) and not isinstance(error, TorchDriftError):
            raise
        refusal = NotCutError.because_of(error)
    try:
        if ddp is not None and is_guarded:
            # Called with each other module with which Dynamo shares the code that is compiled now.
            start = functools.partial(_start_on_module, resolved)
            return compiler.compile_under_ddp(gm, example_inputs, ddp, resolved, start)
        if refusal.reason is Reason.NO_DDP and _trains_without_ddp(example_inputs):
            _warn_of_ranks(dist.get_world_size() if dist.is_initialized() else 1)
        return compiler.compile_whole(gm, example_inputs, ddp, resolved, refusal)
    except Exception as error:
        # Inductor, or the user's inner compiler, may raise anything. It is raised on, with a
        # remedy if we know one.
        if "InvalidCxxCompiler" in str(error):
            _logs.add_note(error, f"ddpopt: Inductor finds no C++ compiler; {NO_COMPILER}")
        raise


def _start_on_module(options: Options, ddp: DistributedDataParallel) -> None:
    """Begin what watches or changes the buckets of a module that is about to run compiled code.

    The module is the one for which code is compiled, at each compile, or one with which Dynamo
    shares the code, at its first run there. What was begun before goes on.

    Raises:
        PlanError: the options name a plan that cannot be read, or does not fit the module.
        TorchDriftError: this release of torch lacks a private name that is needed.
    """
    rebucket.watch(ddp)  # notes what decides whether, and how, the module can get a new Reducer
    early.watch(ddp)  # warns if most gradients leave late
    if options.buckets == "ddp":
        hint.watch(ddp)  # logs how long iterations wait for communication
    else:
        # A search cuts finely, which costs a forward time: its cuts are made again at the end.
        tuner.start(ddp, options.buckets, is_provisional=options.cuts_forward_alone)


def _trains_without_ddp(example_inputs: Sequence[Any]) -> bool:
    """Whether one of a graph's inputs is a trained parameter, while no DDP module is known."""
    return not state.has_modules() and any(
        isinstance(value, torch.nn.Parameter) and value.requires_grad for value in example_inputs
    )


@functools.cache
def _warn_of_ranks(num_ranks: int) -> None:
    """Warn, once per process, that nothing is split here, if there are several ranks."""
    if num_ranks > 1:
        _logs.warning(
            "%d ranks run this model outside DistributedDataParallel: there ddpopt splits nothing, "
            "and reduces no gradients. Wrap the model in DistributedDataParallel; with "
            "fully_shard, which reduces them itself, use backend='inductor'",
            num_ranks,
        )


def _refuse_unsupported_modes(ddp: DistributedDataParallel | None) -> None:
    """Raise UnsupportedModeError if torch is in a mode that leaves DDP, or any overlap, out."""
    mode = _torch.optimize_ddp_mode()
    # Asked without a module too: in this mode DDP never says that its forward is active.
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
    """Raise NotCutError if splitting is off or gradients are, TorchDriftError if it cannot work."""
    if options.drift:  # torch lacks a name that the inner compiler needs
        raise TorchDriftError(options.drift)
    # `optimize_ddp = False` turns off the in-tree optimizer, a workaround that stands in many
    # programs. It does not switch ddpopt off: Dynamo gives us the same graphs as if it were True.
    if not options.enabled:
        raise NotCutError(Reason.DISABLED)
    if not torch.is_grad_enabled():
        raise NotCutError(Reason.NO_GRAD)


def _guard_on_rules(
    gm: fx.GraphModule, example_inputs: Sequence[Any], ddp: DistributedDataParallel | None
) -> None:
    """Restrict the graph to DDP modules with equal rules (None: to runs without DDP).

    In a checkpoint's recomputation it is restricted to what the forward may have run. Dynamo has no
    guard on DDP being active, and shares code between models of one class.

    Raises:
        RecomputationError: a recomputation compiles what its forward did not run.
    """
    # Parameters that are no inputs are the graph's own, see `parameters_of` in split/facts.py.
    values = [*example_inputs, *gm.parameters()]
    version = recomputation.Version(
        frame=frame_of(_torch.graph_name(gm)),
        rules=state.rules_of(ddp),
        saves_tensors=any(isinstance(v, torch.Tensor) and v.requires_grad for v in values),
    )
    # Dynamo's code of this graph is added to the list when it is compiled. The module's state has
    # Dynamo drop it when the rules change; code without a module stays.
    code = [] if ddp is None else state.get(ddp).code
    recomputation.note_compiled(version)
    _torch.guard_on(lambda: recomputation.may_run(version), "DDP's bucket rules", code)


# ---- registration -----------------------------------------------------------------------------


def install() -> None:
    """Take over graphs under DDP from the in-tree optimizer, for this backend only. Idempotent.

    Runs when this module is imported. From then on the forwards of DDP modules are reported, of
    modules that others compile too.
    """
    try:
        _torch.take_over(lambda candidate: candidate is backend)
    except TorchDriftError as error:
        _logs.warning(
            "ddpopt gets graphs that the in-tree DDPOptimizer has split already, and compiles "
            "each whole: %s",
            error,
        )
    watch_forwards()
    subscribe_to_all(_Noting())  # so that a module's state knows which graphs run in a forward
    subscribe_to_all(_Verifying())  # where `config.verify` asks for it
    uncompiled.watch(backend)  # warns if Dynamo compiles nothing of a model for this backend
    ask_at_first(number_at_first)  # numbers modules, in their first backward that reduces


class _Noting(Subscriber):
    """Tells the state of a module, if it has one, when a forward begins and ends.

    In between the state notes which graphs run.
    """

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        ddp_state = state.find(ddp)
        if ddp_state is not None:
            ddp_state.begin_forward()

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        ddp_state = state.find(ddp)
        if ddp_state is not None:
            ddp_state.end_forward()


class _Verifying(Subscriber):
    """Verifies the first step of any module, where `config.verify` asks for it."""

    may_raise = True  # a step that is not eager's is to end the training

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        first_step.before_forward(ddp, forward)

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        first_step.after_forward(ddp, forward)


def _begin_anew() -> None:
    """Follow `torch._dynamo.reset()`: forget the graphs that it drops, see also `hide_again`."""
    state.forget_all()
    _torch.hide_again()


backend.reset = _begin_anew  # type: ignore[attr-defined]  # called by torch._dynamo.reset()
install()
