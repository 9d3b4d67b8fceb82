"""What `convergence.py` trains: the example's GPT, and a small network on images of digits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.algorithms.peers import MakeOptimizer
from benchmarks.harness.models import MissingPackageError, load_example

_CONTEXT = 64
_HELD_OUT = 0.05  # of the text
_NUM_TESTED = 128  # windows of it
_NUM_TEST_IMAGES = 360


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Training data, from which each rank draws at random, and held-out data."""

    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, which maps inputs to logits, and how it is trained.

    `lr` is that of Adam, for algorithms that bring an optimizer of their own.
    """

    name: str
    description: str
    build: Callable[[], nn.Module]
    load: Callable[[], Data]
    make_optimizer: MakeOptimizer
    lr: float
    batch: int
    num_steps: int
    is_classification: bool

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets.flatten())

    def batches(self, data: Data, seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a rank's batches, the same ones for every algorithm."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        for _ in range(self.num_steps):
            yield data.draw(self.batch, generator)

    @torch.no_grad()
    def test(self, model: nn.Module, data: Data) -> tuple[float, float]:
        """Return the loss on held-out data, and the share of right answers."""
        inputs, targets = data.held_out
        logits = model(inputs)
        right = (logits.argmax(-1) == targets.flatten()).double().mean().item()
        return F.cross_entropy(logits, targets.flatten()).item(), right


# ---- text -------------------------------------------------------------------------------------


def _load_text() -> Data:
    text: Tensor = load_example().read_standard_library()
    num_train = int(len(text) * (1 - _HELD_OUT))

    def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
        found = text[starts + torch.arange(_CONTEXT + 1)].long()
        return found[:, :-1], found[:, 1:].contiguous()

    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return windows(torch.randint(num_train - _CONTEXT, (batch, 1), generator=generator))

    held_out = torch.linspace(num_train, len(text) - _CONTEXT - 1, _NUM_TESTED).long()
    return Data(draw=draw, held_out=windows(held_out[:, None]))


def _gpt() -> nn.Module:
    model: nn.Module = load_example().GPT(2, 64, 2, _CONTEXT)
    return model


# ---- images -----------------------------------------------------------------------------------


class _ConvNet(nn.Module):
    """Three convolutions, without batch norm, whose statistics no algorithm averages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.third = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(64 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape [num_images, 10] for images of shape [num_images, 1, 8, 8]."""
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        return self.head(F.max_pool2d(F.relu(self.third(x)), 2).flatten(1))


def _load_digits() -> Data:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  # optional
    except ImportError as error:
        raise MissingPackageError(
            "the images of digits are those of scikit-learn: pip install 'ddpopt[benchmarks]', "
            "or leave the task out (--tasks gpt)"
        ) from error
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:_NUM_TEST_IMAGES], order[_NUM_TEST_IMAGES:]

    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = train[torch.randint(len(train), (batch,), generator=generator)]
        return images[chosen], labels[chosen]

    return Data(draw=draw, held_out=(images[test], labels[test]))


_ALL = (
    Task(
        name="gpt",
        description="examples/train_gpt.py on Python's standard library: 2 layers of width 64, "
        "windows of 64 bytes, 8 a step and rank; Adam, lr 2e-3",
        build=_gpt,
        load=_load_text,
        make_optimizer=functools.partial(torch.optim.Adam, lr=2e-3),
        lr=2e-3,
        batch=8,
        num_steps=500,
        is_classification=False,
    ),
    Task(
        name="convnet",
        description="three 3 x 3 convolutions on scikit-learn's digits, 1,437 images of 8 x 8 to "
        "train and 360 to test, 32 a step and rank; SGD, lr 0.05, momentum 0.9; with Adam, lr 2e-3",
        build=_ConvNet,
        load=_load_digits,
        make_optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        lr=2e-3,
        batch=32,
        num_steps=200,
        is_classification=True,
    ),
)
TASKS = {task.name: task for task in _ALL}
