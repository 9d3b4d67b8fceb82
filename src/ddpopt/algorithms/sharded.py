"""`ShardedUpdate`: sums gradients to shards; each rank updates its own, and all get the rest.

Sources: stage 1 of ZeRO (Rajbhandari et al., arXiv 1910.02054) shards the optimizer's state and
its work; DeAR (Zhang et al., arXiv 2302.12445) hides the two halves of an allreduce behind backward
and behind the next forward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, _waits
from ddpopt._events import follow
from ddpopt.algorithms.comm import Exchange, Works, make_agreement_group
from ddpopt.algorithms.gradients import ShardedGradients
from ddpopt.algorithms.handle import (
    Algorithm,
    Bucket,
    GradientFuture,
    Handle,
    Training,
    agree_on,
)
from ddpopt.algorithms.shards import Shard, ShardedStates, Shards, State, check_memory
from ddpopt.bucketing import tuner
from ddpopt.config import check_boolean
from ddpopt.errors import OptionError, PeerError
from ddpopt.ranks.agreement import communicating
from ddpopt.ranks.rendezvous import name_ranks
from ddpopt.reducer import known_buckets, predict_buckets
from ddpopt.split import state

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)


class _Sent(NamedTuple):
    """What ranks tell each other besides parameters: 1 for each rank whose update raised."""

    has_failed: torch.Tensor
    work: Any
    step: int


class ShardedUpdateHandle(Handle):
    """As `Handle`, with gradients and optimizer states in shards; see [Note: shards and pieces].

    From backward on, using the `.grad` of parameters raises: read `full_gradients()`, and clip
    with `clip_grad_norm_`. From an update to the end of the next forward, parameters may still be
    in transit. Forwards of DDP and of its modules wait for them, and so does `state_dict`; before
    anything else reads them (weight averaging, a copy, a compiled module without DDP) call `wait`.
    """

    algorithm: ShardedUpdate

    def __init__(self, training: Training, algorithm: ShardedUpdate) -> None:
        super().__init__(training, algorithm)
        ddp = training.ddp
        self._parameters: list[torch.Tensor] = list(training.parameters)
        self._index = {parameter: k for k, parameter in enumerate(self._parameters)}
        everyone = self.groups.everyone
        self._flags = everyone
        if training.device.type != "cpu":
            self._flags = make_agreement_group(training.group, training.device)
        self.exchange = Exchange(everyone, _following(ddp))
        self.shards = Shards(self._parameters, self.exchange, self._predict())
        self._gradients = ShardedGradients(self.shards)
        self._states = ShardedStates(self.shards, training.optimizers)
        self._failure: Exception | None = None
        self._buckets: list[tuple[int, ...]] = []  # of the last backward that ended
        self._buckets_so_far: list[tuple[int, ...]] = []  # of the running one
        self._updating: set[optim.Optimizer] = set()
        self._is_changed = False  # shards were updated, but not all have been sent
        self._unsent: list[Shard] = []  # those not sent, in the order in which forward reads
        self._has_failed = False  # an update that was partly sent failed
        self._sent: _Sent | None = None
        self._is_training = False
        self._removable += [*self._hooks(), *self._states.hooks()]
        _waits.begin_sharded(ddp, self.exchange)
        state.of(ddp).wait_in_forward(True)
        tuner.begin_anew(ddp)

    # ---- what users do -----------------------------------------------------------------------

    def wait(self) -> None:
        """Return when all parameters are whole, current, and equal on all ranks. Collective.

        Raises:
            PeerError: an update failed on a rank, or a rank is gone.
        """
        self.check_attached()
        if self._is_changed:
            self._send()
        self._receive()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` for all parameters, before the update. Collective.

        Returns:
            The norm of all gradients before clipping, equal on all ranks.

        Raises:
            OptionError: `norm_type` is not above 0.
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        if not norm_type > 0:
            raise OptionError(f"norm_type is {norm_type}; give a number above 0")
        return self._gradients.clip_norm_(max_norm, norm_type, error_if_nonfinite)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the averaged gradients of whole parameters, by name in DDP's module. Collective.

        The gradients are copies. Parameters without a gradient are left out.
        """
        names = [described.name for described in self.training.parameters.values()]
        return {names[index]: whole for index, whole in self._gradients.gather()}

    def average(self) -> None:
        """As `wait`: weights are equal on all ranks."""
        self.settle()
        self.wait()

    def begin_pause(self) -> None:
        """Wait for all parameters."""
        self.wait()

    def detach(self, *, average: bool = True) -> None:
        """As `Handle.detach`; optimizers get whole states back, and parameters gradients.

        With `average=False` optimizers lose their states, most of which are on other ranks.
        """
        if not self._is_attached:
            return
        wholes: list[list[State]] = []
        gradients: dict[str, torch.Tensor] = {}
        try:
            if average:
                self.average()
                gradients, wholes = self.full_gradients(), self._states.gather()
        finally:
            self._states.end(wholes)
            self._gradients.release()
            for parameter, described in self.training.parameters.items():
                parameter.grad = gradients.get(described.name, parameter.grad)
            super().detach(average=average)

    def close(self) -> None:
        """Give parameters storages of their own."""
        _waits.end_sharded(self.training.ddp)
        state.of(self.training.ddp).wait_in_forward(False)
        self.shards.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, and the optimizers' states as with plain DDP. Collective.

        `["optimizers"]` has, for each optimizer, what its `state_dict` returns with plain DDP.
        """
        self.settle()
        self.wait()
        return {
            "algorithm": self.algorithm.name,
            "num_steps": self.num_steps,
            "num_communications": self.num_communications,
            "optimizers": self._states.state_dicts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`, or that of the only optimizer with plain DDP. Collective.

        Raises:
            OptionError, TypeError: it does not fit the optimizers.
            AttachError: ranks load different ones.
        """
        self.settle()
        self.wait()
        everyone = self.groups.everyone
        remedy = "load the same on all ranks"
        agree_on(self.training.ddp, lambda: self._states.check(state), remedy, everyone)
        self._states.load(state)
        self.num_steps = state.get("num_steps", self.num_steps)
        self.num_communications = state.get("num_communications", self.num_communications)

    # ---- a step ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note the step's number."""
        self._gradients.step = self.num_steps

    def on_forward(self) -> None:
        """As `Handle.on_forward`; wait for parameters that no reader is known to wait for."""
        super().on_forward()
        self._gradients.end_lift()
        self._buckets_so_far.clear()
        if self.training.ddp.gradient_as_bucket_view:  # the Reducer copies them to new buckets
            self._gradients.hide()
        self._is_training = torch.is_grad_enabled() and self.training.ddp.training
        for shard in reversed(self.shards):
            # Readers that waited in the last forward will wait in this one.
            if not (self._is_training and shard.is_awaited):
                shard.wait()
            shard.awaited.clear()

    def on_forward_end(self) -> None:
        """Wait for all parameters, and note which ones readers waited for."""
        self._gradients.show()
        for shard in self.shards:
            if self._is_training:
                shard.is_awaited = shard.awaited >= shard.addresses
        self._receive()

    def on_gradient(self, index: int) -> None:
        """Note a local gradient that autograd is about to accumulate."""
        self._gradients.note(index)

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """Start summing a bucket to shards. DDP need not wait for it."""
        self.num_communications += 1
        values: torch.Tensor = bucket.buffer()
        members = [self._index.get(parameter) for parameter in bucket.parameters()]
        self._buckets_so_far.append(tuple(index for index in members if index is not None))
        try:
            if self._failure is None:
                sizes = [parameter.numel() for parameter in bucket.parameters()]
                self._gradients.begin_sum(bucket.index(), values, members, sizes)
                _forget_local_gradients(bucket, self._index)
        except Exception as error:  # DDP would show it without its type
            self._failure = error
        done: GradientFuture = torch.futures.Future()
        done.set_result(values)
        return done

    def end_backward(self) -> None:
        """Replace gradients by placeholders that raise when used."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._buckets, self._buckets_so_far = self._buckets_so_far, []
        self._gradients.end_backward()

    def before_update(self) -> None:
        """Wait for all parameters, and for this rank's gradients."""
        self._receive()
        self._gradients.finish()

    def on_update(
        self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any], is_compiled: bool
    ) -> None:
        """As `Handle.on_update`; give the optimizer this rank's gradients.

        A step's last one updates bucket by bucket, and so has no gradients left when its own update
        runs. A compiled one does not: updates by bucket would not be compiled.
        """
        super().on_update(optimizer, args, kwargs, is_compiled)
        self._has_failed |= optimizer in self._updating and len(self._unsent) < len(self.shards.all)
        self._updating.add(optimizer)
        if not self._is_changed:
            self._is_changed, self._unsent = True, [*reversed(self.shards)]
        self._gradients.give(self._states.indices_of(optimizer))
        is_last = self._updated | {optimizer} == set(self.training.optimizers)
        # Users' own optimizers may count steps in groups.
        if is_last and not is_compiled and type(optimizer) in ELEMENTWISE:
            step = _torch.step_without_hooks(optimizer, self._update_hooks[optimizer])
            if step is not None:
                self._update_by_bucket(step)

    def _update_by_bucket(self, step: Callable[[], object]) -> None:
        """Send each bucket as soon as it is updated, in the order in which forward reads."""
        self._gradients.withhold()
        try:
            while self._unsent:
                members = self._unsent[0].members
                self._gradients.lend(members)
                step()
                self._gradients.withhold(members)
                self._send_next()
        except BaseException:
            self._gradients.lend()
            raise

    def on_updated(self, optimizer: optim.Optimizer, *_ignored: object) -> None:
        """As `Handle.on_updated`; take the gradients away again."""
        self._updating.discard(optimizer)
        self._gradients.take_away()
        super().on_updated(optimizer)

    def after_update(self) -> None:
        """Send what was updated; divide buckets anew if DDP has other ones now."""
        if self._is_changed:
            self._send()
        if not self.algorithm.overlap_forward:
            self._receive()
        buckets, self._buckets = self._buckets, []
        is_final = not _torch.will_rebuild_buckets(self.training.ddp)
        if is_final and buckets and not self.shards.by_members.keys() >= set(buckets):
            self._divide_anew(buckets)

    # ---- parameters --------------------------------------------------------------------------

    def _send(self) -> None:
        """Start sending all ranks the updated parameters that they have not been sent yet."""
        while self._unsent:
            self._send_next()
        flags = torch.zeros(self._flags.num_ranks, dtype=torch.int64)
        flags[self._flags.rank] = self._has_failed or bool(self._updating)
        self._is_changed = self._has_failed = False
        self._updating.clear()
        with communicating(f"sending parameters in step {self.num_steps}"):
            work = self._flags.all_reduce(flags)
            self._sent = _Sent(flags, work, self.num_steps)

    def _send_next(self) -> None:
        """Start sending one bucket to all ranks."""
        shard = self._unsent.pop(0)
        torch.autograd.graph.increment_version(shard.parameters)  # as in-place updates do
        with communicating(f"sending parameters in step {self.num_steps}"):
            shard.send(f"receiving parameters of step {self.num_steps}")

    def _receive(self) -> None:
        """Wait for all parameters; raise if an update failed."""
        for shard in reversed(self.shards):
            shard.wait()
        sent, self._sent = self._sent, None
        if sent is None:
            return
        with communicating(f"receiving parameters of step {sent.step}"):
            sent.work.wait()
        if failed := sent.has_failed.nonzero().flatten().tolist():
            raise PeerError(
                f"the optimizer's update raised on {name_ranks(failed)} in step {sent.step}; all "
                "ranks have the same parameters, of which some were not updated: start again from "
                "a checkpoint"
            )

    def _predict(self) -> list[list[int]]:
        """Return the Reducer's buckets, as far as they are known, by parameter index."""
        known, described = state.of(self.training.ddp), list(self.training.parameters.values())
        if known.buckets is not None and {*itertools.chain(*known.buckets)} == {
            *self._index.values()
        }:
            buckets = known_buckets(described, known.buckets, known.rules)
        else:
            buckets = predict_buckets(described[::-1], known.rules)
        return [[parameter.index for parameter in bucket.parameters] for bucket in buckets]

    def _divide_anew(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide these buckets in place of the previous ones. Collective."""
        self._receive()
        self._gradients.finish()
        are_there = [piece.grad is not None for piece in self.shards.pieces()]
        missing = {*self._index.values()}.difference(*buckets)
        self._states.divide([*filter(None, buckets), *([index] for index in sorted(missing))])
        self._gradients.renew(are_there)

    # ---- hooks -------------------------------------------------------------------------------

    def _hooks(self) -> Iterator[Any]:
        """Register all hooks that `Handle` does not have."""
        ddp, me = self.training.ddp, weakref.ref(self)

        def call(method: Callable[..., None], *arguments: Any) -> None:
            live = me()
            if live is not None:
                method(live, *arguments)

        def end_forward(module: object, *_: object) -> None:
            live = me()
            if live is not None and module is live.training.ddp:  # and not a copy of it
                live.on_forward_end()

        end = _torch.uncompiled(end_forward)
        yield ddp.register_forward_hook(end, always_call=True)
        self._nodes = [_torch.accumulate_node(parameter) for parameter in self._parameters]
        for index, node in enumerate(self._nodes):
            yield node.register_prehook(
                lambda *_, index=index: call(ShardedUpdateHandle.on_gradient, index)
            )
        _torch.while_compiling(_wait_for_all)  # not at import, which would import Dynamo
        for module in ddp.modules():
            own = [p for p in module.parameters(recurse=False) if p in self._index]
            if own and self.algorithm.overlap_forward:
                yield module.register_forward_pre_hook(_waiting_for(own))
            whole = _torch.uncompiled(lambda *_: call(ShardedUpdateHandle.wait))
            hooked: Any = module  # its methods for hooks have no types
            yield hooked.register_state_dict_pre_hook(whole)
            yield hooked.register_load_state_dict_pre_hook(whole)


def _forget_local_gradients(bucket: Bucket, members: Container[torch.Tensor]) -> None:
    """Make the gradients of members views of the bucket, as with `gradient_as_bucket_view`.

    This frees their memory for the rest of backward. It also spares DDP a copy: when backward ends,
    it copies the bucket into gradients that are not views of the bucket.
    """
    values, start = bucket.buffer(), 0
    for parameter in bucket.parameters():
        if parameter.grad is not None and parameter in members:
            place = values.storage_offset() + start
            parameter.grad = values.as_strided(parameter.shape, parameter.stride(), place)
        start += parameter.numel()


def _following(ddp: DistributedDataParallel) -> Callable[[str, int, int, Works], Works]:
    """Return a function that reports exchanges to a recording of this module."""
    find = weakref.ref(ddp)

    def tell(what: str, bucket: int, num_bytes: int, works: Works) -> Works:
        return follow(find(), what, bucket, num_bytes, works)

    return tell


def _wait_for_all() -> None:
    _waits.wait_for_all()


def _waiting_for(parameters: Sequence[torch.Tensor]) -> Callable[..., None]:
    """Return a hook that runs before the forward of a module with these parameters."""

    def wait(*_: object) -> None:
        if torch.compiler.is_compiling():
            _wait_for_all()  # now: other backends than ours compile code without waits
        else:
            _waits.wait_for(parameters)

    return wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedUpdate(Algorithm[ShardedUpdateHandle]):
    """Sums gradients to shards behind backward, and sends updated shards behind forward.

    The result is that of plain DDP with the same optimizer, bit for bit on two ranks if parameters
    have 32 or 64 bits. Each rank keeps its part of the optimizer's state, and does its part of the
    update. The optimizer has to update each element of a parameter independently.

    Attributes:
        overlap_forward: Send parameters behind the next forward; False waits in `optimizer.step`,
            so that parameters may be read at any time.
        elementwise: Additional optimizers, by class, that update each element independently.
    """

    handle_type = ShardedUpdateHandle
    overlap_forward: bool = True
    elementwise: tuple[type[optim.Optimizer], ...] = ()

    def __post_init__(self) -> None:
        check_boolean("overlap_forward", self.overlap_forward, TypeError)
        kinds = self.elementwise
        if not isinstance(kinds, tuple) or not all(isinstance(kind, type) for kind in kinds):
            raise TypeError(f"elementwise is {kinds!r}; give a tuple of optimizers' classes")

    def check(self, training: Training) -> None:
        """Raise the reason if this cannot be attached to `training` on this rank."""
        for optimizer in training.optimizers:
            if type(optimizer) not in (*ELEMENTWISE, *self.elementwise):
                name = type(optimizer).__name__
                raise OptionError(
                    f"ShardedUpdate cannot work with {name}, since a rank has only parts of "
                    "parameters, as flat tensors: take an optimizer that updates each element by "
                    f"itself, such as AdamW; if {name} does, give ShardedUpdate(elementwise="
                    f"({name},))"
                )
        named = {p: described.name for p, described in training.parameters.items()}
        reduced = _torch.reducer_parameters(training.ddp)
        for parameter, name in named.items():
            if parameter not in reduced:
                raise OptionError(
                    f"DDP does not reduce {name}, which was frozen when DDP was made; make DDP anew"
                )
        check_memory(named)
