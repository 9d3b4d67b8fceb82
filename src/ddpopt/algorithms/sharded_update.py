"""`ShardedUpdate`: gradients are summed to shards, each rank updates its own, and all get the rest.

Sources: stage 1 of ZeRO (Rajbhandari et al., arXiv 1910.02054) divides the optimizer's state and
its work; DeAR (Zhang et al., arXiv 2302.12445) hides the two halves of an allreduce behind backward
and behind the next forward.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn, optim

from ddpopt import _torch, _waits
from ddpopt.algorithms._runtime.absent_gradient import AbsentGradient
from ddpopt.algorithms._runtime.exchange import Complete, Exchange, Works
from ddpopt.algorithms._runtime.groups import make_agreement_group
from ddpopt.algorithms._runtime.handle import (
    Algorithm,
    Bucket,
    GradientFuture,
    Handle,
    Training,
    agree_on,
)
from ddpopt.algorithms._runtime.shards import Shard, State, is_dense
from ddpopt.config import check_boolean
from ddpopt.errors import OptionError, PeerError
from ddpopt.ranks.agreement import Fact
from ddpopt.ranks.faults import communicating
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
    """What ranks tell each other beside parameters: 1 for each rank whose update raised."""

    has_failed: torch.Tensor
    work: Any
    step: int


class ShardedUpdateHandle(Handle):
    """As `Handle`, with gradients and optimizer states in shards; see [Note: shards and pieces].

    From backward on, `.grad` of parameters raises when it is used: read `full_gradients()`, clip
    with `clip_grad_norm_`. Between an update and the end of the next forward parameters may be on
    their way. DDP's forwards, its modules' and `state_dict` wait for them; before anything else
    that reads them (averages of weights, a copy, a compiled module called without DDP) call `wait`.
    """

    algorithm: ShardedUpdate

    def __init__(self, training: Training, algorithm: ShardedUpdate) -> None:
        super().__init__(training, algorithm)
        self._parameters: list[torch.Tensor] = list(training.parameters)
        self._index = {parameter: k for k, parameter in enumerate(self._parameters)}
        everyone = self.groups.everyone
        self._exchange = Exchange(everyone, training.device)
        self._flags = everyone
        if training.device.type != "cpu":
            self._flags = make_agreement_group(training.group, training.device)
        me = weakref.ref(self)
        self._absent = [AbsentGradient(p, k, me) for k, p in enumerate(self._parameters)]
        self._absent_pieces: list[AbsentGradient] = []
        self._has_gradient = [False] * len(self._parameters)  # of what is in the shards
        self._reductions: list[Callable[[], None]] = []
        self._failure: Exception | None = None
        self._told_buckets: list[tuple[int, ...]] = []  # by the Reducer, in the last backward
        self._hidden: list[int] = []  # gradients that are taken away for a forward
        self._is_ending = False  # all of a backward's buckets are there
        self._lifted: set[int] | None = None  # gradients that were there when a backward began
        self._updating: set[optim.Optimizer] = set()
        self._is_changed = False  # shards were updated, and not sent
        self._sent: _Sent | None = None
        self._is_whole = False  # optimizers have their whole states for a moment
        self._addresses: dict[int, Shard] = {}
        self._is_training = False
        self._take(self._predict())
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                shard, k = self._home[index]
                shard.gradient[shard.place_of(k)].copy_(shard.cut(parameter.grad, k))
                self._has_gradient[index] = True
                parameter.grad = self._absent[index]
                shard.pieces[k].grad = self._absent_pieces[index]
        for optimizer in training.optimizers:
            self._give_pieces(optimizer)
        self._removable += [*self._hooks()]
        weakref.finalize(self, _waits.withdraw, self._addresses)
        state.of(training.ddp).wait_in_forward(True)

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
        """As `torch.nn.utils.clip_grad_norm_` of all parameters, and before the update. Collective.

        Returns:
            The norm of all gradients, before they were clipped, equal on all ranks.

        Raises:
            OptionError: `norm_type` is not above 0.
            RuntimeError: the norm is not finite, and `error_if_nonfinite` asks for this.
        """
        if not norm_type > 0:
            raise OptionError(f"norm_type is {norm_type}; give a number above 0")
        gradients = [gradient for _, gradient in self._gradients()]
        is_double = any(parameter.dtype is torch.float64 for parameter in self._parameters)
        kind = torch.float64 if is_double else torch.float32
        total = torch.zeros((), device=self.training.device, dtype=kind)
        norms = [torch.linalg.vector_norm(g, norm_type).to(kind) for g in gradients if g.numel()]
        if norms:
            total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        with communicating("adding up the norms of gradients"):
            if math.isinf(norm_type):
                dist.all_reduce(total, dist.ReduceOp.MAX, group=self.groups.everyone)
            else:
                total = total.pow(norm_type)
                dist.all_reduce(total, group=self.groups.everyone)
                total = total.pow(1 / norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of gradients is {total.item()}, so they were not clipped")
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return total

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the averaged gradients of whole parameters, by name in DDP's module. Collective.

        Parameters without a gradient are left out. They are copies.
        """
        having = {index for index, _ in self._gradients()}
        found: dict[str, torch.Tensor] = {}
        for shard in self._shards:
            for index, parameter, whole in zip(
                shard.members, shard.parameters, shard.gather_gradients(), strict=True
            ):
                if index in having:
                    found[self.training.parameters[parameter].name] = whole
        return found

    def average(self) -> None:
        """As `wait`: weights are equal."""
        self.settle()
        self.wait()

    def begin_pause(self) -> None:
        """Have all parameters."""
        self.wait()

    def detach(self, *, average: bool = True) -> None:
        """As `Handle.detach`; optimizers have their whole states again, parameters gradients.

        With `average=False` optimizers lose their states, of which other ranks have the most.
        """
        if not self._is_attached:
            return
        is_whole = False
        try:
            if average:
                self.average()
                gradients = self.full_gradients()
                wholes = [self._gather_states(o) for o in self.training.optimizers]
                is_whole = True
        finally:
            for optimizer in self.training.optimizers:
                self._take_pieces(optimizer)
            for parameter, absent in zip(self._parameters, self._absent, strict=True):
                if parameter.grad is absent:
                    parameter.grad = None
            if is_whole:
                for optimizer, whole in zip(self.training.optimizers, wholes, strict=True):
                    kept = zip(self._parameters, whole, strict=True)
                    optimizer.state.update({p: s for p, s in kept if s})
                for parameter, described in self.training.parameters.items():
                    parameter.grad = gradients.get(described.name, parameter.grad)
            super().detach(average=average)

    def close(self) -> None:
        """Give parameters storages of their own."""
        _waits.withdraw(self._addresses)
        state.of(self.training.ddp).wait_in_forward(False)
        for shard in self._shards:
            shard.release()

    def state_dict(self) -> dict[str, Any]:
        """Return steps so far, and the optimizers' whole states, as without this. Collective.

        `["optimizers"]` has for each optimizer what its `state_dict` returns with plain DDP.
        """
        self.settle()
        self.wait()
        return {
            "algorithm": self.algorithm.name,
            "num_steps": self.num_steps,
            "num_communications": self.num_communications,
            "optimizers": [self._whole_state_dict(o) for o in self.training.optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, or from that of the one optimizer with plain DDP. Collective.

        Raises:
            OptionError, TypeError: it does not fit the optimizers.
            AttachError: ranks load different ones.
        """
        self.settle()
        self.wait()
        everyone = self.groups.everyone
        remedy = "load the same on all ranks"
        agree_on(self.training.ddp, lambda: self._check_loaded(state), remedy, everyone)
        loaded = [state] if "param_groups" in state else state["optimizers"]
        for optimizer, saved in zip(self.training.optimizers, loaded, strict=True):
            self._take_pieces(optimizer)
            with self._being_whole():
                optimizer.load_state_dict(saved)
            self._give_pieces(optimizer)
        self.num_steps = state.get("num_steps", self.num_steps)
        self.num_communications = state.get("num_communications", self.num_communications)

    # ---- a step ------------------------------------------------------------------------------

    def on_forward(self) -> None:
        """As `Handle.on_forward`; wait for what no reader is known to wait for."""
        super().on_forward()
        self._end_lift()
        if self.training.ddp.gradient_as_bucket_view:  # the Reducer copies them to new buckets
            self._hide()
        self._is_training = torch.is_grad_enabled() and self.training.ddp.training
        for shard in reversed(self._shards):
            # Readers that waited in the last forward do so in this one.
            if not (self._is_training and shard.is_awaited):
                shard.wait()
            shard.awaited.clear()

    def on_forward_end(self) -> None:
        """Have all parameters; note where readers waited for them."""
        for index in self._hidden:
            self._parameters[index].grad = self._absent[index]
        self._hidden.clear()
        for shard in self._shards:
            if self._is_training:
                shard.is_awaited = shard.awaited >= shard.addresses
        self._receive()

    def on_gradient(self, index: int) -> None:
        """Note a gradient of this rank's own, which autograd is about to accumulate."""
        if self._lifted is None:
            self._lift()
        self._piece(index).grad = self._absent_pieces[index]

    def _lift(self) -> None:
        """Get ready for a backward, in which autograd and DDP read and write gradients.

        What was zeroed since the last one is forgotten, wherever that was done.
        """
        self._finish()
        self._lifted = set()
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None or self._piece(index).grad is None:
                self._has_gradient[index] = False
                parameter.grad = None
            elif parameter.grad is self._absent[index]:
                parameter.grad = None
                self._lifted.add(index)

    def _hide(self) -> None:
        """Take away what stands in the place of gradients, until this forward ends."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is self._absent[index]:
                parameter.grad = None
                self._hidden.append(index)

    def _end_lift(self) -> None:
        """Put what raises in the place of gradients that this backward had none of."""
        for index in self._lifted or ():
            if self._parameters[index].grad is None and self._piece(index).grad is not None:
                self._parameters[index].grad = self._absent[index]
        self._lifted = None

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """Begin to sum a bucket to shards. DDP need not wait for it, and copies local gradients."""
        self.num_communications += 1
        values: torch.Tensor = bucket.buffer()
        # In its first backward, a static graph's buckets come when all nodes have run, unnumbered.
        is_after_all = _torch.autograd_node() is None
        if bucket.index() == 0 and not self._is_ending:
            self._told_buckets.clear()
        if (bucket.is_last() or is_after_all) and not self._is_ending:
            self._is_ending = True
            _torch.at_end_of_backward(self.on_backward_end)
        members = [self._index.get(parameter) for parameter in bucket.parameters()]
        known = tuple(index for index in members if index is not None)
        self._told_buckets.append(known)
        try:
            if self._failure is None:
                sizes = [parameter.numel() for parameter in bucket.parameters()]
                self._reductions.append(self._begin_sum(values, members, sizes))
        except Exception as error:  # DDP would show it without type
            self._failure = error
        done: GradientFuture = torch.futures.Future()
        done.set_result(values)
        return done

    def on_backward_end(self) -> None:
        """Put what raises in the place of gradients."""
        self._is_ending = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._end_lift()
        for index, parameter in enumerate(self._parameters):
            has = parameter.grad is not None  # or it was never used, on no rank
            self._has_gradient[index] = has
            parameter.grad = self._absent[index] if has else None
            self._piece(index).grad = self._absent_pieces[index] if has else None

    def before_update(self) -> None:
        """Have all parameters, and this rank's gradients."""
        self._receive()
        self._finish()

    def on_update(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """As `Handle.on_update`; give the optimizer this rank's gradients."""
        super().on_update(optimizer, args, kwargs)
        self._updating.add(optimizer)
        self._is_changed = True
        gradients = dict(self._gradients())
        for index in self._indices_of(optimizer):
            piece = self._piece(index)
            if self._parameters[index].grad is None:  # by zero_grad of the model
                piece.grad = None
            elif piece.grad is not None and index in gradients:
                piece.grad = gradients[index]

    def on_updated(self, optimizer: optim.Optimizer, *_ignored: object) -> None:
        """As `Handle.on_updated`; take the gradients away again."""
        self._updating.discard(optimizer)
        for index in self._indices_of(optimizer):
            if self._piece(index).grad is not None:
                self._piece(index).grad = self._absent_pieces[index]
        super().on_updated(optimizer)

    def after_update(self) -> None:
        """Send what was updated; divide buckets anew where DDP's are others now."""
        if self._is_changed:
            self._send()
        if not self.algorithm.overlap_forward:
            self._receive()
        told, self._told_buckets = self._told_buckets, []
        is_final = not _torch.will_rebuild_buckets(self.training.ddp)
        if is_final and told and not self._by_members.keys() >= set(told):
            self._divide_anew(told)

    # ---- gradients ---------------------------------------------------------------------------

    def zero(self, index: int) -> None:
        """Make a gradient zero, and what this rank has accumulated of it."""
        self._finish()
        shard, k = self._home[index]
        shard.gradient[shard.place_of(k)].zero_()
        own = self._parameters[index].grad
        if own is not None and own is not self._absent[index]:
            own.zero_()

    def unscale(self, indices: Sequence[int], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
        """Multiply gradients by `scale`; `found_inf` is 1.0 if any rank's are not finite."""
        gradients = dict(self._gradients())
        for index in indices:
            gradient = gradients[index]
            if not gradient.isfinite().all():
                found_inf.fill_(1.0)
            gradient.mul_(scale.to(gradient.dtype))
        with communicating("asking all ranks for gradients that are not finite"):
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.groups.everyone)

    def _gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the index and this rank's gradient, a view, of each parameter that has one."""
        self._finish()
        for index, has in enumerate(self._has_gradient):
            shard, k = self._home[index]
            is_kept = shard.pieces[k].grad is not None
            if has and is_kept and self._parameters[index].grad is self._absent[index]:
                yield index, shard.gradient[shard.place_of(k)]

    def _begin_sum(
        self, values: torch.Tensor, members: Sequence[int | None], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to average a bucket, and return what completes this rank's gradients."""
        homes = [self._home[k] for k in members if k is not None and self._has_gradient[k]]
        parts = [shard.gradient[shard.place_of(k)] for shard, k in homes]
        earlier = [part.clone() for part in parts]  # to which this backward adds
        own = self._by_members.get(tuple(members))
        if own is not None:
            works, finish = self._exchange.mean_scatter(values, own.gradient)
        else:
            works, finish = self._begin_mean(values, members, sizes)

        def complete() -> None:
            for work in works:
                work.wait()
            finish()
            for part, addend in zip(parts, earlier, strict=True):
                part.add_(addend)

        return complete

    def _begin_mean(
        self, values: torch.Tensor, members: Sequence[int | None], sizes: Sequence[int]
    ) -> tuple[Works, Complete]:
        """Begin to average a bucket that is not divided: all ranks get all of it, and cut it."""
        values.div_(self._exchange.num_ranks)
        work = dist.all_reduce(values, group=self.groups.everyone, async_op=True)

        def cut() -> None:
            for index, part in zip(members, torch.split(values, list(sizes)), strict=True):
                if index is not None:
                    shard, k = self._home[index]
                    shard.gradient[shard.place_of(k)].copy_(shard.cut_flat(part, k))

        return [work], cut

    def _finish(self) -> None:
        """Complete this rank's gradients."""
        reductions, self._reductions = self._reductions, []
        with communicating(f"reducing gradients in step {self.num_steps}"):
            for complete in reductions:
                complete()

    # ---- parameters --------------------------------------------------------------------------

    def _send(self) -> None:
        """Begin to give all ranks the updated parameters, in the order in which forward reads."""
        torch.autograd.graph.increment_version(self._parameters)  # as updates in place do
        self._is_changed = False
        flags = torch.zeros(self._flags.size(), dtype=torch.int64)
        flags[self._flags.rank()] = bool(self._updating)
        self._updating.clear()
        with communicating(f"sending parameters in step {self.num_steps}"):
            work = dist.all_reduce(flags, group=self._flags, async_op=True)
            self._sent = _Sent(flags, work, self.num_steps)
            for shard in reversed(self._shards):
                shard.send(f"receiving parameters of step {self.num_steps}")

    def _receive(self) -> None:
        """Have all parameters; raise if an update failed."""
        for shard in reversed(self._shards):
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

    # ---- shards ------------------------------------------------------------------------------

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

    def _take(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide these buckets among the ranks."""
        _waits.withdraw(self._addresses)
        self._shards = [
            Shard(members, [self._parameters[index] for index in members], self._exchange)
            for members in buckets
        ]
        self._by_members: dict[tuple[int | None, ...], Shard] = {s.members: s for s in self._shards}
        self._home = {index: (s, k) for s in self._shards for k, index in enumerate(s.members)}
        me = weakref.ref(self)
        self._absent_pieces = [AbsentGradient(p, k, me) for k, p in enumerate(self._pieces())]
        self._addresses.clear()
        self._addresses.update({a: shard for shard in self._shards for a in shard.addresses})
        _waits.announce(self._addresses)

    def _divide_anew(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide other buckets than before. Collective; a bucket's states are whole at a time."""
        self._receive()
        old, optimizers = self._shards, self.training.optimizers
        old_pieces = self._pieces()
        self._finish()
        missing = {*self._index.values()}.difference(*buckets)
        self._take([*filter(None, buckets), *([index] for index in sorted(missing))])
        for shard in old:
            for optimizer in optimizers:
                states = [optimizer.state.pop(piece, {}) for piece in shard.pieces]
                for index, whole in zip(shard.members, shard.gather_states(states), strict=True):
                    self._put_state(optimizer, index, whole)
            for index, whole_gradient in zip(shard.members, shard.gather_gradients(), strict=True):
                home, member = self._home[index]
                home.gradient[home.place_of(member)].copy_(home.cut(whole_gradient, member))
        pieces_now = self._pieces()
        for optimizer in optimizers:
            _replace(optimizer, dict(zip(old_pieces, pieces_now, strict=True)))
        for index, (was, now) in enumerate(zip(old_pieces, pieces_now, strict=True)):
            now.grad = None if was.grad is None else self._absent_pieces[index]

    def _piece(self, index: int) -> nn.Parameter:
        shard, k = self._home[index]
        return shard.pieces[k]

    def _pieces(self) -> list[nn.Parameter]:
        return [self._piece(index) for index in range(len(self._parameters))]

    def _indices_of(self, optimizer: optim.Optimizer) -> list[int]:
        """Return which parameters' pieces an optimizer has."""
        own = {piece for group in optimizer.param_groups for piece in group["params"]}
        return [index for index, piece in enumerate(self._pieces()) if piece in own]

    # ---- optimizers --------------------------------------------------------------------------

    def _give_pieces(self, optimizer: optim.Optimizer) -> None:
        """Give an optimizer pieces in the place of parameters, and their part of its states."""
        _replace(optimizer, dict(zip(self._parameters, self._pieces(), strict=True)))
        for index, parameter in enumerate(self._parameters):
            self._put_state(optimizer, index, optimizer.state.pop(parameter, {}))

    def _take_pieces(self, optimizer: optim.Optimizer) -> None:
        """Give an optimizer its parameters back, without states."""
        for piece in self._pieces():
            optimizer.state.pop(piece, None)
        _replace(optimizer, dict(zip(self._pieces(), self._parameters, strict=True)))

    def _put_state(self, optimizer: optim.Optimizer, index: int, whole: State) -> None:
        shard, k = self._home[index]
        if whole:
            optimizer.state[shard.pieces[k]] = shard.cut_state(whole, k)

    def _gather_states(self, optimizer: optim.Optimizer) -> list[State]:
        """Return an optimizer's states of whole parameters, by index. Collective."""
        found: dict[int, State] = {}
        for shard in self._shards:
            states = [optimizer.state.get(piece, {}) for piece in shard.pieces]
            found.update(zip(shard.members, shard.gather_states(states), strict=True))
        return [found[index] for index in range(len(self._parameters))]

    def _whole_state_dict(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return what an optimizer's `state_dict` would be with plain DDP. Collective."""
        whole = self._gather_states(optimizer)
        pieces = self._pieces()
        cut: dict[torch.Tensor, State] = {
            piece: optimizer.state.pop(piece) for piece in pieces if piece in optimizer.state
        }
        optimizer.state.update({p: s for p, s in zip(self._parameters, whole, strict=True) if s})
        _replace(optimizer, dict(zip(pieces, self._parameters, strict=True)))
        try:
            with self._being_whole():
                return optimizer.state_dict()
        finally:
            for parameter in self._parameters:
                optimizer.state.pop(parameter, None)
            optimizer.state.update(cut)
            _replace(optimizer, dict(zip(self._parameters, pieces, strict=True)))

    def _check_loaded(self, given: Any) -> list[Fact]:
        if not isinstance(given, dict):
            raise TypeError(f"a state is a dict, as state_dict returns it; this is {type(given)}")
        loaded = [given] if "param_groups" in given else given.get("optimizers")
        num_optimizers = len(self.training.optimizers)
        if not isinstance(loaded, list) or len(loaded) != num_optimizers:
            raise OptionError(
                f"the state is not of {num_optimizers} optimizers; give what state_dict of this "
                "handle returned, or that of the optimizer where there is one"
            )
        facts = []
        for number, (optimizer, saved) in enumerate(
            zip(self.training.optimizers, loaded, strict=True)
        ):
            sizes = [len(group["params"]) for group in saved["param_groups"]]
            own = [len(group["params"]) for group in optimizer.param_groups]
            if sizes != own:
                raise OptionError(
                    f"the state of optimizer {number} is of groups of {sizes} parameters, and it "
                    f"has {own}; load what an optimizer like it saved"
                )
            facts.append(Fact(f"parameters of optimizer {number}", str(sorted(saved["state"]))))
        return facts

    @contextlib.contextmanager
    def _being_whole(self) -> Iterator[None]:
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    # ---- hooks -------------------------------------------------------------------------------

    def _hooks(self) -> Iterator[Any]:
        """Register all hooks that `Handle` has not."""
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
            hooked: Any = module  # whose methods for hooks have no types
            yield hooked.register_state_dict_pre_hook(whole)
            yield hooked.register_load_state_dict_pre_hook(whole)
        for optimizer in self.training.optimizers:
            yield optimizer.register_state_dict_pre_hook(
                lambda *_: call(ShardedUpdateHandle.refuse, "state_dict")
            )
            yield optimizer.register_load_state_dict_pre_hook(
                lambda *_: call(ShardedUpdateHandle.refuse, "load_state_dict")
            )

    def refuse(self, what: str) -> None:
        """Raise OptionError where an optimizer would save or load this rank's part alone."""
        if not self._is_whole:
            raise OptionError(
                f"{what} of this optimizer concerns only this rank's part of its state; call "
                f"handle.{what}, on all ranks, with the handle that attach returned"
            )


def _wait_for_all() -> None:
    _waits.wait_for_all()


def _waiting_for(parameters: Sequence[torch.Tensor]) -> Callable[..., None]:
    """Return a hook that runs before the forward of a module with these parameters."""

    def wait(*_: object) -> None:
        if torch.compiler.is_compiling():
            _wait_for_all()  # now: a backend that is not ours compiles code without waits
        else:
            _waits.wait_for(parameters)

    return wait


def _replace(optimizer: optim.Optimizer, by: dict[Any, Any]) -> None:
    """Give an optimizer's groups other parameters in the place of some."""
    for group in optimizer.param_groups:
        group["params"] = [by.get(parameter, parameter) for parameter in group["params"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedUpdate(Algorithm[ShardedUpdateHandle]):
    """Gradients are summed to shards behind backward; updated shards are sent behind forward.

    The result is that of plain DDP with the same optimizer, to the bit on two ranks where
    parameters have 32 or 64 bits. A rank keeps its part of the optimizer's state, and does its part
    of the update. An optimizer has to update each element of a parameter by itself.

    Attributes:
        overlap_forward: Send parameters behind the next forward; False waits in `optimizer.step`,
            so that all that reads parameters may do so at any time.
        elementwise: Further optimizers, by class, that update each element by itself.
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
        """Raise the reason if this cannot be attached there on this rank."""
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
            if not is_dense(parameter):
                raise OptionError(
                    f"{name} has gaps or overlaps in memory (strides {parameter.stride()}); make "
                    "it contiguous before DDP is made"
                )
        _refuse_shared_memory(named)


def _refuse_shared_memory(named: dict[torch.Tensor, str]) -> None:
    """Raise OptionError for parameters that lie in the same memory, which would be divided."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name) for p, name in named.items() if p.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise OptionError(
                f"{name} and {other} share memory without being the same parameter; register one "
                "parameter twice instead"
            )
