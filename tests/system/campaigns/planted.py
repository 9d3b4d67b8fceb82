"""Faults that are planted to see whether the fuzzers find them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

from ddpopt._torch import aot
from ddpopt.split import forward
from ddpopt.split.gates import CompiledSection, Run
from ddpopt.steps.sections import Label
from tests.system.training import running

# Each shows in a part of all random models.
BUGS = ("a section's gradients are lost", "gradients are swapped", "a cut detaches")
# Shows with Inductor alone, and with complex numbers.
WRITES_COMPLEX_IN_PLACE = "Inductor writes in place to complex values"
RAISES_ON_ONE_RANK = "one rank raises"
LOSES_GRADIENTS = "a section's gradients are lost on one rank"
LONE_COLLECTIVE = "each forward with gradients is collective"
RAISES_IN_EAGER = "one rank raises in eager DDP"


@contextlib.contextmanager
def planting(name: str, rank: int, *, is_eager: bool = False) -> Iterator[None]:
    """Train with one of these faults, or with none; all but one are of the compiled training.

    Raises:
        KeyError: there is none of this name.
    """
    if name == "":
        yield
        return
    plant = _FAULTS[name]
    is_wanted = is_eager == (name == RAISES_IN_EAGER)
    with plant(rank) if is_wanted else contextlib.nullcontext():
        yield


def _changing(
    change: Callable[[Sequence[Any]], list[Any]], ranks: Sequence[int] | None = None
) -> Any:
    """Have the second section of each graph return other gradients, on some ranks or on all."""

    def plant(rank: int) -> contextlib.AbstractContextManager[Any]:
        def run(self: CompiledSection, run: Run) -> Sequence[Any]:
            gradients = _run(self, run)
            return change(gradients) if self.label.section == 1 else gradients

        if ranks is not None and rank not in ranks:
            return contextlib.nullcontext()
        return mock.patch.object(CompiledSection, "_run", run)

    return plant


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


def _detach(_rank: int) -> contextlib.AbstractContextManager[Any]:
    """Have the first section's results lose their autograd history."""

    def detaching(section: Callable[..., Any], label: Label) -> Callable[..., Any]:
        def detached(*args: Any) -> Any:
            return tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in section(*args))

        return detached if label.section == 0 else section

    return mock.patch.object(forward, "report_runs", detaching)


@contextlib.contextmanager
def _write_complex_in_place(_rank: int) -> Iterator[None]:
    # What was compiled without the fault is in the cache.
    with fresh_cache(), mock.patch.object(aot, "has_complex_values", return_value=False):
        yield


@contextlib.contextmanager
def _raise_on_rank_0(rank: int) -> Iterator[None]:
    def raise_(section: CompiledSection, run: Run) -> Sequence[Any]:
        if rank == 0:
            raise RuntimeError("planted")
        return _run(section, run)

    running.leave_group()  # the next one has this limit
    limit = mock.patch.object(running, "COLLECTIVE_LIMIT_S", 3)
    with limit, mock.patch.object(CompiledSection, "_run", raise_):
        yield


def _meet(_rank: int) -> contextlib.AbstractContextManager[Any]:
    def meeting(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            dist.barrier(ddp.process_group)
        return _pre_forward(ddp, *args, **kwargs)

    return mock.patch.object(DistributedDataParallel, "_pre_forward", meeting)


def _raise_on_rank_1(rank: int) -> contextlib.AbstractContextManager[Any]:
    if rank != 1:
        return contextlib.nullcontext()
    return mock.patch.object(torch.Tensor, "backward", side_effect=RuntimeError("planted"))


_run = CompiledSection._run
_pre_forward = DistributedDataParallel._pre_forward
_FAULTS: dict[str, Callable[[int], contextlib.AbstractContextManager[Any]]] = {
    BUGS[0]: _changing(_zero),
    BUGS[1]: _changing(_swap),
    BUGS[2]: _detach,
    WRITES_COMPLEX_IN_PLACE: _write_complex_in_place,
    RAISES_ON_ONE_RANK: _raise_on_rank_0,
    LOSES_GRADIENTS: _changing(_zero, ranks=(1,)),
    LONE_COLLECTIVE: _meet,
    RAISES_IN_EAGER: _raise_on_rank_1,
}
