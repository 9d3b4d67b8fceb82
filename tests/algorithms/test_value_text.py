"""`text_of`: equal where values are, in whichever process, and different where they are not."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import logging
import pathlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpopt.algorithms.value_text import text_of
from tests.support.ranks import Ranks


def _scale(lr: float) -> float:
    return lr


def _other(lr: float) -> float:
    return lr


class _Config:
    def __init__(self, scale: Any = 0.5) -> None:
        self.scale = scale
        self.names = {"decay", "norm", "bias"}

    def adjust(self) -> None:
        pass

    @functools.cached_property
    def computed(self) -> int:
        return 1


class _Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


@dataclasses.dataclass
class _Data:
    scale: float
    seen: int = dataclasses.field(default=0, compare=False)


class _Kind(enum.Enum):
    A = 1
    B = 2


class _Raising:
    def __repr__(self) -> str:
        raise ValueError

    @property
    def __dict__(self) -> Any:
        raise ArithmeticError


def _looped(scale: float) -> _Config:
    config = _Config(scale)
    config.own = [config]  # type: ignore[attr-defined]
    return config


def _computed() -> _Config:
    config = _Config()
    assert config.computed
    return config


EQUAL: dict[str, Any] = {
    "a function": lambda: _scale,
    "a lambda": lambda: lambda x: x,
    "a method": lambda: _Config().adjust,
    "a partial": lambda: functools.partial(_scale, lr=0.1),
    "an object": _Config,
    "an object with slots": lambda: _Slotted(0.5),
    "a part of itself": lambda: _looped(0.5),
    "a dict in another order": lambda: dict(sorted({"a": 1, "b": 2}.items(), key=lambda _: 0)),
    "a lock": threading.Lock,
    "a file": lambda: open(__file__),  # noqa: SIM115
    "a logger": lambda: logging.getLogger("ddpopt"),
    "a module with weights": lambda: nn.Linear(2, 2),
    "a parameter": lambda: nn.Parameter(torch.randn(2)),
    "one that raises": _Raising,
    "NaN": lambda: [float("nan"), torch.full((20,), torch.nan), np.full(20, np.nan)],
    "objects": lambda: np.array([object()] * 3),
}


@pytest.mark.parametrize("name", EQUAL)
def test_values_made_alike_have_one_text(name: str) -> None:
    """Each call makes new objects, as each rank does."""
    first, second = (EQUAL[name]() for _ in range(2))
    assert text_of({"mine": first}) == text_of({"mine": second})


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a number's last bit": (0.1, 0.1 + 2**-56),
    "betas": ((0.9, 0.999), (0.9, 0.99)),
    "a number's type": (1, True),
    "a function": (_scale, _other),
    "a partial": (functools.partial(_scale, lr=0.1), functools.partial(_scale, lr=0.2)),
    "the object of a method": (_Config(1).adjust, _Config(2).adjust),
    "an attribute": (_Config(1), _Config(2)),
    "an attribute's attribute": (_Config(_Config(1)), _Config(_Config(2))),
    "a slot": (_Slotted(1), _Slotted(2)),
    "a part of a part of itself": (_looped(1), _looped(2)),
    "a field": (_Data(1), _Data(2)),
    "a member": (_Kind.A, _Kind.B),
    "a set": ({"a", "b"}, {"a", "c"}),
    "a deque": (collections.deque([1]), collections.deque([2])),
    "a path": (pathlib.Path("a"), pathlib.Path("b")),
    "a small tensor": (torch.tensor(0.5), torch.tensor(0.25)),
    "a large tensor": (torch.arange(99), torch.arange(99).flip(0)),
    "an array": (np.arange(99), np.arange(99)[::-1]),
    "a tensor's shape where it has no values": (
        torch.empty(2, device="meta"),
        torch.empty(3, device="meta"),
    ),
    "a number of numpy's": (np.float64(0.1), np.float64(0.2)),
    "the end of a long text": ("a" * 9999 + "b", "a" * 9999 + "c"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_differ_have_two_texts(name: str) -> None:
    first, second = DIFFERENT[name]
    assert text_of([first]) != text_of([second])


def test_what_says_nothing_of_equality_is_left_out() -> None:
    """What was computed on demand, fields that are not compared, a device, where a script began."""
    assert text_of(_computed()) == text_of(_Config())
    assert text_of(_Data(1, seen=5)) == text_of(_Data(1))
    assert text_of(torch.device("cuda:0")) == text_of(torch.device("cuda:1"))
    assert text_of(torch.tensor(0.5)) == "0.5 of torch.float32"
    spawned = type("Config", (), {"__module__": "__mp_main__"})
    assert text_of(spawned) == "__main__.Config"


@pytest.mark.parametrize("values", [torch.arange, np.arange])
def test_few_numbers_are_shown_and_of_many_a_hash(values: Any) -> None:
    assert "15]" in text_of(values(16))
    assert "hash" in text_of(values(17))


def test_the_text_of_a_large_object_ends() -> None:
    value: Any = [[[[[list(range(99)) for _ in range(99)]] * 99] * 99] * 99]
    assert text_of(value) == text_of(value)
    for _ in range(5000):
        value = [value]
    assert text_of(value) == "((((((list))))))"


def _text_of_sets(_rank: int) -> tuple[int, str]:
    text = text_of([{"decay", "norm", "bias"}, {"b": object(), "a": frozenset("xyz")}])
    return hash("decay"), text


def test_a_text_is_equal_under_other_hashes(ranks: Ranks) -> None:
    (first_hash, first), (second_hash, second) = ranks.run(_text_of_sets)
    assert first_hash != second_hash
    assert first == second
