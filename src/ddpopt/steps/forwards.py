"""When forwards of DDP modules begin and end, for whoever subscribes.

A module without subscribers of its own pays one dictionary lookup a forward.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._torch import Forward
from ddpopt.errors import TorchDriftError
from ddpopt.steps.observing import report


class Subscriber:
    """Is told of forwards. It holds the DDP module weakly, if at all."""

    # Whether its errors are for the user. Others only observe: an error of theirs is reported, the
    # forward goes on, and they are told of no more forwards of the module (unless of all modules').
    may_raise = False

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Run before a forward."""

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Run after a forward."""


class Turn(enum.IntEnum):
    """When a subscriber is told, among those of one module."""

    PERMITS = enum.auto()  # first: it may raise, and then the forward does not run
    CHANGES = enum.auto()  # it may change the module's buckets, and others see the new ones
    WATCHES = enum.auto()
    REMEMBERS = enum.auto()  # last: it notes a forward after the others asked about the one before


class _Subscription(NamedTuple):
    turn: Turn
    subscriber: Subscriber


_S = TypeVar("_S", bound=Subscriber)
_Interest = Callable[[DistributedDataParallel], Subscriber | None]

# Subscribers to the forwards of all modules, for the life of the process: the backend's own. They
# hear of a forward's beginning before the module's subscribers, and of its end after these.
_subscribers_to_all: list[Subscriber] = []
# Functions that are asked once for each module, and may return a subscriber to it.
_interests: list[_Interest] = []
# The subscribers to each module, in the order in which they are told.
_subscriptions: ModuleSlot[tuple[_Subscription, ...]] = ModuleSlot(tuple, Lifetime.MODULE)
# Whether forwards are reported in this process.
_are_reported = False
# The problems that were warned of; each is told once.
_warned: set[str] = set()


def watch_forwards() -> None:
    """Have forwards reported in this process. Idempotent.

    Without the name of torch's that it takes no forward is reported, and a warning says so.
    """
    global _are_reported  # noqa: PLW0603  # a matter of the process: DDP's method was replaced
    try:
        _torch.watch_ddp_forward(_before_forward, _after_forward)
        _are_reported = True
    except TorchDriftError as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            _logs.warning("ddpopt cannot tell when Dynamo compiles nothing of a model: %s", error)
    # Or Dynamo would compile what subscribers do. In each call: it hides those of our modules that
    # are imported by now, and a subscriber's may be new.
    _torch.hide_from_dynamo()


def are_forwards_reported() -> bool:
    """Whether it is told here when forwards begin and end."""
    return _are_reported


def subscribe_to_all(subscriber: Subscriber) -> None:
    """Tell a subscriber of every module's forwards, unless there is one of its class."""
    if not any(type(other) is type(subscriber) for other in _subscribers_to_all):
        _subscribers_to_all.append(subscriber)


def ask_at_first(interest: _Interest) -> None:
    """Ask `interest` for a subscriber to each module, at the latest as its next forward begins.

    Of modules for which the other interests were asked before, it is asked now. Idempotent.
    """
    if interest in _interests:
        return
    _interests.append(interest)
    for ddp in _subscriptions.modules():
        subscriber = interest(ddp)
        if subscriber is not None:
            subscribe(ddp, subscriber)


def subscribe(
    ddp: DistributedDataParallel, subscriber: Subscriber, turn: Turn = Turn.WATCHES
) -> None:
    """Tell a subscriber of a module's forwards; it replaces one of its class."""
    subscriptions = list(_subscriptions_of(ddp))
    new = _Subscription(turn, subscriber)
    for index, other in enumerate(subscriptions):
        if type(other.subscriber) is type(subscriber):
            subscriptions[index] = new
            break
    else:
        subscriptions.append(new)
    subscriptions.sort(key=lambda subscription: subscription.turn)  # equals keep their order
    _subscriptions.set(ddp, tuple(subscriptions))


def unsubscribe(ddp: DistributedDataParallel, kind: type[Subscriber]) -> None:
    """Remove the subscriber of this class."""
    others = [s for s in _subscriptions_of(ddp) if type(s.subscriber) is not kind]
    _subscriptions.set(ddp, tuple(others))


def find_subscriber(ddp: DistributedDataParallel, kind: type[_S]) -> _S | None:
    """The subscriber of this class to a module's forwards, None if there is none."""
    for subscription in _subscriptions.get(ddp):
        if type(subscription.subscriber) is kind:
            return subscription.subscriber
    return None


def find_ddp(module: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP module around a module, once its forward has run; the newest of several."""
    for ddp in reversed(_subscriptions.modules()):
        if ddp.module is module:
            return ddp
    return None


def will_communicate(ddp: DistributedDataParallel) -> bool:
    """Whether a backward of the current forward would end in allreduces."""
    return torch.is_grad_enabled() and _torch.syncs_gradients(ddp)


def _before_forward(ddp: DistributedDataParallel, forward: Forward) -> None:
    for subscriber in _subscribers_to_all:
        _tell(subscriber, subscriber.before_forward, ddp, forward)
    for _, subscriber in _subscriptions_of(ddp):
        _tell(subscriber, subscriber.before_forward, ddp, forward)


def _after_forward(ddp: DistributedDataParallel, forward: Forward) -> None:
    # Including those that subscribed during this forward: a tuner does so when code is compiled.
    for _, subscriber in _subscriptions_of(ddp):
        _tell(subscriber, subscriber.after_forward, ddp, forward)
    for subscriber in _subscribers_to_all:
        _tell(subscriber, subscriber.after_forward, ddp, forward)


def _tell(
    subscriber: Subscriber,
    call: Callable[[DistributedDataParallel, Forward], None],
    ddp: DistributedDataParallel,
    forward: Forward,
) -> None:
    """Call a subscriber; its error ends the forward if it `may_raise`, and else is a warning.

    Then it is told of no further forward of `ddp`; one that subscribed to all modules is, and a
    warning of the same error comes once.
    """
    try:
        call(ddp, forward)
    except Exception as error:
        if subscriber.may_raise:
            raise
        unsubscribe(ddp, type(subscriber))
        report(error)


def _subscriptions_of(ddp: DistributedDataParallel) -> tuple[_Subscription, ...]:
    subscriptions = _subscriptions.find(ddp)
    if subscriptions is None:  # asked for the first time
        found = [interest(ddp) for interest in _interests]
        subscriptions = tuple(_Subscription(Turn.WATCHES, s) for s in found if s is not None)
        _subscriptions.set(ddp, subscriptions)
    return subscriptions
