"""`Shard`: one bucket's parameters in one buffer, of which each rank owns a part; and `Shards`.

[Note: shards and pieces]
A bucket's parameters become views of one flat buffer, in the order in which the bucket has their
gradients. The buffer is padded and divided among the ranks: rank r's part is its *shard*. The part
of a parameter that lies in it is this rank's *piece* of that parameter: a flat view, often empty.
Optimizers are given pieces in place of parameters, all of them on each rank, so that groups, their
order and their hyperparameters stay the same. A parameter's state is cut like the parameter, and
`ShardedStates` saves it as plain DDP's optimizers would, and loads such a state.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn, optim

from ddpopt import _torch, _waits
from ddpopt.algorithms.comm import Exchange
from ddpopt.algorithms.handle import weakly
from ddpopt.errors import OptionError
from ddpopt.ranks.agree import Fact, communicating

_ALIGNMENT = 16  # elements: parts end where vectors of 64 bytes end
# States that torch's optimizers keep for a parameter as a whole; all others are for its elements.
_WHOLE = frozenset({"step", "eta", "mu", "mu_product"})

State = dict[str, Any]  # an optimizer's, of one parameter


class Member:
    """A parameter of a bucket, its place in the buffer, and this rank's piece of it.

    Attributes:
        place: Its place in the buffer, with its shape and strides.
        own: Where its piece is in this rank's part of the bucket.
        piece: What optimizers are given.
        gradient: The averaged gradient of the piece.
    """

    def __init__(self, shard: Shard, index: int, parameter: torch.Tensor, start: int) -> None:
        """`start` is where the parameter begins in the bucket."""
        self.index, self.parameter, self._start = index, parameter, start
        self.place = shard.buffer.as_strided(parameter.shape, parameter.stride(), start)
        size, offset = len(shard.gradient), shard.first - start
        first = min(max(-offset, 0), size)
        last = min(max(parameter.numel() - offset, first), size)
        self.own = slice(first, last)
        # Where the piece is among the parameter's own values.
        self._piece = slice(first + offset, last + offset) if first < last else slice(0)
        if parameter.numel() and _may_move(parameter, self.place):
            self.bring_home(parameter.detach())
        else:
            self.place.copy_(parameter.detach())
        self.piece = _make_piece(shard.own_part(shard.buffer)[self.own])
        self.gradient = shard.gradient[self.own]

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """Return this member's place in values of the whole bucket, as `place` is in the buffer."""
        return values.as_strided(self.place.shape, self.place.stride(), self._start)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a value of the member's shape, if possible a view."""
        return self.cut_flat(flatten(value, self.place))

    def cut_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """As `cut`, for values of shape [num_elements], in the order of the member's memory."""
        return flat[self._piece]

    def cut_state(self, state: State) -> State:
        """Return this rank's piece of a parameter's state, in its own memory."""
        own = dict(state)
        for name, value in state.items():
            if is_of_elements(name, value, self.place.shape):
                own[name] = self.cut(value).clone()
            elif isinstance(value, torch.Tensor):
                own[name] = value.clone()
        return own

    def fits(self) -> bool:
        """Whether the parameter can still be in the buffer."""
        kinds = [(t.shape, t.stride(), t.dtype, t.device) for t in (self.parameter, self.place)]
        return kinds[0] == kinds[1]

    def is_stray(self) -> bool:
        """Whether the parameter is elsewhere: `.data` was assigned, or it was never moved.

        It is copied to the buffer before an update, and back when that has been received.
        """
        address = self.parameter.data_ptr()
        return address != self.place.data_ptr() and self.parameter.numel() > 0

    def bring_home(self, value: torch.Tensor) -> None:
        """Move the parameter to its place in the buffer, with this value."""
        self.place.copy_(value)
        # A storage of its own: views would drag the bucket along when they are saved.
        self.parameter.data = torch.from_dlpack(self.place)  # type: ignore[attr-defined]

    def mark(self) -> tuple[int, int]:
        """Return what changes if the parameter is moved or written."""
        return self.parameter.data_ptr(), _torch.version_of(self.parameter)


class Shard:
    """A bucket of which this rank owns a part; see [Note: shards and pieces].

    Attributes:
        index: The bucket's index.
        indices: Those of its parameters, in its order.
        buffer: The values of all members, padded.
        first: Where this rank's part of it begins.
        gradient: The averaged gradient of this rank's part.
        awaited: The addresses of parameters that readers have waited for since it was cleared.
        is_awaited: Whether these were all of them in the last training forward.
        disturbed: The first parameter that was written or moved while it was being received.
    """

    def __init__(
        self,
        index: int,
        indices: Sequence[int],
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        is_guarded: bool = False,
    ) -> None:
        """Move those of `parameters` that `indices` name into the shard's storage.

        With `is_guarded` what happens to them between `send` and `wait` is looked at.
        """
        self.index, self.indices = index, tuple(indices)
        self._exchange, self._is_guarded = exchange, is_guarded
        own = [parameters[k] for k in indices]
        *starts, num_values = itertools.accumulate((p.numel() for p in own), initial=0)
        size = -(-num_values // (_ALIGNMENT * exchange.num_ranks)) * _ALIGNMENT
        self.first = size * exchange.rank
        self.buffer = own[0].detach().new_zeros(size * exchange.num_ranks)
        self.gradient = self.buffer.new_zeros(size)
        rows = zip(indices, own, starts, strict=True)
        self.members = [Member(self, *row) for row in rows]
        self.awaited: set[int] = set()
        self.is_awaited = False
        self.disturbed: int | None = None
        self._sent: list[tuple[int, int]] = []
        self._arriving: list[Any] = []
        self._what = ""

    def own_part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the values of the whole, padded bucket."""
        return values[self.first : self.first + len(self.gradient)]

    def holds(self, address: int) -> bool:
        return 0 <= address - self.buffer.data_ptr() < self.buffer.nbytes

    # ---- parameters --------------------------------------------------------------------------

    def send(self, what: str, updated: Collection[int]) -> None:
        """Start sending each rank's part of the current parameters to all ranks.

        `updated` are the indices of those that this update may have changed. Errors begin with
        `what`.
        """
        self._what = what
        changed = [m.parameter for m in self.members if m.index in updated]
        torch.autograd.graph.increment_version(changed)  # as in-place updates do
        if self._is_guarded:
            self._sent = [m.mark() for m in self.members]
        works = self._exchange.all_gather(self.buffer)
        self._arriving = self._exchange.follow("gather", self.index, self.buffer.nbytes, works)

    def wait(self) -> None:
        """Return when all parameters have arrived."""
        if self._arriving:
            arriving, self._arriving = self._arriving, []
            with communicating(self._what):
                self._exchange.wait(arriving)
            if self._is_guarded and self.disturbed is None:
                pairs = zip(self.members, self._sent, strict=True)
                self.disturbed = next((m.index for m, sent in pairs if m.mark() != sent), None)
            for member in self.members:
                if member.is_stray():
                    member.parameter.data.copy_(member.place)

    def reach(self, address: int) -> None:
        """Wait on behalf of a parameter's reader."""
        self.wait()
        self.awaited.add(address)

    def addresses(self) -> set[int]:
        return {m.parameter.data_ptr() for m in self.members if m.parameter.numel()}

    def release(self) -> None:
        for member in self.members:
            member.parameter.data = member.parameter.data.clone()  # which keeps strides

    # ---- what belongs to parameters ----------------------------------------------------------

    def gather_states(self, states: Sequence[State]) -> list[State]:
        """Return the states of whole parameters, given those of this rank's pieces. Collective.

        All ranks have states of the same members, with the same names and types.
        """
        wholes = [dict(state) for state in states]
        cuts: dict[tuple[str, torch.dtype], list[tuple[Member, State]]] = {}
        for member, whole in zip(self.members, wholes, strict=True):
            for name, value in whole.items():
                if is_of_elements(name, value, member.piece.shape):
                    cuts.setdefault((name, value.dtype), []).append((member, whole))
        for (name, dtype), pairs in cuts.items():
            values = torch.zeros_like(self.buffer, dtype=dtype)
            for member, whole in pairs:
                self.own_part(values)[member.own].copy_(whole[name])
            self._gather(values)
            for member, whole in pairs:
                whole[name] = member.view(values).clone()
        return wholes

    def gather_gradients(self) -> list[torch.Tensor]:
        """Return the averaged gradients of all members. Collective."""
        values = torch.zeros_like(self.buffer)
        self.own_part(values).copy_(self.gradient)
        self._gather(values)
        return [member.view(values).clone() for member in self.members]

    def _gather(self, values: torch.Tensor) -> None:
        """Complete the bucket's values, of which each rank has its part. Collective."""
        with communicating("gathering what ranks have of parameters"):
            self._exchange.wait(self._exchange.all_gather(values))

    def join_gradients(self) -> torch.Tensor:
        """Return the gradients of this rank, zero where there are none, in the buffer's order."""
        values = torch.zeros_like(self.buffer)
        for member in self.members:
            if member.parameter.grad is not None:
                member.view(values).copy_(member.parameter.grad)
        return values


class Shards:
    """All parameters of a model in shards, by bucket.

    With `is_guarded` readers of a parameter wait for it as long as this object is alive; see
    `_waits.py`. `members` are those of all shards, by their parameters' indices.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        buckets: Sequence[Sequence[int]],
        is_guarded: bool = False,
    ) -> None:
        """Divide `buckets`, given by parameter indices, among the ranks."""
        self.parameters = tuple(parameters)
        self.exchange = exchange
        self._is_guarded = is_guarded
        self._addresses: dict[int, Shard] = {}
        weakref.finalize(self, _waits.withdraw, self._addresses)
        self.divide(buckets)

    def divide(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide these buckets in place of the previous ones, of which nothing is kept."""
        own = (self.parameters, self.exchange, self._is_guarded)
        self.all = [Shard(index, indices, *own) for index, indices in enumerate(buckets)]
        self.by_indices: dict[tuple[int, ...], Shard] = {s.indices: s for s in self.all}
        found = {member.index: member for shard in self.all for member in shard.members}
        self.members = [found[index] for index in range(len(self.parameters))]
        self.announce()

    def collect_strays(self) -> int | None:
        """Copy this rank's pieces of strays to the buffers; return a parameter that does not fit.

        Strays may be in each other's places, as after `a.data, b.data = b.data, a.data`: these are
        all read before any is written, and go home.
        """
        misfit = next((m.index for m in self.members if not m.fits()), None)
        strays = [m for m in self.members if m.is_stray()]
        if misfit is not None or not strays:
            return misfit
        places = Counter(p.data_ptr() for p in self.parameters if p.numel())
        moved = []
        for member in strays:
            value = member.parameter.detach()
            if places[value.data_ptr()] > 1:
                return member.index
            if any(shard.holds(value.data_ptr()) for shard in self.all):
                moved.append((member, value.clone()))
        for member, value in moved:
            member.bring_home(value)
        for member in strays:
            member.piece.data.copy_(member.cut(member.parameter.detach()))
        return None

    def announce(self) -> None:
        """Make readers wait for parameters, which may have moved since this was last called."""
        if self._is_guarded:
            _waits.withdraw(self._addresses)
            self._addresses.clear()
            self._addresses.update({a: s for s in self.all for a in s.addresses()})
            _waits.announce(self._addresses)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.all)

    def __reversed__(self) -> Iterator[Shard]:
        return reversed(self.all)

    def release(self) -> None:
        _waits.withdraw(self._addresses)
        for shard in self.all:
            shard.release()


def is_of_elements(name: str, value: object, shape: torch.Size) -> bool:
    """Whether a state has a value for each element of a parameter or piece of this shape."""
    return isinstance(value, torch.Tensor) and name not in _WHOLE and value.shape == shape


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether a parameter's elements fill its memory without gaps, each once."""
    return parameter.stride() == torch.empty_like(parameter).stride()


def _may_move(parameter: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether a parameter may be here: not if processes share it, nor, on a GPU, unaligned.

    Compiled code relies on 16 bytes there.
    """
    if place.device.type == "cpu":
        return not parameter.untyped_storage().is_shared()
    return place.data_ptr() % 16 == 0


def _make_piece(values: torch.Tensor) -> nn.Parameter:
    piece: Any = nn.Parameter(values)
    # Not a subclass's methods: torch's optimizers are faster with parameters of no other type.
    piece.__deepcopy__ = piece.__reduce_ex__ = _refuse_copy
    return piece  # type: ignore[no-any-return]


def _refuse_copy(*_: object) -> NoReturn:
    raise OptionError(
        "this optimizer's states are in shards, of which a copy would have this rank's only; save "
        "handle.state_dict() of the handle that attach returned, or copy after handle.detach()"
    )


def check_memory(held: Mapping[torch.Tensor, str], others: Mapping[torch.Tensor, str]) -> None:
    """Raise OptionError for parameters that have gaps in memory, or share it, also with `others`.

    Both are by name.
    """
    for parameter, name in held.items():
        if not is_dense(parameter):
            raise OptionError(
                f"{name} has gaps or overlaps in memory (strides {parameter.stride()}); make it "
                "contiguous before DDP is made"
            )
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes, t in held, name)
        for t, name in [*held.items(), *others.items()]
        if t.numel() and t.layout is torch.strided
    )
    for (_, end, is_held, name), (start, _, is_other_held, other) in itertools.pairwise(spans):
        if start < end and (is_held or is_other_held):
            raise OptionError(
                f"{name} and {other} share memory without being the same parameter; register one "
                "parameter twice instead"
            )


def flatten(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values of shape [num_elements], in the order that `like` has in memory."""
    if value.stride() != like.stride():
        value = torch.empty_like(like, dtype=value.dtype).copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


class ShardedStates:
    """This rank's part of the optimizers' states, which they keep for pieces of parameters."""

    def __init__(self, shards: Shards, optimizers: Sequence[optim.Optimizer]) -> None:
        self._shards = shards
        self._optimizers = tuple(optimizers)
        for optimizer in optimizers:
            self.cut(optimizer)

    def cut(self, optimizer: optim.Optimizer) -> None:
        """Cut the states that an optimizer has of whole parameters."""
        for member in self._shards.members:
            if member.parameter in optimizer.state:
                self._put(optimizer, member, optimizer.state.pop(member.parameter))

    def divide(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide new buckets, with their states and gradients. Collective.

        Only one bucket's are whole at a time.
        """
        old = self._shards.all
        self._shards.divide(buckets)
        for shard in old:
            members = [self._shards.members[index] for index in shard.indices]
            for optimizer in self._optimizers:
                states = [optimizer.state.pop(m.piece, {}) for m in shard.members]
                for member, whole in zip(members, shard.gather_states(states), strict=True):
                    self._put(optimizer, member, whole)
            for member, gradient in zip(members, shard.gather_gradients(), strict=True):
                member.gradient.copy_(member.cut(gradient))

    def gather(self) -> list[dict[torch.Tensor, State]]:
        """Return the states of whole parameters, of each optimizer. Collective."""
        return [self._gather(optimizer.state) for optimizer in self._optimizers]

    def end(self, wholes: Sequence[dict[torch.Tensor, State]] = ()) -> None:
        """Remove pieces from optimizers; give them whole states as `gather` returned them."""
        for optimizer in self._optimizers:
            self._forget(optimizer.state)
        for optimizer, states in zip(self._optimizers, wholes, strict=False):
            optimizer.state.update(states)

    # ---- saving and loading ------------------------------------------------------------------

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return whole state dicts, by the hooks of all handles of an optimizer. Collective."""
        return [_whole_state_dict(optimizer) for optimizer in self._optimizers]

    def check(self, given: Any) -> list[Fact]:
        """Return what in a state has to be equal on all ranks; raise why it cannot be loaded."""
        loaded = self._states_in(given)
        facts = []
        for number, (optimizer, saved) in enumerate(zip(self._optimizers, loaded, strict=True)):
            sizes = [len(group["params"]) for group in saved["param_groups"]]
            own = [len(group["params"]) for group in optimizer.param_groups]
            if sizes != own:
                raise OptionError(
                    f"the state of optimizer {number} is of groups of {sizes} parameters, and it "
                    f"has {own}; load what an optimizer like it saved"
                )
            facts.append(Fact(f"parameters of optimizer {number}", str(sorted(saved["state"]))))
        return facts

    def load(self, given: dict[str, Any]) -> None:
        for optimizer, saved in zip(self._optimizers, self._states_in(given), strict=True):
            self._forget(optimizer.state)
            stand_in(optimizer).load_state_dict(saved)
            self.cut(optimizer)

    def _states_in(self, given: Any) -> list[Any]:
        if not isinstance(given, dict):
            raise TypeError(f"a state is a dict, as state_dict returns it; this is {type(given)}")
        loaded = [given] if "param_groups" in given else given.get("optimizers")
        num_optimizers = len(self._optimizers)
        if not isinstance(loaded, list) or len(loaded) != num_optimizers:
            raise OptionError(
                f"the state is not of {num_optimizers} optimizers; give what state_dict of this "
                "handle returned, or that of the optimizer where there is one"
            )
        return loaded

    def hooks(self) -> Iterator[Any]:
        """Yield hooks that make optimizers refuse to save or load by themselves."""
        saving, loading = weakly(self._before_saving), weakly(self._before_loading)
        for optimizer in self._optimizers:
            yield optimizer.register_state_dict_pre_hook(saving)
            yield optimizer.register_load_state_dict_pre_hook(loading)

    def _before_saving(self, optimizer: optim.Optimizer) -> None:
        """Give a stand-in whole states to save. Collective."""
        self._refuse(optimizer, "state_dict")
        if all(optimizer.state is not own.state for own in self._optimizers):  # not in an update
            wholes = self._gather(optimizer.state)
            self._forget(optimizer.state)
            optimizer.state.update(wholes)

    def _before_loading(self, optimizer: optim.Optimizer, _state: object) -> None:
        self._refuse(optimizer, "load_state_dict")

    def _refuse(self, optimizer: optim.Optimizer, what: str) -> None:
        if optimizer in self._optimizers:  # and not a stand-in
            raise OptionError(
                f"{what} of this optimizer concerns only this rank's part of its state; call "
                f"handle.{what}, on all ranks, with the handle that attach returned"
            )

    # ---- pieces ------------------------------------------------------------------------------

    def _put(self, optimizer: optim.Optimizer, member: Member, whole: State) -> None:
        if whole:
            optimizer.state[member.piece] = member.cut_state(whole)

    def _forget(self, of_optimizer: dict[torch.Tensor, State]) -> None:
        for member in self._shards.members:
            of_optimizer.pop(member.piece, None)

    def _gather(self, of_optimizer: dict[torch.Tensor, State]) -> dict[torch.Tensor, State]:
        found: dict[int, State] = {}
        for shard in self._shards:
            states = [of_optimizer.get(m.piece, {}) for m in shard.members]
            found.update(zip(shard.indices, shard.gather_states(states), strict=True))
        return {m.parameter: found[m.index] for m in self._shards.members if found[m.index]}


def _whole_state_dict(optimizer: optim.Optimizer) -> dict[str, Any]:
    states = dict(optimizer.state)
    saved: dict[str, Any] = stand_in(optimizer, state=lambda: states).state_dict()
    return saved


def stand_in(optimizer: optim.Optimizer, **own: Callable[[], Any]) -> Any:
    """Return an optimizer that has all in common with this one, except for its `own` attributes.

    Each is what its function returns. As it is another object, hooks can tell it from the user's.
    """

    def reading(function: Callable[[], Any]) -> property:
        return property(lambda _: function())

    kind: Any = type(optimizer)
    properties = {name: reading(function) for name, function in own.items()}
    made: Any = object.__new__(type(kind.__name__, (kind,), properties))
    made.__dict__ = optimizer.__dict__
    return made
