"""Waiting for parameters that other ranks are still sending, where they are read.

Whoever sends parameters says so with `announce`; whoever is about to read some calls `wait_for`, or
in compiled code the operator `ddpopt::wait_`. Neither knows the other. A parameter is identified by
its address: compiled code is given parameters, but not their names.

A module whose parameters are sent this way has *sharded* updates. Code that times its steps asks
`waited_s` how much of the time was waiting.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel


class Arrival(Protocol):
    """Knows when parameters have arrived."""

    def wait(self) -> None:
        """Return when they may be read."""

    def reach(self, address: int) -> None:
        """As `wait`, on behalf of a reader of the parameter at this address."""


class Waiting(Protocol):
    """Waits for other ranks when a module's updates are sharded."""

    @property
    def waited_s(self) -> float:
        """How long it has waited so far."""


class _Sharded(NamedTuple):
    find_waiting: Callable[[], Waiting | None]  # a weak reference
    is_behind_forward: bool


_arrivals: dict[int, Arrival] = {}  # by the parameter's address
_sharded: weakref.WeakKeyDictionary[DistributedDataParallel, _Sharded]
_sharded = weakref.WeakKeyDictionary()


def begin_sharded(ddp: DistributedDataParallel, waiting: Waiting, is_behind_forward: bool) -> None:
    """Note that a module's updates are sharded while `waiting` lives, or until `end_sharded`."""
    _sharded[ddp] = _Sharded(weakref.ref(waiting), is_behind_forward)


def end_sharded(ddp: DistributedDataParallel) -> None:
    _sharded.pop(ddp, None)


def is_sharded(ddp: DistributedDataParallel) -> bool:
    return ddp in _sharded and _sharded[ddp].find_waiting() is not None


def hides_behind_forward(ddp: DistributedDataParallel) -> bool:
    """Whether a module's sharded parameters may arrive while its forward runs."""
    return is_sharded(ddp) and _sharded[ddp].is_behind_forward


def waited_s(ddp: DistributedDataParallel | None) -> float:
    """Return how long a module's sharded updates have waited for other ranks, 0 without any."""
    sharded = None if ddp is None else _sharded.get(ddp)
    waiting = None if sharded is None else sharded.find_waiting()
    return 0.0 if waiting is None else waiting.waited_s


def announce(arrivals: Mapping[int, Arrival]) -> None:
    """Make readers of the parameters at these addresses wait, until `withdraw`."""
    _arrivals.update(arrivals)


def withdraw(arrivals: Mapping[int, Arrival]) -> None:
    """Let readers of these parameters no longer wait."""
    for address, arrival in arrivals.items():
        if _arrivals.get(address) is arrival:  # the memory may belong to another model by now
            del _arrivals[address]


def wait_for(parameters: Iterable[torch.Tensor]) -> None:
    """Return when all of these may be read; at once for those that nobody announced."""
    for parameter in parameters:
        arrival = _arrivals.get(parameter.data_ptr())
        if arrival is not None:
            arrival.reach(parameter.data_ptr())


def wait_for_all() -> None:
    for arrival in list(_arrivals.values()):
        arrival.wait()


def _wait(parameters: list[torch.Tensor], _after: torch.Tensor | None) -> None:
    # The operator outlives this module, which may be imported again with other `_arrivals`.
    sys.modules[__name__].wait_for(parameters)


# As if it wrote the parameters, so that compilers run it before what reads them; and as if it read
# `after`, so that they run it no earlier than the call that makes that value.
if not hasattr(torch.ops.ddpopt, "wait_"):  # else this module is imported once more
    _library: Any = torch.library.Library("ddpopt", "DEF")  # type: ignore[no-untyped-call]
    _library.define("wait_(Tensor(a!)[] parameters, Tensor? after) -> ()")
    _library.impl("wait_", _wait, "CompositeExplicitAutograd")
    torch.library.register_fake("ddpopt::wait_", lambda _parameters, _after: None, lib=_library)
WAIT = torch.ops.ddpopt.wait_.default
