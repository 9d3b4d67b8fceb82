"""`UpdateWatch`: updates that no hook of a given optimizer tells of."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpopt.algorithms import AsyncModelAverage, ByteGrad, attach
from ddpopt.errors import AttachError, OptionError
from tests.support.algorithms import ALGORITHMS, FLAT, attached_mlp
from tests.support.logs import logged
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
    """Has the hooks' dictionaries, as timm's Lookahead does, and a step that no one wrapped."""

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


@pytest.mark.quick("Wrapping")
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
    """A function that makes an optimizer around another, for `attach` and to step."""

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


@pytest.mark.quick("scheduler")
@pytest.mark.parametrize(
    "make",
    [_scheduled, _around(Lookahead, True), _around(Lookahead, False), _zero, _twice],
    ids=["scheduler", "inner of a wrapper", "wrapper", "ZeRO", "super"],
)
def test_optimizers_in_and_around_those_given_are_no_strangers(one_rank: None, make: Any) -> None:
    """Those of another model are not either, nor one that updates this model while paused."""
    ddp, other = DistributedDataParallel(MLP(1)), MLP(1)
    attached, stepped = make(ddp.parameters())
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    visitor = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, attached, FLAT)
    with logged("warning") as lines:
        for _ in range(3):
            ddp(torch.ones(2, WIDTH)).sum().backward()
            other(torch.ones(2, WIDTH)).sum().backward()
            of_other.step()
            stepped.step()
            with handle.paused():
                ddp(torch.ones(2, WIDTH)).sum().backward()
                visitor.step()
    assert handle.metrics()["ddpopt.algorithm.skipped_updates"] == 0
    assert not lines
    handle.detach()


@pytest.mark.quick("True")
@pytest.mark.parametrize("has_backward", [True, False])
def test_only_an_update_outside_of_a_pause_has_to_be_known(
    one_rank: None, has_backward: bool
) -> None:
    """In it there may be a backward, which reduces buckets, or gradients of another kind."""
    ddp, optimizer, handle = attached_mlp()
    visitor = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.ones(2, WIDTH)

    def train() -> None:
        ddp(x).sum().backward()
        optimizer.step()

    train()
    with handle.paused():
        if has_backward:
            ddp(x).sum().backward()
        visitor.step()
    train()
    with handle.paused():
        visitor.step()
    visitor.step()
    with pytest.raises(AttachError, match="a SGD that was not given to attach"):
        ddp(x)
    handle.detach(average=False)


@pytest.mark.quick("Decentralized-paused")
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
    with logged("warning") as lines:
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
                time.sleep(0.05)  # rounds of AsyncModelAverage write meanwhile
    assert not lines
    handle.detach()


def test_handles_may_be_collected_in_the_middle_of_a_step(one_rank: None) -> None:
    """Torch walks over the process's hooks there, and one of them collects garbage."""

    def collect(*_: object) -> None:
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    unrelated = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    gc.disable()  # so that nothing but the hook collects
    try:
        for _ in range(3):
            ddp = DistributedDataParallel(MLP(1))
            ddp.handle = attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT)
            handle = weakref.ref(ddp.handle)
            del ddp  # with its handle, which nobody detaches
            assert handle() is not None
            unrelated.step()
            assert handle() is None
    finally:
        gc.enable()
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
        ddp(x)  # an evaluation raises nothing
    errors = [error_of(lambda: ddp(x)), error_of(lambda: ddp(x))]
    handle.detach()
    again = attach(ddp, [optimizer, anew], ByteGrad(hierarchical=False))
    ddp(x).sum().backward()
    optimizer.step()
    anew.step()
    ddp(x)
    again.detach()
    return errors


@pytest.mark.quick("Decentralized-all")
@pytest.mark.parametrize("is_partial", [False, True], ids=["all", "a part"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_optimizer_that_was_made_anew_is_noticed_at_the_next_forward(
    ranks: Ranks, name: str, is_partial: bool
) -> None:
    for errors in ranks.run(_make_anew, name, is_partial):
        for error in errors:
            assert error.startswith(
                "AttachError: a AdamW that was not given to attach has updated parameters of this "
                f"model in step 2, and {name} has to know"
            )


def _train_without_steps(case: str) -> tuple[list[str], int]:
    """Train with two optimizers, the first of which makes its steps in a way of `case`.

    Returns the warnings, and how often the algorithm communicated.
    """
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in ddp.module.layers)

    def update() -> None:
        with torch.no_grad():
            for parameter in ddp.module.layers[0].parameters():
                parameter.sub_(parameter.grad, alpha=0.1)

    handle = attach(ddp, [first, second], FLAT)
    with logged("warning") as lines:
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.ones(2, WIDTH)).square().mean().backward()
            if case == "replaced":
                first.step = update  # type: ignore[method-assign]
            if case in ("clipped", "clipped and alternating"):
                with torch.no_grad():
                    ddp.module.layers[0].weight.clamp_(-0.01, 0.01)
            is_alternating = case in ("clipped and alternating", "alternating")
            if case != "skipped" and (not is_alternating or step % 2):
                first.step()
            if case != "skipped":
                second.step()
    handle.detach()
    return lines, handle.num_communications


@pytest.mark.quick("replaced")
@pytest.mark.parametrize("case", ["replaced", "clipped and alternating"])
def test_weights_written_without_the_hooks_of_a_step_are_told_once(
    one_rank: None, case: str
) -> None:
    """A `step` was replaced by a function, or skipped after somebody had written weights."""
    lines, num_communications = _train_without_steps(case)
    assert num_communications == 4
    (line,) = lines
    assert line.startswith("weights were written after the backward of step 1, and step() of the ")
    assert "the SGD given to attach has not called its hooks" in line


@pytest.mark.quick("plain")
@pytest.mark.parametrize("case", ["plain", "clipped", "alternating", "skipped"])
def test_usual_steps_are_not_told(one_rank: None, case: str) -> None:
    """Weights that are written before a `step` are not told either, nor by the algorithm."""
    lines, num_communications = _train_without_steps(case)
    assert num_communications == 4
    assert not lines
