"""`ByteGrad`: gradients are reduced behind backward as DDP does, in one byte an element.

`QAdam` reduces momenta the same way.
Source: ByteGrad as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddpopt.algorithms._runtime.comm_hook import Bucket, GradientFuture
from ddpopt.algorithms._runtime.groups import Groups
from ddpopt.algorithms._runtime.handle import AnyAlgorithm, Training
from ddpopt.algorithms._runtime.quantization import (
    are_finite,
    compress,
    decompress,
    pack,
    unpack,
)
from ddpopt.algorithms._runtime.worker import BackgroundHandle
from ddpopt.algorithms.api import HierarchicalAlgorithm
from ddpopt.config import check_boolean
from ddpopt.errors import NonFiniteError

# torch < 2.13: only the old name exists
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteGrad(HierarchicalAlgorithm["ByteGradHandle"]):
    """Gradients are averaged over all ranks as 8-bit codes, bucket by bucket behind backward.

    A bucket is divided into one chunk for each rank. Each rank receives its chunk from all others
    as codes, averages it in float32, and sends the codes of the mean to all others. So a gradient
    is rounded twice, and all ranks end with bitwise equal ones. What rounding loses is not carried
    over to later steps.

    Attributes:
        average: Divide by the number of ranks, as DDP does.
        hierarchical: Average within each node first, uncompressed, and compress between nodes;
            with one node nothing is compressed. See [Note: hierarchical] in
            `algorithms/_runtime/groups.py`.
        local_world_size: Ranks on each node; None is LOCAL_WORLD_SIZE, which torchrun sets.

    Raises:
        OptionError: a value is out of its range.
        TypeError: a value has another type.
    """

    average: bool = True

    def __post_init__(self) -> None:
        HierarchicalAlgorithm.__post_init__(self)
        check_boolean("average", self.average, TypeError)

    def make_handle(self, training: Training) -> ByteGradHandle:
        """Put this to work on a model."""
        return ByteGradHandle(training, self, average=self.average)


class ByteGradHandle(BackgroundHandle):
    """As `BackgroundHandle`."""

    def __init__(
        self, training: Training, algorithm: AnyAlgorithm, *, average: bool = True
    ) -> None:
        super().__init__(training, algorithm)
        self._average = average

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """Reduce a bucket over all ranks."""
        values = bucket.buffer()
        return self.run_behind_backward(bucket, lambda: self.reduce_in_8_bits(values))

    def reduce_in_8_bits(self, values: torch.Tensor) -> None:
        """Replace flat `values` by their mean or sum over all ranks, in place. Collective.

        Raises:
            NonFiniteError: on all ranks.
        """
        groups = self.groups
        groups.average_node(values)
        if groups.leaders is not None:
            reduced = _mean_of_leaders(values, groups)
            if not self._average:
                reduced = reduced * self.training.group.size()
            values.copy_(reduced)
        groups.tell_node(values)
        if values[0].isnan():  # then all are, see _mean_of_leaders
            raise NonFiniteError(
                f"gradients in step {self.num_steps} are NaN, infinite or too large for 8-bit "
                "codes on some rank, and nothing was averaged; skip this update, or lower the "
                "learning rate; with float16 and GradScaler take an algorithm without codes"
            )


def _mean_of_leaders(values: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the mean over the nodes, each of which computes one chunk; all NaN if one is bad.

    NaN and what is too large stay so through decompression, mean and compression: all nodes see
    it in the ranges of the mean.
    """
    num_chunks, num_values = groups.num_leaders, values.numel()
    if num_chunks == 1:
        return values if values.isfinite().all() else torch.full_like(values, torch.nan)
    padded = F.pad(values, (0, -num_values % num_chunks))
    sent = pack(compress(padded.view(num_chunks, -1)))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=groups.leaders)
    mean = pack(compress(decompress(unpack(received)).mean(dim=0, keepdim=True)))
    _all_gather(received, mean, group=groups.leaders)
    reduced = unpack(received)
    if not are_finite(reduced.ranges):
        return torch.full_like(values, torch.nan)
    return decompress(reduced).view(-1)[:num_values]
