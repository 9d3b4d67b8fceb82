"""Every private name of torch that ddpopt touches, one wrapper each; no other file touches one.

Names are looked up when they are used: a release that moved one raises `TorchDriftError` there,
the backend reports it as `Fallback.TORCH_DRIFT`, and training goes on unsplit; see
tests/system/test_drift.py. Unless a comment says otherwise, each name was seen at its place in
torch 2.11, 2.12, 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import OptionError, TorchDriftError
from ddpopt.reducer import Parameter

CompilerFn = Callable[..., Callable[..., Any]]

_DYNAMO_DDP = "torch._dynamo.backends.distributed"
_C10D = "torch.distributed.distributed_c10d"

# TORCH_LOGS knows loggers by the modules of torch that own them: a child of this one is heard
# under dynamo, distributed and ddp alike.
LOG_NAME = f"{_DYNAMO_DDP}.ddpopt"


def _private(module: str, name: str) -> Any:
    """Return attribute `name` of a torch module.

    Raises:
        TorchDriftError: this release does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _drift(f"{module}.{name}") from error


def _private_of(owner: Any, name: str) -> Any:
    """Return attribute `name` of an object or a class of torch's; raises as `_private` does."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise _drift(f"{kind}.{name}") from error


def _drift(missing: str) -> TorchDriftError:
    return TorchDriftError(
        f"torch {torch.__version__} has no {missing}, which ddpopt needs; "
        "ddpopt was tested with torch 2.11 to 2.15"
    )


@functools.cache
def _do_without(purpose: str, missing: str) -> None:
    """Warn, once a process, of a missing name without which only `purpose` is lost."""
    logging.getLogger(LOG_NAME).warning("%s; training is split without %s", missing, purpose)


# ---- Dynamo: who compiles a graph -------------------------------------------------------------


def take_over(is_ours: Callable[[Any], bool]) -> None:
    """Have Dynamo give whole graphs, unsplit, to those backends for which `is_ours` is true.

    While a DDP forward is active, Dynamo looks `DDPOptimizer` up in its module for each frame,
    constructs it around the backend and uses its `compile_fn`. There is no other place to step
    in, so the class is replaced by a subclass; for other backends that is the original.
    Idempotent; `give_back` undoes it.

    Raises:
        TorchDriftError: this release has no such class.
    """
    original = _private(_DYNAMO_DDP, "DDPOptimizer")
    if hasattr(original, "ddpopt_replaces"):
        return

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend_compile_fn", args[1] if len(args) > 1 else None)
        if cls is replacement and backend is not None and is_ours(innermost_backend(backend)):
            return _WholeGraph(backend)
        return object.__new__(cls)

    copied = {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    members = {**copied, "__new__": construct, "ddpopt_replaces": original}
    replacement = type(original.__name__, (original,), members)
    _set_ddp_optimizer(replacement)


def give_back() -> None:
    """Restore Dynamo's own `DDPOptimizer`; nothing happens where it is in place."""
    current = _private(_DYNAMO_DDP, "DDPOptimizer")
    _set_ddp_optimizer(getattr(current, "ddpopt_replaces", current))


def _set_ddp_optimizer(cls: type) -> None:
    importlib.import_module(_DYNAMO_DDP).__dict__["DDPOptimizer"] = cls


class _WholeGraph:
    """What Dynamo sees as a DDPOptimizer; it passes the graph on as it is."""

    def __init__(self, backend: CompilerFn) -> None:
        self.compile_fn = backend


def innermost_backend(backend: Any) -> Any:
    """Unwrap what `torch.compile`, Dynamo and `functools.partial` put around a backend."""
    while True:
        if isinstance(backend, functools.partial):
            backend = backend.func
        elif hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif hasattr(backend, "compiler_fn"):
            backend = backend.compiler_fn
        else:
            return backend


def is_skipped_by_dynamo(function: Callable[..., Any]) -> bool:
    """Whether Dynamo never compiles frames of this function because of where it is defined."""
    return bool(_private("torch._dynamo.trace_rules", "check")(function))


def guard_on(check: Callable[[], bool], description: str, code: list[Any]) -> None:
    """Have Dynamo run the graph that it is compiling only while `check` is true.

    When it is false Dynamo compiles anew, as when a tensor's shape has changed. `code` gets what
    `forget_code` takes.
    """
    tracing = _private("torch._guards", "TracingContext").try_get()
    if tracing is None:
        return

    def create(builder: Any, _guard: Any) -> None:
        builder.guard_manager.root.add_lambda_guard(lambda _: check(), [description], None)
        code.append(getattr(builder, "check_fn_manager", None))

    source = _private("torch._dynamo.source", "GlobalStateSource")()
    guards = _private_of(_private_of(tracing, "guards_context"), "dynamo_guards")
    guards.add(_private("torch._guards", "Guard")(source, create))


def checkpointed_region() -> object | None:
    """Return what is the same in a checkpoint's forward and in its recomputation, None outside.

    `torch.utils.checkpoint` without reentrance; nothing tells of other implementations. A release
    that hides it from us costs nothing but the case of several compiled versions of one region.
    """
    try:
        hooks = _private("torch._C._autograd", "_top_saved_tensors_default_hooks")(True)
        frame_class = _private("torch.utils.checkpoint", "_CheckpointFrame")
    except TorchDriftError as error:
        _do_without("telling which code a checkpoint's recomputation has to run", str(error))
        return None
    if hooks is None:
        return None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        found = cell.cell_contents
        found = found() if isinstance(found, weakref.ref) else found
        if isinstance(found, frame_class):
            return found  # type: ignore[no-any-return]
    return None


def forget_code(code: Sequence[Any]) -> None:
    """Have Dynamo give up code that it will never run again, so that its limits do not count it.

    As it does itself where an object dies that code was compiled for. Dynamo keeps such code in its
    list, and would count it as compiled for the object that is there now; so it is noted as another
    one's.
    """
    try:
        for manager in code:
            _private_of(manager, "invalidate")("DDP's bucket rules")
            of_others = {"": weakref.ref(forget_code)}
            _private_of(_private_of(manager, "guard_manager"), "id_matched_objs").update(of_others)
    except TorchDriftError as error:
        _do_without("Dynamo forgetting what it compiled for other buckets", str(error))


def optimize_ddp_mode() -> str:
    """Return `torch._dynamo.config.optimize_ddp` with its booleans spelled out.

    `ddp_optimizer` (True), `no_optimization` (False), or one of the `python_reducer` modes.
    """
    return str(_private("torch._dynamo.utils", "get_optimize_ddp_mode")())


def is_compiled_autograd_on() -> bool:
    """Whether compiled autograd will take backward over."""
    is_enabled = _private("torch._dynamo.compiled_autograd", "compiled_autograd_enabled")
    config = _private("torch._dynamo", "config")
    return bool(is_enabled or _private_of(config, "compiled_autograd"))


def suppresses_errors() -> bool:
    """Whether Dynamo is to run eagerly what a backend fails to compile."""
    try:
        return bool(_private_of(_private("torch._dynamo", "config"), "suppress_errors"))
    except TorchDriftError:
        return False  # an exception is being handled, and must not be hidden by another


def control_flow_exceptions() -> tuple[type[BaseException], ...]:
    """Return the exceptions by which a compiler talks to Dynamo; they must pass unchanged."""
    try:
        names = ("SkipFrame", "RestartAnalysis", "TensorifyScalarRestartAnalysis", "Unsupported")
        fallbacks = _private("torch._dynamo.output_graph", "exceptions_allowed_to_be_fallback")
        return (*(_private("torch._dynamo.exc", name) for name in names), *fallbacks)
    except TorchDriftError as error:  # the caller handles another, which this must not hide
        _do_without("telling Dynamo's own exceptions from errors", str(error))
        return ()


# ---- DDP and its Reducer ----------------------------------------------------------------------


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP module whose forward is running."""
    ddp = _private_of(DistributedDataParallel, "_get_active_ddp_module")()
    return ddp if isinstance(ddp, DistributedDataParallel) else None


def will_rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether the Reducer has yet to form its final buckets; see [Note: buckets] in buckets.py.

    DDP keeps an attribute for that, which copies and pickles of a module hand on, though each has a
    Reducer of its own. So it is believed of Reducers that were seen before; of others DDP's log is,
    which tells a step later.
    """
    has_rebuilt, reducer = _private_of(ddp, "_has_rebuilt_buckets"), _private_of(ddp, "reducer")
    if not follows_arrival_order(ddp):
        return False
    if not has_rebuilt:
        _seen_before_rebuild.add(reducer)
        return True
    if reducer in _seen_before_rebuild:
        return False
    try:
        return not _log_of(ddp).get("has_rebuilt_buckets")
    except TorchDriftError:
        return False


_seen_before_rebuild: weakref.WeakSet[Any] = weakref.WeakSet()


def _log_of(ddp: DistributedDataParallel) -> Mapping[str, Any]:
    """Return what DDP's log has of the module's present Reducer."""
    log: Mapping[str, Any] = _private_of(ddp, "_get_ddp_logging_data")()
    return log


def _registered_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the comm hooks in Python of the module's present Reducer, and their states.

    Copies of a module have its list of hooks, and a Reducer without any.
    """
    return list(_private_of(ddp, "_comm_hooks")) if _log_of(ddp).get("comm_hook") else []


def follows_arrival_order(ddp: DistributedDataParallel) -> bool:
    """Whether the Reducer forms buckets anew from the first backward's order of gradients."""
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def rebuilt_buckets(ddp: DistributedDataParallel) -> tuple[tuple[int, ...], ...] | None:
    """Return the Reducer's final buckets by parameter index, None where DDP does not tell (yet).

    DDP's log has them from the first step on after the one that rebuilt the buckets.
    """
    reported = _log_of(ddp).get("rebuilt_per_bucket_param_indices")
    if not reported:
        return None
    return tuple(tuple(map(int, bucket.split())) for bucket in reported.split(","))


def reducer_caps(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """Return the limits in bytes by which this module's Reducer closes buckets."""
    caps = tuple(_private_of(ddp, "bucket_bytes_cap_list"))
    if not caps:
        cap = int(_private_of(ddp, "bucket_bytes_cap"))
        first = int(_private("torch.distributed", "_DEFAULT_FIRST_BUCKET_BYTES"))
        is_default = _private_of(ddp, "bucket_bytes_cap_default")
        caps = (first, cap) if is_default and first < cap else (cap,)
    return caps


def reducer_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """Return the parameters that the Reducer reduces, in its order, shared ones once.

    They are those that required gradients when it was made, whatever is frozen now.
    """
    return _describe(ddp, _reduced_tensors(ddp))


def trainable_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """Return the parameters that the Reducer would reduce if it were made now."""
    return _describe(ddp, _required_tensors(ddp))


def _describe(
    ddp: DistributedDataParallel, wanted: frozenset[torch.Tensor]
) -> dict[torch.Tensor, Parameter]:
    found: dict[torch.Tensor, Parameter] = {}
    for module_name, module in ddp.module.named_modules():
        is_sparse = _produces_sparse_gradient(module)
        for leaf_name, parameter in module.named_parameters(recurse=False):
            if parameter not in wanted or parameter in found:
                continue
            found[parameter] = Parameter(
                index=len(found),
                name=f"{module_name}.{leaf_name}" if module_name else leaf_name,
                num_bytes=parameter.numel() * parameter.element_size(),
                group=f"{parameter.dtype} on {parameter.device}",
                is_sparse=is_sparse,
            )
    return found


_reduced: weakref.WeakKeyDictionary[Any, frozenset[torch.Tensor]] = weakref.WeakKeyDictionary()


def _reduced_tensors(ddp: DistributedDataParallel) -> frozenset[torch.Tensor]:
    """Ask the Reducer, once: DDP forgets what it gave it."""
    reducer = _private_of(ddp, "reducer")
    if reducer not in _reduced:
        ask = _private_of(reducer, "_get_zeros_like_grad_buckets")
        mode = _private("torch._subclasses.fake_tensor", "FakeTensorMode")
        try:
            with mode(allow_non_fake_inputs=True):  # or it would allocate all buckets again
                buckets = ask()
        except RuntimeError:  # a sparse gradient has no bucket before the first backward
            return _required_tensors(ddp)
        _reduced[reducer] = frozenset(p for bucket in buckets for p in bucket.parameters())
    return _reduced[reducer]


def _required_tensors(ddp: DistributedDataParallel) -> frozenset[torch.Tensor]:
    return frozenset(_private_of(ddp, "_build_params_for_reducer")()[0])


@contextlib.contextmanager
def requiring_grad(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Unfreeze parameters in this block; a frozen one has no node that accumulates its gradient.

    The Reducer keeps the nodes of all that it reduces, so they are the same when training goes on.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def cannot_rebucket(ddp: DistributedDataParallel) -> str:
    """Say why this module's Reducer cannot be replaced, "" if it can."""
    if not follows_arrival_order(ddp):
        return (
            "it looks for unused parameters in each iteration (find_unused_parameters=True), and "
            "then forms buckets by the order of registration; set static_graph=True if the same "
            "parameters are used in all iterations"
        )
    if ddp.mixed_precision is not None:
        return "it has DDP's mixed_precision; use autocast or a comm hook instead"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        return "an optimizer runs in its backward (apply_optimizer_in_backward)"
    if _private_of(ddp, "_join_config").enable:
        return "it is in its join() context, whose bookkeeping lies in the Reducer"
    return ""


def hook_states(ddp: DistributedDataParallel) -> list[Any]:
    """Return what comm hooks registered in Python keep, but for None and process groups."""
    states = [state for _, state in _registered_hooks(ddp)]
    kinds = (type(None), torch.distributed.ProcessGroup)
    return [state for state in states if not isinstance(state, kinds)]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compiler.disable`, which has no types: Dynamo leaves the function alone."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a comm hook was registered, in Python or one of DDP's own in C++."""
    return bool(_registered_hooks(ddp)) or _builtin_hook(ddp) is not None


def cannot_attach(ddp: DistributedDataParallel) -> str:
    """Say why no communication algorithm can take the place of DDP's allreduce, "" if one can."""
    if ddp.mixed_precision is not None:
        return "it has DDP's mixed_precision; use autocast instead"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        return "an optimizer runs in its backward (apply_optimizer_in_backward)"
    if _private_of(ddp, "_delay_all_reduce_params"):
        return "it delays the reduction of some parameters (delay_all_reduce_named_params)"
    if _private_of(ddp, "_join_config").enable:
        return "it is in its join() context, in which ranks make different numbers of steps"
    return ""


def is_in_join(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's join() context is open."""
    return bool(_private_of(ddp, "_join_config").enable)


@contextlib.contextmanager
def naming_groups(name: str) -> Iterator[None]:
    """Give process groups that are made in this block this name.

    torch names a group that only its members make by the number of groups that the rank is in.
    That differs between ranks, which then wait for each other until their timeout; and it comes
    again when groups are destroyed: then ranks look for connections that are gone.
    """
    original = _private(_C10D, "_process_group_name")
    names = importlib.import_module(_C10D).__dict__
    names["_process_group_name"] = lambda *_args, **_kwargs: name
    try:
        yield
    finally:
        names["_process_group_name"] = original


def group_timeout(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """Return the time after which a collective on `group` fails, a `datetime.timedelta`."""
    backend = _private_of(group, "_get_backend")(device)
    return _private_of(backend.options, "_timeout")


def num_collectives(group: torch.distributed.ProcessGroup) -> int:
    """Return how many collectives `group` has launched, which is the same on all ranks.

    Raises:
        RuntimeError: its backend does not count them.
    """
    return int(_private_of(group, "_get_sequence_number_for_group")())


def check_names_for_tuning(ddp: DistributedDataParallel) -> None:
    """Find out, before a step depends on it, whether buckets can be changed while training.

    Raises:
        TorchDriftError: a name that is needed for it has moved.
    """
    for name in (
        "_ddp_init_helper",
        "_comm_hooks",
        "_get_ddp_logging_data",
        "_join_config",
        "_remove_autograd_hooks",
    ):
        _private_of(ddp, name)
    _private("torch.distributed", "_compute_bucket_assignment_by_size")
    _private(_C10D, "_get_process_group_store")
    _queue_callback()


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return bool(_private("torch._C", "_current_graph_task_id")() != -1)


def replace_reducer(
    ddp: DistributedDataParallel, buckets: Sequence[Sequence[int]], caps_bytes: Sequence[int]
) -> None:
    """Give `ddp` a new Reducer with these buckets, by parameter index, in launch order.

    As DDP's constructor makes it, with the same options and comm hooks. It rebuilds its buckets
    after its first iteration as any Reducer, by the limits `caps_bytes`, one for each bucket.
    """
    reduced = reducer_parameters(ddp)
    hooks = _registered_hooks(ddp)
    builtin_hook = _builtin_hook(ddp)
    ddp.bucket_bytes_cap_list = list(caps_bytes)
    config = getattr(ddp, "_bucket_config", None)  # from 2.12 on
    if config is not None:
        ddp._bucket_config = dataclasses.replace(config, per_bucket_bytes_caps=tuple(caps_bytes))
    _drop_reducer(ddp)
    with _assigned_buckets(buckets, caps_bytes):
        _make_reducer(ddp, list(reduced), list(reduced.values()))
    for hook, state in hooks:
        _private_of(ddp.logger, "_set_comm_hook_name")(hook.__qualname__)
        _private("torch.distributed", "_register_comm_hook")(ddp.reducer, state, hook)
    if builtin_hook is not None:
        _private_of(ddp.logger, "_set_comm_hook_name")(str(builtin_hook))
        _private("torch.distributed", "_register_builtin_comm_hook")(ddp.reducer, builtin_hook)
    ddp._has_rebuilt_buckets = False


def _drop_reducer(ddp: DistributedDataParallel) -> None:
    """Free the buckets of `ddp` before there are others.

    `torch.compile(ddp)` makes functions with all attributes of `ddp`, by `functools.wraps`. They
    would keep the Reducer, and its logger that keeps it too.
    """
    _private_of(ddp, "_remove_autograd_hooks")()
    attributes = ("reducer", "logger")
    for owner in gc.get_referrers(ddp.reducer):
        if isinstance(owner, dict) and owner.keys() >= {*attributes, "process_group"}:
            owner.update(dict.fromkeys(attributes))


def _make_reducer(
    ddp: DistributedDataParallel, tensors: Sequence[torch.Tensor], parameters: Sequence[Parameter]
) -> None:
    """Give `ddp` a Reducer of these, as DDP's constructor makes it; some may be frozen now."""
    is_sparse = [parameter.is_sparse for parameter in parameters]
    names = {parameter.index: parameter.name for parameter in parameters}
    with requiring_grad(tensors):
        _private_of(ddp, "_ddp_init_helper")(list(tensors), is_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        _private_of(ddp.reducer, "_set_static_graph")()
        _private_of(ddp.logger, "_set_static_graph")()


def _builtin_hook(ddp: DistributedDataParallel) -> Any:
    """Return the comm hook of DDP's own in C++, of which only the log keeps the name."""
    name = str(_log_of(ddp).get("comm_hook", ""))
    kinds = _private("torch.distributed", "BuiltinCommHookType")
    return kinds.__members__.get(name.rpartition(".")[2]) if name.startswith("Builtin") else None


@contextlib.contextmanager
def _assigned_buckets(
    buckets: Sequence[Sequence[int]], caps_bytes: Sequence[int]
) -> Iterator[None]:
    """Let DDP form these buckets in this block; it reverses what it is given."""
    original = _private("torch.distributed", "_compute_bucket_assignment_by_size")
    assigned = ([list(bucket) for bucket in reversed(buckets)], list(reversed(caps_bytes)))
    distributed: Any = torch.distributed
    distributed._compute_bucket_assignment_by_size = lambda *_args, **_kwargs: assigned
    try:
        yield
    finally:
        distributed._compute_bucket_assignment_by_size = original


def prepare_reducer(ddp: DistributedDataParallel) -> None:
    """Tell a Reducer that was made inside of DDP's forward that this forward has begun."""
    _private_of(ddp, "reducer").prepare_for_forward()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call when the backward that is running has ended, DDP's own work in it included.

    Autograd calls what was queued in that order, and DDP queues its end with the last gradient;
    so this queues itself once more.
    """
    queue = _queue_callback()
    queue(lambda: queue(call))


def accumulate_node(parameter: torch.Tensor) -> Any:
    """Return the autograd node that accumulates a parameter's gradient.

    It lives as long as somebody holds it, or a graph that uses the parameter.
    """
    with requiring_grad([parameter]):
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


@contextlib.contextmanager
def profile_ranges(has_cuda: bool) -> Iterator[list[Any]]:
    """Have torch's profiler note named ranges, collectives and kernels, but no operators.

    Yields a list that holds its events when the block has ended. `torch.profiler.profile` cannot
    leave operators out, which cost some percent of a step.
    """
    profiler: Any = torch.autograd.profiler.profile(use_device="cuda" if has_cuda else None)
    scopes = {_private("torch._C._profiler", "RecordScope").USER_SCOPE}
    prepare, enable, disable = (
        _private("torch._C._autograd", name)
        for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
    )
    events: list[Any] = []
    prepare(profiler.config(create_trace_id=True), profiler.kineto_activities)
    enable(profiler.config(create_trace_id=False), profiler.kineto_activities, scopes)
    try:
        yield events
    finally:
        events += disable().events()


def is_profiling() -> bool:
    """Whether torch's profiler is on."""
    return bool(_private("torch._C._autograd", "_profiler_enabled")())


def _queue_callback() -> Callable[[Callable[[], None]], None]:
    engine = _private_of(_private("torch.autograd", "Variable"), "_execution_engine")
    queue: Callable[[Callable[[], None]], None] = _private_of(engine, "queue_callback")
    return queue


def store_of(group: torch.distributed.ProcessGroup) -> Any:
    """Return the store by which the ranks of a group found each other."""
    return _private(_C10D, "_get_process_group_store")(group)


def _produces_sparse_gradient(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse


def watch_ddp_forward(
    before: Callable[[DistributedDataParallel], None],
    after: Callable[[DistributedDataParallel, Any], None],
) -> None:
    """Call `before` and `after` around each DDP forward, with the DDP module.

    `after` also gets the backend that the forward ran under.

    The backend is that of the innermost `torch.compile` around the forward, or None. DDP has no
    hook there, so the context that it opens around its forward is replaced by one that opens it
    too; DDP's python_reducer, which Dynamo traces through, does not open it. Idempotent.

    Raises:
        TorchDriftError: this release has no such context.
    """
    original = _private_of(DistributedDataParallel, "_inside_ddp_forward")
    if hasattr(original, "ddpopt_replaces"):
        return
    disable = _private("torch.compiler", "disable")
    current_callback = _private("torch._C._dynamo.eval_frame", "get_eval_frame_callback")

    def report(ddp: DistributedDataParallel, callback: Any) -> None:
        after(ddp, innermost_backend(callback) if callable(callback) else None)

    uncompiled_report, uncompiled_before = disable(report), disable(before)

    def inside_ddp_forward(self: DistributedDataParallel) -> Iterator[None]:
        uncompiled_before(self)
        with original(self):
            yield
        uncompiled_report(self, current_callback())  # asked here: `disable` takes it away

    # Dynamo is to skip this frame, as it does the original's, but not the module's below. It skips
    # generators that are marked, and contextlib; classes of ours it would compile at each call.
    context = contextlib.contextmanager(disable(inside_ddp_forward, recursive=False))
    watched: Any = functools.wraps(original)(context)
    watched.ddpopt_replaces = original
    type.__setattr__(DistributedDataParallel, "_inside_ddp_forward", watched)


def unwatch_ddp_forward() -> None:
    """Restore DDP's own context."""
    current = _private_of(DistributedDataParallel, "_inside_ddp_forward")
    original = getattr(current, "ddpopt_replaces", current)
    type.__setattr__(DistributedDataParallel, "_inside_ddp_forward", original)


# ---- Graphs and their metadata ----------------------------------------------------------------


def carry_dynamo_metadata(source: fx.GraphModule, target: fx.GraphModule) -> None:
    """Give `target`, whose placeholders are a copy of some of `source`'s, Dynamo's metadata.

    AOTAutograd recognises a graph of Dynamo's by it, deduplicates inputs by their source and
    finds out which inputs are parameters. Placeholders that are new get the source None.
    """
    target.meta = dict(source.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):  # the latter from 2.12 on
        if hasattr(source, name):
            target.__dict__[name] = getattr(source, name)
    sources = {
        node.name: getattr(node, "_dynamo_source", None)
        for node in source.graph.find_nodes(op="placeholder")
    }
    for node in target.graph.find_nodes(op="placeholder"):
        node._dynamo_source = sources.get(node.name)


def mark_as_new(placeholder: fx.Node) -> None:
    """Tell AOTAutograd that Dynamo knows no source of this placeholder."""
    placeholder._dynamo_source = None


def written_arguments(target: object, name: str) -> set[tuple[int | None, str]]:
    """Return the places (None: keyword only) and names of the arguments that an operator writes to.

    `target` is the operator, or it is that of ATen of this `name`. All overloads count where it is
    not said which is called. Running averages count too, whose schemas leave that out.
    """
    if isinstance(target, _private("torch._ops", "OpOverload")):
        overloads = [target]
    else:
        packet_type = _private("torch._ops", "OpOverloadPacket")
        packet: Any = target
        if not isinstance(target, packet_type):
            packet = getattr(torch.ops.aten, name, None)
        is_packet = isinstance(packet, packet_type)
        overloads = [getattr(packet, o) for o in packet.overloads()] if is_packet else []
    found: set[tuple[int | None, str]] = set()
    for overload in overloads:
        schema = _private_of(overload, "_schema")
        if overload not in _writes:
            _writes[overload] = _find_writes(schema)
        found.update(_writes[overload])
    return found


_writes: dict[Any, tuple[tuple[int | None, str], ...]] = {}


def _find_writes(schema: Any) -> tuple[tuple[int | None, str], ...]:
    return tuple(
        (None if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in RUNNING_AVERAGES
    )


RUNNING_AVERAGES = ("running_mean", "running_var")


def is_higher_order(target: object) -> bool:
    """Whether a call's target is an operator that takes graphs or kernels as arguments."""
    return isinstance(target, _private("torch._ops", "HigherOrderOperator"))


def unwrap_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself."""
    original: torch.nn.Module = getattr(module, "_orig_mod", module)
    return original


def is_whole_forward(path: tuple[str, ...]) -> bool:
    """Whether a path below DDP leads to its module, or to what `torch.compile` wrapped there."""
    return path in ((), ("_orig_mod",))


def depth_below_frame(placeholder: fx.Node) -> int:
    """Return how many modules lie between what a frame was given and a parameter.

    1 for `self.linear.weight`, 0 for `self.weight`.
    """
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name).count("._modules[")


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identify a tensor's memory, so that aliases compare equal; None where it has no storage."""
    try:
        return int(_private_of(tensor.untyped_storage(), "_cdata"))
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other storage-less layouts


def is_of_functorch(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what vmap, grad or jvp work on: it does not say what requires grad."""
    return bool(_private("torch._C._functorch", "is_functorch_wrapped_tensor")(tensor))


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether another graph follows this one in its frame; True where Dynamo does not tell."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", True))


def free_symbols(value: object) -> frozenset[Any]:
    """Return the symbols of a symbolic shape or number."""
    if not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset()
    if isinstance(value, torch.Tensor) and not _has_symbolic_shape(value):
        return frozenset()
    return frozenset(_private("torch.fx.experimental.symbolic_shapes", "free_symbols")(value))


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size as it was in the first call; 1 where it depends on data."""
    if isinstance(size, int):
        return size
    node = _private_of(size, "node")
    return int(node.hint) if _private_of(node, "has_hint")() else 1


def own_memory(fake: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like the given one, strides included, that shares no memory with it."""
    with fake.fake_mode if hasattr(fake, "fake_mode") else contextlib.nullcontext():
        return fake.clone()


def gradient_arguments(backward: fx.GraphModule) -> list[int | None]:
    """Return for each value that a backward graph returns which argument it is the gradient of.

    The argument is counted among those of the graph that AOTAutograd was given; None where the
    value is no gradient, or AOTAutograd does not tell.
    """
    (output,) = backward.graph.find_nodes(op="output")
    grad = _private("torch._functorch._aot_autograd.descriptors", "GradAOTOutput")
    plain = _private("torch._functorch._aot_autograd.descriptors", "PlainAOTInput")
    found: list[int | None] = []
    for description in output.meta.get("desc", ()):
        is_plain = isinstance(description, grad) and isinstance(description.grad_of, plain)
        found.append(description.grad_of.idx if is_plain else None)
    return found


def outputs_described(forward: fx.GraphModule) -> list[Any]:
    """Return AOTAutograd's description of each value that a forward graph returns, hashable."""
    (output,) = forward.graph.find_nodes(op="output")
    return list(output.meta.get("desc", ()))


def tangents(backward: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return which inputs of a backward graph are gradients of which of the forward's outputs."""
    tangent = _private("torch._functorch._aot_autograd.descriptors", "TangentAOTInput")
    described = {
        node: node.meta.get("desc") for node in backward.graph.find_nodes(op="placeholder")
    }
    return {
        node: description.output
        for node, description in described.items()
        if isinstance(description, tangent)
    }


def autograd_node() -> Any:
    """Return the autograd node that runs in this thread."""
    return _private("torch._C", "_current_autograd_node")()


def argument_placeholders(forward: fx.GraphModule) -> dict[fx.Node, int]:
    """Return which argument of the graph that AOTAutograd was given each input is."""
    plain = _private("torch._functorch._aot_autograd.descriptors", "PlainAOTInput")
    descriptions = (
        (node, node.meta.get("desc")) for node in forward.graph.find_nodes(op="placeholder")
    )
    return {node: text.idx for node, text in descriptions if isinstance(text, plain)}


def constant_of(value: object) -> int | None:
    """Return the number that a symbolic integer is known to equal, None where it may vary."""
    if not isinstance(value, torch.SymInt):
        return None
    constant: int | None = _private_of(_private_of(value, "node"), "maybe_as_int")()
    return constant


@contextlib.contextmanager
def hidden_float_symbols(graph: fx.Graph, fake_mode: Any) -> Iterator[None]:
    """Hide the symbols of float arguments that do not occur in `graph` from AOTAutograd.

    It makes constants of all float symbols that it finds no use for, and has Dynamo start anew:
    right for a whole graph; for a section it would recompile at each new value.
    """
    if fake_mode.shape_env is None:
        yield
        return
    is_type = _private("torch.utils._sympy.symbol", "symbol_is_type")
    kind = _private("torch.utils._sympy.symbol", "SymT").FLOAT
    values: dict[Any, Any] = _private_of(fake_mode.shape_env, "backed_var_to_val")
    used = {s for node in graph.nodes for s in free_symbols(node.meta.get("example_value"))}
    hidden = {s: v for s, v in values.items() if is_type(s, kind) and s not in used}
    for symbol in hidden:
        del values[symbol]
    try:
        yield
    finally:
        values.update(hidden)


def _has_symbolic_shape(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return any(isinstance(size, torch.SymInt) for size in tensor.shape)
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


# ---- Compiling a section ----------------------------------------------------------------------


class SectionTrace:
    """What AOTAutograd left behind while it compiled a section."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def has_run_aot(self) -> bool:
        """Whether AOTAutograd compiled something, so that the first call returns fake tensors."""
        return self._context is not None and self._context.fw_metadata is not None


@contextlib.contextmanager
def section_tracing() -> Iterator[SectionTrace]:
    """Give the section compiled in this block a TracingContext of its own.

    AOTAutograd writes a graph's metadata into Dynamo's TracingContext, and keeps the context for
    whatever is compiled of that graph later: with one for all sections it would find the last
    one's metadata. Guards and fake mode stay shared. The first call of what AOTAutograd compiled,
    made inside this block, returns fake tensors with the strides that Inductor chose.
    """
    outer = _private("torch._guards", "TracingContext").try_get()
    if outer is None:
        yield SectionTrace(None)
        return
    context = copy.copy(outer)
    context.fw_metadata = None
    context.aot_graph_name = None
    context.params_flat = None
    context.params_flat_unwrap_subclasses = None
    context.params_unwrapped_to_flat_index = None
    context.output_strides = None
    context.fakify_first_call = True
    no_hooks = _private("torch._dynamo.utils", "_disable_saved_tensors_hooks_during_tracing")
    try:
        with _private("torch._guards", "tracing")(context), no_hooks(), _no_donated_buffers():
            yield SectionTrace(context)
    finally:
        context.fakify_first_call = False
        if context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # AOTAutograd's spelling of "none"


@contextlib.contextmanager
def _no_donated_buffers() -> Iterator[None]:
    """Compile backward now, and so that it leaves saved tensors as they are.

    Inductor's backward may reuse the memory of saved tensors ("donated buffers"), unless it is
    compiled in a backward with retain_graph=True. Its cache does not tell the two apart
    (torch 2.11 to 2.13): a backward with retain_graph could get one that overwrites what the next
    backward needs. AOTAutograd's own cache avoids that; a section's first call bypasses it.
    """
    functorch_config = _private("torch._functorch", "config")
    compiler_config = _private("torch.compiler", "config")
    tag = f"{compiler_config.cache_key_tag} ddpopt: no donated buffers"
    with (
        functorch_config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True),
        compiler_config.patch(cache_key_tag=tag),
    ):
        yield


# A backward graph compiled so far: (graph, inputs, which of the whole graph's inputs each is,
# None for others) -> a callable that takes a list and empties it.
CompileSection = Callable[[fx.GraphModule, list[Any], list[int | None]], Callable[..., Any]]
CutBackward = Callable[[fx.GraphModule, list[Any], CompileSection], Callable[..., Any]]
# (graph, inputs, edit the forward graph, cut the backward graph) -> compiled forward
AOTCompilerFn = Callable[
    [fx.GraphModule, list[Any], Callable[[fx.GraphModule], None], CutBackward], Callable[..., Any]
]


def aot_inductor(inductor: CompilerFn) -> AOTCompilerFn:
    """Return what compiles as `inductor` does, which `inductor()` made, with a cut backward."""

    def compile_graph(
        gm: fx.GraphModule,
        inputs: list[Any],
        edit_forward: Callable[[fx.GraphModule], None],
        cut_backward: CutBackward,
    ) -> Callable[..., Any]:
        compile_fx = _private("torch._inductor.compile_fx", "compile_fx")
        compile_fx_inner = _private("torch._inductor.compile_fx", "compile_fx_inner")

        def inner_compile(graph: fx.GraphModule, graph_inputs: Any, **options: Any) -> Any:
            if not options.get("is_backward", False):
                edit_forward(graph)
                return compile_fx_inner(graph, graph_inputs, **options)
            static = set(options.pop("static_input_idxs", ()))

            def compile_section(
                section: fx.GraphModule, section_inputs: list[Any], origins: list[int | None]
            ) -> Any:
                (output,) = section.graph.find_nodes(op="output")
                values: Any = output.args[0]
                # Inductor keeps the strides of these; the next section counts on them.
                output.meta["user_visible_output_idxs"] = list(range(len(values)))
                kept = [i for i, origin in enumerate(origins) if origin in static]
                return compile_fx_inner(section, section_inputs, static_input_idxs=kept, **options)

            return cut_backward(graph, list(graph_inputs), compile_section)

        with _cut_backward_settings():
            compiled: Callable[..., Any] = compile_fx(
                gm,
                inputs,
                inner_compile=inner_compile,
                config_patches=_private_of(inductor, "config"),
            )
        return compiled

    return compile_graph


def aot_eager(
    gm: fx.GraphModule,
    inputs: list[Any],
    edit_forward: Callable[[fx.GraphModule], None],
    cut_backward: CutBackward,
) -> Callable[..., Any]:
    """Compile as the backend of this name does, with a cut backward."""
    boxed = _private("torch._dynamo.backends.debugging", "boxed_nop")

    def compile_forward(graph: fx.GraphModule, graph_inputs: Any) -> Any:
        edit_forward(graph)
        return boxed(graph, graph_inputs)

    def compile_backward(graph: fx.GraphModule, graph_inputs: Any) -> Any:
        return cut_backward(
            graph, list(graph_inputs), lambda section, values, _: boxed(section, values)
        )

    with _cut_backward_settings():
        return lookup_backend("aot_eager")(
            gm, inputs, fw_compiler=compile_forward, bw_compiler=compile_backward
        )


@contextlib.contextmanager
def _cut_backward_settings() -> Iterator[None]:
    """Compile backward before the first forward, which needs its gates, and each time.

    On a hit AOTAutograd's own cache would return a backward that nobody cut. The caches of what
    the sections are compiled to stay on.
    """
    functorch_config = _private("torch._functorch", "config")
    off = dict.fromkeys(
        ("enable_autograd_cache", "enable_remote_autograd_cache", "bundled_autograd_cache"), False
    )
    with _no_donated_buffers(), functorch_config.patch(off):
        yield
    tracing = _private("torch._guards", "TracingContext").try_get()
    if tracing is not None and (metadata := _private_of(tracing, "fw_metadata")) is not None:
        metadata.bw_donated_idxs = []  # AOTAutograd's spelling of "none"


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell AOTAutograd that a function takes its arguments as a list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def has_cuda_graphs(inductor: CompilerFn) -> bool:
    """Whether what `inductor()` made records CUDA graphs."""
    options = _private_of(inductor, "config")
    triton = _private_of(_private("torch._inductor", "config"), "triton")
    return bool(options.get("triton.cudagraphs", _private_of(triton, "cudagraphs")))


def is_subclass(value: object) -> bool:
    """Whether AOTAutograd takes a tensor apart into others, as it does a DTensor."""
    check = _private("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")
    return bool(check(value))


def is_autocast_on() -> bool:
    """Whether autocast is on for any device."""
    return bool(_private("torch._C", "_is_any_autocast_enabled")())


def no_autocast() -> contextlib.AbstractContextManager[None]:
    """Return a context in which autocast is off for all devices."""
    context: contextlib.AbstractContextManager[None] = _private("torch._C", "_DisableAutocast")()
    return context


def restride(gm: fx.GraphModule, inputs: list[Any]) -> None:
    """Bring the metadata of a backward graph in line with its inputs.

    Inductor may have chosen other strides in the forward for what it saved than were traced.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if all(
        _has_strides_of(n.meta.get("val"), v) for n, v in zip(placeholders, inputs, strict=True)
    ):
        return
    propagate = _private("torch.fx.passes.fake_tensor_prop", "FakeTensorProp")
    propagate(gm, mode=fake_mode_of(inputs)).propagate_dont_convert_inputs(*inputs)


def _has_strides_of(value: object, other: object) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    return value.layout is not torch.strided or value.stride() == other.stride()


def fake_mode_of(inputs: object) -> Any:
    """Return the fake mode that Dynamo traced with, or a new one outside of Dynamo."""
    found = _private("torch._guards", "detect_fake_mode")(inputs)
    return found or _private("torch._subclasses.fake_tensor", "FakeTensorMode")()


def to_fake(value: Any, fake_mode: Any) -> Any:
    """Return the fake tensor that stands for `value` in this compile; other values unchanged."""
    fake_tensor = _private("torch._subclasses.fake_tensor", "FakeTensor")
    if not isinstance(value, torch.Tensor) or isinstance(value, fake_tensor):
        return value
    return _private("torch._dynamo.utils", "to_fake_tensor")(value, fake_mode)


def lookup_backend(name: str) -> CompilerFn:
    """Return a registered backend by its name.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is none of that name.
    """
    backend: CompilerFn = _private("torch._dynamo.backends.registry", "lookup_backend")(name)
    return backend


def inductor_options() -> list[str]:
    """Return the names of Inductor's options."""
    return list(_private("torch._inductor", "list_options")())


def inductor(mode: str | None, options: Mapping[str, Any]) -> CompilerFn:
    """Return Inductor with `mode` and `options` applied as `torch.compile` applies them.

    Raises:
        RuntimeError: an option is unknown or has the wrong type, or the mode is unknown.
    """
    wrapper: CompilerFn = _private("torch", "_TorchCompileInductorWrapper")(
        mode, dict(options), None
    )
    return wrapper


# ---- Logs -------------------------------------------------------------------------------------


def artifact_logger(module: str, artifact: str) -> logging.Logger:
    """Return the logger that `TORCH_LOGS=<artifact>` turns on, or a silent one where it moved."""
    try:
        logger: logging.Logger = _private("torch._logging", "getArtifactLogger")(module, artifact)
    except TorchDriftError as error:
        _do_without(f"TORCH_LOGS={artifact}", str(error))
        return logging.getLogger(f"{module}.{artifact}")
    return logger


def trace_structured(name: str, metadata: dict[str, Any], payload: Callable[[], str]) -> None:
    """Write a payload to torch's structured trace, which tlparse reads; nothing when it is off."""
    try:
        trace = _private("torch._logging", "trace_structured")
    except TorchDriftError as error:
        _do_without("payloads for tlparse", str(error))
        return
    trace(name, lambda: metadata, payload_fn=payload)


# ---- Several compiled models side by side -----------------------------------------------------


@contextlib.contextmanager
def dynamo_settings(*, optimize_ddp: bool, recompile_limit: int) -> Iterator[None]:
    """Set Dynamo's `optimize_ddp`, and how often it may compile one function, in this block.

    Models of one class count together, whichever backends they are compiled with.
    """
    config = _private("torch._dynamo", "config")
    with config.patch(optimize_ddp=optimize_ddp, recompile_limit=recompile_limit):
        yield


# ---- DataParallel -----------------------------------------------------------------------------


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` made this module, or its `compile` was called."""
    is_wrapper = isinstance(module, _private("torch._dynamo", "OptimizedModule"))
    return is_wrapper or _private_of(module, "_compiled_call_impl") is not None


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after the forward of a module and its submodules."""
    names = ("_forward_pre_hooks", "_forward_hooks")
    return [h for m in module.modules() for n in names for h in _private_of(m, n).values()]


def replica(
    module: torch.nn.Module,
    tensors: Mapping[torch.Tensor, torch.Tensor],
    hooks: Mapping[int, Callable[..., Any]],
) -> torch.nn.Module:
    """Return a copy of a module's structure with other tensors and hooks, all else shared.

    As `torch.nn.DataParallel` makes one, but that `parameters()` of it works. `tensors` has all
    parameters; buffers that are not in it stay. `hooks` has what takes the place of each of
    `forward_hooks`, by the `id` of that.
    """
    copies = {m: _private_of(m, "_replicate_for_data_parallel")() for m in module.modules()}
    for original, copied in copies.items():
        children = _private_of(original, "_modules")
        _private_of(copied, "_modules").update(
            {n: None if child is None else copies[child] for n, child in children.items()}
        )
        buffers = _private_of(copied, "_buffers")
        buffers.update({n: tensors.get(b, b) for n, b in buffers.items() if b is not None})
        parameters = _private_of(original, "_parameters")
        own = {name: None if p is None else tensors[p] for name, p in parameters.items()}
        for name, tensor in own.items():
            if tensor is not None:
                setattr(copied, name, tensor)  # RNNs list their weights anew when one is set
        copied._parameters = own
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            if found := _private_of(original, name):
                changed = type(found)((key, hooks[id(hook)]) for key, hook in found.items())
                setattr(copied, name, changed)
    made: torch.nn.Module = copies[module]
    return made


@contextlib.contextmanager
def compiling_replicas(num_devices: int) -> Iterator[None]:
    """Compile, in this block, what is to run on that many devices at the same time.

    A function may be compiled as often on each device as it may on one. Hooks that come or go are
    noticed. Backward is compiled with its forward: autograd has a thread for each device, and they
    would compile at the same time.
    """
    dynamo, functorch = _private("torch._dynamo", "config"), _private("torch._functorch", "config")
    limit = _private_of(dynamo, "recompile_limit") * num_devices
    with (
        dynamo.patch(recompile_limit=limit, skip_nnmodule_hook_guards=False),
        functorch.patch(force_non_lazy_backward_lowering=True),
    ):
        yield


def uncompiled_while_tracing() -> contextlib.AbstractContextManager[None]:
    """Return a context in which compiled functions run uncompiled while FX traces.

    Otherwise they raise, in other threads too: FX's flag that it is tracing is one for all.
    """
    try:
        config = _private("torch._dynamo", "config")
    except TorchDriftError:
        return contextlib.nullcontext()  # what is not compiled is traced as well as ever
    context: contextlib.AbstractContextManager[None] = config.patch(error_on_nested_fx_trace=False)
    return context


# ---- Steps on a copy --------------------------------------------------------------------------


def compiled_parts(model: torch.nn.Module) -> list[Any]:
    """Return what compiles each part of a model that `torch.compile` was called for, once each.

    Parts are modules that it wrapped, modules that it compiled in place (`Module.compile` keeps a
    compiled function), and other functions that are attributes of modules.
    """
    optimized = _private("torch._dynamo", "OptimizedModule")
    contexts = []
    for part in model.modules():
        if isinstance(part, optimized):
            contexts.append(_private_of(part, "dynamo_ctx"))
        else:
            contexts += map(_context_of, _compiled_functions(part).values())
    return list({id(context): context for context in contexts}.values())


def _compiled_functions(module: torch.nn.Module) -> dict[str, Callable[..., Any]]:
    """Return a module's own attributes that are what `torch.compile` made of functions."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and hasattr(value, "get_compiler_config")
    }


def _context_of(function: Callable[..., Any]) -> Any:
    """Return what compiles a function that `torch.compile` made: it keeps it in a closure."""
    getter = _private_of(function, "get_compiler_config")
    try:
        return inspect.getclosurevars(getter).nonlocals["self"]
    except KeyError as error:
        raise _drift("self in the closure of get_compiler_config") from error


def backend_of(context: Any) -> Any:
    """Return the innermost backend of one of `compiled_parts`."""
    return innermost_backend(_private_of(context, "callback"))


def compile_options(context: Any) -> dict[str, Any]:
    """Return the `mode` and `options` that `torch.compile` was given for one of them."""
    return dict(getattr(_compiler_of(context), "kwargs", {}))


def _compiler_of(context: Any) -> Any:
    """Return the backend as `torch.compile` wrapped it, with its options bound."""
    backend = _private_of(context, "callback")
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def copy_compiled(
    model: torch.nn.Module, *, is_apart: bool = False
) -> tuple[torch.nn.Module, DistributedDataParallel]:
    """Return a copy of a compiled DDP model with a Reducer of its own, and the DDP module in it.

    Options are the same, comm hooks are left out, and nothing is communicated. Dynamo runs the
    same compiled code for both, unless the copy `is_apart`: then it is compiled for itself.

    Raises:
        OptionError: the copy would share state with the model.
    """
    contexts = {
        id(context): _context_apart(context) if is_apart else context
        for context in compiled_parts(model)
    }
    ddp = unwrap_compiled(model)
    assert isinstance(ddp, DistributedDataParallel)
    twin: DistributedDataParallel = object.__new__(type(ddp))
    copies: dict[int, Any] = {**contexts, id(ddp): twin}  # by the original's id
    _copy_ddp(ddp, twin, deep_copy(ddp.module, copies))
    optimized = _private("torch._dynamo", "OptimizedModule")
    for part in ddp.modules():
        copied = copies.get(id(part))
        if copied is not None and not isinstance(part, optimized):  # those compile themselves
            for name, function in _compiled_functions(part).items():
                compile_alike = contexts[id(_context_of(function))]
                vars(copied)[name] = compile_alike(_rebound(function, copies))
            _refuse_foreign_forward(part, copied)
    _refuse_shared_tensors(ddp, twin)
    outer = None if model is ddp else contexts[id(_private_of(model, "dynamo_ctx"))]
    return (twin if outer is None else outer(twin)), twin


class _CopyingResults(torch.overrides.TorchFunctionMode):
    """Lets `copy.deepcopy` take tensors that autograd computed, which it refuses as such.

    The copy is the result of a leaf with equal values, so that it may be written to as well.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            with torch.enable_grad():
                return copy.deepcopy(tensor.detach(), memo).requires_grad_().clone()
        return func(*args, **(kwargs or {}))


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """As `copy.deepcopy`, but that it takes tensors that are no leaves."""
    with _CopyingResults():
        return copy.deepcopy(value, memo)


def _rebound(function: Callable[..., Any], copies: Mapping[int, Any]) -> Callable[..., Any]:
    """Return what `torch.compile` was given; if that is a method of an original, its copy's."""
    original: Callable[..., Any] = _private_of(function, "_torchdynamo_orig_callable")
    if not inspect.ismethod(original):
        return original
    return types.MethodType(original.__func__, copies.get(id(original.__self__), original.__self__))


def _refuse_foreign_forward(module: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Raise where a forward of the instance's own would run the original module."""
    cells = getattr(vars(copied).get("forward"), "__closure__", None) or ()
    held: list[Any] = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    if any(value is module or getattr(value, "__self__", None) is module for value in held):
        raise OptionError(
            f"the forward of this {type(module).__name__} is replaced by a function that holds the "
            "module, so a copy would run the original; call it where the forward is the module's "
            "own"
        )


def _refuse_shared_tensors(ddp: DistributedDataParallel, twin: DistributedDataParallel) -> None:
    own = {id(tensor) for tensor in (*ddp.parameters(), *ddp.buffers())}
    for name, tensor in (*twin.module.named_parameters(), *twin.module.named_buffers()):
        if id(tensor) in own:
            raise OptionError(
                f"a copy of this {type(ddp.module).__name__} would have the same {name}; a "
                "__deepcopy__ in it has to copy parameters and buffers"
            )


def _context_apart(context: Any) -> Any:
    """Return what compiles as `context` does, with code that nothing else shares."""
    backend = functools.partial(_compiler_of(context))  # backends are told apart by identity
    return _private("torch._dynamo", "optimize")(
        backend=backend,
        nopython=_private_of(context, "fullgraph"),
        dynamic=_private_of(context, "_dynamic"),
    )


def _copy_ddp(
    ddp: DistributedDataParallel, twin: DistributedDataParallel, module: torch.nn.Module
) -> None:
    """Make `twin` a DDP module like `ddp` around `module`; its constructor would communicate."""
    state = dict(ddp.__dict__)
    for name in ("reducer", "logger", "_compiled_call_impl"):
        state.pop(name, None)
    state |= {name: copy.copy(value) for name, value in state.items() if isinstance(value, dict)}
    state |= {"_modules": {"module": module}, "_comm_hooks": [], "_has_rebuilt_buckets": False}
    state |= {"require_backward_grad_sync": True, "require_forward_param_sync": True}
    state["logger"] = None
    twin.__dict__.update(state)
    ignored = _private_of(ddp, "parameters_to_ignore")
    own = [parameter for name, parameter in module.named_parameters() if name not in ignored]
    twin.__dict__["_module_parameters"] = own
    _private_of(twin, "_assign_modules_buffers")()
    copied = dict(module.named_parameters(remove_duplicate=False))
    reduced = list(reducer_parameters(ddp).values())
    _make_reducer(twin, [copied[parameter.name] for parameter in reduced], reduced)


def keep_local(ddp: DistributedDataParallel) -> None:
    """Have a module that was just made communicate nothing, in forward and in backward."""
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False
    if ddp.static_graph:  # its first backward would allreduce whatever no_sync says
        ddp._static_graph_delay_allreduce_enqueued = True


def calling_model(ddp: DistributedDataParallel) -> torch.nn.Module | None:
    """Return the result of `torch.compile(ddp)` whose forward is running, None if there is none."""
    optimized = _private("torch._dynamo", "OptimizedModule")
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, optimized) and unwrap_compiled(owner) is ddp:
            return owner  # type: ignore[no-any-return]
    return None


def forward_arguments(ddp: DistributedDataParallel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the DDP forward that is running was given.

    Raises:
        TorchDriftError: the frame that has them is another in this release.
    """
    code = _private_of(DistributedDataParallel, "_run_ddp_forward").__code__
    for frame in _frames():
        found = frame.f_locals if frame.f_code is code else {}
        if found.get("self") is ddp and {"inputs", "kwargs"} <= found.keys():
            return found["inputs"], found["kwargs"]
    raise _drift("inputs and kwargs in DistributedDataParallel._run_ddp_forward")


def _frames() -> Iterator[Any]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def drawing_as_eager() -> contextlib.AbstractContextManager[None]:
    """Have Inductor compile random operators, in this block, to draw what eager draws."""
    config = _private("torch._inductor", "config")
    context: contextlib.AbstractContextManager[None] = config.patch(fallback_random=True)
    return context


def place_of_store(store: Any) -> tuple[str, int] | None:
    """Return the host and port at which a store is reached, None if not by the network."""
    while isinstance(store, _private("torch.distributed", "PrefixStore")):
        store = store.underlying_store
    is_tcp = isinstance(store, _private("torch.distributed", "TCPStore"))
    return (store.host, store.port) if is_tcp else None
