"""DDP: how a module's Reducer forms buckets, which modes and hooks it has, and copies of it.

Process groups are here too.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _traced
from ddpopt._indices import ParameterIndex, numbered
from ddpopt._torch import names
from ddpopt._torch.dynamo import (
    compiled_functions,
    compiled_parts,
    context_of,
    context_of_copy,
    innermost_backend,
    unwrap_compiled,
)
from ddpopt._torch.hidden import calls_users_code
from ddpopt._torch.runtime import queue_callback, run_in_backward
from ddpopt.errors import PeerError, PlanError, TorchDriftError
from ddpopt.reducer import Parameter

_T = TypeVar("_T")


def active_ddp() -> DistributedDataParallel | None:
    return names.GET_ACTIVE_DDP.get(DistributedDataParallel)()


def live_ddp_modules() -> list[DistributedDataParallel]:
    """Return all DDP modules of this process, also those that wait for the garbage collector.

    One whose constructor has raised has no Reducer, and is left out.
    """
    # The class is looked for among the bases, since asking it whether it is one, an abstract class,
    # takes seconds for the objects of a large program.
    modules = [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]
    return [ddp for ddp in modules if names.REDUCER.find(ddp) is not None]


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
    has_rebuilt, reducer = names.HAS_REBUILT_BUCKETS.get(ddp), names.REDUCER.get(ddp)
    if not follows_arrival_order(ddp) or (has_rebuilt and reducer in _seen_before_rebuild):
        return False
    if not has_rebuilt:
        _seen_before_rebuild.add(reducer)
        return True
    try:
        return not _log_of(ddp).get(names.HAS_REBUILT.text)
    except TorchDriftError:
        return False


# Both are of Reducers, and end with them: a module may get another one.
_seen_before_rebuild: weakref.WeakSet[Any] = weakref.WeakSet()
# Reducers whose numbers of parameters are ours, and whose first steps `pass_first_steps` has taken.
_rebuilt_here: weakref.WeakSet[Any] = weakref.WeakSet()


def final_buckets(
    ddp: DistributedDataParallel,
) -> tuple[tuple[ParameterIndex, ...], ...] | None:
    """The Reducer's final buckets, None if DDP does not tell (yet).

    DDP's log has them from the step after the one that rebuilt the buckets. A Reducer that keeps
    its initial buckets, or was taken through its first steps here, reports them itself.

    Raises:
        TorchDriftError: the log numbers parameters otherwise than `reducer_parameters`.
    """
    are_final = not follows_arrival_order(ddp) or names.REDUCER.get(ddp) in _rebuilt_here
    logged = None if are_final else _logged_buckets(ddp)
    if logged is None and not are_final:
        return None
    index_of = {tensor: p.index for tensor, p in reducer_parameters(ddp).items()}
    buckets = _ask_buckets(ddp) or ()
    asked = tuple(tuple(index_of[tensor] for tensor in bucket) for bucket in buckets)
    if logged is None:
        return asked or None
    # `asked` is numbered by `reducer_parameters`, whose order may be a guess; the log has the
    # Reducer's own numbers.
    if not asked and sorted(itertools.chain(*logged)) != sorted(index_of.values()):
        # The Reducer does not tell whose numbers these are, and some parameters were frozen since.
        return None
    if asked and asked != logged:
        raise TorchDriftError(
            "DDP's buckets are not known: its log numbers parameters otherwise than was taken to "
            f"be the Reducer's order (buckets {logged} there, and {asked})"
        )
    return logged


def _logged_buckets(
    ddp: DistributedDataParallel,
) -> tuple[tuple[ParameterIndex, ...], ...] | None:
    """The rebuilt buckets as DDP's log has them, None without."""
    logged = _log_of(ddp).get(names.REBUILT_BUCKETS.text)
    if not logged:
        return None
    buckets = [map(int, bucket.split()) for bucket in logged.split(",")]
    return tuple(tuple(map(ParameterIndex, bucket)) for bucket in buckets)


def _log_of(ddp: DistributedDataParallel) -> Mapping[str, Any]:
    """Return what DDP has logged about the module's current Reducer."""
    return names.GET_LOGGING_DATA.get(ddp)()


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
    """The last step that DDP timed: it times the first ten, then every hundredth."""
    logged = _log_of(ddp)  # in nanoseconds
    return LoggedStep(
        number=int(logged.get(names.ITERATION.text, 0)),
        forward_s=logged.get(names.FORWARD_TIME.text, 0) / 1e9,
        backward_s=logged.get(names.BACKWARD_TIME.text, 0) / 1e9,
        communication_s=logged.get(names.COMM_TIME.text, 0) / 1e9,
        overlap_s=logged.get(names.OVERLAP_TIME.text, 0) / 1e9,
        num_bytes=int(logged.get(names.NUM_BYTES.text, 0)),
    )


def reducer_caps(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """The limits in bytes at which this module's Reducer closes buckets."""
    if caps := tuple(names.CAPS_BYTES.get(ddp)):
        return caps
    first, cap = int(names.FIRST_CAP_BYTES.get()), int(names.CAP_BYTES.get(ddp))
    return (first, cap) if names.CAP_IS_DEFAULT.get(ddp) and first < cap else (cap,)


# ---- Parameters --------------------------------------------------------------------------------


class _Reduced(NamedTuple):
    """A parameter, as it was when it was first asked for: the module may change afterwards."""

    tensor: torch.Tensor
    name: str
    is_sparse: bool


# The parameters of each Reducer, in its order. Plans made at different times have to speak of the
# same parameters, so names stay, whatever the module calls them later. Each ends with its Reducer.
_reduced: weakref.WeakKeyDictionary[Any, tuple[_Reduced, ...]]
_reduced = weakref.WeakKeyDictionary()


def reducer_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """The parameters that the Reducer reduces, in its order, shared ones once.

    They are those that required gradients when it was made, even if they are frozen now, have
    another name, or are in the module no more.

    Raises:
        TorchDriftError: it is not known in which order the Reducer has them.
    """
    reducer = names.REDUCER.get(ddp)
    if reducer in _reduced:
        return _describe(_reduced[reducer])
    buckets = _ask_buckets(ddp)
    if buckets is None:  # ask again next time; they are those that still require gradients
        trained = _required_tensors(ddp)
        return _describe(_name(ddp, _kept_order(ddp, trained) or trained))
    _reduced[reducer] = tuple(_name(ddp, _reducers_order(ddp, buckets)))
    return _describe(_reduced[reducer])


def trainable_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """The parameters that the Reducer would reduce if it were made now."""
    return _describe(_name(ddp, _required_tensors(ddp)))


def trains_any(ddp: DistributedDataParallel) -> bool:
    """Whether a parameter that the Reducer reduces requires a gradient now."""
    return any(tensor.requires_grad for tensor in reducer_parameters(ddp))


def reduced_or_trainable_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """The parameters of both kinds, in the module's order; those that left it come last."""
    wanted = dict.fromkeys([*reducer_parameters(ddp), *_required_tensors(ddp)])
    ordered = [tensor for tensor in ddp.module.parameters() if tensor in wanted]
    return _describe(_name(ddp, dict.fromkeys([*ordered, *wanted])))


def plain_names(names_of_module: Iterable[str]) -> dict[str, str]:
    """What parameters or buffers with these names are called, whatever is wrapped around modules.

    `layers._orig_mod.0.weight` is `layers.0.weight`: a module is the same one if it is compiled, or
    checkpointed by torch's wrapper, and ranks or plans may differ in that. Of several whose names
    would become equal each keeps its own.
    """
    wrappers = {names.ORIG_MOD.name, names.CHECKPOINT_WRAPPED.text}
    plain = {}
    for name in names_of_module:
        plain[name] = ".".join(part for part in name.split(".") if part not in wrappers)
    num_of = collections.Counter(plain.values())
    return {name: short if num_of[short] == 1 else name for name, short in plain.items()}


def names_now(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """The names by which the module has its parameters now.

    Those of `reducer_parameters` are `plain_names`, and may be older ones.
    """
    return {tensor: name for name, tensor in ddp.module.named_parameters()}


def _name(ddp: DistributedDataParallel, tensors: Iterable[torch.Tensor]) -> list[_Reduced]:
    """Find the names of tensors in the module, and make some for those that left it."""
    name_of, named = names_now(ddp), []
    plain_of = plain_names(name_of.values())
    for index, tensor in enumerate(tensors):
        name, is_sparse = name_of.get(tensor), False
        if name is not None:
            owner = ddp.module.get_submodule(name.rpartition(".")[0])
            is_sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and bool(owner.sparse)
        called = f"parameter {index}, replaced" if name is None else plain_of[name]
        named.append(_Reduced(tensor, called, is_sparse))
    return named


def _describe(reduced: Iterable[_Reduced]) -> dict[torch.Tensor, Parameter]:
    described: dict[torch.Tensor, Parameter] = {}
    for index, (tensor, name, is_sparse) in numbered(ParameterIndex, reduced):
        described[tensor] = Parameter(
            index=index,
            name=name,
            num_bytes=tensor.nbytes,
            group=f"{tensor.dtype} on {tensor.device}",
            is_sparse=is_sparse,
        )
    return described


_Buckets = tuple[tuple[torch.Tensor, ...], ...]


def _ask_buckets(ddp: DistributedDataParallel) -> _Buckets | None:
    """Ask the Reducer for the parameters of its buckets as they are now.

    None if it does not tell: a sparse gradient has no bucket before the first backward.
    """
    ask, mode = names.ZEROS_LIKE_BUCKETS.get(names.REDUCER.get(ddp)), names.FAKE_TENSOR_MODE.get()
    try:
        with mode(allow_non_fake_inputs=True):  # else it would allocate all buckets again
            return tuple(tuple(bucket.parameters()) for bucket in ask())
    except RuntimeError:
        return None


def _reducers_order(ddp: DistributedDataParallel, buckets: _Buckets) -> Sequence[torch.Tensor]:
    """The tensors in the Reducer's buckets in the order of its own list.

    Nobody has that list. DDP keeps one of the module's parameters from its construction, but a copy
    of a DDP module has the original's, and the module may have changed in between. So what is taken
    is compared with the buckets.
    """
    members = [tensor for bucket in buckets for tensor in bucket]
    logged = _logged_buckets(ddp) if follows_arrival_order(ddp) else None
    if logged is not None:  # rebuilt: the log has the numbers of what is in the buckets
        indices = [index for bucket in logged for index in bucket]
        if sorted(indices) == list(range(len(members))):
            return [tensor for _, tensor in sorted(zip(indices, members, strict=True), key=_first)]
    is_initial = not (follows_arrival_order(ddp) and names.HAS_REBUILT_BUCKETS.get(ddp))
    if is_initial and len({(tensor.dtype, tensor.device) for tensor in members}) == 1:
        # Formed in order of registration, and then reversed.
        return [tensor for bucket in reversed(buckets) for tensor in bucket]
    orders = [_kept_order(ddp, members), _in_order(_required_tensors(ddp), members)]
    for order in orders:
        if order is not None and _could_be_formed(buckets, order):
            return order
    if not is_initial and orders[0] is not None:
        # Rebuilt a moment ago, and not logged yet: `final_buckets` compares it with the log.
        return orders[0]
    raise TorchDriftError(
        "a Reducer has other parameters than the module in DistributedDataParallel, or in another "
        "order: make the DDP module after the last change of its parameters"
    )


def _first(pair: tuple[int, torch.Tensor]) -> int:
    return pair[0]


def _kept_order(
    ddp: DistributedDataParallel, members: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return tensors in the order in which DDP's constructor found them; None if it lacks one."""
    return _in_order(names.MODULE_PARAMETERS.get(ddp), members)


def _in_order(
    order: Iterable[torch.Tensor], members: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return `members` as `order` has them; None if it lacks one."""
    wanted = set(members)
    found = [tensor for tensor in order if tensor in wanted]
    return found if len(found) == len(wanted) else None


def _could_be_formed(buckets: _Buckets, order: Sequence[torch.Tensor]) -> bool:
    """Whether DDP may have formed these initial buckets of parameters in this order.

    In each they are in that order, and buckets are sorted by their first, from last to first.
    """
    index_of = {tensor: index for index, tensor in enumerate(order)}
    indices = [[index_of[tensor] for tensor in bucket] for bucket in buckets]
    firsts = [bucket[0] for bucket in indices]
    return all(bucket == sorted(bucket) for bucket in indices) and firsts == sorted(firsts)[::-1]


def _required_tensors(ddp: DistributedDataParallel) -> Sequence[torch.Tensor]:
    """Return what a Reducer that is made now would reduce, in its order."""
    parameters: Sequence[torch.Tensor] = names.BUILD_PARAMS.get(ddp)()[0]
    return parameters


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
    """The autograd node that accumulates a gradient; it lives while somebody holds it."""
    with requiring_grad([parameter]):
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


def accumulate_nodes(result: torch.Tensor) -> list[Any]:
    """The autograd nodes that accumulate the gradients of a result, each with its `variable`."""
    found = []
    nodes = [result.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # no other kind of node has it
            found.append(node)
        nodes += [before for before, _ in node.next_functions]
    return found


def gradient_hooks(leaf: torch.Tensor) -> list[dict[int, Any]]:
    """The hooks of a leaf that a backward calls, in dictionaries that may be written to."""
    rows = (names.TENSOR_HOOKS, names.ACCUMULATED_HOOKS)
    return [hooks for row in rows if (hooks := row.get(leaf)) is not None]


# ---- Modes and hooks ---------------------------------------------------------------------------


def is_in_join(ddp: DistributedDataParallel) -> bool:
    return bool(names.JOIN_CONFIG.get(ddp).enable)


def has_optimizer_in_backward(ddp: DistributedDataParallel) -> bool:
    """Whether backward steps an optimizer (`apply_optimizer_in_backward`)."""
    return any(map(names.OPTIMIZERS_IN_BACKWARD.is_in, ddp.parameters()))


def has_delayed_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether DDP reduces some parameters after backward (`delay_all_reduce_named_params`)."""
    return bool(names.DELAYED_PARAMS.get(ddp))


def awaiting_delayed(ddp: DistributedDataParallel) -> tuple[ParameterIndex, ...]:
    """The parameters, by index, whose gradient makes DDP reduce the delayed ones."""
    if not has_delayed_parameters(ddp):
        return ()
    hook = names.DELAYED_HOOK.get(type(ddp))
    return tuple(
        p.index
        for tensor, p in reducer_parameters(ddp).items()
        for found in (names.TENSOR_HOOKS.get(tensor) or {}).values()
        if getattr(found, "__func__", None) is hook
    )


class BucketReduction:
    """What reduces the buckets of a DDP module: an algorithm, or DDP's allreduce when that is gone.

    It is the state of the only comm hook that the module can get, and stays when an algorithm goes.
    DDP's Reducer keeps it alive from C++, where no cycles are collected, so it has weak references;
    copies of the module lose it.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        # The function that reduces a bucket to the future of its gradients, None while none does.
        self.find: Callable[[], Callable[[Any], Any] | None] = lambda: None
        ddp.register_comm_hook(self, BucketReduction.reduce)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def is_idle(self) -> bool:
        """Whether DDP's own allreduce runs, as if there were no comm hook."""
        return self.find() is None

    def reduce(self, bucket):  # type: ignore[no-untyped-def]  # DDP refuses Any
        reduce, ddp = self.find(), self._ddp()
        assert ddp is not None  # it is in its backward
        return allreduce_hook(ddp.process_group, bucket) if reduce is None else reduce(bucket)


def bucket_reduction(ddp: DistributedDataParallel) -> BucketReduction | None:
    """The one of this module, None if no algorithm has ever been attached to it."""
    states = (state for _, state in _registered_hooks(ddp) if isinstance(state, BucketReduction))
    return next(states, None)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a comm hook reduces gradients, in Python or one of DDP's own in C++."""
    reduction = bucket_reduction(ddp)
    is_registered = bool(_log_of(ddp).get(names.COMM_HOOK.text))
    return is_registered and (reduction is None or not reduction.is_idle)


def hook_states(ddp: DistributedDataParallel) -> list[Any]:
    """Return what comm hooks registered in Python may keep between buckets.

    It is the state that they were registered with, and what is bound to them. The state of an
    algorithm that was detached is none: DDP's allreduce keeps nothing.
    """
    found: list[Any] = []
    for hook, state in _registered_hooks(ddp):
        if not (isinstance(state, BucketReduction) and state.is_idle):
            found += [kept for kept in (state, *_bound_to(hook)) if _may_change(kept)]
    return found


def _bound_to(hook: Any) -> list[Any]:
    """What a hook keeps: its object, its partial arguments, the variables of its closure.

    Functions among them are looked into as well, each once: two may have each other.
    """
    if isinstance(hook, types.MethodType):
        return [hook.__self__]
    found: list[Any] = []
    seen: set[int] = set()
    pending = [hook]
    while pending:
        kept = pending.pop()
        if id(kept) in seen:
            continue
        seen.add(id(kept))
        if isinstance(kept, functools.partial):
            pending += [kept.func, *kept.args, *kept.keywords.values()]
        elif isinstance(kept, types.FunctionType):
            for cell in kept.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty one
                    pending.append(cell.cell_contents)
        else:
            found.append(kept)
    return found


# Types whose values cannot be changed from bucket to bucket.
_CONSTANTS = (
    *(type(None), int, float, str, type, torch.dtype, torch.device, dist.ProcessGroup),
    *(types.FunctionType, types.BuiltinFunctionType),
)


def _may_change(kept: Any) -> bool:
    """Whether something may be a state that a hook changes from bucket to bucket."""
    return not isinstance(kept, _CONSTANTS)


def runs_optimizers(ddp: DistributedDataParallel) -> bool:
    """Whether a comm hook is one of torch's that update parameters, by numbers of buckets."""
    hooks = (hook for hook, _ in _registered_hooks(ddp))
    return any(getattr(hook, "__module__", "").endswith(".ddp_zero_hook") for hook in hooks)


class _CommHook(NamedTuple):
    """A comm hook in Python, or with `hook` None one of DDP's own in C++, of the kind `state`."""

    hook: Any
    state: Any


def _possible_hooks(ddp: DistributedDataParallel) -> list[_CommHook]:
    """The comm hook of the module's Reducer; several where it is one of these, which is not told.

    A Reducer takes the first hook that it is given, and refuses all others. DDP's list has those as
    well, and its log has the last one. If A is registered, then B, B is refused:

        list [A, B], log "B", and A reduces gradients

    A copy of a module, or a loaded one, has the list of the original, but a Reducer that has none
    of these. If B is registered with a copy of a module that has A, B reduces gradients, and list
    and log are the same as above.
    """
    logged = str(_log_of(ddp).get(names.COMM_HOOK.text, ""))
    if not logged:
        return []
    hooks = [_CommHook(hook, state) for hook, state in names.COMM_HOOKS.get(ddp)]
    if logged.startswith("BuiltinCommHookType."):
        kinds = names.BUILTIN_HOOKS.get().__members__
        hooks.append(_CommHook(None, kinds[logged.rpartition(".")[2]]))
    # `__setstate__` sets the process group before all else, the constructor does so later.
    is_loaded = next(iter(vars(ddp))) == "process_group"
    # LIMIT: one of DDP's own in C++, registered before the first in Python, is in force unseen:
    # `_register_builtin_comm_hook`, which torch does not document, notes it nowhere but in the log.
    return hooks if is_loaded else hooks[:1]


def find_unknown_hook(ddp: DistributedDataParallel) -> str:
    """Say why it is not known which comm hook reduces gradients; "" if it is."""
    num_hooks = len(_possible_hooks(ddp))
    if num_hooks < 2:
        return ""
    return (
        f"of its {num_hooks} comm hooks one is in force, and DDP does not tell which: it is a copy "
        "of a module that had one, or was loaded; register hooks with the module that "
        "DistributedDataParallel's constructor makes"
    )


def _registered_hooks(ddp: DistributedDataParallel) -> list[_CommHook]:
    """Those of the possible comm hooks that are in Python."""
    return [each for each in _possible_hooks(ddp) if each.hook is not None]


# ---- Gradients that wait to be reduced ---------------------------------------------------------


def has_unfinished_reduction(ddp: DistributedDataParallel) -> bool:
    """Whether a backward has begun to reduce gradients, and DDP has not ended that."""
    try:
        names.CHECK_FINALIZED.get(names.REDUCER.get(ddp))()
    except TorchDriftError:
        raise
    except RuntimeError:
        return True
    return False


def may_hold_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether gradients may lie in the Reducer's buckets, where a new Reducer does not look."""
    return bool(ddp.gradient_as_bucket_view) and has_gradients(ddp)


def has_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether a parameter that is reduced has a gradient."""
    return any(parameter.grad is not None for parameter in reducer_parameters(ddp))


def last_forward_synced(ddp: DistributedDataParallel) -> bool:
    """Whether the last forward had gradients and was not under no_sync; true before the first."""
    return bool(names.SYNCS_BUFFERS.get(ddp))


def num_used_map_resets(ddp: DistributedDataParallel) -> int | None:
    """How often the Reducer has reduced, and cleared, its map of the parameters that were used.

    Backwards under no_sync mark parameters in the map as well; while this number is unchanged, the
    marks are still there. It is the version of the map's tensor, which clearing changes and marking
    does not. None if the Reducer does not look for unused parameters, or has a static graph.
    """
    if follows_arrival_order(ddp):
        return None
    used_map = names.LOCAL_USED_MAP.get(names.REDUCER.get(ddp))()
    return int(names.TENSOR_VERSION.get(used_map))


# ---- Another Reducer ---------------------------------------------------------------------------

# The arguments of DDP's constructor, and its properties that can be set, of which it is known what
# becomes of them with a new Reducer. One that is not here may be lost: see `find_unknown_setting`,
# and the test that compares with torch.
KNOWN_SETTINGS = frozenset(
    {
        # The DDP module or its tensors have it, and its Reducer has not.
        *("module", "device_ids", "output_device", "dim", "broadcast_buffers"),
        *("forward_sync_buffers", "init_sync", "check_reduction"),
        *("delay_all_reduce_named_params", "param_to_hook_all_reduce"),
        # DDP's own `_ddp_init_helper` reads it off the module for each Reducer.
        *("process_group", "device_mesh", "find_unused_parameters", "gradient_as_bucket_view"),
        *("skip_all_reduce_unused_params", "batched_grad_copy"),
        "lazy_bucket_allocation",  # since 2.15
        # `replace_reducer` and `make_reducer` set it on the new one.
        "static_graph",
        "require_manual_backward_finalization",  # since 2.15
        # The new Reducer is made for other buckets than these.
        *("bucket_cap_mb", "bucket_cap_mb_list"),
        # A `DDPMode` that keeps its Reducer.
        "mixed_precision",
    }
)


@functools.cache
def ddp_settings() -> Mapping[str, Any]:
    """What DDP's constructor takes and its properties set, with the constructor's defaults."""
    taken = inspect.signature(DistributedDataParallel.__init__).parameters.values()
    settings = {p.name: p.default for p in taken if p.name != "self"}
    for name, value in vars(DistributedDataParallel).items():
        if isinstance(value, property) and value.fset is not None:
            settings.setdefault(name, None)
    return settings


def find_unknown_setting(ddp: DistributedDataParallel) -> str:
    """One that a new Reducer might lose, as in `its option=True`; "" if there is none.

    It is one that torch has had since a release that we do not know, with another value than the
    default (of a property: None or False), or a value that the module does not show.
    """
    missing = object()
    for name, default in ddp_settings().items():
        if name not in KNOWN_SETTINGS:
            value = getattr(ddp, name, missing)
            if value is missing:
                return f"its {name}, which it may have been made with"
            if value is not default and value is not False and value != default:
                return f"its {name}={value!r}"
    return ""


def find_changed_setting(ddp: DistributedDataParallel) -> str:
    """One that the module has with another value than its Reducer, which a new one would have."""
    logged = _log_of(ddp)
    for name in ("find_unused_parameters", "gradient_as_bucket_view"):
        if name in logged and bool(logged[name]) != bool(getattr(ddp, name)):
            return name
    return ""


def check_names_for_tuning(ddp: DistributedDataParallel) -> None:
    """Raise TorchDriftError now if a name that changing buckets in a step needs has moved."""
    for row in names.TABLE:
        if row.need is names.Need.REBUCKET and row.is_expected:
            if row.is_global:
                row.get()
            elif row.owner == names.REDUCER.owner and row is not names.STATIC_ENQUEUED:
                row.get(ddp)
            elif row.owner == names.PREPARE_FOR_FORWARD.owner:
                row.get(names.REDUCER.get(ddp))
    names.SYNCS_BUFFERS.get(ddp)
    names.GROUP_STORE.get()
    queue_callback()


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def replace_reducer(
    ddp: DistributedDataParallel,
    buckets: Sequence[Sequence[ParameterIndex]],
    caps_bytes: Sequence[int],
    num_arrivals: Mapping[ParameterIndex, int] | None = None,
    settle: Callable[[Exception | None], None] = _raise,
) -> None:
    """Give `ddp` a new Reducer with these buckets, in launch order. Collective.

    It has the same comm hook and options, see `KNOWN_SETTINGS`. Its first steps are behind it, so
    that it takes part in nothing that the one before would not: see `pass_first_steps`.

    Whatever is raised, `ddp` has the buckets of before again, unless a PeerError says that it has
    none.

    Args:
        ddp: the module; no gradient waits to be reduced.
        buckets: what the Reducer is made with.
        caps_bytes: the limits, one for each bucket, at which it closes them when it rebuilds them.
        num_arrivals: how often each gradient arrives in a backward of a static graph, on this rank,
            by parameter index; without those that never do. None if that is not known on some rank:
            then DDP has yet to learn it, in the next step.
        settle: is called on all ranks behind each part that a rank does alone, with what this rank
            has raised in it; raises on all ranks what one has raised.
    """

    def do_alone(part: Callable[[], _T]) -> _T:
        # All ranks are to have the same Reducer: if one cannot go on, for want of memory for one,
        # no other may.
        problem, done = None, None
        try:
            done = part()
        except Exception as error:
            problem = error
        settle(problem)
        return done  # type: ignore[return-value]  # `settle` has raised the problem

    change = do_alone(lambda: _Change(ddp, buckets, caps_bytes, num_arrivals))
    # Whether all ranks are at the same place, so that the way back may communicate.
    are_together = True
    try:
        gradients = do_alone(lambda: change.make(change.after))
        are_together = False
        change.pass_first_steps(change.after, gradients)
        are_together = True
        do_alone(change.register_hook)
    except Exception as error:
        try:
            gradients = change.make(change.before)
            if are_together:
                change.pass_first_steps(change.before, gradients)
            change.register_hook()
        except Exception as failure:
            raise PeerError(
                "ddpopt was giving this DistributedDataParallel new buckets, which failed "
                f"({error}), and then those that it had, which failed too ({failure}): it has none "
                "now; do not go on, and start all ranks again"
            ) from error
        raise


class _Formation(NamedTuple):
    """How a Reducer gets its buckets."""

    # In launch order. None if the Reducer does not tell those that it has: one
    # like it forms them as DDP's constructor does.
    buckets: Sequence[Sequence[ParameterIndex]] | None
    # DDP's two attributes with the limits of buckets; the second one is None where torch lacks it.
    caps_bytes: Sequence[int]
    config: Any
    # How often each gradient arrives in the Reducer's first steps, in the order of arrival; None if
    # it takes these steps in training.
    num_arrivals: Mapping[ParameterIndex, int] | None


class _Change:
    """A change of a module's Reducer, and the way back.

    What can be found missing is found missing here, while the Reducer of before is in place.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        buckets: Sequence[Sequence[ParameterIndex]],
        caps_bytes: Sequence[int],
        num_arrivals: Mapping[ParameterIndex, int] | None,
    ) -> None:
        if unknown := find_unknown_hook(ddp):
            raise PlanError(unknown)
        for row in (names.AUTOGRAD_HOOK, names.PREPARE_FOR_BACKWARD, names.REBUILD_BUCKETS):
            row.get(names.REDUCER.get(ddp))
        self._ddp = ddp
        self._hooks = _possible_hooks(ddp)
        if any(each.hook is None for each in self._hooks):
            names.REGISTER_BUILTIN_HOOK.get(ddp)
        self._reduced = reducer_parameters(ddp)
        # The Reducer alone may hold the nodes that accumulate gradients, and so users' hooks.
        self._nodes = [accumulate_node(tensor) for tensor in self._reduced]
        # The parameters, by index, to which DDP gives a gradient.
        self._has_gradient: Collection[int] = range(len(self._reduced))
        if ddp.static_graph and num_arrivals is not None:
            self._has_gradient = used_in_static_graph(ddp)
        self.before = self._present_formation(num_arrivals)
        config = self.before.config
        if config is not None:
            config = dataclasses.replace(config, per_bucket_bytes_caps=tuple(caps_bytes))
        arrivals = self._arrivals(buckets, num_arrivals)
        self.after = _Formation(buckets, list(caps_bytes), config, arrivals)

    def _present_formation(self, num_arrivals: Mapping[ParameterIndex, int] | None) -> _Formation:
        ddp, buckets, arrivals = self._ddp, None, None
        if (asked := _ask_buckets(ddp)) is not None:
            buckets = []
            for bucket in asked:
                buckets.append([self._reduced[tensor].index for tensor in bucket])
            if not will_rebuild_buckets(ddp):
                arrivals = self._arrivals(buckets, num_arrivals)
        config = names.BUCKET_CONFIG.get(ddp) if names.BUCKET_CONFIG.is_expected else None
        return _Formation(buckets, list(names.CAPS_BYTES.get(ddp)), config, arrivals)

    def _arrivals(
        self,
        buckets: Sequence[Sequence[ParameterIndex]],
        num_arrivals: Mapping[ParameterIndex, int] | None,
    ) -> Mapping[ParameterIndex, int] | None:
        """The arrivals of a Reducer's first steps; None if it is to take these in training."""
        # One that looks for unused parameters keeps the buckets that it is made with.
        if not follows_arrival_order(self._ddp):
            return None
        arrival = list(itertools.chain.from_iterable(buckets))
        if not self._ddp.static_graph:
            return dict.fromkeys(arrival, 1)
        if num_arrivals is None:
            return None
        return {index: num_arrivals[index] for index in arrival if index in num_arrivals}

    def make(self, formation: _Formation) -> list[torch.Tensor | None]:
        """Make a Reducer in place of the present one; return gradients for its first steps."""
        ddp = self._ddp
        names.CAPS_BYTES.set(list(formation.caps_bytes), ddp)
        if formation.config is not None:
            names.BUCKET_CONFIG.set(formation.config, ddp)
        names.HAS_REBUILT_BUCKETS.set(False, ddp)
        if names.REDUCER.get(ddp) is not None:
            _drop_reducer(ddp)
        form: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if formation.buckets is not None:
            # DDP reverses the buckets that it is given.
            reversed_buckets = [list(bucket) for bucket in reversed(formation.buckets)]
            assigned = (reversed_buckets, list(reversed(formation.caps_bytes)))
            form = names.ASSIGN_BUCKETS.replaced_by(lambda *_args, **_kwargs: assigned)
        with form:
            make_reducer(ddp, list(self._reduced), list(self._reduced.values()))
        gradients: list[torch.Tensor | None] = []
        arriving = formation.num_arrivals or {}
        for tensor, parameter in self._reduced.items():
            is_used = parameter.index in arriving and parameter.index in self._has_gradient
            gradients.append(torch.zeros_like(tensor) if is_used else None)
        return gradients

    def pass_first_steps(
        self, formation: _Formation, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Take the new Reducer through its first steps, if these are known. Collective."""
        if formation.num_arrivals is not None:
            pass_first_steps(self._ddp, formation.num_arrivals, gradients)

    def register_hook(self) -> None:
        """Give the new Reducer the comm hook of the one before."""
        names.COMM_HOOKS.set([], self._ddp)
        for hook, state in self._hooks:
            if hook is None:
                names.REGISTER_BUILTIN_HOOK.get(self._ddp)(state)
            else:
                self._ddp.register_comm_hook(state, hook)
        manual = "require_manual_backward_finalization"
        if getattr(self._ddp, manual, False):
            # The module remembers it; setting it tells the Reducer.
            setattr(self._ddp, manual, True)


def _drop_reducer(ddp: DistributedDataParallel) -> None:
    """Free the buckets of `ddp` before new ones are made.

    `torch.compile(ddp)` makes functions with all attributes of `ddp`, by `functools.wraps`. They
    would keep the Reducer alive, and so would its logger, which they have too.
    """
    names.REMOVE_AUTOGRAD_HOOKS.get(ddp)()
    reducer, attributes = names.REDUCER.get(ddp), (names.REDUCER.name, names.LOGGER.name)
    for owner in gc.get_referrers(reducer):
        if isinstance(owner, dict) and owner.get(names.REDUCER.name) is reducer:
            # Of dicts, those of the module and of functions. A program may have made others.
            owners = gc.get_referrers(owner)
            if any(getattr(each, "__dict__", None) is owner for each in owners):
                owner.update({name: None for name in attributes if name in owner})


def make_reducer(
    ddp: DistributedDataParallel, tensors: Sequence[torch.Tensor], parameters: Sequence[Parameter]
) -> None:
    """Give `ddp` a Reducer for these, as DDP's constructor does; some may be frozen by now."""
    is_sparse = [parameter.is_sparse for parameter in parameters]
    named = {parameter.index: parameter.name for parameter in parameters}
    with requiring_grad(tensors):
        names.DDP_INIT_HELPER.get(ddp)(list(tensors), is_sparse, named, ddp.static_graph)
    _reduced[names.REDUCER.get(ddp)] = tuple(
        _Reduced(tensor, parameter.name, parameter.is_sparse)
        for tensor, parameter in zip(tensors, parameters, strict=True)
    )
    if ddp.static_graph:
        names.STATIC_ENQUEUED.set(False, ddp)
        names.REDUCER_SET_STATIC.get(names.REDUCER.get(ddp))()
        names.LOGGER_SET_STATIC.get(names.LOGGER.get(ddp))()


def pass_first_steps(
    ddp: DistributedDataParallel,
    num_arrivals: Mapping[ParameterIndex, int],
    gradients_of_zeros: Sequence[torch.Tensor | None],
) -> None:
    """Take a new Reducer to where any other is from its third step on. Collective.

    Each Reducer does something once. In its first backward it notes the order in which gradients
    arrive, and the next forward with gradients, also that of an evaluation, forms buckets by it and
    has rank 0 broadcast them. With a static graph a backward comes before that, in which it counts
    how often each gradient arrives, and reduces them all at the end. In the first steps of a
    training all ranks do the same. Later one of them may run a forward alone, or differentiate by
    its input, so here these steps are taken while all ranks are together: gradients of zeros
    arrive, and are reduced. None of the program's hooks runs, and its gradients stay.

    Args:
        ddp: a module with a new Reducer, without comm hooks.
        num_arrivals: how often each gradient arrives in a backward, by parameter index, in the
            order in which buckets are to be formed. Without those that never arrive on this rank,
            as there may be in a static graph.
        gradients_of_zeros: what arrives, by parameter index; None for those to which DDP does not
            give the ranks' average.
    """
    reducer = names.REDUCER.get(ddp)
    arrive = names.AUTOGRAD_HOOK.get(reducer)
    begin_backward = names.PREPARE_FOR_BACKWARD.get(reducer)
    tensors = list(reducer_parameters(ddp))
    gradients = [tensor.grad for tensor in tensors]

    def arrive_all() -> None:
        for index, num in num_arrivals.items():
            for _ in range(num):
                arrive(index)

    try:
        for tensor, zeros in zip(tensors, gradients_of_zeros, strict=True):
            tensor.grad = zeros
        if ddp.static_graph:
            prepare_reducer(ddp)
            begin_backward([])
            arrive_all()  # are counted
            names.DELAY_ALL_REDUCE.get(reducer)()
            names.STATIC_ENQUEUED.set(True, ddp)
            prepare_reducer(ddp)
        begin_backward([])
        # Within a backward, at whose end the Reducer waits for its allreduces.
        run_in_backward(arrive_all)
    finally:
        for tensor, kept in zip(tensors, gradients, strict=True):
            tensor.grad = kept
    is_rebuilt = names.REBUILD_BUCKETS.get(reducer)()
    assert is_rebuilt, "it has noted an order, and follows it"
    names.HAS_REBUILT_BUCKETS.set(True, ddp)
    _seen_before_rebuild.add(reducer)
    _rebuilt_here.add(reducer)


def awaits_static_graph(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has yet to learn, in the next backward, which gradients a static graph has."""
    return bool(ddp.static_graph and not names.STATIC_ENQUEUED.get(ddp))


def used_in_static_graph(ddp: DistributedDataParallel) -> set[int]:
    """The parameters, by index, that got a gradient on some rank in the first backward.

    One for which a function of the program's returns None is not among them, though this arrives:
    DDP leaves it without a gradient.
    """
    num_ranks = names.LOCAL_USED_MAP.get(names.REDUCER.get(ddp))().tolist()
    return {index for index, num in enumerate(num_ranks) if num}


def ready_ns(ddp: DistributedDataParallel) -> list[int]:
    """When the Reducer last took each gradient for ready to be reduced, by parameter index.

    In nanoseconds since the forward before it; it is 0 in a static graph's first backward.
    """
    return list(names.BACKWARD_STATS.get(names.REDUCER.get(ddp))())


def prepare_reducer(ddp: DistributedDataParallel) -> None:
    """Tell a Reducer that was made inside DDP's forward that this forward has begun."""
    names.PREPARE_FOR_FORWARD.get(names.REDUCER.get(ddp))()


# ---- Forwards ----------------------------------------------------------------------------------


class Forward(NamedTuple):
    """A forward of a DDP module: its arguments, on DDP's device, and what compiles around it.

    `callback` is Dynamo's in the innermost `torch.compile` around the forward, not callable outside
    of any.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    callback: Any

    @property
    def backend(self) -> Any:
        """The backend of the innermost `torch.compile` around the forward, None outside of any."""
        return innermost_backend(self.callback) if callable(self.callback) else None


def watch_ddp_forward(
    before: Callable[[DistributedDataParallel, Forward], None],
    after: Callable[[DistributedDataParallel, Forward], None],
) -> None:
    """Call `before` and `after` around each DDP forward. Idempotent.

    DDP's own hooks run before it has moved the arguments to its device, and at none of them is it
    known which `torch.compile` is around the forward. So the method in which DDP calls its module
    is replaced.
    """
    original = names.RUN_DDP_FORWARD.get(DistributedDataParallel)
    if hasattr(original, "ddpopt_replaces"):
        return
    run_ddp_forward = calls_users_code(
        _traced.around_ddp_forward(
            original,
            lambda ddp, *forward: before(ddp, Forward(*forward)),
            lambda ddp, *forward: after(ddp, Forward(*forward)),
            names.FRAME_CALLBACK.get(),
        )
    )
    watched: Any = functools.wraps(original)(run_ddp_forward)
    watched.ddpopt_replaces = original
    names.RUN_DDP_FORWARD.set(watched, DistributedDataParallel)


# ---- Copies ------------------------------------------------------------------------------------


class CompiledCopy(NamedTuple):
    """What was made: `model`, the `ddp` in it, and the copy of each module below."""

    model: nn.Module
    ddp: DistributedDataParallel
    copies: dict[nn.Module, nn.Module]
    memo: dict[int, Any]  # as `copy.deepcopy` keeps it: all copies, by the originals' ids


def copy_compiled(
    model: nn.Module, deep_copy: Callable[[Any, dict[int, Any]], Any], *, has_own_code: bool
) -> CompiledCopy:
    """A copy of a compiled DDP model with a Reducer of its own.

    Options are the same, comm hooks are left out, and nothing is communicated. Dynamo runs the
    same compiled code for both, unless the copy `has_own_code`, compiled for the copy alone.
    """
    parts = compiled_parts(model)
    contexts = {id(part): context_of_copy(part) if has_own_code else part for part in parts}
    ddp = unwrap_compiled(model)
    assert isinstance(ddp, DistributedDataParallel)
    copied_ddp: DistributedDataParallel = object.__new__(type(ddp))
    copies: dict[int, Any] = {**contexts, id(ddp): copied_ddp}  # by the original's id
    module = deep_copy(ddp.module, copies)
    _copy_ddp(ddp, copied_ddp, module, lambda tensor: deep_copy(tensor, copies))
    optimized = names.OPTIMIZED_MODULE.get()
    modules = {part: copies[id(part)] for part in ddp.modules() if id(part) in copies}
    for part, copied in modules.items():
        if not isinstance(part, optimized):  # those compile themselves
            for name, function in compiled_functions(part).items():
                compile_alike = contexts[id(context_of(function))]
                vars(copied)[name] = compile_alike(rebound(function, copies))
    outer = None if model is ddp else contexts[id(names.DYNAMO_CTX.get(model))]
    made = copied_ddp if outer is None else outer(copied_ddp)
    copies[id(model)] = made
    return CompiledCopy(made, copied_ddp, modules, copies)


def _copy_ddp(
    ddp: DistributedDataParallel,
    copied_ddp: DistributedDataParallel,
    module: nn.Module,
    copy_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Make `copied_ddp` a DDP module like `ddp` around `module`.

    DDP's constructor would communicate. `copy_of` copies a parameter that the Reducer has and
    `ddp.module` has no more.
    """
    state = vars(ddp)
    copied = {name: copy.copy(value) for name, value in state.items() if isinstance(value, dict)}
    vars(copied_ddp).update({**state, **copied})
    copied_ddp.module = module
    names.COMM_HOOKS.set([], copied_ddp)
    names.HAS_REBUILT_BUCKETS.set(False, copied_ddp)
    for row in (names.SYNCS_GRADIENTS, names.SYNCS_BUFFERS):
        row.set(True, copied_ddp)
    for row in (names.REDUCER, names.LOGGER, names.COMPILED_CALL):
        row.set(None, copied_ddp)
    ignored = names.IGNORED_PARAMETERS.get(ddp)
    own = [parameter for name, parameter in module.named_parameters() if name not in ignored]
    names.MODULE_PARAMETERS.set(own, copied_ddp)
    names.ASSIGN_BUFFERS.get(copied_ddp)()
    copied_by_name = dict(module.named_parameters(remove_duplicate=False))
    # By the module's own names, which the copy has too.
    name_of, tensors = names_now(ddp), []
    for tensor in (reduced := reducer_parameters(ddp)):
        is_there = tensor in name_of
        tensors.append(copied_by_name[name_of[tensor]] if is_there else copy_of(tensor))
    make_reducer(copied_ddp, tensors, list(reduced.values()))


def keep_local(ddp: DistributedDataParallel) -> None:
    """Keep a module that was just made from communicating, in forward and in backward."""
    names.SYNCS_GRADIENTS.set(False, ddp)
    names.SYNCS_BUFFERS.set(False, ddp)
    if ddp.static_graph:  # its first backward would allreduce despite no_sync
        names.STATIC_ENQUEUED.set(True, ddp)


def rebound(function: Callable[..., Any], copies: Mapping[int, Any]) -> Callable[..., Any]:
    """The function that `torch.compile` was given; for an original's method, its copy's."""
    original = names.ORIG_CALLABLE.get(function)
    # `torch.compile` puts a function around a method of a class that Dynamo skips, since torch 2.15
    # also around that of `DistributedDataParallel.compile`. It will do so for the copy's again.
    if inspect.isfunction(original):
        wrapping_code = names.WRAP_INLINE.get().__code__.co_consts
        if original.__code__ in wrapping_code:
            original = original.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
    if not inspect.ismethod(original):
        return original
    return types.MethodType(original.__func__, copies.get(id(original.__self__), original.__self__))


_HOOKS = (names.FORWARD_PRE_HOOKS, names.FORWARD_HOOKS)


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that run before and after the forward of a module and its submodules."""
    return [hook for m in module.modules() for row in _HOOKS for hook in row.get(m).values()]


def replica(
    module: nn.Module,
    tensors: Mapping[torch.Tensor, torch.Tensor],
    hooks: Mapping[int, Callable[..., Any]],
) -> nn.Module:
    """A copy of a module's structure with other tensors and hooks, all else shared.

    It is like those of `torch.nn.DataParallel`, except that its `parameters()` works. `tensors` has
    all parameters; buffers that are not in it are kept. `hooks` has the replacement for each of
    `forward_hooks`, by the hook's `id`.
    """
    copies = {m: names.REPLICATE.get(m)() for m in module.modules()}
    for original, copied in copies.items():
        children = names.MODULES.get(original)  # `named_children` has shared ones once
        names.MODULES.get(copied).update(
            {n: None if child is None else copies[child] for n, child in children.items()}
        )
        buffers = names.BUFFERS.get(copied)
        buffers.update({n: tensors.get(b, b) for n, b in buffers.items() if b is not None})
        parameters = names.PARAMETERS.get(original).items()
        own = {name: None if p is None else tensors[p] for name, p in parameters}
        for name, tensor in own.items():
            if tensor is not None:
                setattr(copied, name, tensor)  # RNNs rebuild their list of weights when one is set
        names.PARAMETERS.set(own, copied)
        for row in _HOOKS:
            if found := row.get(original):
                row.set(type(found)((key, hooks[id(h)]) for key, h in found.items()), copied)
    return copies[module]


def compiling_replicas(num_devices: int) -> contextlib.AbstractContextManager[None]:
    """Compile, in a block, what is to run on this many devices concurrently.

    A function may be compiled as often on each device as otherwise on one. Hooks that come or go
    are noticed. Backward is compiled with its forward, not concurrently by autograd's threads.
    """
    return names.settings(
        {
            names.RECOMPILE_LIMIT: names.RECOMPILE_LIMIT.get() * num_devices,
            names.SKIP_HOOK_GUARDS: False,
            names.COMPILE_BACKWARD_NOW: True,
        }
    )


# ---- Process groups ----------------------------------------------------------------------------


@contextlib.contextmanager
def making_groups_apart(name: str) -> Iterator[None]:
    """Let some ranks make a process group of this name in a block, with no part for the others.

    torch names a group that only its members make by the number of groups that the rank is in.
    That differs between ranks, which then wait for each other until their timeout; and it recurs
    when groups are destroyed: then ranks look for connections that are gone. And if
    `init_process_group` was given a device, NCCL splits a group off the default one, for which all
    of its ranks have to call; without the device it makes a group by itself, when it is first used.
    """
    named = names.GROUP_NAME.replaced_by(lambda *_args, **_kwargs: name)
    with named, names.GROUP_DEVICE.replaced_by(None, dist.group.WORLD):
        yield


def group_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what communicates tensors of a device on a group, such as `gloo`.

    `dist.get_backend` gives the name by which the group was made: `cpu:gloo`, or `undefined`.
    """
    return str(names.GROUP_BACKEND.get(group)(device).name())


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The time after which a collective on `group` fails, a `datetime.timedelta`."""
    return names.GROUP_TIMEOUT.get(names.GROUP_BACKEND.get(group)(device).options)


def store_of(group: dist.ProcessGroup) -> Any:
    """The store through which the ranks of a group found each other; None if torch knows of none.

    So it is with a group that somebody else made, as torchft's is.
    """
    find = names.GROUP_STORE.get()
    try:
        return find(group)
    except (KeyError, ValueError):  # it is not in torch's table of groups
        return None
