"""How far two tensors are from each other, and how far rounding may bring them."""

from __future__ import annotations

import torch

# Largest difference of an element over the largest element, where the order of sums differs.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 6e-2}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest element; infinite for another kind."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if torch.equal(actual, expected) or expected.numel() == 0:
        return 0.0
    if expected.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    ours, theirs = actual.double(), expected.double()
    if not ours.isfinite().all() or not theirs.isfinite().all():
        return 0.0 if torch.equal(ours.nan_to_num(), theirs.nan_to_num()) else float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))
