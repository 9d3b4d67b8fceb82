"""The final buckets of a Reducer, and whether it has formed them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpopt._indices import ParameterIndex
from ddpopt._torch import names
from ddpopt._torch.parameters import reducer_parameters
from ddpopt._torch.reducer import ask_buckets, follows_arrival_order, log_of, logged_buckets
from ddpopt.errors import TorchDriftError


def will_rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether the Reducer has yet to form its final buckets; see [Note: buckets].

    A DDP module has an attribute that says so, but copies and pickles of the module inherit the
    attribute, although each has a Reducer of its own. So the attribute is trusted only for a
    Reducer that was seen before it rebuilt its buckets; for others DDP's log decides, a step later.
    """
    has_rebuilt, reducer = names.HAS_REBUILT_BUCKETS.get(ddp), names.REDUCER.get(ddp)
    if not follows_arrival_order(ddp) or (has_rebuilt and reducer in _seen_before_rebuild):
        return False
    if not has_rebuilt:
        _seen_before_rebuild.add(reducer)
        return True
    try:
        return not log_of(ddp).get(names.HAS_REBUILT.text)
    except TorchDriftError:
        return False


# Sets of Reducers, not of modules: a module may get another Reducer.
_seen_before_rebuild: weakref.WeakSet[Any] = weakref.WeakSet()


# Reducers whose numbers of parameters are ours, and whose first steps `pass_first_steps` has taken.
_rebuilt_here: weakref.WeakSet[Any] = weakref.WeakSet()


def final_buckets(
    ddp: DistributedDataParallel,
) -> tuple[tuple[ParameterIndex, ...], ...] | None:
    """The Reducer's final buckets, None if DDP does not tell (yet).

    DDP's log has them from the step after the one that rebuilt the buckets. A Reducer that keeps
    its initial buckets, or was taken through its first steps here, reports them itself.

    Raises:
        TorchDriftError: the log numbers parameters otherwise than `reducer_parameters`.
    """
    are_final = not follows_arrival_order(ddp) or names.REDUCER.get(ddp) in _rebuilt_here
    logged = None if are_final else logged_buckets(ddp)
    if logged is None and not are_final:
        return None
    index_of = {tensor: p.index for tensor, p in reducer_parameters(ddp).items()}
    buckets = ask_buckets(ddp) or ()
    asked = tuple(tuple(index_of[tensor] for tensor in bucket) for bucket in buckets)
    if logged is None:
        return asked or None
    # `asked` is numbered by `reducer_parameters`, whose order may be a guess; the log has the
    # Reducer's own numbers.
    if not asked and sorted(itertools.chain(*logged)) != sorted(index_of.values()):
        # The Reducer does not tell whose numbers these are, and some parameters were frozen since.
        return None
    if asked and asked != logged:
        raise TorchDriftError(
            "DDP's buckets are not known: its log numbers parameters otherwise than was taken to "
            f"be the Reducer's order (buckets {logged} there, and {asked})"
        )
    return logged


def note_first_steps_taken(reducer: Any) -> None:
    """Remember that a Reducer was taken through its first steps: it has its final buckets."""
    _seen_before_rebuild.add(reducer)
    _rebuilt_here.add(reducer)
