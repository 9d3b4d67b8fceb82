"""Giving a DDP module another Reducer, with other buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt._indices import ParameterIndex
from ddpopt._torch import names
from ddpopt._torch.buckets import note_first_steps_taken, will_rebuild_buckets
from ddpopt._torch.modes import find_unknown_hook, possible_hooks
from ddpopt._torch.parameters import (
    accumulate_node,
    keep_parameters,
    reducer_parameters,
    requiring_grad,
)
from ddpopt._torch.reducer import (
    ask_buckets,
    follows_arrival_order,
    log_of,
    prepare_reducer,
    used_in_static_graph,
)
from ddpopt._torch.runtime import queue_callback, run_in_backward
from ddpopt.errors import PeerError, PlanError
from ddpopt.reducer import Parameter

_T = TypeVar("_T")


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
    """The names of all settings of a DDP module, and their defaults.

    Settings are the constructor's arguments, and properties that can be set on the module later,
    whose default is not known: None.
    """
    taken = inspect.signature(DistributedDataParallel.__init__).parameters.values()
    settings = {p.name: p.default for p in taken if p.name != "self"}
    for name, value in vars(DistributedDataParallel).items():
        if isinstance(value, property) and value.fset is not None:
            settings.setdefault(name, None)
    return settings


def find_unknown_setting(ddp: DistributedDataParallel) -> str:
    """A setting of DDP's that a new Reducer might lose, as in `its option=True`; "" if none.

    That is a setting of a release of torch that we do not know, if it has another value than the
    default (of a property: None or False), or if the module does not show its value.
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
    """A setting that was changed on the module after its Reducer was made; "" if none.

    A new Reducer would have the changed value. Of the options that it reads off the module,
    DDP's log has these two, as the present Reducer was made with them.
    """
    logged = log_of(ddp)
    for name in ("find_unused_parameters", "gradient_as_bucket_view"):
        if name in logged and bool(logged[name]) != bool(getattr(ddp, name)):
            return name
    return ""


def check_names_for_tuning(ddp: DistributedDataParallel) -> None:
    """Raise TorchDriftError if a name that changing buckets in a step needs has moved.

    The tuner asks as it starts, when it can still do without; in a step the other ranks would wait.
    """
    # What rows say of the kind of object that has their name.
    of_ddp, of_reducer = names.REDUCER.owner, names.PREPARE_FOR_FORWARD.owner
    for row in names.TABLE:
        if row.need is names.Need.REBUCKET and row.is_expected:
            if row.is_global:
                row.get()
            # Of all DDP modules those with a static graph alone have STATIC_ENQUEUED.
            elif row.owner == of_ddp and row is not names.STATIC_ENQUEUED:
                row.get(ddp)
            elif row.owner == of_reducer:
                row.get(names.REDUCER.get(ddp))
    # Three more, whose rows name other needs; nothing is called or queued by looking them up.
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

    The new Reducer has the same comm hook and options, see `KNOWN_SETTINGS`. It has been taken
    through its first steps, in which Reducers communicate once more than later: see
    `pass_first_steps`.

    If this raises, `ddp` has its former buckets again, unless a PeerError says that it has none.

    Args:
        ddp: the module; no gradient waits to be reduced.
        buckets: what the Reducer is made with.
        caps_bytes: the limits, one for each bucket, at which it closes them when it rebuilds them.
        num_arrivals: how often each gradient arrives in a backward of a static graph, on this rank,
            by parameter index; without those that never do. None if that is not known on some rank:
            then DDP has yet to learn it, in the next step.
        settle: is called on all ranks after each part that a rank does alone, with the error that
            this rank had in that part, or None; raises on all ranks if one had an error.
    """

    def do_alone(part: Callable[[], _T]) -> _T:
        # All ranks are to have the same buckets: if one rank cannot make the Reducer, for want of
        # memory, no other rank may.
        problem, done = None, None
        try:
            done = part()
        except Exception as error:
            problem = error
        settle(problem)
        return done  # type: ignore[return-value]  # `settle` has raised the problem

    # A program may ask in inference mode, whose tensors could be no buckets in training.
    with torch.inference_mode(False):
        change = do_alone(lambda: Change(ddp, buckets, caps_bytes, num_arrivals))
        # Whether all ranks are at the same point, so that the way back may communicate. After an
        # error in the first steps, which communicate, another rank may be anywhere in them.
        are_together = True
        try:
            gradients = do_alone(lambda: change.make(change.after))
            are_together = False
            change.pass_known_first_steps(change.after, gradients)
            are_together = True
            # Only now, so that the program's hook sees none of the first steps' zeros.
            do_alone(change.register_hook)
        except Exception as error:
            try:
                gradients = change.make(change.before)
                if are_together:  # else it takes its first steps in training, as any new Reducer
                    change.pass_known_first_steps(change.before, gradients)
                change.register_hook()
            except Exception as failure:
                raise PeerError(
                    "ddpopt was giving this DistributedDataParallel new buckets, which failed "
                    f"({error}), and then those that it had, which failed too ({failure}): it has "
                    "none now; do not go on, and start all ranks again"
                ) from error
            raise


class Formation(NamedTuple):
    """How a Reducer that `Change` makes gets its buckets."""

    # In launch order. None if the present Reducer does not tell its buckets: then DDP forms a new
    # one's as its constructor does.
    buckets: Sequence[Sequence[ParameterIndex]] | None
    # The limits of buckets, as DDP keeps them in two attributes; `config` is None where torch lacks
    # the second attribute.
    caps_bytes: Sequence[int]
    config: Any
    # How often each gradient arrives in the Reducer's first steps, in the order of arrival; None if
    # the Reducer is to take these steps in training.
    num_arrivals: Mapping[ParameterIndex, int] | None


class Change:
    """A change of a module's Reducer, to `after`, and the way back, to `before`.

    If torch lacks a name that the change needs, the constructor raises, while the former Reducer is
    in place.
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
        # Names that are needed of the new Reducer, looked up on the present one.
        for method in (names.AUTOGRAD_HOOK, names.PREPARE_FOR_BACKWARD, names.REBUILD_BUCKETS):
            method.get(names.REDUCER.get(ddp))
        self._ddp = ddp
        self._hooks = possible_hooks(ddp)  # one or none, as nothing about it is unknown
        if any(hook.hook is None for hook in self._hooks):  # as `register_hook` will
            names.REGISTER_BUILTIN_HOOK.get(ddp)
        self._reduced = reducer_parameters(ddp)
        # The nodes that accumulate gradients, and may have users' hooks. They are held here, since
        # nothing but the former Reducer may hold them.
        self._nodes = [accumulate_node(tensor) for tensor in self._reduced]
        # The parameters, by index, to which DDP gives a gradient in a step. For a static graph the
        # present Reducer tells, unless it has yet to learn that.
        self._has_gradient: Collection[int] = range(len(self._reduced))
        if ddp.static_graph and num_arrivals is not None:
            self._has_gradient = used_in_static_graph(ddp)
        self.before = self._present_formation(num_arrivals)
        config = self.before.config
        if config is not None:
            config = dataclasses.replace(config, per_bucket_bytes_caps=tuple(caps_bytes))
        arrivals = self._arrivals_in_first_steps(buckets, num_arrivals)
        self.after = Formation(buckets, list(caps_bytes), config, arrivals)

    def _present_formation(self, num_arrivals: Mapping[ParameterIndex, int] | None) -> Formation:
        """The `before`: how to make another Reducer with the buckets that the present one has."""
        ddp, buckets, arrivals = self._ddp, None, None
        # A Reducer with sparse gradients does not tell its buckets before its first backward.
        if (asked := ask_buckets(ddp)) is not None:
            buckets = []
            for bucket in asked:
                buckets.append([self._reduced[tensor].index for tensor in bucket])
            # A Reducer that has yet to form its buckets takes its first steps in training.
            if not will_rebuild_buckets(ddp):
                arrivals = self._arrivals_in_first_steps(buckets, num_arrivals)
        config = names.BUCKET_CONFIG.get(ddp) if names.BUCKET_CONFIG.is_expected else None
        return Formation(buckets, list(names.CAPS_BYTES.get(ddp)), config, arrivals)

    def _arrivals_in_first_steps(
        self,
        buckets: Sequence[Sequence[ParameterIndex]],
        num_arrivals: Mapping[ParameterIndex, int] | None,
    ) -> Mapping[ParameterIndex, int] | None:
        """How often each gradient is to arrive in the first steps of a Reducer with these buckets.

        A Reducer forms its buckets from the order of arrival in its first steps. `pass_first_steps`
        takes those, with gradients that arrive bucket by bucket: each once, or, with a static
        graph, as often as in a step of the training, which is `num_arrivals`. None if the Reducer
        takes its first steps in training.
        """
        # A Reducer that looks for unused parameters keeps the buckets that it is made with.
        if not follows_arrival_order(self._ddp):
            return None
        arrival = list(itertools.chain.from_iterable(buckets))
        if not self._ddp.static_graph:
            return dict.fromkeys(arrival, 1)
        if num_arrivals is None:
            return None  # DDP has yet to learn it
        return {index: num_arrivals[index] for index in arrival if index in num_arrivals}

    def make(self, formation: Formation) -> list[torch.Tensor | None]:
        """Make a Reducer in place of the present one; return gradients for its first steps.

        They are zeros, by parameter index, and None where `pass_first_steps` wants none. They are
        made here, where a rank whose memory does not suffice keeps no other rank waiting.
        """
        ddp = self._ddp
        names.CAPS_BYTES.set(list(formation.caps_bytes), ddp)
        if formation.config is not None:
            names.BUCKET_CONFIG.set(formation.config, ddp)
        names.HAS_REBUILT_BUCKETS.set(False, ddp)
        if names.REDUCER.get(ddp) is not None:  # None on the way back from a failure in here
            _drop_reducer(ddp)
        assigning: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if formation.buckets is not None:
            # DDP reverses the buckets that it is given.
            reversed_buckets = [list(bucket) for bucket in reversed(formation.buckets)]
            assigned = (reversed_buckets, list(reversed(formation.caps_bytes)))
            assigning = names.ASSIGN_BUCKETS.replaced_by(lambda *_args, **_kwargs: assigned)
        with assigning:
            make_reducer(ddp, list(self._reduced), list(self._reduced.values()))
        gradients: list[torch.Tensor | None] = []
        arriving = formation.num_arrivals or {}
        for tensor, parameter in self._reduced.items():
            # One that arrives may be without a gradient: `autograd.Function`s may return None.
            is_used = parameter.index in arriving and parameter.index in self._has_gradient
            gradients.append(torch.zeros_like(tensor) if is_used else None)
        return gradients

    def pass_known_first_steps(
        self, formation: Formation, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Take the new Reducer through its first steps, if these are known. Collective."""
        if formation.num_arrivals is not None:
            pass_first_steps(self._ddp, formation.num_arrivals, gradients)

    def register_hook(self) -> None:
        """Give the new Reducer the comm hook of the one before."""
        names.COMM_HOOKS.set([], self._ddp)  # to which registering adds
        for hook, state in self._hooks:
            if hook is None:
                names.REGISTER_BUILTIN_HOOK.get(self._ddp)(state)
            else:
                self._ddp.register_comm_hook(state, hook)
        manual = "require_manual_backward_finalization"
        if getattr(self._ddp, manual, False):
            # The module keeps this setting, and tells a Reducer of it only when it is set.
            setattr(self._ddp, manual, True)


def _drop_reducer(ddp: DistributedDataParallel) -> None:
    """Free the buckets of `ddp` before new ones are made.

    `torch.compile(ddp)` makes functions with all attributes of `ddp`, by `functools.wraps`. These
    would keep the old Reducer alive, and so would the Reducer's logger, another of the attributes:
    both become None in the module and in those functions.
    """
    names.REMOVE_AUTOGRAD_HOOKS.get(ddp)()
    reducer, attributes = names.REDUCER.get(ddp), (names.REDUCER.name, names.LOGGER.name)
    for owner in gc.get_referrers(reducer):
        if isinstance(owner, dict) and owner.get(names.REDUCER.name) is reducer:
            # Only if the dict is the `__dict__` of the module or of a function: a program may have
            # dicts of its own that hold the Reducer.
            owners = gc.get_referrers(owner)
            if any(getattr(each, "__dict__", None) is owner for each in owners):
                owner.update({name: None for name in attributes if name in owner})


def make_reducer(
    ddp: DistributedDataParallel, tensors: Sequence[torch.Tensor], parameters: Sequence[Parameter]
) -> None:
    """Give `ddp` a Reducer for these tensors, each with its description, as DDP's constructor does.

    Parameters that were frozen since are reduced too, as by the Reducer before.
    """
    is_sparse = [parameter.is_sparse for parameter in parameters]
    named = {parameter.index: parameter.name for parameter in parameters}
    with requiring_grad(tensors):
        names.DDP_INIT_HELPER.get(ddp)(list(tensors), is_sparse, named, ddp.static_graph)
    keep_parameters(names.REDUCER.get(ddp), tensors, parameters)
    if ddp.static_graph:  # which DDP's constructor tells the Reducer after that helper
        names.STATIC_ENQUEUED.set(False, ddp)
        names.REDUCER_SET_STATIC.get(names.REDUCER.get(ddp))()
        names.LOGGER_SET_STATIC.get(names.LOGGER.get(ddp))()


def pass_first_steps(
    ddp: DistributedDataParallel,
    num_arrivals: Mapping[ParameterIndex, int],
    gradients_of_zeros: Sequence[torch.Tensor | None],
) -> None:
    """Take a new Reducer to where any other is from its third step on. Collective.

    What a Reducer does once: in its first backward it notes the order in which gradients arrive,
    and in the next forward with gradients, also that of an evaluation, it forms buckets by that
    order and has rank 0 broadcast them. With a static graph there is one more backward in front, in
    which the Reducer counts how often each gradient arrives, and reduces all gradients at the end.
    In the first steps of a training all ranks do the same. Later a rank may run a forward alone, or
    differentiate by its input. So here these steps are taken while all ranks are together:
    gradients of zeros arrive, and are reduced. None of the program's hooks runs, and the program's
    gradients stay.

    Args:
        ddp: a module with a new Reducer, without comm hooks.
        num_arrivals: how often each gradient arrives in a backward, by parameter index, in the
            order in which buckets are to be formed. Without those that never arrive on this rank,
            as there may be in a static graph.
        gradients_of_zeros: what arrives, by parameter index; None for those to which DDP does not
            give the ranks' average.
    """
    reducer = names.REDUCER.get(ddp)
    arrive = names.AUTOGRAD_HOOK.get(reducer)  # autograd calls it when a gradient is accumulated
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
            # `prepare_reducer` counts a forward. By that count, which matters with a static graph
            # alone, the Reducer tells the first backward from the second.
            prepare_reducer(ddp)
            begin_backward([])
            arrive_all()  # they are counted
            # What DDP queues, once, for the end of a static graph's first backward.
            names.DELAY_ALL_REDUCE.get(reducer)()
            names.STATIC_ENQUEUED.set(True, ddp)
            prepare_reducer(ddp)
        begin_backward([])  # no outputs, in which it would search for unused parameters
        # Within a backward, at whose end the Reducer waits for its allreduces.
        run_in_backward(arrive_all)
    finally:
        for tensor, kept in zip(tensors, gradients, strict=True):
            tensor.grad = kept
    is_rebuilt = names.REBUILD_BUCKETS.get(reducer)()
    assert is_rebuilt, "it has noted an order, and follows it"
    names.HAS_REBUILT_BUCKETS.set(True, ddp)
    note_first_steps_taken(reducer)
