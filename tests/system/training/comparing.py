"""How far two trainings are from each other, and how far rounding may bring them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

# Largest difference of an element over the largest element, where the order of sums differs.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 6e-2}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest element; infinite for another kind.

    The signs of zeros and of NaNs do not count.
    """
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


# What is said of two tensors that differ, "" if they do not.
Measure = Callable[[torch.Tensor, torch.Tensor], str]


def within(tolerance: float) -> Measure:
    """A measure that lets through what differs by no more of the largest element."""

    def measure(actual: torch.Tensor, expected: torch.Tensor) -> str:
        error = relative_error(actual, expected)
        return f"relative error {error:.1e}" if error > tolerance else ""

    return measure


in_bits = within(0.0)


def as_torch_tests(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """A measure by the tolerances of torch's own tests: of float32 1.3e-6 an element, or 1e-5.

    A loss or a norm, which is summed in float64, has no more digits than the float32 values in it.
    """
    if expected.dim() == 0 and (actual.dtype, expected.dtype) == (torch.float64, torch.float64):
        actual, expected = actual.float(), expected.float()
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def differences(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    measure: Measure = in_bits,
) -> dict[str, str]:
    """Return what is said of each value that differs, by name."""
    found = {}
    for name in dict.fromkeys([*expected, *actual]):
        if name not in actual or name not in expected:
            found[name] = "missing in ours" if name in expected else "only in ours"
        elif text := measure(actual[name], expected[name]):
            found[name] = text
    return found


def lines_of(found: Mapping[str, str]) -> str:
    """Return a line for each value that differs."""
    return "\n".join(f"{name}: {text}" for name, text in found.items())
