"""`ShardedStates`: optimizers work on pieces of parameters; their states are cut, and gathered.

What is saved is what the optimizers would save with plain DDP, and such a state can be loaded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import optim

from ddpopt.algorithms._runtime.shards import Shards, State
from ddpopt.errors import OptionError
from ddpopt.ranks.agreement import Fact


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
