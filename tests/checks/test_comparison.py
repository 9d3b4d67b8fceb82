"""Relative errors, and the tolerances that they are judged by."""

from __future__ import annotations

import math

import pytest
import torch

from ddpopt.checks.comparison import limits_by_name, relative_error


def test_tolerances_go_from_fine_to_coarse() -> None:
    """TF32's limit stands between float32's and float16's, and is never below float32's."""
    assert list(limits_by_name({}).values()) == [1e-7, 1e-3, 1e-2, 1e-2, 5e-2]
    assert list(limits_by_name({torch.float32: 0.1}).values())[1:3] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([-math.inf], [math.inf], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_an_error_is_relative_to_the_largest_element(
    actual: list[float], expected: list[float], error: float
) -> None:
    """The error is infinite where shapes or non-finite elements differ."""
    computed = relative_error(torch.tensor(actual), torch.tensor(expected))
    assert computed == pytest.approx(error, abs=1e-6)


def test_missing_gradients_and_dtypes_count() -> None:
    """A missing gradient equals a missing one alone, float16 float16 alone; a floor counts too."""
    one = torch.ones(1)
    assert relative_error(None, None) == 0
    assert relative_error(one, None) == relative_error(None, one) == math.inf
    assert relative_error(one.half(), one) == math.inf
    assert relative_error(1e-6 * one, 0 * one, floor=1e-3) == pytest.approx(1e-3)
    assert relative_error(torch.tensor([2]), torch.tensor([3])) == math.inf
