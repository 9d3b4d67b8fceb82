"""Dynamo: who compiles a graph and when anew, what `torch.compile` made, and what graphs hold."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from ddpopt._torch import names
from ddpopt.errors import TorchDriftError

CompilerFn = Callable[..., Callable[..., Any]]


# ---- Who compiles a graph ----------------------------------------------------------------------


def take_over(is_ours: Callable[[Any], bool]) -> None:
    """Make Dynamo give whole graphs, unsplit, to those backends for which `is_ours` is true.

    While a DDP forward is active, Dynamo looks up `DDPOptimizer` in its module for each frame,
    constructs it around the backend and uses its `compile_fn`. There is no other way to
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
    names.DDP_OPTIMIZER.set(replacement)


def innermost_backend(backend: Any) -> Any:
    """Unwrap a backend from what `torch.compile`, Dynamo and `functools.partial` put around it."""
    while True:
        if isinstance(backend, functools.partial):
            backend = backend.func
        elif names.ORIG_BACKEND.is_in(backend):
            backend = names.ORIG_BACKEND.get(backend)
        elif names.COMPILER_FN.is_in(backend):
            backend = names.COMPILER_FN.get(backend)
        else:
            return backend


def lookup_backend(name: str) -> CompilerFn:
    """A registered backend; raises `torch._dynamo.exc.InvalidBackend` if there is none."""
    return names.LOOKUP_BACKEND.get()(name)


def optimize_ddp_mode() -> str:
    """Return Dynamo's `optimize_ddp`, spelled out: False is `no_optimization`."""
    mode = names.OPTIMIZE_DDP.get()
    return {True: "ddp_optimizer", False: "no_optimization"}.get(mode, mode)


def is_compiled_autograd_on() -> bool:
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
    rows = (names.SKIP_FRAME, names.RESTART_ANALYSIS, names.UNSUPPORTED)
    with names.doing_without(names.Need.ERRORS):  # the caller handles another, not to be hidden
        return (*(row.get() for row in rows), *names.ALLOWED_FALLBACKS.get())
    return ()


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
        return contextlib.nullcontext()  # uncompiled code is traced as usual
    return names.settings({names.ERROR_ON_FX_TRACE: False})


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compiler.disable`, which has no types: Dynamo leaves the function alone."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def is_skipped_by_dynamo(function: Callable[..., Any]) -> bool:
    """Whether Dynamo never compiles frames of this function because of where it is defined."""
    return names.TRACE_RULES_CHECK.get()(function)


def find_reached_limit(module: nn.Module) -> str | None:
    """Say which forward in a module Dynamo has compiled as often as a limit of its allows."""
    for part, row in itertools.product(
        module.modules(), (names.ACCUMULATED_LIMIT, names.RECOMPILE_LIMIT)
    ):
        code = getattr(part.forward, "__code__", None)
        if code is not None and len(names.CACHE_ENTRIES.get()(code)) >= row.get():
            return f"{type(part).__name__}.forward as often as {row} allows ({row.get()})"
    return None


def find_dispatch_mode() -> str | None:
    """The class of a TorchDispatchMode that is on, under which Dynamo compiles nothing."""
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
    tensor's shape has changed. `code` gets what `forget_code` takes.
    """
    tracing = names.TRACING_CONTEXT.get().try_get()
    if tracing is None:
        return

    def create(builder: Any, _guard: Any) -> None:
        # Dynamo calls this after the graph was compiled, too late for an error.
        with names.doing_without(names.Need.GUARD):
            root = names.GUARD_ROOT.get(names.BUILT_GUARDS.get(builder))
            root.add_lambda_guard(lambda _: check(), [description], None)
            code.append(names.CHECK_FN_MANAGER.get(builder))

    guard = names.GUARD.get()(names.GLOBAL_STATE_SOURCE.get()(), create)
    names.DYNAMO_GUARDS.get(names.GUARDS_CONTEXT.get(tracing)).add(guard)


def forget_code(code: Sequence[Any]) -> None:
    """Make Dynamo give up code that it will never run again, so that its limits do not count it.

    Dynamo itself gives up code that was compiled for an object when the object dies. Code given up
    here stays in Dynamo's list, which would count it for the module that runs next; so the code is
    noted as compiled for another object.
    """
    with names.doing_without(names.Need.GUARD):
        for manager in code:
            names.INVALIDATE.get(manager)("DDP's bucket rules")
            of_others = {"": weakref.ref(forget_code)}
            names.ID_MATCHED_OBJS.get(names.GUARD_MANAGER.get(manager)).update(of_others)


def tell_of_reset(backend: CompilerFn) -> None:
    """Have the next `torch._dynamo.reset()` call `backend.reset`.

    Dynamo notes a backend where `torch.compile` is called, and forgets it at a reset. What that
    call returned is compiled again later, and would go through a second reset unnoticed.
    """
    with names.doing_without(names.Need.GUARD):
        names.CACHED_BACKENDS.get().setdefault(id(backend), backend)


def checkpointed_region() -> object | None:
    """An object shared by a checkpoint's forward and its recomputation, None outside.

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
        names.warn_of(str(error), names.Need.CHECKPOINT)
        return None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        found = cell.cell_contents
        found = found() if isinstance(found, weakref.ref) else found
        if isinstance(found, frame_class):
            return found
    return None


# ---- What torch.compile made -------------------------------------------------------------------


def unwrap_compiled(module: Any) -> Any:
    """The module that `torch.compile` wrapped, or the object itself."""
    is_wrapper = isinstance(module, names.OPTIMIZED_MODULE.get())
    return names.ORIG_MOD.get(module) if is_wrapper else module


def is_whole_forward(path: tuple[str, ...]) -> bool:
    """Whether a path below DDP leads to its module, or to what `torch.compile` wrapped there."""
    return path in ((), (names.ORIG_MOD.name,))


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module, or its `compile` was called."""
    is_wrapper = isinstance(module, names.OPTIMIZED_MODULE.get())
    return is_wrapper or names.COMPILED_CALL.get(module) is not None


def compiled_parts(model: nn.Module) -> list[Any]:
    """Return what compiles each part of a model for which `torch.compile` was called, once each.

    Parts are modules that it wrapped, and functions that are attributes of modules, including the
    one that `Module.compile` keeps.
    """
    optimized = names.OPTIMIZED_MODULE.get()
    contexts = []
    for part in model.modules():
        if isinstance(part, optimized):
            contexts.append(names.DYNAMO_CTX.get(part))
        else:
            contexts += map(context_of, compiled_functions(part).values())
    return list({id(context): context for context in contexts}.values())


def compiled_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """A module's own attributes that are functions which `torch.compile` returned."""
    is_compiled = names.GET_COMPILER_CONFIG.is_in
    return {
        name: attribute
        for name, attribute in vars(module).items()
        if inspect.isfunction(attribute) and is_compiled(attribute)
    }


def context_of(function: Callable[..., Any]) -> Any:
    """Return what compiles a function that `torch.compile` made, which has it in its closure."""
    getter = names.GET_COMPILER_CONFIG.get(function)
    try:
        return inspect.getclosurevars(getter).nonlocals["self"]
    except KeyError as error:
        raise names.GET_COMPILER_CONFIG.drift() from error


def backend_of(context: Any) -> Any:
    """The innermost backend of one of `compiled_parts`."""
    return innermost_backend(names.CALLBACK.get(context))


def compile_options(context: Any) -> dict[str, Any]:
    """Return the `mode` and `options` that `torch.compile` got for one of `compiled_parts`."""
    return dict(names.BACKEND_OPTIONS.find(compiler_of(context), {}))


def context_of_copy(context: Any) -> Any:
    """Return what compiles as `context` does, but shares its code with nothing else."""
    compiled = torch.compile(
        lambda: None,
        backend=functools.partial(compiler_of(context)),  # backends are distinguished by identity
        fullgraph=names.FULLGRAPH.get(context),
        dynamic=names.DYNAMIC.get(context),
    )
    return context_of(compiled)


def compiler_of(context: Any) -> Any:
    """The backend as `torch.compile` wrapped it, with its options bound."""
    backend = names.CALLBACK.get(context)
    while names.ORIG_BACKEND.is_in(backend):
        backend = names.ORIG_BACKEND.get(backend)
    return backend


def compiled_by(callback: Any, module: nn.Module) -> nn.Module:
    """Return what `torch.compile` returns for a module, with this callback of Dynamo's.

    It runs the code that the callback's own `torch.compile` has compiled.
    """
    other = torch.compile(lambda: None, backend="eager")
    context = context_of(other)
    names.CALLBACK.set(callback, context)
    compiled: nn.Module = context(module)
    return compiled


def frames() -> Iterator[types.FrameType]:
    """Yield the frames of this thread, from this one outwards."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


# ---- Graphs ------------------------------------------------------------------------------------


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph that finds in `root` what the graph refers to.

    Under Dynamo its code is made when it is first needed. `fx.GraphModule` makes it at once, and
    anew after each change, at a cost of 20 ms for 500 nodes.
    """
    make: Callable[..., fx.GraphModule] = fx.GraphModule
    with names.doing_without(names.Need.LAZY):
        make = names.MAKE_GRAPH_MODULE.get()
    return make(root, graph)


def carry_dynamo_metadata(source: fx.GraphModule, target: fx.GraphModule) -> None:
    """Give `target`, a copy of `source` or a section of such a copy, Dynamo's metadata.

    From it AOTAutograd recognises a graph of Dynamo's, deduplicates inputs by their source and
    finds out which inputs are parameters. New placeholders get the source None.
    """
    target.meta = dict(source.meta)
    # No node refers to hooks on saved tensors. AOTAutograd's cache tells graphs by them.
    for name, hook in source.named_children():
        if name.startswith(names.SAVED_TENSORS_HOOKS.text):
            setattr(target, name, hook)
    for row in (names.PARAMETER_SOURCES, names.USER_STACKS):
        if row.is_in(source):
            row.mark(target, row.get(source))
    given = {node.name: node for node in source.graph.find_nodes(op="placeholder")}
    for node in target.graph.find_nodes(op="placeholder"):
        names.DYNAMO_SOURCE.mark(node, names.DYNAMO_SOURCE.find(given.get(node.name)))


def wants_cuda_graphs(gm: fx.GraphModule) -> bool:
    """Whether the program asks for CUDA graphs of this graph, by `override_cudagraphs`."""
    annotation = gm.meta.get(names.CUDA_GRAPHS_WANTED.text)
    return annotation is not None and bool(annotation.fwd)


def mark_as_new(placeholder: fx.Node) -> None:
    """Note on a placeholder that was added to Dynamo's graph that it has no source in the program.

    AOTAutograd asserts that each placeholder has such a note, and takes None for one without.
    """
    names.DYNAMO_SOURCE.mark(placeholder, None)


def depth_below_frame(placeholder: fx.Node) -> int:
    """Return how many modules lie between the object that a frame was given and a parameter.

    1 for `self.linear.weight`, 0 for `self.weight`.
    """
    name = names.SOURCE_NAME.find(names.DYNAMO_SOURCE.find(placeholder), "")
    return str(name() if callable(name) else name).count(
        f".{names.MODULES.name}["
    )  # a method in some releases


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether another graph follows this one in its frame; True if Dynamo does not tell."""
    return bool(names.GRAPH_BREAK.find(names.STOP_REASON.find(gm), True))


def follows_graph_break() -> bool:
    """Whether the graph that is compiled now begins where another broke; True if nobody tells.

    Between the two graphs code may have run that is not compiled. There may be no graph before the
    break: Dynamo compiles none that has no call.
    """
    with names.doing_without(names.Need.PREDICT):
        tracing = names.TRACING_CONTEXT.get().try_get()
        code = [] if tracing is None else names.TRACED_CODE.get(tracing)
        # Dynamo continues behind a break in a function that it makes and names.
        return not code or code[0].co_name.startswith(names.RESUMED_CODE.get())
    return True


_OVERLOAD, _PACKET = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)
RUNNING_AVERAGES = ("running_mean", "running_var")
# Batch norms that do not write to their running averages have names that end so.
_READS_AVERAGES = ("_functional", "_no_training", "_no_update", "_backward")


def written_arguments(target: object, name: str) -> set[tuple[int | None, str]]:
    """The positions (None: keyword only) and names of the arguments that an operator writes to.

    `target` is the operator, or else it is ATen's operator `name`. All overloads count if it is not
    known which is called. Running averages count too, although schemas do not declare them.
    """
    if isinstance(target, _OVERLOAD):
        overloads = [target]
    else:
        packet: Any = target if isinstance(target, _PACKET) else getattr(torch.ops.aten, name, None)
        is_packet = isinstance(packet, _PACKET)
        overloads = [getattr(packet, o) for o in packet.overloads()] if is_packet else []
    for overload in overloads:
        schema = names.SCHEMA.get(overload)  # looked up each time; some cannot be hashed
        if overload not in _writes:
            _writes[overload] = _find_writes(schema)
    return {written for overload in overloads for written in _writes[overload]}


# By an operator's overload, which is another object where it is defined anew.
_writes: dict[Any, tuple[tuple[int | None, str], ...]] = {}


def _find_writes(schema: Any) -> tuple[tuple[int | None, str], ...]:
    """The arguments that one overload writes to, as `written_arguments` returns them."""
    only_reads_averages = schema.name.endswith(_READS_AVERAGES)
    return tuple(
        (None if argument.kwarg_only else position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (argument.name in RUNNING_AVERAGES and not only_reads_averages)
    )


def is_higher_order(target: object) -> bool:
    """Whether a call's target is an operator that takes graphs or kernels as arguments."""
    return isinstance(target, names.HIGHER_ORDER.get())


def runs_graphs(name: str) -> bool:
    """Whether a higher-order operator does nothing but run the graphs that it is given."""
    return name in names.RUNNING_GRAPHS.text.split()


def applies_function(name: str) -> bool:
    """Whether a higher-order operator is a call of an `autograd.Function`: forward, backward, *."""
    return name == names.FUNCTION_APPLY.text


def is_triton_kernel(target: object) -> bool:
    """Whether a call runs a user's Triton kernel, which may write to what it is given."""
    return target is names.TRITON_KERNEL.get()


def links_effects(target: object) -> bool:
    """Whether a call takes and returns an effect token, which keeps such calls in order."""
    return target is names.WITH_EFFECTS.get()


def is_effect_token(name: str) -> bool:
    """Whether an operator makes the first effect token, or takes the last."""
    return name in names.EFFECT_TOKENS.text.split()


def is_wait(target: object) -> bool:
    """Whether an operator waits for a functional collective, which was issued before."""
    return str(target) == names.WAIT_TENSOR.text


def is_view(target: object) -> bool:
    """Whether an operator returns memory of its first argument, seen in another shape."""
    if not isinstance(target, _OVERLOAD):
        return False
    # ATen does not mark these as views: autograd need not know, but they are (splits.md, fault 10).
    unmarked = (
        names.UNSAFE_VIEW.get().default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    )
    return bool(names.IS_VIEW.get(target)) or target in unmarked


# Parts of the names of ATen's operators: of those in the tables of Inductor's pass `reinplace`,
# torch 2.11 to 2.15, and of operators that the pass or a decomposition turns into one of these.
# test_facts.py compares.
_MAY_BECOME_IN_PLACE = ("scatter", "index_put", "_foreach_", "_philox_", "_scaled_addmm")


def may_become_in_place(target: object) -> bool:
    """Whether Inductor may have a call write to an input, if nothing reads that any more."""
    library = namespace_of(target)
    if library == "aten":
        return any(part in str(target) for part in _MAY_BECOME_IN_PLACE)
    return is_higher_order(target) or (library or "").endswith("c10d_functional")


def without_device(name: str) -> str:
    """The name of an operator for the CPU as that of the same one for all devices."""
    return name.replace(names.FOR_CPU.text, "")


def enters_autocast(name: str) -> bool:
    return names.ENTER_AUTOCAST.is_name_of(name)


def exits_autocast(name: str) -> bool:
    return names.EXIT_AUTOCAST.is_name_of(name)


def sets_grad_mode(name: str) -> bool:
    """Whether a call, by its name, switches gradients on or off for the calls after it."""
    return names.SET_GRAD_ENABLED.is_name_of(name)


def region_partners() -> dict[str, str]:
    """The names of calls that switch on a global state, with those that switch it off.

    Those of autocast and of no_grad are not among them.
    """
    pairs = (
        (names.ENTER_VMAP, names.EXIT_VMAP),
        (names.ENTER_GRAD, names.EXIT_GRAD),
        (names.ENTER_JVP, names.EXIT_JVP),
        (names.DISABLE_SAVED_HOOKS, names.ENABLE_SAVED_HOOKS),
        (names.ENTER_DUAL_LEVEL, names.EXIT_DUAL_LEVEL),
    )
    for row in itertools.chain.from_iterable(pairs):
        row.get()
    return {enter.name: leave.name for enter, leave in pairs}


# The endings of the names above, by which others like them are told, such as functionalize's.
_STATEFUL = ("_nesting", "_hooks_disable", "_hooks_enable", "_dual_level")


def chooses_attention(name: str) -> bool:
    """Whether a call, by its name, says which kernels attention may use in the calls after it.

    Dynamo writes it at the beginning and at the end of an `sdpa_kernel` block.
    """
    return names.CHOOSE_ATTENTION.is_name_of(name)


def changes_state(name: str) -> bool:
    """Whether a function of torch's, by its name, changes a global state."""
    return name.endswith(_STATEFUL) or chooses_attention(name)


def uses_stream(target: object) -> bool:
    """Whether an operator says on which stream the calls after it run, or waits for one."""
    return namespace_of(target) == names.STREAMS.text


def dynamo_value(node: fx.Node) -> Any:
    """What Dynamo found a node of its graph to return, when it traced; None if unknown.

    A fake tensor, a number that may be symbolic, or a tuple of such.
    """
    return node.meta.get(names.EXAMPLE_VALUE.text)


def forget_dynamo_value(node: fx.Node) -> None:
    """Take from a node of a copy what Dynamo found it to return."""
    node.meta.pop(names.EXAMPLE_VALUE.text, None)


def traced_value(node: fx.Node) -> Any:
    """What a node returned when it was traced, by Dynamo or else into a graph of ATen."""
    return node.meta.get(names.EXAMPLE_VALUE.text, node.meta.get(names.VALUE.text))


def check_dynamo_graph(gm: fx.GraphModule) -> None:
    """Raise TorchDriftError if a graph of Dynamo's lacks a mark that it gives each of them.

    Without values it would seem to have no memory that calls share or write to, and no nested
    tensors; without a name it would be taken for any other graph. (One that somebody has traced
    again, which has no values, is none of Dynamo's.)
    """
    if not names.PARAMETER_SOURCES.is_in(gm):
        return
    # A graph without inputs need not have values: after a break in a region under no_grad it may
    # hold nothing but the calls that set the mode. It has no parameters, so it is not cut anyway.
    has_inputs = bool(gm.graph.find_nodes(op="placeholder"))
    if has_inputs and not any(names.EXAMPLE_VALUE.text in node.meta for node in gm.graph.nodes):
        raise names.EXAMPLE_VALUE.drift()
    if names.COMPILE_ID.text not in gm.meta:
        raise names.COMPILE_ID.drift()


def graph_name(gm: fx.GraphModule) -> str:
    """Dynamo's name for a graph: its frame and the number of the frame's compile."""
    return str(gm.meta.get(names.COMPILE_ID.text, "?"))


def namespace_of(target: object) -> str | None:
    """The library that an operator belongs to, such as `aten`; None for anything else."""
    return str(target).partition(".")[0] if isinstance(target, _OVERLOAD | _PACKET) else None


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identify a tensor's memory, so that aliases compare equal; None if it has no storage."""
    try:
        return id(tensor.untyped_storage())  # torch makes one such object for each memory
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other storage-less layouts


def is_of_functorch(tensor: torch.Tensor) -> bool:
    """Whether vmap, grad or jvp work on a tensor: it does not say then whether it requires grad."""
    return names.IS_OF_FUNCTORCH.get()(tensor)


def is_subclass(value: object) -> bool:
    """Whether AOTAutograd takes a tensor apart into others, as it does with a DTensor."""
    protocol = ("__tensor_flatten__", "__tensor_unflatten__")
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in protocol)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what a parameter holds, is of no class that somebody derived.

    AOTAutograd checks the operators of a graph's first run with a mode that refuses others.
    """
    kinds = (torch.Tensor, nn.Parameter, names.FAKE_TENSOR.get())
    return isinstance(tensor, nn.Parameter) or type(tensor) in kinds


def fake_mode_of(inputs: object) -> Any:
    """The fake mode with which Dynamo traced, or a new one outside Dynamo."""
    return names.DETECT_FAKE_MODE.get()(inputs) or names.FAKE_TENSOR_MODE.get()()


def mixing_fake_mode() -> Any:
    """A new fake mode, in which a real tensor counts as the fake one that stands for it."""
    return names.FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True)


def to_fake(value: Any, fake_mode: Any) -> Any:
    """The fake tensor that stands for `value` in this compile; other values unchanged."""
    if not isinstance(value, torch.Tensor) or isinstance(value, names.FAKE_TENSOR.get()):
        return value
    return names.TO_FAKE_TENSOR.get()(value, fake_mode)


def free_symbols(value: object) -> frozenset[Any]:
    from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415  # it imports sympy

    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset(symbolic_shapes.free_symbols(value))
    return frozenset()


def size_hint(size: int | torch.SymInt) -> int:
    """A size as it was in the first call; 1 if it depends on data."""
    if isinstance(size, int):
        return size
    hint = names.HINT.get(names.SYM_NODE.get(size))
    return 1 if hint is None else int(hint)


def constant_of(value: object) -> int | None:
    """The number that a symbolic integer is known to equal, None if it may vary."""
    from torch.fx.experimental import sym_node, symbolic_shapes  # noqa: PLC0415  # import sympy

    if not isinstance(value, torch.SymInt):
        return None
    if not isinstance(names.SYM_NODE.get(value), sym_node.SymNode):  # a jagged size
        return None
    return int(value) if symbolic_shapes.is_concrete_int(value) else None


@contextlib.contextmanager
def hidden_float_symbols(graph: fx.Graph, fake_mode: Any) -> Iterator[None]:
    """Hide the symbols of float arguments that do not occur in `graph` from AOTAutograd.

    It turns all float symbols that it finds unused into constants, and makes Dynamo start over.
    That is right for a whole graph; a section would be recompiled at each new value.
    """
    shape_env = names.SHAPE_ENV.get(fake_mode)
    if shape_env is None:
        yield
        return
    values: dict[Any, Any] = names.VALUES.get(shape_env)
    used = {s for node in graph.nodes for s in free_symbols(dynamo_value(node))}
    hidden = {s: v for s, v in values.items() if not s.is_integer and s not in used}
    for symbol in hidden:
        del values[symbol]
    try:
        yield
    finally:
        values.update(hidden)


# ---- Logs --------------------------------------------------------------------------------------


def graph_logger() -> logging.Logger:
    """The logger that `TORCH_LOGS=ddp_graphs` turns on, or a silent one if it has moved."""
    with names.doing_without(names.Need.LOGS):
        return names.ARTIFACT_LOGGER.get()(names.LOG_NAME, "ddp_graphs")
    return logging.getLogger(f"{names.LOG_NAME}.ddp_graphs")


def trace_structured(name: str, metadata: dict[str, Any], payload: Callable[[], str]) -> None:
    """Write a payload to torch's structured trace, which tlparse reads; do nothing if it is off."""
    with names.doing_without(names.Need.TRACE):
        names.TRACE_STRUCTURED.get()(name, lambda: metadata, payload_fn=payload)
