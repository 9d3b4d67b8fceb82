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

    A Reducer forms them once, in the forward after the first backward, by the order in which
    gradients arrived. A DDP module has an attribute that says so, but copies and pickles of the
    module inherit the attribute, although each has a Reducer of its own. So the attribute is
    trusted only for a Reducer of which this was asked before it rebuilt its buckets (each step of
    compiled code asks). For others DDP's log decides, which knows of the rebuild a step later.
    """
    has_rebuilt, reducer = names.HAS_REBUILT_BUCKETS.get(ddp), names.REDUCER.get(ddp)
    if not follows_arrival_order(ddp):
        return False  # its initial buckets stay
    if not has_rebuilt:
        _seen_before_rebuild.add(reducer)
        return True
    if reducer in _seen_before_rebuild:
        return False  # the attribute, False when this was asked before, became True since
    try:
        return not log_of(ddp).get(names.HAS_REBUILT.text)
    except TorchDriftError:
        return False  # no step should fail for want of the log: the attribute is believed


# Sets of Reducers, not of modules: a module may get another Reducer.
_seen_before_rebuild: weakref.WeakSet[Any] = weakref.WeakSet()


# Reducers that `make_reducer` made, so that their numbers of parameters are known, and that
# `pass_first_steps` has taken through their first steps.
_rebuilt_here: weakref.WeakSet[Any] = weakref.WeakSet()


def final_buckets(
    ddp: DistributedDataParallel,
) -> tuple[tuple[ParameterIndex, ...], ...] | None:
    """The Reducer's final buckets, None if DDP does not tell (yet).

    DDP's log has them from the step after the one that rebuilt the buckets. A Reducer that keeps
    its initial buckets, or was taken through its first steps by `pass_first_steps`, is asked.

    Raises:
        TorchDriftError: the log numbers parameters otherwise than `reducer_parameters`.
    """
    # The log has initial buckets never, and those of `pass_first_steps` only from the next step on.
    is_log_needed = follows_arrival_order(ddp) and names.REDUCER.get(ddp) not in _rebuilt_here
    logged = logged_buckets(ddp) if is_log_needed else None
    if logged is None and is_log_needed:
        return None
    index_of = {tensor: p.index for tensor, p in reducer_parameters(ddp).items()}
    buckets = ask_buckets(ddp) or ()
    asked = tuple(tuple(index_of[tensor] for tensor in bucket) for bucket in buckets)
    if logged is None:
        return asked or None
    # `asked` is numbered by `reducer_parameters`, whose order may be a guess; the log has the
    # Reducer's own numbers.
    if not asked and sorted(itertools.chain(*logged)) != sorted(index_of.values()):
        # The Reducer told no parameters, so `reducer_parameters` took those that are trained now.
        # These are others than the log's, of which some were frozen since.
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
