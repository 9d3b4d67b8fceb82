"""MinMaxUInt8: numbers as 8-bit codes between their smallest and largest. Pure functions.

[Note: codes] Each chunk has its own range (min, max) and scale = 255 / (max - min + 1e-7). A
value x has the level rint(x * scale), and its code is that level minus the lowest one, clamped to
[0, 255]: 0 stays 0, and x changes by at most half a level, beside float32 rounding. Both sides
compute the scale from the range that is sent, in float32. A chunk with values that are NaN,
infinite or too large has a range that shows it (`are_finite`), and the sender has to make sure that
all ranks raise.
Source: Bagua's MinMaxUInt8 (Gan et al., arXiv 2107.01499), with a clamp, without which codes of
symmetric ranges could wrap around.
"""

from __future__ import annotations

import torch

EPSILON = 1e-7
NUM_STEPS = 255
RANGE_BYTES = 8


@torch.no_grad()
def compress(values: torch.Tensor) -> torch.Tensor:
    """Return the message of floats of shape [num_chunks, chunk_size]; see [Note: codes].

    It has a row for each chunk, with its range and its codes: uint8 [num_chunks, 8 + chunk_size].
    """
    values = values.float()
    ranges = torch.stack([values.amin(dim=1), values.amax(dim=1)], dim=1)
    scale, lowest = _levels(ranges)
    # The clamp is for ties at both ends of a symmetric range. No level is above the highest one,
    # since rounding is monotonic.
    levels = torch.mul(values, scale).round_().sub_(lowest).clamp_(0, NUM_STEPS)
    return torch.cat([ranges.view(torch.uint8), levels.to(torch.uint8)], dim=1)


@torch.no_grad()
def decompress(message: torch.Tensor) -> torch.Tensor:
    """Return the values, float32 [num_chunks, chunk_size], that a message stands for."""
    scale, lowest = _levels(read_ranges(message))
    return message[:, RANGE_BYTES:].to(torch.float32).add_(lowest).div_(scale)


def are_finite(message: torch.Tensor) -> torch.Tensor:
    """Return whether all chunks can be decompressed, as one bool on their device."""
    ranges = read_ranges(message)
    width = ranges[:, 1] - ranges[:, 0]
    lowest = _levels(ranges)[1]
    return (width.isfinite() & lowest.squeeze(1).isfinite()).all()


def read_ranges(message: torch.Tensor) -> torch.Tensor:
    """Return each chunk's smallest and largest value, float32 [num_chunks, 2]."""
    # A copy, since a row need not be aligned for float32.
    ranges = message[:, :RANGE_BYTES].clone(memory_format=torch.contiguous_format)
    return ranges.view(torch.float32)


def _levels(ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels per unit, and the lowest level, of each chunk: both [num_chunks, 1]."""
    smallest, largest = ranges[:, :1], ranges[:, 1:]
    scale = NUM_STEPS / (largest - smallest + EPSILON)
    return scale, (largest * scale).round_().sub_(NUM_STEPS)
