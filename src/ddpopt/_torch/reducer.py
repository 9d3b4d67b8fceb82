"""What the Reducer of a DDP module tells: its buckets, its log, where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt._indices import ParameterIndex
from ddpopt._torch import names


def follows_arrival_order(ddp: DistributedDataParallel) -> bool:
    """Whether the Reducer rebuilds buckets in the order of gradients of the first backward.

    It does not if it searches each iteration for unused parameters, see [Note: buckets].
    """
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def reducer_of(ddp: DistributedDataParallel) -> Any:
    """The Reducer that a module has now; None after a change of buckets that broke off."""
    return names.REDUCER.get(ddp)


def log_of(ddp: DistributedDataParallel) -> Mapping[str, Any]:
    """Return what DDP has logged about the module's current Reducer."""
    return names.GET_LOGGING_DATA.get(ddp)()


def logged_buckets(
    ddp: DistributedDataParallel,
) -> tuple[tuple[ParameterIndex, ...], ...] | None:
    """The rebuilt buckets as DDP's log has them; None before they are logged."""
    logged = log_of(ddp).get(names.REBUILT_BUCKETS.text)
    if not logged:
        return None
    buckets = [map(int, bucket.split()) for bucket in logged.split(",")]
    return tuple(tuple(map(ParameterIndex, bucket)) for bucket in buckets)


class LoggedStep(NamedTuple):
    """What DDP's log has of a step: its number, times in seconds, and the bytes of all gradients.

    `backward_s` is backward's computation, `communication_s` the time from the first launch to the
    last end of an allreduce, `overlap_s` the overlap of the two.
    """

    number: int
    forward_s: float
    backward_s: float
    communication_s: float
    overlap_s: float
    num_bytes: int

    @property
    def exposed_s(self) -> float:
        """How long backward waits for allreduces."""
        return max(0.0, self.communication_s - self.overlap_s)


def last_logged_step(ddp: DistributedDataParallel) -> LoggedStep:
    """The last step that DDP timed, of the first ten and every hundredth; before, number 0."""
    logged = log_of(ddp)  # which has times, in nanoseconds, once DDP has timed a step
    return LoggedStep(
        number=int(logged.get(names.ITERATION.text, 0)),
        forward_s=logged.get(names.FORWARD_TIME.text, 0) / 1e9,
        backward_s=logged.get(names.BACKWARD_TIME.text, 0) / 1e9,
        communication_s=logged.get(names.COMM_TIME.text, 0) / 1e9,
        overlap_s=logged.get(names.OVERLAP_TIME.text, 0) / 1e9,
        num_bytes=int(logged.get(names.NUM_BYTES.text, 0)),
    )


def reducer_caps(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """The limits in bytes at which this module's Reducer closes buckets."""
    if caps := tuple(names.CAPS_BYTES.get(ddp)):  # empty unless a program or we gave some
        return caps
    first, cap = int(names.FIRST_CAP_BYTES.get()), int(names.CAP_BYTES.get(ddp))
    return (first, cap) if names.CAP_IS_DEFAULT.get(ddp) and first < cap else (cap,)


TensorsOfBuckets = tuple[tuple[torch.Tensor, ...], ...]


def ask_buckets(ddp: DistributedDataParallel) -> TensorsOfBuckets | None:
    """Ask the Reducer for the parameters of its buckets as they are now.

    None if it does not tell: a sparse gradient has no bucket before the first backward.
    """
    ask, mode = names.ZEROS_LIKE_BUCKETS.get(names.REDUCER.get(ddp)), names.FAKE_TENSOR_MODE.get()
    try:
        # The Reducer makes zeros of each bucket's size: fake ones, which take no memory.
        with mode(allow_non_fake_inputs=True):
            return tuple(tuple(bucket.parameters()) for bucket in ask())
    except RuntimeError:
        return None


def has_unfinished_reduction(ddp: DistributedDataParallel) -> bool:
    """Whether a backward has begun to reduce gradients, and DDP has not ended that."""
    check = names.CHECK_FINALIZED.get(names.REDUCER.get(ddp))
    try:
        check()
    except RuntimeError:  # what users would see: that the last reduction is unfinished
        return True
    return False


def last_forward_synced(ddp: DistributedDataParallel) -> bool:
    """Whether the last forward had gradients and was not under no_sync; true before the first."""
    return bool(names.SYNCS_BUFFERS.get(ddp))


def num_used_map_resets(ddp: DistributedDataParallel) -> int | None:
    """How often the Reducer has reduced, and cleared, its map of the parameters that were used.

    Backwards under no_sync mark parameters in the map as well; while this number is unchanged, the
    marks are still there. The number is the version of the map's tensor, which clearing changes
    and marking does not. None if the Reducer does not look for unused parameters, or has a static
    graph.
    """
    if follows_arrival_order(ddp):
        return None
    used_map = names.LOCAL_USED_MAP.get(names.REDUCER.get(ddp))()
    return int(names.TENSOR_VERSION.get(used_map))


def awaits_static_graph(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has yet to learn, in the next backward, which gradients a static graph has."""
    return bool(ddp.static_graph and not names.STATIC_ENQUEUED.get(ddp))


def used_in_static_graph(ddp: DistributedDataParallel) -> set[int]:
    """The parameters, by index, that got a gradient on some rank in the first backward.

    A parameter for which an `autograd.Function` returns None is left out: the None arrives, but DDP
    leaves the parameter without a gradient.
    """
    # The Reducer's map of used parameters, by index, summed over ranks in that backward.
    num_ranks = names.LOCAL_USED_MAP.get(names.REDUCER.get(ddp))().tolist()
    return {index for index, num in enumerate(num_ranks) if num}


def ready_ns(ddp: DistributedDataParallel) -> list[int]:
    """When the Reducer last took each gradient for ready to be reduced, by parameter index.

    In nanoseconds since the forward before it; it is 0 in a static graph's first backward.
    """
    return list(names.BACKWARD_STATS.get(names.REDUCER.get(ddp))())


def prepare_reducer(ddp: DistributedDataParallel) -> None:
    """Tell a Reducer that a forward of its module has begun.

    DDP has told the Reducer before, if this one was made inside the forward.
    """
    names.PREPARE_FOR_FORWARD.get(names.REDUCER.get(ddp))()
