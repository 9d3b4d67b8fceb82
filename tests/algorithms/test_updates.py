"""`UpdateWatch`: updates that no hook of a given optimizer tells of."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpopt.algorithms import ByteGrad, attach
from ddpopt.errors import AttachError, OptionError
from tests.support.algorithms import ALGORITHMS, FLAT, Trial, X
from tests.support.logs import logged
from tests.support.models import MLP

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


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.quick("Wrapping")
@pytest.mark.parametrize("kind", [Wrapping, WrappingWithHooks])
def test_an_optimizer_whose_step_calls_no_hooks_is_refused(one_rank: None, kind: Any) -> None:
    """The one in it is taken, as the error advises."""
    with pytest.raises(OptionError, match=rf"{kind.__name__} .* hooks"):
        Trial(make_optimizers=lambda model: kind(_sgd(model)))
    trial = Trial()
    for _ in range(3):
        trial.ddp(X).sum().backward()
        kind(trial.optimizer).step()
    assert trial.handle.metrics()["ddpopt.algorithm.skipped_updates"] == 0
    trial.handle.detach()
    with pytest.raises(OptionError, match="no optimizer"):
        attach(trial.ddp, [], FLAT)


def _scheduled(model: nn.Module) -> tuple[Any, Any]:
    optimizer = _sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which sets a `step` on it
    return optimizer, optimizer


def _inner(model: nn.Module) -> tuple[Any, Any]:
    inner = _sgd(model)
    return inner, Lookahead(inner)


def _twice(optimizer: Any) -> tuple[Any, Any]:
    return optimizer, optimizer


# What makes an optimizer for `attach`, and the one to step.
MAKERS: dict[str, Callable[[nn.Module], tuple[Any, Any]]] = {
    "scheduler": _scheduled,
    "inner of a wrapper": _inner,
    "wrapper": lambda model: _twice(Lookahead(_sgd(model))),
    "ZeRO": lambda model: _twice(
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    ),
    "super": lambda model: _twice(Twice(model.parameters(), lr=0.1)),
}


@pytest.mark.quick("scheduler")
@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_in_and_around_those_given_are_no_strangers(one_rank: None, name: str) -> None:
    """Those of another model are not either, nor one that updates this model while paused."""
    model, other = MLP(2), MLP(2)
    attached, stepped = MAKERS[name](model)
    trial = Trial(model=model, make_optimizers=lambda _model: attached)
    of_other, visitor = _sgd(other), _sgd(model)
    with logged("warning") as lines:
        for _ in range(3):
            trial.ddp(X).sum().backward()
            other(X).sum().backward()
            of_other.step()
            stepped.step()
            with trial.handle.paused():
                trial.ddp(X).sum().backward()
                visitor.step()
    assert trial.handle.metrics()["ddpopt.algorithm.skipped_updates"] == 0
    assert not lines
    trial.handle.detach()


@pytest.mark.quick("True")
@pytest.mark.parametrize("has_backward", [True, False])
def test_only_an_update_outside_of_a_pause_has_to_be_known(
    one_rank: None, has_backward: bool
) -> None:
    """In it there may be a backward, which reduces buckets, or gradients of another kind."""
    trial = Trial()
    visitor = _sgd(trial.model)
    trial.step()
    with trial.handle.paused():
        if has_backward:
            trial.ddp(X).sum().backward()
        visitor.step()
    trial.step()
    with trial.handle.paused():
        visitor.step()
    visitor.step()
    with pytest.raises(AttachError, match="a SGD"):
        trial.ddp(X)
    trial.handle.detach(average=False)


@pytest.mark.quick("Decentralized-paused")
@pytest.mark.parametrize("between", ["paused", "state_dict", "average", "nothing"])
@pytest.mark.parametrize("name", ["Decentralized", "AsyncModelAverage"])
def test_what_the_algorithm_writes_after_a_skipped_update_is_no_update(
    one_rank: None, name: str, between: str
) -> None:
    """A GradScaler skips the first update, and then a method of the handle's ends the step."""
    trial = Trial(ALGORITHMS[name])
    with logged("warning") as lines:
        trial.backward()
        if between == "paused":
            with trial.handle.paused(), torch.no_grad():
                trial.ddp(X)
                time.sleep(0.05)
        elif between != "nothing":
            getattr(trial.handle, between)()
            time.sleep(0.05)  # rounds of AsyncModelAverage write meanwhile
        trial.train([X] * 2)
    assert not lines
    trial.handle.detach()


def test_handles_may_be_collected_in_the_middle_of_a_step(one_rank: None) -> None:
    """Torch walks over the process's hooks there, and one of them collects garbage."""

    def collect(*_: object) -> None:
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    unrelated = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    gc.disable()  # so that nothing but the hook collects
    try:
        for _ in range(3):
            trial = Trial()
            trial.ddp.handle = trial.handle
            handle = weakref.ref(trial.handle)
            del trial  # with its handle, which nobody detaches
            assert handle() is not None
            unrelated.step()
            assert handle() is None
    finally:
        gc.enable()
        hook.remove()


@pytest.mark.quick("Decentralized-all")
@pytest.mark.parametrize("is_partial", [False, True], ids=["all", "a part"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_optimizer_that_was_made_anew_is_noticed_at_the_next_forward(
    one_rank: None, name: str, is_partial: bool
) -> None:
    """It is for all layers, or for the last one. An evaluation raises nothing."""
    trial = Trial(ALGORITHMS[name])
    trial.step()
    trial.backward()
    layers = trial.model.layers[-1 if is_partial else 0 :]
    anew = torch.optim.AdamW(layers.parameters(), lr=0.1)
    if is_partial:
        trial.optimizer.step()
    anew.step()
    with torch.no_grad():
        trial.ddp(X)
    for _ in range(2):
        with pytest.raises(AttachError, match=f"a AdamW .* in step 2, and {name}"):
            trial.ddp(X)
    trial.handle.detach()
    again = attach(trial.ddp, [trial.optimizer, anew], ByteGrad(hierarchical=False))
    trial.optimizers.append(anew)
    trial.step()
    trial.ddp(X)
    again.detach()


# The ways in which the first of two optimizers makes its steps, and whether a warning says so.
CASES = {
    "replaced": True,
    "clipped and alternating": True,
    "plain": False,
    "clipped": False,
    "alternating": False,
    "skipped": False,
}


@pytest.mark.quick("replaced", "plain")
@pytest.mark.parametrize("case", CASES)
def test_weights_written_without_the_hooks_of_a_step_are_told_once(
    one_rank: None, case: str
) -> None:
    """A `step` was replaced by a function, or skipped after somebody had written weights.

    Weights that are written before a `step` are not told, nor are those by the algorithm.
    """
    trial = Trial(make_optimizers=lambda model: [_sgd(layer) for layer in model.layers])
    first, second = trial.optimizers

    def update() -> None:
        with torch.no_grad():
            for parameter in trial.model.layers[0].parameters():
                parameter.sub_(parameter.grad, alpha=0.1)

    with logged("warning") as lines:
        for step in range(4):
            trial.backward()
            if case == "replaced":
                first.step = update
            if "clipped" in case:
                with torch.no_grad():
                    trial.model.layers[0].weight.clamp_(-0.01, 0.01)
            if case != "skipped":
                if "alternating" not in case or step % 2:
                    first.step()
                second.step()
    trial.handle.detach()
    assert trial.handle.num_communications == 4
    assert len(lines) == CASES[case]
    if lines:
        assert lines[0].startswith("weights were written after the backward of step 1, ")
        assert "SGD" in lines[0]
