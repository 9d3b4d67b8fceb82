"""The buckets of a real DDP module, by the places of parameters in its Reducer's list."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def real_buckets(ddp: DistributedDataParallel) -> list[list[int]]:
    """Return the buckets that a DDP module uses now."""
    reduced = ddp._build_params_for_reducer()[0]
    place_of = {parameter: place for place, parameter in enumerate(reduced)}
    return [
        [place_of[parameter] for parameter in bucket.parameters()]
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    ]


def rebuilt_buckets(ddp: DistributedDataParallel) -> list[list[int]]:
    """Return the buckets of which DDP's log says that they were rebuilt, none before that."""
    logged: str = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(place) for place in text.split()] for text in logged.split(",") if text.strip()]


def assigned_by_torch(
    parameters: list[torch.Tensor], caps_bytes: list[int], arrival: list[int]
) -> list[list[int]]:
    """Return the buckets that torch's own function forms of parameters that arrive in an order."""
    tensors = [parameters[place] for place in arrival]
    return dist._compute_bucket_assignment_by_size(tensors, caps_bytes, [], arrival)[0]
