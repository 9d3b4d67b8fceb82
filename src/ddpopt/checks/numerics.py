"""How far apart two steps are, and how far apart they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.checks.dry_run import Outcome

_FLOOR = 1e-3  # a gradient's errors are relative to at least this part of the largest gradient

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""The largest relative error that passes, by the coarsest dtype that a step computes in."""

_TF32, _TF32_TOLERANCE = "float32 (TF32)", 1e-2


class Errors(NamedTuple):
    """Relative errors of a step, or the largest of several; see `relative_error`."""

    gradients: dict[str, float]
    buffers: dict[str, float]
    loss: float

    @property
    def worst(self) -> float:
        return max([*self.gradients.values(), *self.buffers.values(), self.loss])


def name_of(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def limits_by_name(tolerances: Mapping[torch.dtype, float]) -> dict[str, float]:
    """Return the tolerance for each name that `precision_of` returns, from fine to coarse."""
    limits = {}
    for dtype, limit in {**TOLERANCES, **tolerances}.items():
        limits[name_of(dtype)] = limit
        if dtype is torch.float32:
            limits[_TF32] = max(limit, _TF32_TOLERANCE)
    return limits


def precision_of(ddp: DistributedDataParallel, steps: list[Outcome]) -> str:
    """Return the name of the coarsest dtype in which a step computes, as far as can be seen.

    `float32 (TF32)` where a device may compute float32 with fewer bits.
    """
    device = next(ddp.parameters()).device
    seen = {parameter.dtype for parameter in ddp.parameters()}.union(*(s.dtypes for s in steps))
    if torch.is_autocast_enabled(device.type):
        seen.add(torch.get_autocast_dtype(device.type))
    known = [dtype for dtype in TOLERANCES if dtype in seen]
    coarsest = known[-1] if known else torch.bfloat16  # TOLERANCES goes from fine to coarse
    backends = torch.backends
    may_use_tf32 = backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32
    is_tf32 = device.type == "cuda" and coarsest is torch.float32 and may_use_tf32
    return _TF32 if is_tf32 else name_of(coarsest)


def compare_steps(compiled: Sequence[Outcome], eager: Sequence[Outcome]) -> Errors:
    """Return the largest errors of the compiled steps, taking the eager ones as correct."""
    return largest([_compare(*pair) for pair in zip(compiled, eager, strict=True)])


def _compare(ours: Outcome, theirs: Outcome) -> Errors:
    floor = _FLOOR * max((_magnitude(g) for g in theirs.gradients.values()), default=0.0)
    return Errors(
        {n: relative_error(ours.gradients[n], g, floor) for n, g in theirs.gradients.items()},
        {n: relative_error(ours.buffers[n], buffer) for n, buffer in theirs.buffers.items()},
        relative_error(ours.loss, theirs.loss),
    )


def largest(found: Sequence[Errors]) -> Errors:
    """Return the largest error for each name; it is infinite if one of them lacks that name."""

    def of_each(named: Sequence[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for errors in named for name in errors)
        return {name: max(errors.get(name, math.inf) for errors in named) for name in names}

    gradients, buffers, losses = zip(*found, strict=True)
    return Errors(of_each(gradients), of_each(buffers), max(losses))


def relative_error(
    actual: torch.Tensor | None, expected: torch.Tensor | None, floor: float = 0.0
) -> float:
    """Return the largest difference over the largest magnitude of `expected`, or over `floor`.

    Infinite if one is missing, or if shape, dtype, layout or non-finite elements differ.
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
    scale = max(_magnitude(expected), floor)
    return difference / scale if difference else 0.0


def _magnitude(tensor: torch.Tensor | None) -> float:
    """Return the largest finite magnitude of an element."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    values = _exact(tensor.to_dense() if tensor.is_sparse else tensor).abs()
    return float(torch.where(values.isfinite(), values, 0.0).max())


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in a dtype in which differences of 16-bit numbers do not overflow."""
    return tensor if tensor.dtype is torch.float64 or tensor.is_complex() else tensor.float()
