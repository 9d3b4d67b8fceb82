"""A number for each DDP module, the same on all ranks.

[Note: keys of meetings]
Ranks that meet for a module have to write to the same keys of the store, to which no meeting
for another module, or an earlier one for this, has written. Collectives of one group run in one
order on all ranks, DDP's allreduces as well. So modules are numbered in the order in which they
first reduce gradients, whether anybody looks for their buckets or not. What else could be
counted is not the same on all ranks: forwards, of which one rank may run more; and what a
process group counts, where ranks send to each other, or wait in a `monitored_barrier`.

Ranks that began to look for a module's buckets in different steps have the same key, and
meet nowhere: no backward of the later one ends while the earlier one waits before the next.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._torch import Forward
from ddpopt.errors import TorchDriftError
from ddpopt.steps.forwards import Subscriber, unsubscribe, will_communicate
from ddpopt.steps.observing import observing

# A module has one process group for life.
_numbers: ModuleSlot[int] = ModuleSlot(int, Lifetime.MODULE)
# How many modules have a number, by their process group: not by its name, which the next group of a
# process that lives on has again, with ranks that begin to count.
_num_modules: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def number_of(ddp: DistributedDataParallel) -> int:
    """The module's number, 0 before it has reduced gradients."""
    return _numbers.get(ddp)


def number_at_first(_: DistributedDataParallel) -> Subscriber:
    """Subscribe to a module, for its number."""
    return _Numbering()


class _Numbering(Subscriber):
    """Gives a module its number among all of its process group, in its first reducing backward."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # autograd's nodes live only as long as somebody holds them

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Watch for the first gradient from here on, at the first forward that communicates."""
        # If this torch lacks a name, no search begins either.
        with contextlib.suppress(TorchDriftError):
            if not will_communicate(ddp):
                return
            # Ranks of a group of another kind cannot meet, and need no number.
            if isinstance(ddp.process_group, dist.ProcessGroup):
                trained = [t for t in _torch.reducer_parameters(ddp) if t.requires_grad]
                if not trained:
                    return  # as a critic in its generator's step: its first backward comes later
                self._nodes = [_torch.accumulate_node(tensor) for tensor in trained]
        unsubscribe(ddp, _Numbering)
        # A hook for each, before or after its gradient, some 10 us once for each parameter; fewer
        # could number two modules differently on ranks, or one module on some ranks alone:
        # - On one parameter: with `find_unused_parameters` a rank may not use it. And where two
        #   modules' first gradients arrive in one backward, a rank whose forward takes branches in
        #   another order may get that gradient before or after the other module's first one.
        # - On the outputs: `torch.autograd.grad` passes them and reduces nothing, and a loss that
        #   the module has put aside does not pass them.
        # - At the end of a forward, as the Reducer counts: one rank may run more of them.
        number = observing(functools.partial(self._number, weakref.ref(ddp)))
        self._hooks = [node.register_prehook(number) for node in self._nodes]

    def _number(
        self, ddp_ref: Callable[[], DistributedDataParallel | None], _gradients: object
    ) -> None:
        """Number the module with its first gradient; a hook of each of `_nodes`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], []
        ddp = ddp_ref()
        # With parameters on two devices, a hook in the other thread may have begun already.
        if ddp is not None and _numbers.find(ddp) is None:
            group = ddp.process_group
            _num_modules[group] = _num_modules.get(group, 0) + 1
            _numbers.set(ddp, _num_modules[group])
