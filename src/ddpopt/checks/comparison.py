"""How far a step is from another one that is correct, and how far it may be.

Errors are relative: the largest difference of an element over the largest element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt._values import Limits, check_kind, check_number
from ddpopt.checks.copies import Outcome, dtype_name
from ddpopt.errors import OptionError

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""The largest relative error that passes, by the coarsest dtype that a step computes in.

From the finest dtype to the coarsest.
"""

# The name under which float32 has its tolerance where a device may compute it with fewer bits.
_TF32, _TF32_TOLERANCE = "float32 (TF32)", 1e-2

# A gradient's errors are relative to at least this part of the model's largest gradient. A gradient
# that is much smaller may be a sum in which everything cancels but rounding, and an error relative
# to that would say nothing.
_FLOOR = 1e-3


class StepErrors(NamedTuple):
    """The relative errors of a step by the names of parameters and buffers, and of its loss."""

    gradients: dict[str, float]
    buffers: dict[str, float]
    loss: float

    @property
    def worst_error(self) -> float:
        """The largest error among gradients, buffers and the loss."""
        return max([*self.gradients.values(), *self.buffers.values(), self.loss])


# ---- How far a step may be ---------------------------------------------------------------------


def limits_by_name(tolerances: Mapping[torch.dtype, float]) -> dict[str, float]:
    """The tolerance for each name that `precision_of` returns, from fine to coarse.

    `tolerances` overrides `TOLERANCES`. The limit of a dtype that `TOLERANCES` lacks is unused.
    """
    limits = {}
    remedy = "give relative errors by dtype, as {torch.float32: 1e-2}"
    check_kind("tolerances", tolerances, Mapping, remedy, OptionError)
    for dtype, limit in {**TOLERANCES, **tolerances}.items():
        check_kind("a key of tolerances", dtype, torch.dtype, remedy, OptionError)
        check_number(f"tolerances[{dtype}]", limit, Limits(at_least=0, below=None), OptionError)
        limits[dtype_name(dtype)] = limit
        if dtype is torch.float32:
            limits[_TF32] = max(limit, _TF32_TOLERANCE)
    return limits


def precision_of(ddp: DistributedDataParallel, steps: Sequence[Outcome]) -> str:
    """The name of the coarsest dtype in which steps compute, as far as can be seen.

    That is the dtype of a parameter, of an output or of autocast. The name is `float32 (TF32)`
    where a device may compute float32 with fewer bits.
    """
    device = next(ddp.parameters()).device
    dtypes = {parameter.dtype for parameter in ddp.parameters()}
    for step in steps:
        dtypes |= step.dtypes
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    coarsest = torch.bfloat16  # if no dtype of the steps has a tolerance
    for dtype in TOLERANCES:  # from the finest to the coarsest
        if dtype in dtypes:
            coarsest = dtype
    may_use_tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    if device.type == "cuda" and coarsest is torch.float32 and may_use_tf32:
        return _TF32
    return dtype_name(coarsest)


# ---- How far it is -----------------------------------------------------------------------------


def compare_steps(compiled: Sequence[Outcome], eager: Sequence[Outcome]) -> StepErrors:
    """The largest errors of the compiled steps, taking the eager ones as correct."""
    return largest([_compare(ours, theirs) for ours, theirs in zip(compiled, eager, strict=True)])


def _compare(compiled: Outcome, eager: Outcome) -> StepErrors:
    """The errors of one compiled step."""
    magnitudes = [_magnitude(gradient) for gradient in eager.gradients.values()]
    # An error is not relative to a gradient of rounding alone, see `_FLOOR`.
    floor = _FLOOR * max(magnitudes, default=0.0)
    gradients = {}
    for name, gradient in eager.gradients.items():
        gradients[name] = relative_error(compiled.gradients[name], gradient, floor)
    buffers = {}
    for name, buffer in eager.buffers.items():
        buffers[name] = relative_error(compiled.buffers[name], buffer)
    return StepErrors(gradients, buffers, relative_error(compiled.loss, eager.loss))


def largest(errors: Sequence[StepErrors]) -> StepErrors:
    """The largest error for each name; it is infinite if one of them lacks that name."""
    return StepErrors(
        _largest_by_name([each.gradients for each in errors]),
        _largest_by_name([each.buffers for each in errors]),
        max(each.loss for each in errors),
    )


def _largest_by_name(errors: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for named in errors for name in named)
    return {name: max(named.get(name, math.inf) for named in errors) for name in names}


def relative_error(
    actual: torch.Tensor | None, expected: torch.Tensor | None, floor: float = 0.0
) -> float:
    """The largest difference over the largest magnitude of `expected`, or over `floor`.

    Infinite if one is missing, or if shape, dtype, layout, integers or non-finite elements differ,
    or if zero is expected and something else is there.
    """
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    kinds = [(t.shape, t.dtype, t.layout) for t in (actual, expected)]
    if kinds[0] != kinds[1]:
        return math.inf
    if actual.is_sparse:
        actual, expected = actual.to_dense(), expected.to_dense()
    if not (actual.is_floating_point() or actual.is_complex()):
        return 0.0 if torch.equal(actual, expected) else math.inf
    are_finite = expected.isfinite()
    # Finite elements become zeros; infinities and NaNs have to be equal.
    rest = [torch.where(t.isfinite(), 0.0, t) for t in (actual, expected)]
    if not torch.allclose(rest[0], rest[1], rtol=0, atol=0, equal_nan=True):
        return math.inf
    difference = _magnitude(torch.where(are_finite, _exact(actual) - _exact(expected), 0.0))
    if not difference:
        return 0.0
    scale = max(_magnitude(expected), floor)
    return difference / scale if scale else math.inf


def _magnitude(tensor: torch.Tensor | None) -> float:
    """The largest absolute value of a finite element; 0.0 without one."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    values = _exact(tensor.to_dense() if tensor.is_sparse else tensor).abs()
    return float(torch.where(values.isfinite(), values, 0.0).max())


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """The values in a dtype in which differences of 16-bit numbers do not overflow."""
    return tensor if tensor.dtype is torch.float64 or tensor.is_complex() else tensor.float()
