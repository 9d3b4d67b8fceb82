"""Flat copies of a model's weights, to be sent instead of many small tensors.

The parameters keep their own storage, since compiled graphs know its addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class FlatWeights:
    """Parameters as a few flat tensors, each of one dtype and device and of bounded size.

    A parameter is never divided; one larger than `bucket_bytes` has a bucket of its own. With None,
    all parameters of one dtype and device share a bucket.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], bucket_bytes: int | None = None) -> None:
        open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._buckets: list[list[torch.Tensor]] = []
        for parameter in parameters:
            kind = (parameter.dtype, parameter.device)
            bucket = open_buckets.get(kind)
            if bucket is None or (
                bucket_bytes is not None
                and sum(p.nbytes for p in (*bucket, parameter)) > bucket_bytes
            ):
                bucket = open_buckets[kind] = []
                self._buckets.append(bucket)
            bucket.append(parameter)

    @torch.no_grad()
    def copy(self) -> list[torch.Tensor]:
        """Return the current weights, one tensor of shape [num_elements] per bucket."""
        return [torch.cat([p.detach().reshape(-1) for p in bucket]) for bucket in self._buckets]

    @torch.no_grad()
    def assign(self, flat: Sequence[torch.Tensor]) -> None:
        """Overwrite the parameters in place with tensors like those that `copy` returns."""
        for parameter, value in self._pairs(flat):
            parameter.copy_(value)

    @torch.no_grad()
    def add(self, flat: Sequence[torch.Tensor]) -> None:
        """Add tensors like those that `copy` returns to the parameters, in place."""
        for parameter, value in self._pairs(flat):
            parameter.add_(value)

    def _pairs(self, flat: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for bucket, values in zip(self._buckets, flat, strict=True):
            parts = torch.split(values, [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                yield parameter, part.view(parameter.shape)
