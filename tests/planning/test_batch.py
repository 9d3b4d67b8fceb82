"""Batches that a model is called with, the tensors in its output, and a loss of them."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ddpopt.errors import OptionError
from ddpopt.planning.batch import Batch, as_batch, find_loss, tensors_of

ONE, TWO = torch.ones(2), torch.full((3,), 2.0)


@pytest.mark.parametrize(
    ("example_inputs", "args", "kwargs"),
    [
        (ONE, (ONE,), {}),
        ((ONE, 3), (ONE, 3), {}),
        ([ONE], (ONE,), {}),
        ({"x": ONE}, (), {"x": ONE}),
        (types.MappingProxyType({"x": ONE}), (), {"x": ONE}),
        ("text", ("text",), {}),
        (Batch((1,), {"x": 2}), (1,), {"x": 2}),
    ],
)
def test_inputs_of_each_form_become_the_arguments_of_a_forward(
    example_inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """They are one argument, a sequence of positional ones, or a mapping of keyword arguments."""
    assert as_batch(example_inputs) == Batch(args, kwargs)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    itself: Any = None


def test_each_tensor_in_an_output_is_found_once() -> None:
    """Sequences, mappings and objects hold them, and refer to each other; modules are left out."""
    output = Output(ONE, TWO)
    output.itself = [output, {"a": (ONE,), "module": nn.Linear(2, 2)}]
    assert [id(tensor) for tensor in tensors_of(output)] == [id(ONE), id(TWO)]
    assert list(tensors_of([None, "text", 3, Output])) == []


@pytest.mark.parametrize("first", [[ONE], {"a": ONE}, Output(ONE)], ids=["list", "dict", "object"])
def test_what_comes_behind_a_container_is_found_behind_its_tensors(first: Any) -> None:
    assert [id(tensor) for tensor in tensors_of([first, TWO])] == [id(ONE), id(TWO)]


def test_an_outputs_loss_comes_first_if_it_is_a_scalar_with_a_gradient() -> None:
    """Of other outputs all tensors with a gradient are added up."""
    loss, other = torch.ones((), requires_grad=True), torch.ones(4, requires_grad=True)
    for output in (Output(other, loss), {"loss": loss, "logits": other}):
        assert find_loss(output) is loss
    for output in ({"loss": other}, Output(other, ONE), (other, ONE, torch.ones(2, dtype=int))):
        assert find_loss(output).item() == 4.0
        assert find_loss(output, of_tensor=torch.mean).item() == 1.0
    with pytest.raises(OptionError, match=r"shape \(2,\)\) has no floating point tensor"):
        find_loss(ONE, error=OptionError)
