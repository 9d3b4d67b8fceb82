"""A model that is trained three ways at once: in eager DDP, compiled by ddpopt, compiled whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.split import state
from ddpopt.split.cut import Cut
from tests.support.device import DEVICE
from tests.support.models import WAYS, assert_equal_states, state_of

BACKEND = "ddpopt"
Loss = Callable[[Any], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def arguments_for(inner: Any = "aot_eager", **options: Any) -> dict[str, Any]:
    """Return the arguments with which `torch.compile` uses ddpopt's backend.

    What is not `torch.compile`'s own is an option of the backend.
    """
    of_torch = {name: options.pop(name) for name in ("dynamic", "fullgraph") if name in options}
    return {"backend": BACKEND, "options": {"inner": inner, **options}, **of_torch}


def compiled(module: nn.Module, inner: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(module, **arguments_for(inner, **options))


def mean_square(output: Any) -> torch.Tensor:
    """A loss of the first tensor of what a model returned."""
    first = output[0] if isinstance(output, Sequence) else output
    loss: torch.Tensor = first.float().pow(2).mean()
    return loss


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


class Beside:
    """DDP modules with equal weights: `ddp`, which `run` calls compiled, and `eager`.

    With `as_unsplit` there is a third one, compiled by the inner backend as a whole: gradients and
    parameters have to equal it bitwise, and eager's within rounding. `way` is one of `WAYS`.

    Each step compares loss, gradients, parameters and buffers. A test may set `run` anew.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ddp_options: dict[str, Any] | None = None,
        loss_of: Loss = mean_square,
        make_optimizer: MakeOptimizer = sgd,
        as_unsplit: bool = False,
        way: str = "torch.compile(DDP(m))",
        **options: Any,
    ) -> None:
        ddp_options = ddp_options or {}
        models = [copy.deepcopy(model).to(DEVICE) for _ in range(3 if as_unsplit else 2)]
        run = WAYS[way](models[0], lambda: arguments_for(**options), ddp_options)
        others = [DistributedDataParallel(model, **ddp_options) for model in models[1:]]
        self._begin([state.ddp_of(run), *others], options, loss_of, make_optimizer, run)

    def _begin(
        self,
        ddps: Sequence[DistributedDataParallel],
        options: dict[str, Any],
        loss_of: Loss,
        make_optimizer: MakeOptimizer,
        run: Any = None,
    ) -> None:
        self.ddp, self.eager, *unsplit = ddps
        self.run = compiled(self.ddp, **options) if run is None else run
        self._rest = options, loss_of, make_optimizer
        self._loss_of = loss_of
        inner = options.get("inner", "aot_eager")
        self._whole = [(ddp, torch.compile(ddp, backend=inner)) for ddp in unsplit]
        self._optimizers = [make_optimizer(ddp.parameters()) for ddp in ddps]

    @property
    def _calls(self) -> list[tuple[Any, Any]]:
        return [(self.ddp, self.run), (self.eager, self.eager), *self._whole]

    def __deepcopy__(self, memo: dict[int, Any]) -> Beside:
        """Copies of the modules, compiled anew, with optimizers that have seen nothing."""
        copied = copy.copy(self)
        copied._begin([copy.deepcopy(ddp, memo) for ddp, _ in self._calls], *self._rest)
        return copied

    def step(self, *inputs: Any) -> torch.Tensor:
        """Take a step of each, compare them, and return the loss."""
        states = []
        for (ddp, run), optimizer in zip(self._calls, self._optimizers, strict=True):
            optimizer.zero_grad()
            loss = self._loss_of(run(*inputs))
            loss.backward()
            optimizer.step()
            states.append({"loss": loss.detach(), **state_of(ddp)})
        found, expected, *unsplit = states
        assert_equal_states(found, expected)
        for of_whole in unsplit:
            assert_equal_states(found, of_whole, bitwise=True)
        return found["loss"]

    def train(self, batches: Iterable[torch.Tensor]) -> list[float]:
        """Take a step with each, and return the losses."""
        return [self.step(batch).item() for batch in batches]

    def change(self, change: Callable[[Any], object]) -> None:
        """Do the same to the model of each: register a hook, freeze a layer."""
        for ddp, _ in self._calls:
            change(ddp.module)

    @property
    def cut(self) -> Cut:
        """What became of the only graph of `ddp`."""
        (cut,) = self.cuts
        return cut

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """What became of the graphs of `ddp`, in the order in which they were compiled."""
        return tuple(state.get(self.ddp).cuts)

    @property
    def num_sections(self) -> int:
        """How many sections the backward that was compiled last has."""
        return len(self.cuts[-1].sections)
