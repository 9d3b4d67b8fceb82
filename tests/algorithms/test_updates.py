"""`UpdateWatch`: updates that no hook of a given optimizer tells of."""

from __future__ import annotations

import gc
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    attach,
)
from ddpopt.errors import OptionError
from tests.support.algorithms import ALGORITHMS, FLAT, attached_mlp
from tests.support.models import MLP, WIDTH
from tests.support.ranks import Ranks, error_of

# ---- optimizers whose updates would not be noticed ----------------------------------------------


class Wrapping(torch.optim.Optimizer):
    """Looks like an optimizer, without its constructor: Accelerate's, PostLocalSGDOptimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class WrappingWithHooks(Wrapping):
    """As timm's Lookahead, which has the hooks' dictionaries, and a step that no one wrapped."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}


class Lookahead(torch.optim.Optimizer):
    """An optimizer of its own around another one, of which it has the parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        return result


class Twice(torch.optim.SGD):
    """Its step calls that of its base class, which calls hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Wrapping, WrappingWithHooks])
def test_an_optimizer_whose_step_calls_no_hooks_is_refused(one_rank: None, kind: Any) -> None:
    ddp = DistributedDataParallel(MLP(1))
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=f"step.. of the {kind.__name__} calls none of the hooks"):
        attach(ddp, kind(inner), FLAT)
    with pytest.raises(OptionError, match="no optimizer is given"):
        attach(ddp, [], FLAT)
    handle = attach(ddp, inner, FLAT)  # as the error advises
    for _ in range(3):
        ddp(torch.ones(2, WIDTH)).sum().backward()
        kind(inner).step()
    assert handle.metrics()["ddpopt.algorithm.skipped_updates"] == 0
    handle.detach()


def _scheduled(parameters: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which sets a `step` on it
    return optimizer, optimizer


def _around(kind: Any, is_inner_given: bool) -> Any:
    """Makes an optimizer around another; returns the one for `attach`, and the one to step."""

    def make(parameters: Any) -> tuple[Any, Any]:
        inner = torch.optim.SGD(parameters, lr=0.1)
        outer = kind(inner)
        return (inner if is_inner_given else outer), outer

    return make


def _zero(parameters: Any) -> tuple[Any, Any]:
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    return optimizer, optimizer


def _twice(parameters: Any) -> tuple[Any, Any]:
    optimizer = Twice(parameters, lr=0.1)
    return optimizer, optimizer


@pytest.mark.parametrize(
    "make",
    [_scheduled, _around(Lookahead, True), _around(Lookahead, False), _zero, _twice],
    ids=["scheduler", "inner of a wrapper", "wrapper", "ZeRO", "super"],
)
def test_optimizers_in_and_around_those_given_are_no_strangers(one_rank: None, make: Any) -> None:
    """And others of the process, nor one that has the model's parameters while paused."""
    ddp, other = DistributedDataParallel(MLP(1)), MLP(1)
    given, stepped = make(ddp.parameters())
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    visitor = torch.optim.SGD(ddp.parameters(), lr=0.1)
    said: list[str] = []
    handle = attach(ddp, given, FLAT)
    with mock.patch("ddpopt._logs.warning", lambda text, *given: said.append(text % given)):
        for _ in range(3):
            ddp(torch.ones(2, WIDTH)).sum().backward()
            other(torch.ones(2, WIDTH)).sum().backward()
            others.step()
            stepped.step()
            with handle.paused():
                ddp(torch.ones(2, WIDTH)).sum().backward()
                visitor.step()
    assert handle.metrics()["ddpopt.algorithm.skipped_updates"] == 0
    assert not said
    handle.detach()


@pytest.mark.parametrize("between", ["paused", "state_dict", "average", "nothing"])
@pytest.mark.parametrize("name", ["Decentralized", "AsyncModelAverage"])
def test_what_the_algorithm_writes_after_a_skipped_update_is_no_update(
    one_rank: None, name: str, between: str
) -> None:
    """A GradScaler skips the first update, and then a method of the handle's ends the step."""
    kinds = {"Decentralized": FLAT, "AsyncModelAverage": AsyncModelAverage(sync_interval_ms=1)}
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, kinds[name])
    said: list[str] = []
    with mock.patch("ddpopt._logs.warning", lambda text, *given: said.append(text % given)):
        for step in range(3):
            ddp(torch.ones(2, WIDTH)).sum().backward()
            if step:
                optimizer.step()
            elif between == "paused":
                with handle.paused(), torch.no_grad():
                    ddp(torch.ones(2, WIDTH))
                    time.sleep(0.05)
            elif between != "nothing":
                getattr(handle, between)()
    assert not said
    handle.detach()


def test_handles_may_be_collected_in_the_middle_of_a_step(one_rank: None) -> None:
    """Torch walks over the process's hooks there, and one of them collects garbage."""

    def collect(*_: object) -> None:
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    try:
        for _ in range(3):
            ddp = DistributedDataParallel(MLP(1))
            ddp.handle = attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT)
            del ddp  # with its handle, which nobody detaches
            own.step()
    finally:
        hook.remove()


def _make_anew(rank: int, name: str, is_partial: bool) -> list[str]:
    """Update with an optimizer that was made after `attach`, for all layers or the last one."""
    ddp, optimizer, handle = attached_mlp(ALGORITHMS[name])
    x = torch.ones(2, WIDTH)
    ddp(x).sum().backward()
    optimizer.step()
    ddp(x).sum().backward()
    anew = torch.optim.AdamW(ddp.module.layers[-1 if is_partial else 0 :].parameters(), lr=0.1)
    if is_partial:
        optimizer.step()
    anew.step()
    with torch.no_grad():
        ddp(x)  # an evaluation says nothing
    said = [error_of(lambda: ddp(x)), error_of(lambda: ddp(x))]
    handle.detach()
    again = attach(ddp, [optimizer, anew], ByteGrad(hierarchical=False))
    ddp(x).sum().backward()
    optimizer.step()
    anew.step()
    ddp(x)
    again.detach()
    return said


@pytest.mark.parametrize("is_partial", [False, True], ids=["all", "a part"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_optimizer_that_was_made_anew_is_noticed_at_the_next_forward(
    ranks: Ranks, name: str, is_partial: bool
) -> None:
    for said in ranks.run(_make_anew, name, is_partial):
        for text in said:
            assert text.startswith(
                "AttachError: a AdamW that was not given to attach has updated parameters of this "
                f"model in step 2, and {name} has to know"
            )


def _replace_step(how: str) -> tuple[list[str], int]:
    """Train with two optimizers, the first one's `step` replaced before or after `attach`."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in ddp.module.layers)

    def update() -> None:
        with torch.no_grad():
            for parameter in ddp.module.layers[0].parameters():
                parameter.sub_(parameter.grad, alpha=0.1)

    said: list[str] = []
    handle = attach(ddp, [first, second], FLAT)
    with mock.patch("ddpopt._logs.warning", lambda text, *given: said.append(text % given)):
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.ones(2, WIDTH)).square().mean().backward()
            if how == "replaced":
                first.step = update  # type: ignore[method-assign]
            if how in ("clipped", "every second"):
                with torch.no_grad():
                    ddp.module.layers[0].weight.clamp_(-0.01, 0.01)
            if how != "skipped" and (how not in ("every second", "alternate") or step % 2):
                first.step()
            if how != "skipped":
                second.step()
    handle.detach()
    return said, handle.num_communications


@pytest.mark.parametrize(
    "how", ["plain", "replaced", "clipped", "every second", "alternate", "skipped"]
)
def test_a_step_that_was_replaced_is_told_once(one_rank: None, how: str) -> None:
    """And so are weights that somebody wrote, if the step was skipped; all else is no news.

    What the algorithm itself writes is none.
    """
    said, num_communications = _replace_step(how)
    assert num_communications == 4
    assert len(said) == (how in ("replaced", "every second"))
    for text in said:
        assert text.startswith("weights were written after the backward of step 1, and step() of ")
        assert "the SGD given to attach has not called its hooks" in text
