"""`ByteGrad`: reduces gradients behind backward, as DDP does, with one byte per element.

`QAdam` reduces momenta the same way, and `LowPrecisionDecentralized` has the same codes.

[Note: codes] MinMaxUInt8. Each chunk has its own range (min, max) and scale = 255 / (max - min +
1e-7). A value x has the level rint(x * scale). The lowest level is rint(max * scale) - 255, so that
the largest value has the code 255, and a value's code is its level minus the lowest one, clamped to
[0, 255]: 0 stays 0, and x changes by at most half a level, beside float32 rounding. Both
sides compute the scale from the range that is sent, in float32. The range shows values that are
NaN, infinite or too large (`are_finite`); the sender has to make sure that all ranks raise.

Source: ByteGrad and MinMaxUInt8 as in Bagua (Gan et al., arXiv 2107.01499), with a clamp, without
which codes of symmetric ranges could wrap around.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ddpopt.algorithms.algorithm import HierarchicalAlgorithm
from ddpopt.algorithms.comm import Communicator, Groups
from ddpopt.algorithms.handle import BackgroundHandle, Bucket, GradientFuture
from ddpopt.errors import NonFiniteError

EPSILON = 1e-7
HIGHEST_CODE = 255
RANGE_BYTES = 8


@torch.no_grad()
def compress(values: torch.Tensor) -> torch.Tensor:
    """The message of floats of shape [num_chunks, chunk_size]; see [Note: codes].

    It has a row for each chunk, with its range and its codes: uint8 [num_chunks, 8 + chunk_size].
    QAdam and LowPrecisionDecentralized send it too.
    """
    values = values.float()
    ranges = torch.stack([values.amin(dim=1), values.amax(dim=1)], dim=1)
    scale, lowest = _scale_and_lowest(ranges)
    # The clamp is for ties at both ends of a symmetric range. No level is above the highest one,
    # since rounding is monotonic.
    levels = torch.mul(values, scale).round_().sub_(lowest).clamp_(0, HIGHEST_CODE)
    return torch.cat([ranges.view(torch.uint8), levels.to(torch.uint8)], dim=1)


@torch.no_grad()
def decompress(message: torch.Tensor) -> torch.Tensor:
    """The values, float32 [num_chunks, chunk_size], that a message stands for."""
    scale, lowest = _scale_and_lowest(read_ranges(message))
    return message[:, RANGE_BYTES:].to(torch.float32).add_(lowest).div_(scale)


def are_finite(message: torch.Tensor) -> torch.Tensor:
    """Return whether all chunks can be decompressed, as one bool on their device."""
    ranges = read_ranges(message)
    _, lowest = _scale_and_lowest(ranges)
    return (ranges.diff(dim=1).isfinite() & lowest.isfinite()).all()


def read_ranges(message: torch.Tensor) -> torch.Tensor:
    """Return each chunk's smallest and largest value, float32 [num_chunks, 2]."""
    # A copy, since a row need not be aligned for float32.
    ranges = message[:, :RANGE_BYTES].clone(memory_format=torch.contiguous_format)
    return ranges.view(torch.float32)


def _scale_and_lowest(ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels per unit, and the lowest level, of each chunk: both [num_chunks, 1]."""
    smallest, largest = ranges[:, :1], ranges[:, 1:]
    scale = HIGHEST_CODE / (largest - smallest + EPSILON)
    return scale, (largest * scale).round_().sub_(HIGHEST_CODE)


class ByteGradHandle(BackgroundHandle):
    """As `Handle`: its worker averages each bucket as soon as that is complete."""

    averages_weights = False

    def reduce(self, bucket: Bucket) -> GradientFuture:
        return self.run_behind_backward(
            bucket, lambda values: average_in_8_bits(values, self.groups, self.num_steps)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteGrad(HierarchicalAlgorithm[ByteGradHandle]):
    """Averages gradients over all ranks as 8-bit codes, bucket by bucket behind backward.

    Each rank receives one chunk of a bucket from all others as codes, averages it in float32, and
    sends the codes of the mean to all others. So a gradient is rounded twice, and all ranks end up
    with bitwise equal gradients. Rounding errors are not carried over to later steps.

    Attributes:
        hierarchical: Average within each node first, uncompressed, and compress between nodes;
            with one node nothing is compressed.
    """

    handle_type = ByteGradHandle


def average_in_8_bits(values: torch.Tensor, groups: Groups, step: int) -> None:
    """Replace flat `values` by their mean, in place, or raise NonFiniteError on all ranks."""
    if not values.numel():  # a bucket of parameters without elements
        return
    groups.reduce(values, _average)
    if values[0].isnan():  # then all are, see _average
        raise NonFiniteError(
            f"gradients in step {step} are NaN, infinite or too large for 8-bit codes on some "
            "rank, and nothing was averaged; skip this update, or lower the learning rate; with "
            "float16 and GradScaler take an algorithm without codes"
        )


def _average(leaders: Communicator, values: torch.Tensor) -> None:
    """Replace `values` by their mean, of which each rank computes a chunk; by NaN if one is bad.

    `are_finite` is False of a chunk in which a value was NaN or too large, also after the chunk was
    decompressed, averaged and compressed again, so that all ranks see it.
    """
    num_chunks, num_values = leaders.num_ranks, values.numel()
    if num_chunks == 1:  # the only node, or the only rank: there is nobody to send codes to
        if not values.isfinite().all():
            values.fill_(torch.nan)
        return
    sent = compress(F.pad(values, (0, -num_values % num_chunks)).view(num_chunks, -1))
    received = torch.empty_like(sent)
    leaders.all_to_all(received, sent).wait()
    mean = compress(decompress(received).mean(dim=0, keepdim=True))
    leaders.all_gather(received, mean).wait()
    if are_finite(received):
        values.copy_(decompress(received).view(-1)[:num_values])
    else:
        values.fill_(torch.nan)
