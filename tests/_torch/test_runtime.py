"""The end of a backward, where one runs within another; and autocast switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt import _torch
from tests.support.models import MLP, WIDTH


class _Backward(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


def test_each_backward_that_is_watched_ends_once() -> None:
    """The inner ones end before the outer, which is watched before they begin and after them."""
    seen: list[str] = []
    ends = _torch.BackwardEnds(lambda: seen.append("end"))
    x = torch.ones(1, requires_grad=True)

    def note(name: str) -> None:
        seen.append(name)
        ends.watch()

    def nest() -> None:
        note("outer")
        with torch.enable_grad():
            inner = [_Backward.apply(x, lambda: note("inner")) for _ in range(2)]
        for output in inner:
            output.backward()
        note("outer")

    for _ in range(2):
        _Backward.apply(x, nest).backward()
    assert seen == ["outer", "inner", "end", "inner", "end", "outer", "end"] * 2


def test_of_nested_backwards_only_those_that_are_watched_have_an_end() -> None:
    """An outer one without gradients of its own has none, nor has one that raises."""
    seen: list[str] = []
    ends = _torch.BackwardEnds(lambda: seen.append("end"))
    x = torch.ones(1, requires_grad=True)

    def fail() -> None:
        ends.watch()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        _Backward.apply(x, fail).backward()
    assert seen == []
    inner = _Backward.apply(x, ends.watch)
    _Backward.apply(x, inner.backward).backward()
    assert seen == ["end"]


def test_a_backward_ends_after_ddp_has_reduced(one_rank: None) -> None:
    """DDP reduces in a callback that it queues with the last gradient."""

    class Checkpointed(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            x = checkpoint(self.layers[1], x, use_reentrant=True)
            return self.layers[2](x)

    def reduce(_, bucket):  # DDP takes no annotations but its own
        reduced = torch.futures.Future()
        reduced.set_result(bucket.buffer().fill_(7))
        return reduced

    ddp, seen = DistributedDataParallel(Checkpointed(3)), list[float]()
    ddp.register_comm_hook(None, reduce)
    first = ddp.module.layers[0].weight
    ends = _torch.BackwardEnds(
        lambda: seen.append(0.0 if first.grad is None else first.grad.mean().item())
    )
    for parameter in ddp.parameters():
        parameter.register_hook(lambda _: ends.watch())
    ddp(torch.ones(2, WIDTH)).sum().backward()
    assert seen == [0, 7]


def test_autocast_is_off_where_it_was_switched_off() -> None:
    """Autocast is off as around AOTAutograd's backward, and on again after that."""
    x = torch.ones(2, 2)
    assert not _torch.is_autocast_on()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _torch.is_autocast_on()
        with _torch.no_autocast():
            assert not _torch.is_autocast_on()
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
