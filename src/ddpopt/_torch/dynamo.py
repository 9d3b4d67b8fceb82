"""Dynamo: who compiles a graph, and when it is compiled anew or no more."""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ddpopt._torch import names
from ddpopt._torch.compiled import innermost_backend, unwrap_compiled
from ddpopt.errors import TorchDriftError

CompilerFn = Callable[..., Callable[..., Any]]


# ---- Who compiles a graph ----------------------------------------------------------------------


def take_over(is_ours: Callable[[Any], bool]) -> None:
    """Make Dynamo give whole graphs, unsplit, to those backends for which `is_ours` is true.

    While a DDP forward is active, Dynamo looks up `DDPOptimizer` in its module for each frame,
    constructs it around the backend and uses its `compile_fn`. There is no other way to
    intervene, so the class is replaced by a subclass that for other backends is the original.
    Only this process's first call counts.
    """
    original = names.DDP_OPTIMIZER.get()
    if hasattr(original, "ddpopt_replaces"):
        return

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        # DDPOptimizer(bucket_bytes_cap, backend_compile_fn, ...)
        backend = kwargs.get("backend_compile_fn", args[1] if len(args) > 1 else None)
        # A class that a program derives from the replacement is none that Dynamo constructs.
        if cls is replacement and backend is not None and is_ours(innermost_backend(backend)):
            # What Dynamo wants of a DDPOptimizer; this one passes on the graph unchanged.
            return types.SimpleNamespace(compile_fn=backend)
        return object.__new__(cls)

    copied = {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    members = {**copied, "__new__": construct, "ddpopt_replaces": original}
    replacement = type(original.__name__, (original,), members)
    names.DDP_OPTIMIZER.set(replacement)


def lookup_backend(name: str) -> CompilerFn:
    """A registered backend; raises `torch._dynamo.exc.InvalidBackend` if there is none."""
    return names.LOOKUP_BACKEND.get()(name)


def optimize_ddp_mode() -> str:
    """Return Dynamo's `optimize_ddp`, spelled out: False is `no_optimization`."""
    mode = names.OPTIMIZE_DDP.get()
    return {True: "ddp_optimizer", False: "no_optimization"}.get(mode, mode)


def is_compiled_autograd_on() -> bool:
    """Whether compiled autograd is on, by its context manager or by its setting."""
    return bool(names.AUTOGRAD_ENABLED.get() or names.COMPILED_AUTOGRAD.get())


def traces_backward_around(ddp: nn.Module) -> bool:
    """Whether a compiled function calls `ddp`, which runs, and would have its `backward()` traced.

        @torch.compile                         compiled = torch.compile(ddp)
        def step(x):                           def step(x):
            ddp(x).sum().backward()                compiled(x).sum().backward()

    It is so on the left, with `trace_autograd_ops`. On the right the wrapper that `torch.compile`
    put around `ddp` runs outside of all compiled functions. So this is told by the outermost of
    two kinds of frame: of a compiled function, and of a method of `ddp` or of that wrapper.
    """
    if not names.TRACE_AUTOGRAD.get():
        return False
    # All functions that `torch.compile` returns have the same code.
    compiled_code = torch.compile(ddp.forward, backend="eager").__code__
    ddp_runs = is_around_ddp = False
    for frame in frames():  # outwards, so what is found last is the outermost
        if frame.f_code is compiled_code:
            is_around_ddp = ddp_runs
        elif unwrap_compiled(frame.f_locals.get("self")) is ddp:
            ddp_runs, is_around_ddp = True, False
    return is_around_ddp


def control_flow_exceptions() -> tuple[type[BaseException], ...]:
    """The exceptions with which a compiler talks to Dynamo; they must pass unchanged."""
    # Asked while another exception is handled, which a TorchDriftError would hide.
    with names.doing_without(names.Need.ERRORS):
        own_types = (names.SKIP_FRAME.get(), names.RESTART_ANALYSIS.get(), names.UNSUPPORTED.get())
        # And the errors of fake tensors at which Dynamo breaks the graph.
        return (*own_types, *names.ALLOWED_FALLBACKS.get())
    return ()  # a name is missing


def dynamo_settings(
    *, optimize_ddp: bool, recompile_limit: int
) -> contextlib.AbstractContextManager[None]:
    """Set, in a block, Dynamo's `optimize_ddp` and how often it may compile one function."""
    return names.settings(
        {names.OPTIMIZE_DDP: optimize_ddp, names.RECOMPILE_LIMIT: recompile_limit}
    )


def uncompiled_while_tracing() -> contextlib.AbstractContextManager[None]:
    """A context in which compiled functions run uncompiled while FX traces.

    Otherwise they raise, in other threads too: all threads share FX's flag that it is tracing.
    """
    try:
        names.ERROR_ON_FX_TRACE.get()
    except TorchDriftError:
        # Then compiled functions may raise; models that are not compiled are traced all the same.
        return contextlib.nullcontext()
    return names.settings({names.ERROR_ON_FX_TRACE: False})


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compiler.disable`, which has no types: Dynamo leaves the function alone."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def is_skipped_by_dynamo(function: Callable[..., Any]) -> bool:
    """Whether Dynamo never compiles frames of this function because of where it is defined."""
    return names.TRACE_RULES_CHECK.get()(function)


def find_reached_limit(module: nn.Module) -> str | None:
    """Say which forward in a module Dynamo has compiled as often as a limit of Dynamo's allows.

    The text follows "Dynamo has compiled". None if no limit is reached.
    """
    for part in module.modules():
        code = getattr(part.forward, "__code__", None)
        if code is None:
            continue
        num_compiles = len(names.CACHE_ENTRIES.get()(code))
        for limit in (names.ACCUMULATED_LIMIT, names.RECOMPILE_LIMIT):  # the higher one first
            if num_compiles >= limit.get():
                return f"{type(part).__name__}.forward as often as {limit} allows ({limit.get()})"
    return None


def find_dispatch_mode() -> str | None:
    """The class of a TorchDispatchMode that is on, under which Dynamo compiles nothing.

    None if there is none: some modes let Dynamo compile.
    """
    for mode in reversed(names.DISPATCH_MODES.get()()):
        if not (names.LETS_COMPILE.is_in(mode) and names.LETS_COMPILE.get(mode)()):
            return type(mode).__name__
    return None


def modules_with_backward_hooks(root: nn.Module) -> list[str]:
    """The paths of modules below `root` with full backward hooks, or pre-hooks.

    Dynamo cannot trace their calls, unless compiled autograd is on (torch 2.11 to 2.15). The call
    of the root itself is none that it traces.
    """
    paths = []
    for path, module in root.named_modules():
        has_hooks = names.HAS_FULL_HOOKS.get(module) and names.BACKWARD_HOOKS.get(module)
        if path and (has_hooks or names.BACKWARD_PRE_HOOKS.get(module)):
            paths.append(path)
    return paths


# ---- When it is compiled anew ------------------------------------------------------------------


def guard_on(check: Callable[[], bool], description: str, code: list[Any]) -> None:
    """Make Dynamo run the graph that it is compiling only while `check` is true.

    If it is false Dynamo runs another version of the code, or compiles one, as it does when a
    tensor's shape has changed. When Dynamo has compiled the graph, one more entry, by which
    `forget_code` can give up the compiled code, is put into `code`. Where somebody else than Dynamo
    calls the backend there is nothing to guard.
    """
    tracing = names.TRACING_CONTEXT.get().try_get()
    if tracing is None:
        return

    def create(builder: Any, _guard: Any) -> None:
        # Dynamo calls this after the graph was compiled, too late for an error.
        with names.doing_without(names.Need.GUARD):
            root = names.GUARD_ROOT.get(names.BUILT_GUARDS.get(builder))
            no_stack = None  # of the user's line that the guard is for
            root.add_lambda_guard(lambda _: check(), [description], no_stack)
            code.append(names.CHECK_FN_MANAGER.get(builder))

    # A guard names what it checks. This one has the name of those on global state, as on grad mode.
    guard = names.GUARD.get()(names.GLOBAL_STATE_SOURCE.get()(), create)
    names.DYNAMO_GUARDS.get(names.GUARDS_CONTEXT.get(tracing)).add(guard)


def forget_code(code: Sequence[Any]) -> None:
    """Make Dynamo give up code that it will never run again, so that its limits do not count it.

    `code` is what `guard_on` has put there: what checks the guards of each piece of code.

    Dynamo itself gives up code that was compiled for an object when the object dies. Code given up
    here stays in Dynamo's list, which would count it for the module that runs next; so the code is
    noted as compiled for another object.
    """
    with names.doing_without(names.Need.GUARD):
        for manager in code:
            names.INVALIDATE.get(manager)("DDP's bucket rules")
            # The object that code was compiled for, by its name in the code: any name and any
            # object that lives will do, if it is no module.
            other_object = {"": weakref.ref(forget_code)}
            names.ID_MATCHED_OBJS.get(names.GUARD_MANAGER.get(manager)).update(other_object)


def tell_of_reset(backend: CompilerFn) -> None:
    """Have the next `torch._dynamo.reset()` call `backend.reset`.

    Dynamo notes a backend where `torch.compile` is called, and forgets it at a reset. What that
    call returned is compiled again later, and would go through a second reset unnoticed.
    """
    with names.doing_without(names.Need.GUARD):
        names.CACHED_BACKENDS.get().setdefault(id(backend), backend)


def checkpointed_region() -> object | None:
    """An object shared by a checkpoint's forward and its recomputation, None outside.

    It is the checkpoint's frame, which the hooks on saved tensors refer to in these two.

    This works for non-reentrant `torch.utils.checkpoint`; other implementations leave no trace. If
    a release hides it from us, that affects only the case of several compiled versions of one
    region.
    """
    try:
        also_while_tracing = True
        hooks = names.SAVED_TENSOR_HOOKS.get()(also_while_tracing)
        if hooks is None:  # as in nearly all calls; guards ask in each
            return None
        frame_class = names.CHECKPOINT_FRAME.get()
    except TorchDriftError as error:
        names.warn_of(str(error), names.Need.CHECKPOINT)
        return None
    pack, _unpack = hooks
    for cell in getattr(inspect.unwrap(pack), "__closure__", None) or ():
        value = cell.cell_contents
        # The forward's hook has the frame itself, the recomputation's a weak reference.
        frame = value() if isinstance(value, weakref.ref) else value
        if isinstance(frame, frame_class):
            return frame
    return None


def frames() -> Iterator[types.FrameType]:
    """Yield the frames of this thread, from this one outwards."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
