"""DDP's state: which module runs, how its Reducer forms buckets, which modes and hooks it has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt._torch import names
from ddpopt._torch.dynamo import frames, innermost_backend
from ddpopt._torch.runtime import queue_callback
from ddpopt.errors import TorchDriftError
from ddpopt.reducer import Parameter


def active_ddp() -> DistributedDataParallel | None:
    return names.GET_ACTIVE_DDP.of(DistributedDataParallel)()


# ---- Buckets -----------------------------------------------------------------------------------


def follows_arrival_order(ddp: DistributedDataParallel) -> bool:
    """Whether the Reducer rebuilds buckets in the order of gradients of the first backward."""
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def will_rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether the Reducer has yet to form its final buckets; see [Note: buckets].

    DDP keeps an attribute for that, but copies and pickles of a module inherit it, although each
    has a Reducer of its own. So it is trusted only for Reducers that were seen before; for others
    DDP's log decides, a step later.
    """
    has_rebuilt, reducer = names.HAS_REBUILT_BUCKETS.of(ddp), names.REDUCER.of(ddp)
    if not follows_arrival_order(ddp) or (has_rebuilt and reducer in _seen_before_rebuild):
        return False
    if not has_rebuilt:
        _seen_before_rebuild.add(reducer)
        return True
    try:
        return not _log_of(ddp).get("has_rebuilt_buckets")
    except TorchDriftError:
        return False


_seen_before_rebuild: weakref.WeakSet[Any] = weakref.WeakSet()


def final_buckets(ddp: DistributedDataParallel) -> tuple[tuple[int, ...], ...] | None:
    """Return the Reducer's final buckets by parameter index, None if DDP does not tell (yet).

    DDP's log has them from the step after the one that rebuilt the buckets. A Reducer that keeps
    its initial buckets reports them itself.
    """
    if not follows_arrival_order(ddp):
        index_of = {tensor: p.index for tensor, p in reducer_parameters(ddp).items()}
        asked = _ask_buckets(ddp) or ()
        return tuple(tuple(index_of[p] for p in bucket) for bucket in asked) or None
    reported = _log_of(ddp).get("rebuilt_per_bucket_param_indices")
    if not reported:
        return None
    return tuple(tuple(map(int, bucket.split())) for bucket in reported.split(","))


def _log_of(ddp: DistributedDataParallel) -> Mapping[str, Any]:
    """Return what DDP has logged about the module's current Reducer."""
    return names.GET_LOGGING_DATA.of(ddp)()


class LoggedStep(NamedTuple):
    """What DDP's log has of a step: its number, times in seconds, and the bytes of all gradients.

    `backward_s` is backward's computation, `communication_s` the time from the first launch to the
    last end of an allreduce, `overlap_s` the overlap of the two.
    """

    number: int
    forward_s: float
    backward_s: float
    communication_s: float
    overlap_s: float
    num_bytes: int

    @property
    def exposed_s(self) -> float:
        """How long backward waits for allreduces."""
        return max(0.0, self.communication_s - self.overlap_s)


def last_logged_step(ddp: DistributedDataParallel) -> LoggedStep:
    """Return the last step that DDP timed: it times the first ten, then every hundredth."""
    logged = _log_of(ddp)  # in nanoseconds
    return LoggedStep(
        number=int(logged.get("iteration", 0)),
        forward_s=logged.get("forward_compute_time", 0) / 1e9,
        backward_s=logged.get("backward_compute_time", 0) / 1e9,
        communication_s=logged.get("backward_comm_time", 0) / 1e9,
        overlap_s=logged.get("backward_compute_comm_overlap_time", 0) / 1e9,
        num_bytes=int(logged.get("total_parameter_size_bytes", 0)),
    )


def reducer_caps(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """Return the limits in bytes at which this module's Reducer closes buckets."""
    if caps := tuple(names.CAPS_BYTES.of(ddp)):
        return caps
    first, cap = int(names.FIRST_CAP_BYTES.get()), int(names.CAP_BYTES.of(ddp))
    return (first, cap) if names.CAP_IS_DEFAULT.of(ddp) and first < cap else (cap,)


# ---- Parameters --------------------------------------------------------------------------------


def reducer_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """Return the parameters that the Reducer reduces, in its order, shared ones once.

    They are those that required gradients when it was made, even if they are frozen now.
    """
    return _describe(ddp, _reduced_tensors(ddp))


def trainable_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """Return the parameters that the Reducer would reduce if it were made now."""
    return _describe(ddp, _required_tensors(ddp))


def reduced_or_trainable_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """Return the parameters of both kinds, in the module's order."""
    return _describe(ddp, _reduced_tensors(ddp) | _required_tensors(ddp))


def _describe(
    ddp: DistributedDataParallel, wanted: frozenset[torch.Tensor]
) -> dict[torch.Tensor, Parameter]:
    found: dict[torch.Tensor, Parameter] = {}
    for name, parameter in ddp.module.named_parameters():
        if parameter in wanted:
            owner = ddp.module.get_submodule(name.rpartition(".")[0])
            is_embedding = isinstance(owner, torch.nn.Embedding | torch.nn.EmbeddingBag)
            found[parameter] = Parameter(
                index=len(found),
                name=name,
                num_bytes=parameter.nbytes,
                group=f"{parameter.dtype} on {parameter.device}",
                is_sparse=is_embedding and bool(owner.sparse),
            )
    return found


_asked: weakref.WeakKeyDictionary[Any, tuple[tuple[torch.Tensor, ...], ...]]
_asked = weakref.WeakKeyDictionary()


def _ask_buckets(ddp: DistributedDataParallel) -> tuple[tuple[torch.Tensor, ...], ...] | None:
    """Ask the Reducer, once, for the parameters of its initial buckets.

    None if it does not tell: a sparse gradient has no bucket before the first backward.
    """
    reducer = names.REDUCER.of(ddp)
    if reducer not in _asked:
        ask, mode = names.ZEROS_LIKE_BUCKETS.of(reducer), names.FAKE_TENSOR_MODE.get()
        try:
            with mode(allow_non_fake_inputs=True):  # else it would allocate all buckets again
                _asked[reducer] = tuple(tuple(bucket.parameters()) for bucket in ask())
        except RuntimeError:
            return None
    return _asked[reducer]


def _reduced_tensors(ddp: DistributedDataParallel) -> frozenset[torch.Tensor]:
    """Return the tensors that the Reducer reduces; DDP itself does not keep them."""
    buckets = _ask_buckets(ddp)
    return _required_tensors(ddp) if buckets is None else frozenset(itertools.chain(*buckets))


def _required_tensors(ddp: DistributedDataParallel) -> frozenset[torch.Tensor]:
    return frozenset(names.BUILD_PARAMS.of(ddp)()[0])


@contextlib.contextmanager
def requiring_grad(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Unfreeze parameters in this block; a frozen one has no node that accumulates its gradient.

    The Reducer keeps the nodes of all that it reduces, so they stay the same as training goes on.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def accumulate_node(parameter: torch.Tensor) -> Any:
    """Return the autograd node that accumulates a gradient; it lives while somebody holds it."""
    with requiring_grad([parameter]):
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


# ---- Modes and hooks ---------------------------------------------------------------------------


def is_in_join(ddp: DistributedDataParallel) -> bool:
    return bool(names.JOIN_CONFIG.of(ddp).enable)


def has_optimizer_in_backward(ddp: DistributedDataParallel) -> bool:
    """Whether backward steps an optimizer (`apply_optimizer_in_backward`)."""
    return any(map(names.OPTIMIZERS_IN_BACKWARD.is_in, ddp.parameters()))


def has_delayed_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether DDP reduces some parameters after backward (`delay_all_reduce_named_params`)."""
    return bool(names.DELAYED_PARAMS.of(ddp))


def awaiting_delayed(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """Return the parameters, by index, whose gradient makes DDP reduce the delayed ones."""
    if not has_delayed_parameters(ddp):
        return ()
    hook = names.DELAYED_HOOK.of(type(ddp))
    return tuple(
        p.index
        for tensor, p in reducer_parameters(ddp).items()
        for found in (names.TENSOR_HOOKS.of(tensor) or {}).values()
        if getattr(found, "__func__", None) is hook
    )


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a comm hook was registered, in Python or one of DDP's own in C++."""
    return bool(_log_of(ddp).get("comm_hook"))


def hook_states(ddp: DistributedDataParallel) -> list[Any]:
    """Return the states of comm hooks registered in Python, except None and process groups."""
    kinds = (type(None), torch.distributed.ProcessGroup)
    return [state for _, state in _registered_hooks(ddp) if not isinstance(state, kinds)]


def _registered_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the Python comm hooks of the module's current Reducer, and their states.

    Copies of a module have its list of hooks, but a Reducer without any.
    """
    return list(names.COMM_HOOKS.of(ddp)) if _log_of(ddp).get("comm_hook") else []


def _builtin_hook(ddp: DistributedDataParallel) -> Any:
    """Return the name of DDP's own comm hook in C++, which only the log keeps."""
    name = str(_log_of(ddp).get("comm_hook", ""))
    kinds = names.BUILTIN_HOOKS.get()
    return kinds.__members__.get(name.rpartition(".")[2]) if name.startswith("Builtin") else None


# ---- Another Reducer ---------------------------------------------------------------------------


def check_names_for_tuning(ddp: DistributedDataParallel) -> None:
    """Raise TorchDriftError now if a name that changing buckets in a step needs has moved."""
    for row in names.TABLE:
        if row.need is names.Need.REBUCKET and row.is_expected:
            if isinstance(row, names.ModuleName):
                row.get()
            elif row.owner == names.REDUCER.owner and row is not names.STATIC_ENQUEUED:
                row.of(ddp)
    names.GROUP_STORE.get()
    queue_callback()


def replace_reducer(
    ddp: DistributedDataParallel, buckets: Sequence[Sequence[int]], caps_bytes: Sequence[int]
) -> None:
    """Give `ddp` a new Reducer with these buckets, by parameter index, in launch order.

    It has the same options and comm hooks. Like any Reducer it rebuilds its buckets after its first
    iteration, with the limits `caps_bytes`, one for each bucket.
    """
    reduced = reducer_parameters(ddp)
    hooks, own_hook = _registered_hooks(ddp), _builtin_hook(ddp)
    names.CAPS_BYTES.set(ddp, list(caps_bytes))
    if names.BUCKET_CONFIG.is_expected:
        config = names.BUCKET_CONFIG.of(ddp)
        changed = dataclasses.replace(config, per_bucket_bytes_caps=tuple(caps_bytes))
        names.BUCKET_CONFIG.set(ddp, changed)
    names.HAS_REBUILT_BUCKETS.set(ddp, False)
    _drop_reducer(ddp)
    # DDP reverses the buckets that it is given.
    assigned = ([list(bucket) for bucket in reversed(buckets)], list(reversed(caps_bytes)))
    with names.ASSIGN_BUCKETS.replaced_by(lambda *_args, **_kwargs: assigned):
        make_reducer(ddp, list(reduced), list(reduced.values()))
    names.COMM_HOOKS.set(ddp, [])
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if own_hook is not None:
        names.REGISTER_BUILTIN_HOOK.of(ddp)(own_hook)


def _drop_reducer(ddp: DistributedDataParallel) -> None:
    """Free the buckets of `ddp` before new ones are made.

    `torch.compile(ddp)` makes functions with all attributes of `ddp`, by `functools.wraps`. They
    would keep the Reducer alive, and so would its logger, which they have too.
    """
    names.REMOVE_AUTOGRAD_HOOKS.of(ddp)()
    attributes = (names.REDUCER.name, names.LOGGER.name)
    for owner in gc.get_referrers(names.REDUCER.of(ddp)):
        if isinstance(owner, dict) and owner.keys() >= {*attributes, "process_group"}:
            owner.update(dict.fromkeys(attributes))


def make_reducer(
    ddp: DistributedDataParallel, tensors: Sequence[torch.Tensor], parameters: Sequence[Parameter]
) -> None:
    """Give `ddp` a Reducer for these, as DDP's constructor does; some may be frozen by now."""
    is_sparse = [parameter.is_sparse for parameter in parameters]
    named = {parameter.index: parameter.name for parameter in parameters}
    with requiring_grad(tensors):
        names.DDP_INIT_HELPER.of(ddp)(list(tensors), is_sparse, named, ddp.static_graph)
    if ddp.static_graph:
        names.STATIC_ENQUEUED.set(ddp, False)
        names.REDUCER_SET_STATIC.of(names.REDUCER.of(ddp))()
        names.LOGGER_SET_STATIC.of(names.LOGGER.of(ddp))()


def prepare_reducer(ddp: DistributedDataParallel) -> None:
    """Tell a Reducer that was made inside DDP's forward that this forward has begun."""
    names.PREPARE_FOR_FORWARD.of(names.REDUCER.of(ddp))()


# ---- Forwards ----------------------------------------------------------------------------------


def watch_ddp_forward(
    before: Callable[[DistributedDataParallel], None],
    after: Callable[[DistributedDataParallel, Any], None],
) -> None:
    """Call `before` and `after` around each DDP forward, with the DDP module.

    `after` also gets the backend of the innermost `torch.compile` around the forward, or None. DDP
    has no hook there, so the context that it opens around its forward is replaced by one that also
    opens it; DDP's python_reducer, which Dynamo traces through, does not open it. Idempotent.
    """
    original = names.INSIDE_DDP_FORWARD.of(DistributedDataParallel)
    if hasattr(original, "ddpopt_replaces"):
        return
    disable: Any = torch.compiler.disable  # it has no types
    current_callback, skip_code = names.FRAME_CALLBACK.get(), names.SKIP_CODE.get()

    def report(ddp: DistributedDataParallel, callback: Any) -> None:
        after(ddp, innermost_backend(callback) if callable(callback) else None)

    begin, end = disable(before), disable(report)

    class Watched:
        """The context of one forward."""

        def __init__(self, ddp: DistributedDataParallel) -> None:
            self.ddp = ddp
            self.original = original(ddp)

        def __enter__(self) -> None:
            begin(self.ddp)
            self.original.__enter__()

        def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
            is_handled = self.original.__exit__(kind, error, trace)
            if kind is None:
                end(self.ddp, current_callback())  # asked here: `disable` removes it
            return is_handled

    def inside_ddp_forward(self: DistributedDataParallel) -> Watched:
        return Watched(self)

    # Dynamo would compile these frames. With `disable` it would look at them in each step.
    for function in (Watched.__init__, Watched.__enter__, Watched.__exit__, inside_ddp_forward):
        skip_code(function.__code__)
    watched: Any = functools.wraps(original)(inside_ddp_forward)
    watched.ddpopt_replaces = original
    names.INSIDE_DDP_FORWARD.set(DistributedDataParallel, watched)


def forward_arguments(ddp: DistributedDataParallel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the DDP forward that is running."""
    code = names.RUN_DDP_FORWARD.of(DistributedDataParallel).__code__
    for frame in frames():
        found = frame.f_locals if frame.f_code is code else {}
        if found.get("self") is ddp and {"inputs", "kwargs"} <= found.keys():
            return found["inputs"], found["kwargs"]
    raise names.RUN_DDP_FORWARD.drift()
