"""How often each gradient arrives in a backward of a static graph, which a new Reducer has to know.

[Note: a static graph's arrivals]
With `static_graph=True` a Reducer counts in its first backward how often each gradient arrives:
never if the parameter is unused, several times if several reentrant checkpoints use it, since each
of these runs a backward of its own within the backward. From the second backward on, the Reducer
reduces a gradient when it has arrived as often. A Reducer that is made in the middle of a training
would count in whatever runs next, even a call of `torch.autograd.grad`. So arrivals are counted
once here, as soon as code is compiled for a module, and the new Reducer is told of them: see
`_torch.pass_first_steps`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._indices import ParameterIndex
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._torch import Forward
from ddpopt.errors import TorchDriftError
from ddpopt.split import state
from ddpopt.steps.forwards import (
    Subscriber,
    Turn,
    find_subscriber,
    subscribe,
    unsubscribe,
    will_communicate,
)
from ddpopt.steps.observing import observing

# How often each gradient arrives on this rank, by parameter index; None until it is known. Kept
# when compiled code is dropped: a static graph that changes is an error in DDP anyway.
_num_arrivals: ModuleSlot[Mapping[ParameterIndex, int] | None]
_num_arrivals = ModuleSlot(lambda: None, Lifetime.MODULE)


def watch(ddp: DistributedDataParallel) -> None:
    """Count arrivals of a static graph from this forward on, until they are known."""
    if not ddp.static_graph or state.is_copy(ddp):
        return
    if _num_arrivals.get(ddp) is None and find_subscriber(ddp, _Counter) is None:
        # If this torch lacks a name, steps go on, and the tuner, which asks for arrivals, changes
        # no buckets.
        with contextlib.suppress(TorchDriftError):
            counter = _Counter(ddp)
            if will_communicate(ddp):
                counter.begin(ddp)  # the forward that is running
            subscribe(ddp, counter, Turn.REMEMBERS)


def find_arrivals(ddp: DistributedDataParallel) -> Mapping[ParameterIndex, int] | None:
    """How often each gradient of a static graph arrives; None if unknown."""
    return _num_arrivals.get(ddp)


class _Counter(Subscriber):
    """Counts how often gradients arrive, in the first backward in which DDP waits for them."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._num: dict[ParameterIndex, int] = {}
        self._is_counting = False  # until `begin`
        # When DDP last took each gradient for ready, as the present forward began: by this
        # `_end_backward` tells whether it has had them all since. Asked now, so that no step finds
        # that the name has moved.
        self._ready_ns = _torch.ready_ns(ddp)
        # Called at the end of a backward in which `_arrive` has asked for it. `observing`, here and
        # below: an error of ours is reported, and does not end the user's step.
        self._ends = _torch.BackwardEnds(observing(self._end_backward))
        parameters = _torch.reducer_parameters(ddp)
        # Autograd's nodes live only as long as somebody holds them.
        self._nodes = {p.index: _torch.accumulate_node(tensor) for tensor, p in parameters.items()}
        self._hooks: list[Any] = []
        for index, node in self._nodes.items():
            arrive = observing(functools.partial(self._arrive, index))
            # Called once an arrival; before the gradient is accumulated or after does not matter.
            self._hooks.append(node.register_prehook(arrive))

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        if will_communicate(ddp):
            self.begin(ddp)

    def begin(self, ddp: DistributedDataParallel) -> None:
        """Begin to count, or anew: a forward begins whose gradients DDP expects."""
        # In its own first backward DDP takes no gradient for ready, so the end is not seen.
        self._is_counting = not _torch.awaits_static_graph(ddp)
        self._num = {}
        self._ready_ns = _torch.ready_ns(ddp)

    def _arrive(self, index: ParameterIndex, _gradients: object) -> None:
        if self._is_counting:
            self._num[index] = self._num.get(index, 0) + 1
            self._ends.watch()

    def _end_backward(self) -> None:
        """Keep what was counted if DDP has had all gradients.

        After a backward of a reentrant checkpoint, or with a part of the loss, it has not: then
        the time at which it last took a gradient for ready is still one from before the forward.
        """
        ddp = self._ddp()
        if ddp is None or not self._is_counting:
            return
        for before_ns, now_ns in zip(self._ready_ns, _torch.ready_ns(ddp), strict=True):
            if before_ns == now_ns:
                return
        self._is_counting = False
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], {}
        _num_arrivals.set(ddp, self._num)
        unsubscribe(ddp, _Counter)
