"""`ShardedUpdate`: sums gradients to shards; each rank updates its own, and all get the rest.

Sources: stage 1 of ZeRO (Rajbhandari et al., arXiv 1910.02054) shards the optimizer's state and
its work; DeAR (Zhang et al., arXiv 2302.12445) hides the two halves of an allreduce behind backward
and behind the next forward.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import optim

from ddpopt import _torch, _waits
from ddpopt.algorithms.comm import Exchange
from ddpopt.algorithms.gradients import ShardedGradients
from ddpopt.algorithms.handle import (
    Algorithm,
    Bucket,
    GradientFuture,
    Handle,
    ModuleHook,
    Training,
    agree_on,
    weakly,
)
from ddpopt.algorithms.shards import Shard, ShardedStates, Shards, State, check_memory, stand_in
from ddpopt.config import check_boolean
from ddpopt.errors import AttachError, OptionError, PeerError
from ddpopt.planning import tuner
from ddpopt.ranks.agree import communicating
from ddpopt.ranks.store import name_ranks
from ddpopt.reducer import known_buckets, predict_buckets
from ddpopt.split import state

_NAMES = "SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop"
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = tuple(getattr(optim, n) for n in _NAMES.split())
LEAST_BYTES = 2**18  # of pieces, that are updated at once: each update has a cost of its own


Members = list[list[torch.Tensor]]  # of an optimizer's groups


class _StandIn:
    """An optimizer that has all in common with the user's, except for the members of its groups.

    It is what updates: the user's groups hold their parameters at all times, whatever raises.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.layout: _Layout | None = None  # of the last update
        self.members: Members = []
        self._theirs = optimizer
        self._groups: list[dict[str, Any]] | None = None
        self.optimizer = stand_in(optimizer, param_groups=self.groups, held=lambda: self.members)

    def hold(self, members: Members) -> Any:
        """Return the optimizer, whose groups have these members from now on."""
        self.members, self._groups = members, None
        return self.optimizer

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups, with the options that the user's have at the first call."""
        if self._groups is None:
            pairs = zip(self._theirs.param_groups, self.members, strict=True)
            self._groups = [{**group, "params": own} for group, own in pairs]
        return self._groups

    def end(self) -> None:
        """Give the user's groups what the update changed in their options."""
        for theirs, own in zip(self._theirs.param_groups, self._groups or (), strict=False):
            theirs.update((name, own[name]) for name in own.keys() - {"params"})
        self.members, self._groups = [], None


class _Layout(NamedTuple):
    """What an update has in place of the parameters of the user's groups.

    `foreign` are those that DDP does not reduce. Each of `batches` has shards that are updated at
    once, and their pieces by group: a bucket, or several small ones, in the order in which forward
    reads.
    """

    groups: Members
    pieces: Members
    foreign: Members
    batches: list[tuple[list[Shard], Members]]
    members: frozenset[int]
    digest: int


# What forbids an update, which all ranks learn before it.
_LOCAL, _MOVED, _DISTURBED = 1, 2, 3
_TEXTS = {
    _LOCAL: "has a gradient that is not the average of all ranks: its last backward ran under "
    "no_sync (run one outside of it first), DDP still waits for parameters that had none in it "
    "(give find_unused_parameters=True where parameters are frozen after DDP was made), or your "
    "code assigned it (call handle.set_gradients)",
    _MOVED: "was given memory of another shape, dtype or device, with other strides, or another "
    "parameter's; detach the algorithm before, and attach it again",
    _DISTURBED: "was written or moved after an update, while other ranks' parts of it were still "
    "arriving, as overlap_forward=True allows; call handle.wait() before, or leave "
    "overlap_forward out",
}


class _Reports(NamedTuple):
    """What ranks report of a step: a row of numbers each, once `work` has ended."""

    rows: torch.Tensor
    work: Any
    step: int

    def read(self) -> list[list[int]]:
        with communicating(f"asking all ranks about step {self.step}"):
            self.work.wait()
        rows: list[list[int]] = self.rows.tolist()
        return rows


class ShardedUpdateHandle(Handle):
    """As `Handle`, with gradients and optimizer states in shards; see [Note: shards and pieces].

    From backward on, using the `.grad` of parameters raises: read `full_gradients()`, and clip
    with `clip_grad_norm_`. An optimizer's update returns with all parameters whole. With
    `overlap_forward=True` they may still be in transit from an update to the end of the next
    forward: forwards of DDP and of its modules wait for them, and so does `state_dict`; before
    anything else reads or writes them (weight averaging, clamping, a copy) call `wait`.
    """

    algorithm: ShardedUpdate

    def __init__(self, training: Training, algorithm: ShardedUpdate) -> None:
        super().__init__(training, algorithm)
        ddp = training.ddp
        self._names = [described.name for described in training.parameters.values()]
        self._parameters = list(training.parameters)
        self._index = {parameter: k for k, parameter in enumerate(self._parameters)}
        self._flags = self.groups.everyone
        if training.device.type != "cpu":
            self._flags = self.groups.make_agreement()
        self.exchange = Exchange(self.groups.everyone, ddp)
        is_guarded = algorithm.overlap_forward
        self.shards = Shards(self._parameters, self.exchange, self._predict(), is_guarded)
        self._gradients = ShardedGradients(self.shards)
        self._states = ShardedStates(self.shards, training.optimizers)
        self._stand_ins = {optimizer: _StandIn(optimizer) for optimizer in training.optimizers}
        self._buckets: list[tuple[int, ...]] = []  # of the last backward that ended
        self._earlier_buckets: list[tuple[int, ...]] = []  # of that before the last update
        self._buckets_so_far: list[tuple[int, ...]] = []  # of the running one
        self._unsent: list[Shard] | None = None  # of the running update
        self._updated_members: Collection[int] = ()  # of that
        self._has_failed = False  # an update raised on this rank, and no forward has run since
        self._sent: _Reports | None = None
        self._will_reduce = False  # the next backward, after a forward of DDP's
        self._is_training = False
        self._removable += [*self._hooks(), *self._states.hooks()]
        _waits.begin_sharded(ddp, self.exchange, is_guarded)
        state.get(ddp).wait_in_forward(is_guarded)
        tuner.start_over(ddp)

    # ---- what users do -----------------------------------------------------------------------

    def wait(self) -> None:
        """Return when all parameters are whole, current, and equal on all ranks.

        Raises:
            PeerError: an update failed on a rank, or a rank is gone.
        """
        self.check_attached()
        self._end_failed()
        self._receive()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` for all parameters, before the update. Collective.

        Returns:
            The norm of all gradients before clipping, equal on all ranks.

        Raises:
            OptionError: `norm_type` is not above 0, or a gradient is of one rank alone.
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        if not norm_type > 0:
            raise OptionError(f"norm_type is {norm_type}; give a number above 0")
        self._check_gradients()
        return self._gradients.clip_norm_(max_norm, norm_type, error_if_nonfinite)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the averaged gradients of whole parameters, by name in DDP's module. Collective.

        The gradients are copies. Parameters without a gradient are left out.

        Raises:
            OptionError: a gradient is of one rank alone.
        """
        self._check_gradients()
        return {self._names[index]: whole for index, whole in self._gradients.gather()}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replace gradients, by name as in `full_gradients`, by tensors that all ranks have alike.

        Raises:
            OptionError: a name is unknown, or a gradient has another shape than its parameter.
        """
        index_of = {name: index for index, name in enumerate(self._names)}
        for name, value in gradients.items():
            index = index_of.get(name)
            if index is None or value.shape != self._parameters[index].shape:
                raise OptionError(
                    f"{name} with a gradient of {list(value.shape)} is no parameter of this model; "
                    "give names and shapes as full_gradients returns them"
                )
        for name, value in gradients.items():
            self._gradients.assign(index_of[name], value)

    def average(self) -> None:
        """As `wait`; raise on all ranks if a parameter was disturbed on its way. Collective."""
        self.settle()
        self.wait()
        self._check(self._report_problem())

    def begin_pause(self) -> None:
        self.wait()

    def detach(self, *, average: bool = True) -> None:
        """As `Handle.detach`; optimizers get whole states back, and parameters gradients.

        With `average=False` optimizers lose their states, most of which are on other ranks.
        """
        if not self._is_attached:
            return
        wholes: list[dict[torch.Tensor, State]] = []
        gradients: dict[str, torch.Tensor] = {}
        try:
            if average:
                self.average()
                wholes = self._states.gather()
                found = self._gradients.gather(with_local=True)
                gradients = {self._names[index]: whole for index, whole in found}
        finally:
            self._states.end(wholes)
            self._gradients.hide()
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.grad = gradients.get(name, parameter.grad)
            super().detach(average=average)

    def close(self) -> None:
        _waits.end_sharded(self.training.ddp)
        state.get(self.training.ddp).wait_in_forward(False)
        self.shards.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, and the optimizers' states as with plain DDP. Collective.

        `["optimizers"]` has, for each optimizer, what its `state_dict` returns with plain DDP.
        """
        self.average()
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

    # ---- forward and backward ----------------------------------------------------------------

    def begin_step(self) -> None:
        self._gradients.step = self.num_steps

    def on_forward(self) -> None:
        self._end_failed()
        self._has_failed = False
        super().on_forward()
        ddp = self.training.ddp
        self._gradients.end_lift(has_raised=True)
        self._buckets_so_far.clear()
        if ddp.gradient_as_bucket_view:  # the Reducer copies them to new buckets
            self._gradients.hide()
        if torch.is_grad_enabled():
            self._will_reduce = ddp.require_backward_grad_sync
        if self.algorithm.overlap_forward:
            self._is_training = torch.is_grad_enabled() and ddp.training
            for shard in reversed(self.shards):
                # Readers that waited in the last forward will wait in this one.
                if not (self._is_training and shard.is_awaited):
                    shard.wait()
                shard.awaited.clear()

    def on_forward_end(self, ddp: object, *_ignored: object) -> None:
        """Wait for all parameters, and note which ones readers waited for."""
        if ddp is not self.training.ddp:  # but a shallow copy of it
            return
        self._gradients.show()
        if self.algorithm.overlap_forward:
            for shard in self.shards:
                if self._is_training:
                    shard.is_awaited = shard.awaited >= shard.addresses()
            self._receive()

    def on_gradient(self, *_ignored: object) -> None:
        self._gradients.lift(self._will_reduce)

    def on_state(self, *_ignored: object) -> None:
        self.wait()

    def reduce(self, bucket: Bucket) -> GradientFuture:
        self.num_communications += 1
        values: torch.Tensor = bucket.buffer()
        try:
            members = tuple(self._index[parameter] for parameter in bucket.parameters())
            self._buckets_so_far.append(members)
            if self._failure is None:
                self._gradients.begin_sum(bucket.index(), values, members)
                _forget_local_gradients(bucket)
        except Exception as error:
            self._failure = error
        done: GradientFuture = torch.futures.Future()
        done.set_result(values)  # DDP need not wait
        return done

    def end_backward(self) -> None:
        self._buckets, self._buckets_so_far = self._buckets_so_far, []
        self._will_reduce = False
        self._gradients.end_backward()

    # ---- an update ---------------------------------------------------------------------------

    def before_update(self) -> None:
        self._receive()
        self._gradients.finish()

    def on_update(
        self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any], is_compiled: bool
    ) -> tuple[Any, dict[str, Any]]:
        """As `Handle.on_update`; let a stand-in with pieces, and gradients of them, update.

        Updates of torch's own run bucket by bucket, and for parameters that are not DDP's at last.
        A compiled update would not stay so; and users' own optimizers may count their updates.
        """
        self._end_failed()
        if self._has_failed:
            raise PeerError(
                f"the optimizer's update raised on this rank in step {self.num_steps}, and cannot "
                "be repeated: some buckets were updated; start again from a checkpoint"
            )
        self._receive()
        theirs = [group["params"] for group in optimizer.param_groups]
        held = getattr(args[0], "held", theirs)  # by another handle's stand-in
        own = self._stand_ins[optimizer]
        layout = own.layout = self._lay_out(held, own.layout)
        reports = self._report_problem(layout.members, layout.digest)  # while gradients arrive
        super().on_update(optimizer, args, kwargs, is_compiled)
        self._check(reports)
        self._unsent = [shard for shards, _ in layout.batches for shard in shards]
        self._updated_members = layout.members
        self._states.cut(optimizer)
        self._gradients.lend()
        step = None
        if not is_compiled and type(optimizer) in ELEMENTWISE:
            # Users' hooks after this one would find the update done already.
            step = _torch.step_without_hooks(optimizer, self._update_hooks[optimizer])
        if step is None:
            return (own.hold(layout.pieces), *args[1:]), kwargs
        try:
            for shards, pieces in layout.batches:
                step(own.hold(pieces))
                for _ in shards:
                    self._send_next()
        except BaseException:
            self._end_failed()
            raise
        self._end_update()
        return (own.hold(layout.foreign), *args[1:]), kwargs

    def on_updated(self, optimizer: optim.Optimizer) -> None:
        """Send what was not sent, before others see parameters; then as `Handle.on_updated`.

        If DDP has other buckets now, divide them anew. All ranks have seen the same backwards, and
        are in this update, while forwards may differ (under no_sync), and so do skipped updates'
        ends. DDP rebuilds its buckets after the first backward.
        """
        self._stand_ins[optimizer].end()
        self._end_update()
        buckets, earlier = self._buckets, self._earlier_buckets
        self._earlier_buckets = buckets
        if buckets == earlier and not self.shards.by_indices.keys() >= set(buckets):
            self._divide_anew(buckets)
        super().on_updated(optimizer)

    def _end_update(self, has_failed: bool = False) -> None:
        """Send what an update has not sent; unless forward may hide it, wait for all of it."""
        if self._unsent is not None:
            while self._unsent:
                self._send_next()
            self._unsent = None
            self._gradients.take_back()
            self._sent = self._report(has_failed)
            if not self.algorithm.overlap_forward:
                self._receive()

    def _end_failed(self) -> None:
        """End an update that raised on this rank, so that the others are told."""
        if self._unsent is not None:
            self._has_failed = True
            self._end_update(has_failed=True)

    def _lay_out(self, groups: Members, earlier: _Layout | None) -> _Layout:
        if earlier is not None and _ids(earlier.groups) == _ids(groups):
            return earlier
        index, members = self._index, self.shards.members
        indices = [[index[p] for p in group if p in index] for group in groups]
        group_of = {k: number for number, own in enumerate(indices) for k in own}
        batches: list[tuple[list[Shard], Members]] = []
        open_bytes = LEAST_BYTES
        for shard in reversed(self.shards):
            if group_of.keys().isdisjoint(shard.indices):
                continue
            if open_bytes >= LEAST_BYTES:
                open_bytes = 0
                batches.append(([], [[] for _ in groups]))
            shards, pieces = batches[-1]
            shards.append(shard)
            for member in shard.members:
                if member.index in group_of:
                    pieces[group_of[member.index]].append(member.piece)
                    open_bytes += member.piece.nbytes
        return _Layout(
            groups=[list(group) for group in groups],
            pieces=[[members[index[p]].piece if p in index else p for p in g] for g in groups],
            foreign=[[p for p in group if p not in index] for group in groups],
            batches=batches,
            members=frozenset(group_of),
            digest=zlib.crc32(repr(indices).encode()),
        )

    # ---- what ranks report -----------------------------------------------------------------

    def _report(self, *numbers: int) -> _Reports:
        with communicating(f"asking all ranks about step {self.num_steps}"):
            return _Reports(*self._flags.collect(torch.tensor(numbers)), self.num_steps)

    def _check_gradients(self) -> None:
        index = self._gradients.find_local(self._index.values())
        reports = self._report(0 if index is None else _LOCAL, index or 0, 0)
        self._gradients.finish()  # meanwhile
        self._check(reports)

    def _report_problem(self, members: Collection[int] = (), digest: int = 0) -> _Reports:
        """Collect parameters that were moved, and report what forbids an update of these."""
        self._gradients.end_lift(has_raised=True)  # of a backward that raised
        index = self._gradients.find_local(members)
        problem = 0 if index is None else _LOCAL
        misfit = self.shards.collect_strays()
        if misfit is not None:
            problem, index = _MOVED, misfit
        for shard in self.shards:
            disturbed, shard.disturbed = shard.disturbed, None
            if disturbed is not None:
                problem, index = _DISTURBED, disturbed
        self.shards.announce()  # where they are now
        return self._report(problem, index or 0, digest)

    def _check(self, reports: _Reports) -> None:
        """Raise on all ranks what was found on one."""
        rows = reports.read()
        for rank, (problem, index, _) in enumerate(rows):
            if problem:
                raise OptionError(f"on rank {rank}: {self._names[index]} {_TEXTS[problem]}")
        if len({digest for _, _, digest in rows}) > 1:
            raise AttachError(
                "the optimizer's groups have other parameters on some ranks than on others; add "
                "the same ones on all ranks"
            )

    # ---- parameters --------------------------------------------------------------------------

    def _send_next(self) -> None:
        assert self._unsent is not None
        with communicating(f"sending parameters in step {self.num_steps}"):
            what = f"receiving parameters of step {self.num_steps}"
            self._unsent.pop(0).send(what, self._updated_members)

    def _receive(self) -> None:
        for shard in reversed(self.shards):
            shard.wait()
        sent, self._sent = self._sent, None
        if sent is not None:
            failed = [rank for rank, (has_failed,) in enumerate(sent.read()) if has_failed]
            if failed and not self._has_failed:
                raise PeerError(
                    f"the optimizer's update raised on {name_ranks(failed)} in step {sent.step}; "
                    "all ranks have the same parameters, of which some were not updated: start "
                    "again from a checkpoint"
                )

    def _predict(self) -> list[list[int]]:
        """Return the Reducer's buckets, as far as they are known, by parameter index."""
        known = state.get(self.training.ddp)
        described = list(self.training.parameters.values())
        if known.buckets is not None:
            buckets = known_buckets(described, known.buckets, known.rules)
        else:
            buckets = predict_buckets(described[::-1], known.rules)
        return [[parameter.index for parameter in bucket.parameters] for bucket in buckets]

    def _divide_anew(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide these buckets in place of the previous ones. Collective."""
        self._receive()
        self._gradients.finish()
        self.shards.collect_strays()
        missing = {*self._index.values()}.difference(*buckets)
        self._states.divide([*filter(None, buckets), *([index] for index in sorted(missing))])
        for own in self._stand_ins.values():
            own.layout = None

    # ---- hooks -------------------------------------------------------------------------------

    def _hooks(self) -> Iterator[Any]:
        end = _torch.uncompiled(weakly(self.on_forward_end))
        yield self.training.ddp.register_forward_hook(ModuleHook(end), always_call=True)
        self._nodes = [_torch.accumulate_node(parameter) for parameter in self._parameters]
        for node in self._nodes:
            yield node.register_prehook(weakly(self.on_gradient))
        if self.algorithm.overlap_forward:
            yield from self._guards()

    def _guards(self) -> Iterator[Any]:
        # Dynamo calls it when it compiles a call. Not at import, which would import Dynamo.
        torch.compiler.assume_constant_result(_waits.wait_for_all)  # type: ignore[no-untyped-call]
        whole = ModuleHook(_torch.uncompiled(weakly(self.on_state)))
        for module in self.training.ddp.modules():
            own = [p for p in module.parameters(recurse=False) if p in self._index]
            if own:  # first, since other hooks read parameters: weight_norm's, and pruning's
                waiting = ModuleHook(_waiting_for(own))
                yield module.register_forward_pre_hook(waiting, prepend=True)
            hooked: Any = module  # its methods for hooks have no types
            yield hooked.register_state_dict_pre_hook(whole)
            yield hooked.register_load_state_dict_pre_hook(whole)


def _ids(groups: Members) -> list[list[int]]:
    return [[*map(id, group)] for group in groups]


def _forget_local_gradients(bucket: Bucket) -> None:
    """Make a bucket's gradients views of it, as with `gradient_as_bucket_view`.

    This frees their memory for the rest of backward. It also spares DDP a copy: when backward ends,
    it copies the bucket into gradients that are not views of the bucket.
    """
    values, start = bucket.buffer(), 0
    for parameter in bucket.parameters():
        if parameter.grad is not None:
            place = values.storage_offset() + start
            parameter.grad = values.as_strided(parameter.shape, parameter.stride(), place)
        start += parameter.numel()


def _waiting_for(parameters: Sequence[torch.Tensor]) -> Callable[..., None]:
    def wait(*_: object) -> None:
        if torch.compiler.is_compiling():
            _waits.wait_for_all()  # now: other backends than ours compile code without waits
        else:
            _waits.wait_for(parameters)

    return wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedUpdate(Algorithm[ShardedUpdateHandle]):
    """Sums gradients to shards behind backward, of which each rank updates its own.

    The result is that of plain DDP with the same optimizer, bit for bit on two ranks if parameters
    have 32 or 64 bits. Each rank keeps its part of the optimizer's state, and does its part of the
    update. The optimizer has to update each element of a parameter independently.

    By default `optimizer.step()` sends each bucket as soon as it is updated, and returns with all
    parameters whole: they may be read and written at any time, as with plain DDP.

    Attributes:
        overlap_forward: Return from `optimizer.step()` with parameters in transit, which the next
            forward waits for where it reads them; see `ShardedUpdateHandle` for what this asks of
            the training loop.
        elementwise: Additional optimizers, by class, that update each element independently.
    """

    handle_type = ShardedUpdateHandle
    overlap_forward: bool = False
    elementwise: tuple[type[optim.Optimizer], ...] = ()

    def __post_init__(self) -> None:
        check_boolean("overlap_forward", self.overlap_forward, TypeError)
        kinds = self.elementwise
        if not isinstance(kinds, tuple) or not all(isinstance(kind, type) for kind in kinds):
            raise TypeError(f"elementwise is {kinds!r}; give a tuple of optimizers' classes")

    def check(self, training: Training) -> None:
        for optimizer in training.optimizers:
            if type(optimizer) not in (*ELEMENTWISE, *self.elementwise):
                name = type(optimizer).__name__
                raise OptionError(
                    f"ShardedUpdate cannot work with {name}, since a rank has only parts of "
                    "parameters, as flat tensors: take an optimizer that updates each element by "
                    f"itself, such as AdamW; if {name} does, give ShardedUpdate(elementwise="
                    f"({name},))"
                )
        reduced = _torch.reducer_parameters(training.ddp)
        for parameter, described in training.parameters.items():
            if parameter not in reduced:
                raise OptionError(
                    f"DDP does not reduce {described.name}, which was frozen when DDP was made; "
                    "make DDP anew"
                )
        held = {parameter: described.name for parameter, described in reduced.items()}
        module = training.ddp.module
        named = [*module.named_parameters(), *module.named_buffers()]
        check_memory(held, {t: name for name, t in named if t not in held})
