"""Bugs that are planted to see whether the fuzz finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache

from ddpopt._torch import aot
from ddpopt.split import forward
from ddpopt.split.gates import CompiledSection, Run
from ddpopt.steps.sections import Label
from tests.system.fuzzing import training

BUGS = ("a section's gradients are lost", "gradients are swapped", "a cut detaches")
# Shows with Inductor alone, and with complex numbers.
WRITES_COMPLEX_IN_PLACE = "Inductor writes in place to complex values"
RAISES_ON_ONE_RANK = "one rank raises"


@contextlib.contextmanager
def bug(name: str) -> Iterator[None]:
    """Run ddpopt with one of these bugs, or with none."""
    if name == "":
        yield
    elif name == WRITES_COMPLEX_IN_PLACE:
        # What was compiled without the bug is in the cache.
        with fresh_cache(), mock.patch.object(aot, "has_complex_values", return_value=False):
            yield
    elif name == "a cut detaches":
        with mock.patch.object(forward, "report_runs", _detaching):
            yield
    elif name == RAISES_ON_ONE_RANK:
        training.leave_group()  # the next one has this limit
        limit = mock.patch.object(training, "COLLECTIVE_LIMIT_S", 3)
        with limit, mock.patch.object(CompiledSection, "_run", _raise_on_one_rank):
            yield
    else:
        change = _zero if name == "a section's gradients are lost" else _swap
        with mock.patch.object(CompiledSection, "_run", _changed(change)):
            yield


def _changed(change: Any) -> Any:
    def run(self: CompiledSection, run: Run) -> Sequence[Any]:
        gradients = _original(self, run)
        return change(gradients) if self.label.section == 1 else gradients

    return run


def _raise_on_one_rank(section: CompiledSection, _run: Run) -> Sequence[Any]:
    if dist.get_rank() == 0:
        raise RuntimeError("planted")
    return _original(section, _run)


_original = CompiledSection._run


def _zero(gradients: Sequence[Any]) -> list[Any]:
    return [g * 0 if isinstance(g, torch.Tensor) else g for g in gradients]


def _swap(gradients: Sequence[Any]) -> list[Any]:
    """Exchange the gradients of two parameters of one shape."""
    swapped = list(gradients)
    for i, one in enumerate(swapped):
        for k in range(i + 1, len(swapped)):
            if isinstance(one, torch.Tensor) and one.shape == swapped[k].shape:
                swapped[i], swapped[k] = swapped[k], one
                return swapped
    return swapped


def _detaching(section: Callable[..., Any], label: Label) -> Callable[..., Any]:
    """Have the first section's results lose their autograd history."""

    def detached(*args: Any) -> Any:
        return tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in section(*args))

    return detached if label.section == 0 else section
