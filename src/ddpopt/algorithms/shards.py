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

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from ddpopt import _waits
from ddpopt.algorithms.comm import Exchange
from ddpopt.errors import OptionError
from ddpopt.ranks.agreement import Fact, communicating

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
        addresses: Where in memory the parameters are.
        awaited: The addresses that readers have waited for since this was cleared.
        is_awaited: Whether these were all of them in the last training forward.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
    ) -> None:
        """Move `parameters`, those of `members`, into the shard's storage."""
        self.index = index
        self.members = tuple(members)
        self.parameters = tuple(parameters)
        self._exchange = exchange
        ends = list(itertools.accumulate(p.numel() for p in parameters))
        self._starts = [end - p.numel() for end, p in zip(ends, parameters, strict=True)]
        self.num_values = ends[-1]
        per_rank = -(-self.num_values // exchange.num_ranks)
        self._size = -(-per_rank // _ALIGNMENT) * _ALIGNMENT
        self._first = self._size * exchange.rank
        self._flat = parameters[0].detach().new_zeros(self._size * exchange.num_ranks)
        for parameter, values in zip(parameters, self.split(self._flat), strict=True):
            values.copy_(parameter.detach())
            parameter.data = values
        own = self.own_part(self._flat)
        self.gradient = torch.zeros_like(own)
        self.pieces = [nn.Parameter(own[self.place_of(k)]) for k in range(len(parameters))]
        self.awaited: set[int] = set()
        self.is_awaited = False
        self.addresses = {p.data_ptr() for p in parameters if p.numel()}
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
        return self.cut_flat(flatten(value, self.parameters[member]), member)

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
            flat.as_strided(p.shape, p.stride(), flat.storage_offset() + start)
            for p, start in zip(self.parameters, self._starts, strict=True)
        ]

    # ---- parameters --------------------------------------------------------------------------

    def send(self, what: str) -> None:
        """Start sending each rank's part of the current parameters to all ranks.

        Errors begin with `what`.
        """
        self._what = what
        works = self._exchange.all_gather(self._flat)
        self._arriving = self._exchange.follow("gather", self.index, self._flat.nbytes, works)

    def wait(self) -> None:
        """Return when all parameters have arrived."""
        if self._arriving:
            arriving, self._arriving = self._arriving, []
            with communicating(self._what):
                self._exchange.wait(arriving)

    def reach(self, address: int) -> None:
        """Wait on behalf of a parameter's reader."""
        self.wait()
        self.awaited.add(address)

    def release(self) -> None:
        """Give the parameters back storages of their own."""
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

    Readers of a parameter wait for it as long as this object is alive; see `_waits.py`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        buckets: Sequence[Sequence[int]],
    ) -> None:
        """Divide `buckets`, given by parameter indices, among the ranks."""
        self.parameters = tuple(parameters)
        self.exchange = exchange
        self._addresses: dict[int, Shard] = {}
        weakref.finalize(self, _waits.withdraw, self._addresses)
        self.divide(buckets)

    def divide(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide these buckets in place of the previous ones, of which nothing is kept."""
        _waits.withdraw(self._addresses)
        self.all = [
            Shard(index, members, [self.parameters[k] for k in members], self.exchange)
            for index, members in enumerate(buckets)
        ]
        self.by_members: dict[tuple[int | None, ...], Shard] = {s.members: s for s in self.all}
        self._home = {index: (s, k) for s in self.all for k, index in enumerate(s.members)}
        self._addresses.clear()
        self._addresses.update({a: shard for shard in self.all for a in shard.addresses})
        _waits.announce(self._addresses)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.all)

    def __reversed__(self) -> Iterator[Shard]:
        """Yield shards in the order in which forward reads them."""
        return reversed(self.all)

    def home(self, index: int) -> tuple[Shard, int]:
        """Return the shard of a parameter, and its place in it."""
        return self._home[index]

    def piece(self, index: int) -> nn.Parameter:
        """Return this rank's piece of a parameter."""
        shard, k = self._home[index]
        return shard.pieces[k]

    def pieces(self) -> list[nn.Parameter]:
        """Return this rank's pieces of all parameters, by index."""
        return [self.piece(index) for index in range(len(self.parameters))]

    def gradient(self, index: int) -> torch.Tensor:
        """Return the averaged gradient of this rank's piece of a parameter, as a view."""
        shard, k = self._home[index]
        return shard.gradient[shard.place_of(k)]

    def release(self) -> None:
        """Give parameters storages of their own; nobody waits for them any more."""
        _waits.withdraw(self._addresses)
        for shard in self.all:
            shard.release()


def is_of_elements(name: str, value: object, shape: torch.Size) -> bool:
    """Whether a state has a value for each element of a parameter or piece of this shape."""
    return isinstance(value, torch.Tensor) and name not in _WHOLE and value.shape == shape


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether a parameter's elements fill its memory without gaps, each once."""
    return parameter.stride() == torch.empty_like(parameter).stride()


def check_memory(named: Mapping[torch.Tensor, str]) -> None:
    """Raise OptionError for parameters that have gaps in memory or share it."""
    for parameter, name in named.items():
        if not is_dense(parameter):
            raise OptionError(
                f"{name} has gaps or overlaps in memory (strides {parameter.stride()}); make it "
                "contiguous before DDP is made"
            )
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name) for p, name in named.items() if p.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
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
    """Gives optimizers pieces in place of parameters, and their part of the states."""

    def __init__(self, shards: Shards, optimizers: Sequence[optim.Optimizer]) -> None:
        self._shards = shards
        self._parameters = shards.parameters
        self._optimizers = tuple(optimizers)
        self._is_whole = False  # optimizers temporarily have their whole states
        for optimizer in optimizers:
            self._give_pieces(optimizer)

    def indices_of(self, optimizer: optim.Optimizer) -> list[int]:
        """Return which parameters' pieces an optimizer has."""
        own = {piece for group in optimizer.param_groups for piece in group["params"]}
        return [index for index, piece in enumerate(self._shards.pieces()) if piece in own]

    def divide(self, buckets: Sequence[Sequence[int]]) -> None:
        """Divide new buckets, with their states and gradients. Collective.

        Only one bucket's are whole at a time.
        """
        old, old_pieces = self._shards.all, self._shards.pieces()
        self._shards.divide(buckets)
        for shard in old:
            for optimizer in self._optimizers:
                states = [optimizer.state.pop(piece, {}) for piece in shard.pieces]
                for index, whole in zip(shard.members, shard.gather_states(states), strict=True):
                    self._put(optimizer, index, whole)
            for index, gradient in zip(shard.members, shard.gather_gradients(), strict=True):
                home, member = self._shards.home(index)
                self._shards.gradient(index).copy_(home.cut(gradient, member))
        for optimizer in self._optimizers:
            _replace(optimizer, old_pieces, self._shards.pieces())

    def end(self, wholes: Sequence[Sequence[State]] = ()) -> None:
        """Give optimizers back their parameters, and whole states as `gather` returned them."""
        for optimizer in self._optimizers:
            self._take_pieces(optimizer)
        for optimizer, states in zip(self._optimizers, wholes, strict=False):
            kept = zip(self._parameters, states, strict=True)
            optimizer.state.update({p: s for p, s in kept if s})

    def gather(self) -> list[list[State]]:
        """Return each optimizer's states of whole parameters, by index. Collective."""
        return [self._gather(optimizer) for optimizer in self._optimizers]

    # ---- saving and loading ------------------------------------------------------------------

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return what each optimizer's `state_dict` would be with plain DDP. Collective."""
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
        """Load a state that passes `check`."""
        for optimizer, saved in zip(self._optimizers, self._states_in(given), strict=True):
            self._take_pieces(optimizer)
            with self._being_whole():
                optimizer.load_state_dict(saved)
            self._give_pieces(optimizer)

    def hooks(self) -> Iterator[Any]:
        """Yield hooks that make optimizers refuse to save or load by themselves."""
        me = weakref.WeakMethod(self._refuse)

        def refusing(what: str) -> Callable[..., None]:
            def refuse(*_: object) -> None:
                live = me()
                if live is not None:
                    live(what)

            return refuse

        for optimizer in self._optimizers:
            yield optimizer.register_state_dict_pre_hook(refusing("state_dict"))
            yield optimizer.register_load_state_dict_pre_hook(refusing("load_state_dict"))

    def _refuse(self, what: str) -> None:
        if not self._is_whole:
            raise OptionError(
                f"{what} of this optimizer concerns only this rank's part of its state; call "
                f"handle.{what}, on all ranks, with the handle that attach returned"
            )

    def _states_in(self, given: Any) -> list[Any]:
        """Return the state of each optimizer."""
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
        whole = self._gather(optimizer)
        pieces = self._shards.pieces()
        cut: dict[torch.Tensor, State] = {
            piece: optimizer.state.pop(piece) for piece in pieces if piece in optimizer.state
        }
        optimizer.state.update({p: s for p, s in zip(self._parameters, whole, strict=True) if s})
        _replace(optimizer, pieces, self._parameters)
        try:
            with self._being_whole():
                return optimizer.state_dict()
        finally:
            for parameter in self._parameters:
                optimizer.state.pop(parameter, None)
            optimizer.state.update(cut)
            _replace(optimizer, self._parameters, pieces)

    @contextlib.contextmanager
    def _being_whole(self) -> Iterator[None]:
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    # ---- pieces ------------------------------------------------------------------------------

    def _give_pieces(self, optimizer: optim.Optimizer) -> None:
        """Give an optimizer pieces in place of parameters, and their part of its states."""
        _replace(optimizer, self._parameters, self._shards.pieces())
        for index, parameter in enumerate(self._parameters):
            self._put(optimizer, index, optimizer.state.pop(parameter, {}))

    def _take_pieces(self, optimizer: optim.Optimizer) -> None:
        """Give an optimizer back its parameters, without states."""
        for piece in self._shards.pieces():
            optimizer.state.pop(piece, None)
        _replace(optimizer, self._shards.pieces(), self._parameters)

    def _put(self, optimizer: optim.Optimizer, index: int, whole: State) -> None:
        shard, k = self._shards.home(index)
        if whole:
            optimizer.state[shard.pieces[k]] = shard.cut_state(whole, k)

    def _gather(self, optimizer: optim.Optimizer) -> list[State]:
        found: dict[int, State] = {}
        for shard in self._shards:
            states = [optimizer.state.get(piece, {}) for piece in shard.pieces]
            found.update(zip(shard.members, shard.gather_states(states), strict=True))
        return [found[index] for index in range(len(self._parameters))]


def _replace(
    optimizer: optim.Optimizer, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
) -> None:
    """Replace some parameters in an optimizer's groups by others."""
    by = dict(zip(old, new, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [by.get(parameter, parameter) for parameter in group["params"]]
