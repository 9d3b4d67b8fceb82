"""Which code may run now: that of the active DDP module, or the code that is to be recomputed.

`torch.utils.checkpoint` around a compiled region runs it once more inside of backward, where no
DDP module is active, and gives the tensors that it saves this time to the nodes of the first time.
So the recomputation has to run the very code of the forward: another version saves other tensors,
or as many of equal shapes in another order, which nobody would notice.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.reducer import ReducerRules
from ddpopt.split import state


class _Forward(NamedTuple):
    """The forward of a checkpoint: under which DDP module, and the rules of code for it."""

    ddp: weakref.ref[DistributedDataParallel] | None
    rules: set[ReducerRules | None]


_forwards: weakref.WeakKeyDictionary[object, _Forward] = weakref.WeakKeyDictionary()


def compiled_for() -> DistributedDataParallel | None:
    """Return the DDP module to compile for: the active one, or the one of what is recomputed."""
    active, is_in_backward = _torch.active_ddp(), _torch.is_in_backward()
    if active is not None or not is_in_backward:  # both are asked: later is too late to miss one
        return active
    forward = _current_forward(active)
    return forward.ddp() if forward is not None and forward.ddp is not None else None


def may_run(rules: ReducerRules | None) -> bool:
    """Whether code that was compiled for these rules (None: for no DDP) is the code to run now.

    Dynamo offers the version first that ran last. So where a recomputation cannot be told from
    others (reentrant ones, those of other libraries), any version will do. This is a guard, which
    runs at each call of a compiled function.
    """
    active = _torch.active_ddp()
    forward = _current_forward(active)
    if active is None and _torch.is_in_backward():
        return forward is None or rules in forward.rules
    return state.rules_of(active) == rules


def note_compiled(rules: ReducerRules | None) -> None:
    """Note that code is compiled for these rules, which what is recomputed now may run too.

    Where a guard of the model's own fails in the recomputation, Dynamo compiles there.
    """
    forward = _current_forward(_torch.active_ddp())
    if forward is not None:
        forward.rules.add(rules)


def _current_forward(active: DistributedDataParallel | None) -> _Forward | None:
    """Return the forward that runs in a checkpoint or is recomputed, None if there is none."""
    region = _torch.checkpointed_region()
    if region is None:
        return None
    is_recomputing = active is None and _torch.is_in_backward()
    if region not in _forwards and not is_recomputing:
        reference = weakref.ref(active) if active is not None else None
        _forwards[region] = _Forward(reference, {state.rules_of(active)})
    return _forwards.get(region)
