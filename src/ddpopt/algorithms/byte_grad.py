"""`ByteGrad`: reduces gradients behind backward, as DDP does, with one byte per element.

`QAdam` reduces momenta the same way.
Source: ByteGrad as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddpopt.algorithms._runtime.groups import Groups
from ddpopt.algorithms._runtime.handle import Bucket, GradientFuture
from ddpopt.algorithms._runtime.quantization import are_finite, compress, decompress
from ddpopt.algorithms._runtime.tally import note_sent
from ddpopt.algorithms._runtime.worker import BackgroundHandle
from ddpopt.algorithms.api import HierarchicalAlgorithm
from ddpopt.errors import NonFiniteError

# torch < 2.13: only the old name exists
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ByteGradHandle(BackgroundHandle):
    """As `BackgroundHandle`."""

    algorithm: ByteGrad

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """Reduce a bucket over all ranks."""
        return self.run_behind_backward(bucket, self._reduce)

    def _reduce(self, values: torch.Tensor) -> None:
        average_in_8_bits(values, self.groups, self.num_steps)
        if not self.algorithm.average:
            values.mul_(self.training.group.size())


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteGrad(HierarchicalAlgorithm[ByteGradHandle]):
    """Averages gradients over all ranks as 8-bit codes, bucket by bucket behind backward.

    Each rank receives one chunk of a bucket from all others as codes, averages it in float32, and
    sends the codes of the mean to all others. So a gradient is rounded twice, and all ranks end up
    with bitwise equal gradients. Rounding errors are not carried over to later steps.

    Attributes:
        average: Divide by the number of ranks, as DDP does.
        hierarchical: Average within each node first, uncompressed, and compress between nodes;
            with one node nothing is compressed.
    """

    handle_type = ByteGradHandle
    average: bool = True


def average_in_8_bits(values: torch.Tensor, groups: Groups, step: int) -> None:
    """Replace flat `values` by their mean over all ranks, in place. Collective.

    Raises:
        NonFiniteError: on all ranks.
    """
    groups.reduce(values, _average)
    if values[0].isnan():  # then all are, see _average
        raise NonFiniteError(
            f"gradients in step {step} are NaN, infinite or too large for 8-bit codes on some "
            "rank, and nothing was averaged; skip this update, or lower the learning rate; with "
            "float16 and GradScaler take an algorithm without codes"
        )


def _average(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace `values` by their mean, of which each rank computes a chunk; by NaN if one is bad.

    NaN and values that are too large survive decompression, mean and compression: all ranks see
    them in the ranges of the mean.
    """
    num_chunks, num_values = group.size(), values.numel()
    if num_chunks == 1:
        if not values.isfinite().all():
            values.fill_(torch.nan)
        return
    sent = compress(F.pad(values, (0, -num_values % num_chunks)).view(num_chunks, -1))
    received = torch.empty_like(sent)
    note_sent(group, sent.nbytes * (num_chunks - 1) / num_chunks)
    dist.all_to_all_single(received, sent, group=group)
    mean = compress(decompress(received).mean(dim=0, keepdim=True))
    note_sent(group, mean.nbytes * (num_chunks - 1))
    _all_gather(received, mean, group=group)
    if are_finite(received):
        values.copy_(decompress(received).view(-1)[:num_values])
    else:
        values.fill_(torch.nan)
