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
from collections.abc import Collection, Iterator, Mapping, Sequence
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


class Shard:
    """A bucket of which this rank owns a part; see [Note: shards and pieces].

    Attributes:
        index: The bucket's index.
        members: The bucket's parameters, by index, in its order.
        pieces: This rank's piece of each of them.
        gradient: The averaged gradient of this rank's part.
        awaited: The addresses of parameters that readers have waited for since it was cleared.
        is_awaited: Whether these were all of them in the last training forward.
        disturbed: The first member that was written or moved while it was being received.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        is_guarded: bool = False,
    ) -> None:
        """Move those of `parameters` that are `members` into the shard's storage.

        With `is_guarded` what happens to them between `send` and `wait` is looked at.
        """
        self.index, self.members = index, tuple(members)
        self._exchange, self._is_guarded = exchange, is_guarded
        self.parameters = parameters = tuple(parameters[k] for k in members)
        ends = list(itertools.accumulate(p.numel() for p in parameters))
        self._starts = [end - p.numel() for end, p in zip(ends, parameters, strict=True)]
        self.num_values = ends[-1]
        per_rank = -(-self.num_values // exchange.num_ranks)
        self._size = -(-per_rank // _ALIGNMENT) * _ALIGNMENT
        self._first = self._size * exchange.rank
        self._flat = parameters[0].detach().new_zeros(self._size * exchange.num_ranks)
        self._layouts = [(p.shape, p.stride()) for p in parameters]
        self._places = self.split(self._flat)
        for k, (parameter, place) in enumerate(zip(parameters, self._places, strict=True)):
            if parameter.numel() and _may_move(parameter, place):
                self.bring_home(k, parameter.detach())
            else:
                place.copy_(parameter.detach())
        own = self.own_part(self._flat)
        self.gradient = torch.zeros_like(own)
        self.pieces = [_make_piece(own[self.place_of(k)]) for k in range(len(parameters))]
        self.awaited: set[int] = set()
        self.is_awaited = False
        self.disturbed: int | None = None
        self._sent: list[tuple[int, int]] = []
        self._arriving: list[Any] = []
        self._what = ""

    # ---- places ------------------------------------------------------------------------------

    def place_of(self, member: int) -> slice:
        """Return where the piece of the k-th member is in this rank's part."""
        start, num_values = self._starts[member], self.parameters[member].numel()
        first = min(max(start - self._first, 0), self._size)
        last = min(max(start + num_values - self._first, first), self._size)
        return slice(first, last)

    def cut(self, value: torch.Tensor, member: int) -> torch.Tensor:
        """Return this rank's piece of a value of the k-th member's elements, if possible a view.

        `value` has the member's shape.
        """
        return self.cut_flat(flatten(value, self._places[member]), member)

    def cut_flat(self, flat: torch.Tensor, member: int) -> torch.Tensor:
        """As `cut`, for values of shape [num_elements], in the order of the member's memory."""
        place, offset = self.place_of(member), self._first - self._starts[member]
        if place.start == place.stop:
            return flat[:0]
        return flat[place.start + offset : place.stop + offset]

    def own_part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the values of the whole, padded bucket."""
        return flat[self._first : self._first + self._size]

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of the bucket's values for each member, with its shape and strides."""
        return [
            flat.as_strided(shape, stride, flat.storage_offset() + start)
            for (shape, stride), start in zip(self._layouts, self._starts, strict=True)
        ]

    # ---- parameters --------------------------------------------------------------------------

    def strays(self) -> list[int]:
        """Return the members that are elsewhere: `.data` was assigned, or they were never moved.

        They are copied to the buffer before an update, and back when it has been received.
        """
        pairs = enumerate(zip(self.parameters, self._places, strict=True))
        return [k for k, (p, place) in pairs if p.data_ptr() != place.data_ptr() and p.numel()]

    def addresses(self) -> set[int]:
        return {parameter.data_ptr() for parameter in self.parameters if parameter.numel()}

    def find_misfit(self) -> int | None:
        """Return a member that cannot be in the buffer any more."""
        rows = zip(self.parameters, self._places, self._layouts, strict=True)
        for k, (p, place, layout) in enumerate(rows):
            kind = (p.dtype, p.device)
            if (p.shape, p.stride()) != layout or kind != (place.dtype, place.device):
                return k
        return None

    def take_in(self, member: int) -> None:
        self.pieces[member].data.copy_(self.cut(self.parameters[member].detach(), member))

    def bring_home(self, member: int, value: torch.Tensor) -> None:
        """Move a parameter to its place in the buffer, with this value."""
        place = self._places[member].copy_(value)
        # A storage of its own: views would drag the bucket along when they are saved.
        self.parameters[member].data = torch.from_dlpack(place)  # type: ignore[attr-defined]

    def holds(self, address: int) -> bool:
        return 0 <= address - self._flat.data_ptr() < self._flat.nbytes

    def send(self, what: str, updated: Collection[int]) -> None:
        """Start sending each rank's part of the current parameters to all ranks.

        `updated` are the indices of those that this update may have changed. Errors begin with
        `what`.
        """
        self._what = what
        changed = zip(self.members, self.parameters, strict=True)
        # As in-place updates do.
        torch.autograd.graph.increment_version([p for k, p in changed if k in updated])
        if self._is_guarded:
            self._sent = self._marks()
        works = self._exchange.all_gather(self._flat)
        self._arriving = self._exchange.follow("gather", self.index, self._flat.nbytes, works)

    def wait(self) -> None:
        """Return when all parameters have arrived."""
        if self._arriving:
            arriving, self._arriving = self._arriving, []
            with communicating(self._what):
                self._exchange.wait(arriving)
            if self._is_guarded and self.disturbed is None:
                pairs = enumerate(zip(self._marks(), self._sent, strict=True))
                self.disturbed = next((k for k, (now, sent) in pairs if now != sent), None)
            for k in self.strays():
                self.parameters[k].data.copy_(self._places[k])

    def _marks(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), _torch.version_of(p)) for p in self.parameters]

    def reach(self, address: int) -> None:
        """Wait on behalf of a parameter's reader."""
        self.wait()
        self.awaited.add(address)

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()  # which keeps strides

    # ---- what belongs to parameters ----------------------------------------------------------

    def cut_state(self, state: State, member: int) -> State:
        """Return this rank's piece of a parameter's state, in its own memory."""
        shape = self.parameters[member].shape
        return {
            name: (self.cut(value, member) if is_of_elements(name, value, shape) else value).clone()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }

    def gather_states(self, states: Sequence[State]) -> list[State]:
        """Return the states of whole parameters, given those of this rank's pieces. Collective.

        All ranks have states of the same members, with the same names and types.
        """
        shapes = [piece.shape for piece in self.pieces]
        whole: list[State] = [{} for _ in states]
        rows = zip(range(len(states)), states, shapes, strict=True)
        cuts: dict[tuple[str, torch.dtype], list[int]] = {}
        for k, state, shape in rows:
            for name, value in state.items():
                if is_of_elements(name, value, shape):
                    cuts.setdefault((name, value.dtype), []).append(k)
                    whole[k][name] = None  # keeps their order
                else:
                    whole[k][name] = value
        for (name, dtype), members in cuts.items():
            flat = torch.zeros_like(self._flat, dtype=dtype)
            for k in members:
                self.own_part(flat)[self.place_of(k)].copy_(states[k][name])
            values = self._gather(flat)
            for k in members:
                whole[k][name] = values[k]
        return whole

    def join_gradients(self) -> torch.Tensor:
        """Return the gradients of this rank, zero where there are none, in the buffer's order."""
        flat = torch.zeros_like(self._flat)
        for parameter, place in zip(self.parameters, self.split(flat), strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
        return flat

    def gather_gradients(self) -> list[torch.Tensor]:
        """Return the averaged gradients of all members. Collective."""
        flat = torch.zeros_like(self._flat)
        self.own_part(flat).copy_(self.gradient)
        return self._gather(flat)

    def _gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each member's values, gathered from this rank's part of the bucket's."""
        with communicating("gathering what ranks have of parameters"):
            self._exchange.wait(self._exchange.all_gather(flat))
        return [torch.empty_like(value).copy_(value) for value in self.split(flat)]


class Shards:
    """All parameters of a model in shards, by bucket.

    With `is_guarded` readers of a parameter wait for it as long as this object is alive; see
    `_waits.py`.
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
        self.all = [Shard(index, members, *own) for index, members in enumerate(buckets)]
        self.by_members: dict[tuple[int, ...], Shard] = {s.members: s for s in self.all}
        self._home = {index: (s, k) for s in self.all for k, index in enumerate(s.members)}
        self.announce()

    def take_in(self) -> int | None:
        """Copy this rank's pieces of strays to the buffers; return a parameter that does not fit.

        Strays may be in each other's places, as after `a.data, b.data = b.data, a.data`: these are
        all read before any is written, and go home.
        """
        strays = []
        for shard in self.all:
            misfit = shard.find_misfit()
            if misfit is not None:
                return shard.members[misfit]
            strays += [(shard, k) for k in shard.strays()]
        if not strays:
            return None
        places = Counter(p.data_ptr() for p in self.parameters if p.numel())
        moved = []
        for shard, k in strays:
            value = shard.parameters[k].detach()
            if places[value.data_ptr()] > 1:
                return shard.members[k]
            if any(other.holds(value.data_ptr()) for other in self.all):
                moved.append((shard, k, value.clone()))
        for shard, k, value in moved:
            shard.bring_home(k, value)
        for shard, k in strays:
            shard.take_in(k)
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

    def home(self, index: int) -> tuple[Shard, int]:
        return self._home[index]

    def piece(self, index: int) -> nn.Parameter:
        shard, k = self._home[index]
        return shard.pieces[k]

    def pieces(self) -> list[nn.Parameter]:
        return [self.piece(index) for index in range(len(self.parameters))]

    def gradient(self, index: int) -> torch.Tensor:
        """Return the averaged gradient of this rank's piece of a parameter, as a view."""
        shard, k = self._home[index]
        return shard.gradient[shard.place_of(k)]

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
        self._parameters = shards.parameters
        self._optimizers = tuple(optimizers)
        for optimizer in optimizers:
            self._cut(optimizer)

    def divide(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide new buckets, with their states and gradients. Collective.

        Only one bucket's are whole at a time.
        """
        old = self._shards.all
        self._shards.divide(buckets)
        for shard in old:
            for optimizer in self._optimizers:
                states = [optimizer.state.pop(piece, {}) for piece in shard.pieces]
                for index, whole in zip(shard.members, shard.gather_states(states), strict=True):
                    self._put(optimizer, index, whole)
            for index, gradient in zip(shard.members, shard.gather_gradients(), strict=True):
                home, member = self._shards.home(index)
                self._shards.gradient(index).copy_(home.cut(gradient, member))

    def end(self, wholes: Sequence[Sequence[State]] = ()) -> None:
        """Remove pieces from optimizers; give them whole states as `gather` returned them."""
        for optimizer in self._optimizers:
            self._forget(optimizer)
        for optimizer, states in zip(self._optimizers, wholes, strict=False):
            optimizer.state.update(self._named(states))

    def gather(self) -> list[list[State]]:
        return [self._gather(optimizer) for optimizer in self._optimizers]

    # ---- saving and loading ------------------------------------------------------------------

    def state_dicts(self) -> list[dict[str, Any]]:
        return [self._whole_state_dict(optimizer) for optimizer in self._optimizers]

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
            self._forget(optimizer)
            double = _double(optimizer, optimizer.state)
            double.load_state_dict(saved)
            vars(optimizer).update(vars(double))
            self._cut(optimizer)

    def take_in(self, optimizer: optim.Optimizer) -> None:
        """Cut states that the user has given an optimizer for whole parameters."""
        for index, parameter in enumerate(self._parameters):
            if parameter in optimizer.state:
                self._put(optimizer, index, optimizer.state.pop(parameter))

    def hooks(self) -> Iterator[Any]:
        """Yield hooks that make optimizers refuse to save or load by themselves."""
        refuse = weakly(self._refuse)
        for optimizer in self._optimizers:
            for what in ("state_dict", "load_state_dict"):
                register = getattr(optimizer, f"register_{what}_pre_hook")
                yield register(lambda of, *_, what=what: refuse(of, what))

    def _refuse(self, optimizer: optim.Optimizer, what: str) -> None:
        if optimizer in self._optimizers:  # and not a double
            raise OptionError(
                f"{what} of this optimizer concerns only this rank's part of its state; call "
                f"handle.{what}, on all ranks, with the handle that attach returned"
            )

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

    def _whole_state_dict(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        pieces = set(self._shards.pieces())
        states = {t: state for t, state in optimizer.state.items() if t not in pieces}
        return _double(optimizer, states | self._named(self._gather(optimizer))).state_dict()

    # ---- pieces ------------------------------------------------------------------------------

    def _cut(self, optimizer: optim.Optimizer) -> None:
        for index, parameter in enumerate(self._parameters):
            self._put(optimizer, index, optimizer.state.pop(parameter, {}))

    def _put(self, optimizer: optim.Optimizer, index: int, whole: State) -> None:
        shard, k = self._shards.home(index)
        if whole:
            optimizer.state[shard.pieces[k]] = shard.cut_state(whole, k)

    def _forget(self, optimizer: optim.Optimizer) -> None:
        for piece in self._shards.pieces():
            optimizer.state.pop(piece, None)

    def _named(self, states: Sequence[State]) -> dict[torch.Tensor, State]:
        return {p: state for p, state in zip(self._parameters, states, strict=True) if state}

    def _gather(self, optimizer: optim.Optimizer) -> list[State]:
        found: dict[int, State] = {}
        for shard in self._shards:
            states = [optimizer.state.get(piece, {}) for piece in shard.pieces]
            found.update(zip(shard.members, shard.gather_states(states), strict=True))
        return [found[index] for index in range(len(self._parameters))]


def _double(optimizer: optim.Optimizer, states: dict[torch.Tensor, State]) -> optim.Optimizer:
    double = object.__new__(type(optimizer))
    double.__dict__ = {**vars(optimizer), "state": states}
    return double
