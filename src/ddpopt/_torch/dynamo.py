"""Dynamo: who compiles a graph, when it is recompiled, and what `torch.compile` made."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddpopt._torch import names
from ddpopt._torch.runtime import do_without
from ddpopt.errors import TorchDriftError

CompilerFn = Callable[..., Callable[..., Any]]


# ---- Who compiles a graph ----------------------------------------------------------------------


def take_over(is_ours: Callable[[Any], bool]) -> None:
    """Make Dynamo give whole graphs, unsplit, to those backends for which `is_ours` is true.

    While a DDP forward is active, Dynamo looks up `DDPOptimizer` in its module for each frame,
    constructs it around the backend and uses its `compile_fn`. There is no other place to
    intervene, so the class is replaced by a subclass that for other backends is the original.
    Idempotent.
    """
    original = names.DDP_OPTIMIZER.get()
    if hasattr(original, "ddpopt_replaces"):
        return

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend_compile_fn", args[1] if len(args) > 1 else None)
        if cls is replacement and backend is not None and is_ours(innermost_backend(backend)):
            return types.SimpleNamespace(compile_fn=backend)  # passes on the graph unchanged
        return object.__new__(cls)

    copied = {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    members = {**copied, "__new__": construct, "ddpopt_replaces": original}
    replacement = type(original.__name__, (original,), members)
    names.DDP_OPTIMIZER.replace(replacement)


def innermost_backend(backend: Any) -> Any:
    """Unwrap a backend from what `torch.compile`, Dynamo and `functools.partial` put around it."""
    while True:
        if isinstance(backend, functools.partial):
            backend = backend.func
        elif names.ORIG_BACKEND.is_in(backend):
            backend = names.ORIG_BACKEND.of(backend)
        elif names.COMPILER_FN.is_in(backend):
            backend = names.COMPILER_FN.of(backend)
        else:
            return backend


def lookup_backend(name: str) -> CompilerFn:
    """Return a registered backend; raises `torch._dynamo.exc.InvalidBackend` if there is none."""
    return names.LOOKUP_BACKEND.get()(name)


def optimize_ddp_mode() -> str:
    """Return Dynamo's `optimize_ddp`, spelled out: False is `no_optimization`."""
    return names.GET_OPTIMIZE_DDP_MODE.get()()


def is_compiled_autograd_on() -> bool:
    return bool(names.AUTOGRAD_ENABLED.get() or names.COMPILED_AUTOGRAD.get())


def traces_backward_around(ddp: torch.nn.Module) -> bool:
    """Whether Dynamo compiles what calls a DDP module that runs, and a `backward()` in it too."""
    if not names.TRACE_AUTOGRAD.get():
        return False
    code = torch.compile(ddp.forward, backend="eager").__code__  # that of all compiled functions
    found = [(f.f_code is code, unwrap_compiled(f.f_locals.get("self")) is ddp) for f in frames()]
    are_compiled = [is_compiled for is_compiled, is_ddp in found if is_compiled or is_ddp]
    return False in are_compiled and are_compiled[-1]  # the outermost


def control_flow_exceptions() -> tuple[type[BaseException], ...]:
    """Return the exceptions with which a compiler talks to Dynamo; they must pass unchanged."""
    rows = (names.SKIP_FRAME, names.RESTART_ANALYSIS, names.UNSUPPORTED)
    try:
        return (*(row.get() for row in rows), *names.ALLOWED_FALLBACKS.get())
    except TorchDriftError as error:  # the caller is handling another, which this must not hide
        do_without(str(error), names.Need.ERRORS)
        return ()


def dynamo_settings(
    *, optimize_ddp: bool, recompile_limit: int
) -> contextlib.AbstractContextManager[None]:
    """Set, in a block, Dynamo's `optimize_ddp` and how often it may compile one function."""
    return names.settings(
        {names.OPTIMIZE_DDP: optimize_ddp, names.RECOMPILE_LIMIT: recompile_limit}
    )


def uncompiled_while_tracing() -> contextlib.AbstractContextManager[None]:
    """Return a context in which compiled functions run uncompiled while FX traces.

    Otherwise they raise, in other threads too: all threads share FX's flag that it is tracing.
    """
    try:
        names.ERROR_ON_FX_TRACE.get()
    except TorchDriftError:
        return contextlib.nullcontext()  # uncompiled code is traced as usual
    return names.settings({names.ERROR_ON_FX_TRACE: False})


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compiler.disable`, which has no types: Dynamo leaves the function alone."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def skip_frames(function: Callable[..., Any]) -> None:
    """Let Dynamo compile no frames of a function but as parts of others."""
    names.SKIP_CODE.get()(function.__code__)


def while_compiling(function: Callable[[], None]) -> Callable[[], None]:
    """As `torch.compiler.assume_constant_result`, which marks the function itself.

    Dynamo calls the function when it compiles a call of it.
    """
    return torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]


def is_skipped_by_dynamo(function: Callable[..., Any]) -> bool:
    """Whether Dynamo never compiles frames of this function because of where it is defined."""
    return names.TRACE_RULES_CHECK.get()(function)


def find_reached_limit(module: torch.nn.Module) -> str | None:
    """Say which forward in a module Dynamo has compiled as often as a limit of its allows."""
    for part, row in itertools.product(
        module.modules(), (names.ACCUMULATED_LIMIT, names.RECOMPILE_LIMIT)
    ):
        code = getattr(part.forward, "__code__", None)
        if code is not None and len(names.CACHE_ENTRIES.get()(code)) >= row.get():
            return f"{type(part).__name__}.forward as often as {row} allows ({row.get()})"
    return None


# ---- When it is compiled anew ------------------------------------------------------------------


def guard_on(check: Callable[[], bool], description: str, code: list[Any]) -> None:
    """Make Dynamo run the graph that it is compiling only while `check` is true.

    If it is false Dynamo recompiles, as it does when a tensor's shape has changed. `code` gets what
    `forget_code` takes.
    """
    tracing = names.TRACING_CONTEXT.get().try_get()
    if tracing is None:
        return

    def create(builder: Any, _guard: Any) -> None:
        try:
            root = names.GUARD_ROOT.of(names.BUILT_GUARDS.of(builder))
            root.add_lambda_guard(lambda _: check(), [description], None)
            code.append(names.CHECK_FN_MANAGER.of(builder))
        except TorchDriftError as error:  # Dynamo calls this after the graph was compiled
            do_without(str(error), names.Need.GUARD)

    guard = names.GUARD.get()(names.GLOBAL_STATE_SOURCE.get()(), create)
    names.DYNAMO_GUARDS.of(names.GUARDS_CONTEXT.of(tracing)).add(guard)


def forget_code(code: Sequence[Any]) -> None:
    """Make Dynamo give up code that it will never run again, so that its limits do not count it.

    Dynamo does so itself when an object dies for which code was compiled. It keeps such code in its
    list, and would count it for the current object; so the code is noted as another object's.
    """
    try:
        for manager in code:
            names.INVALIDATE.of(manager)("DDP's bucket rules")
            of_others = {"": weakref.ref(forget_code)}
            names.ID_MATCHED_OBJS.of(names.GUARD_MANAGER.of(manager)).update(of_others)
    except TorchDriftError as error:
        do_without(str(error), names.Need.GUARD)


def checkpointed_region() -> object | None:
    """Return an object shared by a checkpoint's forward and its recomputation, None outside.

    This works for non-reentrant `torch.utils.checkpoint`; other implementations leave no trace. If
    a release hides it from us, that affects only the case of several compiled versions of one
    region.
    """
    try:
        hooks = names.SAVED_TENSOR_HOOKS.get()(True)
        if hooks is None:  # as in nearly all calls; guards ask in each
            return None
        frame_class = names.CHECKPOINT_FRAME.get()
    except TorchDriftError as error:
        do_without(str(error), names.Need.CHECKPOINT)
        return None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        found = cell.cell_contents
        found = found() if isinstance(found, weakref.ref) else found
        if isinstance(found, frame_class):
            return found
    return None


# ---- What torch.compile made -------------------------------------------------------------------


def unwrap_compiled(module: Any) -> Any:
    """Return the module that `torch.compile` wrapped, or the object itself."""
    is_wrapper = isinstance(module, names.OPTIMIZED_MODULE.get())
    return names.ORIG_MOD.of(module) if is_wrapper else module


def is_whole_forward(path: tuple[str, ...]) -> bool:
    """Whether a path below DDP leads to its module, or to what `torch.compile` wrapped there."""
    return path in ((), (names.ORIG_MOD.name,))


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` made this module, or its `compile` was called."""
    is_wrapper = isinstance(module, names.OPTIMIZED_MODULE.get())
    return is_wrapper or names.COMPILED_CALL.of(module) is not None


def compiled_parts(model: torch.nn.Module) -> list[Any]:
    """Return what compiles each part of a model for which `torch.compile` was called, once each.

    Parts are modules that it wrapped, and functions that are attributes of modules, including the
    one that `Module.compile` keeps.
    """
    optimized = names.OPTIMIZED_MODULE.get()
    contexts = []
    for part in model.modules():
        if isinstance(part, optimized):
            contexts.append(names.DYNAMO_CTX.of(part))
        else:
            contexts += map(context_of, compiled_functions(part).values())
    return list({id(context): context for context in contexts}.values())


def compiled_functions(module: torch.nn.Module) -> dict[str, Callable[..., Any]]:
    """Return a module's own attributes that are functions which `torch.compile` returned."""
    own = vars(module).items()
    is_compiled = names.GET_COMPILER_CONFIG.is_in
    return {n: value for n, value in own if inspect.isfunction(value) and is_compiled(value)}


def context_of(function: Callable[..., Any]) -> Any:
    """Return what compiles a function that `torch.compile` made, which has it in its closure."""
    getter = names.GET_COMPILER_CONFIG.of(function)
    try:
        return inspect.getclosurevars(getter).nonlocals["self"]
    except KeyError as error:
        raise names.GET_COMPILER_CONFIG.drift() from error


def backend_of(context: Any) -> Any:
    """Return the innermost backend of one of `compiled_parts`."""
    return innermost_backend(names.CALLBACK.of(context))


def compile_options(context: Any) -> dict[str, Any]:
    """Return the `mode` and `options` that `torch.compile` got for one of `compiled_parts`."""
    return dict(names.BACKEND_OPTIONS.find(compiler_of(context), {}))


def context_apart(context: Any) -> Any:
    """Return what compiles as `context` does, but shares its code with nothing else."""
    return names.OPTIMIZE.get()(
        backend=functools.partial(compiler_of(context)),  # backends are distinguished by identity
        nopython=names.FULLGRAPH.of(context),
        dynamic=names.DYNAMIC.of(context),
    )


def compiler_of(context: Any) -> Any:
    """Return the backend as `torch.compile` wrapped it, with its options bound."""
    backend = names.CALLBACK.of(context)
    while names.ORIG_BACKEND.is_in(backend):
        backend = names.ORIG_BACKEND.of(backend)
    return backend


def calling_model(ddp: torch.nn.Module) -> torch.nn.Module | None:
    """Return the result of `torch.compile(ddp)` whose forward is running, None if there is none."""
    optimized = names.OPTIMIZED_MODULE.get()
    for frame in frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, optimized) and unwrap_compiled(owner) is ddp:
            return owner
    return None


def frames() -> Iterator[types.FrameType]:
    """Yield the frames of this thread, from this one outwards."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
