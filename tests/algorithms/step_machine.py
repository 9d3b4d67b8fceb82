"""Loops in which an algorithm takes part: drawn by rules, run on two ranks, and simulated.

The machine only writes the script; ranks are other processes, and hypothesis is not in them. The
simulator has the models of all ranks in one process, and is written from what `Handle` and
`Decentralized` promise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import Decentralized, attach
from tests.support.algorithms import flat_weights
from tests.support.machines import run_machine
from tests.support.models import MLP, WIDTH

NUM_RANKS = 2
LR = 0.1

State = tuple[torch.Tensor, int, int]  # weights, steps, communications


class Loop(RuleBasedStateMachine):
    """A training loop that is being written: names of methods of `OnRank` and `Simulated`."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[str] = []
        self.is_pending = False  # a forward has no backward yet
        self.is_saved = False

    @rule()
    def forward(self) -> None:
        self._add("forward", is_pending=True)

    @precondition(lambda self: self.is_pending)
    @rule()
    def backward(self) -> None:
        self._add("backward", is_pending=False)

    @precondition(lambda self: not self.is_pending)
    @rule()
    def train(self) -> None:
        for name in ("clear", "forward", "backward", "update"):
            self._add(name)

    @precondition(lambda self: not self.is_pending)
    @rule()
    def train_in_eval_mode(self) -> None:
        for name in ("clear", "forward_in_eval_mode", "backward", "update"):
            self._add(name)

    @precondition(lambda self: not self.is_pending)
    @rule(is_counted=st.booleans())
    def train_without_update(self, is_counted: bool) -> None:
        """The next forward ends the step."""
        for name in ("clear", "forward", "backward", "forward" if is_counted else "evaluate"):
            self._add(name, is_pending=name == "forward")

    @rule()
    def evaluate(self) -> None:
        self._add("evaluate")

    @precondition(lambda self: not self.is_pending)
    @rule(accumulates=st.booleans())
    def evaluate_with_gradients(self, accumulates: bool) -> None:
        """After it DDP reduces in the next backward, under `no_sync` too."""
        self._add("forward_in_eval_mode")
        self._add("forget")
        if accumulates:
            self._add("accumulate")

    # What changes weights has no place between a forward and its backward.
    @precondition(lambda self: not self.is_pending)
    @rule()
    def accumulate(self) -> None:
        self._add("accumulate")

    @precondition(lambda self: not self.is_pending)
    @rule()
    def update(self) -> None:
        self._add("update")

    @precondition(lambda self: not self.is_pending)
    @rule()
    def update_one(self) -> None:
        """As GradScaler does where the other rank's gradients are not finite."""
        self._add("update_one")

    @precondition(lambda self: not self.is_pending)
    @rule()
    def write(self) -> None:
        self._add("write")

    @rule()
    def clear(self) -> None:
        self._add("clear")

    @precondition(lambda self: not self.is_pending)
    @rule()
    def pause(self) -> None:
        self._add("pause")

    @precondition(lambda self: not self.is_pending)
    @rule()
    def average(self) -> None:
        self._add("average")

    @precondition(lambda self: not self.is_pending)
    @rule()
    def save(self) -> None:
        self._add("save")
        self.is_saved = True

    @precondition(lambda self: self.is_saved and not self.is_pending)
    @rule()
    def load(self) -> None:
        self._add("load")

    @precondition(lambda self: not self.is_pending)
    @rule()
    def detach(self) -> None:
        """And a step with DDP's own allreduce, and another algorithm like it."""
        self._add("detach")
        self.is_saved = False

    def _add(self, name: str, *, is_pending: bool | None = None) -> None:
        self.script.append(name)
        if is_pending is not None:
            self.is_pending = is_pending


def draw_scripts(num_scripts: int, num_steps: int = 14) -> list[list[str]]:
    """Scripts of up to so many rules each."""
    drawn: list[list[str]] = []

    class Drawn(Loop):
        def teardown(self) -> None:
            if self.script:
                drawn.append(self.script)

    run_machine(Drawn, num_scripts, num_steps)
    return drawn


def _input(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return MLP(2).double()


def _write(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)


class OnRank:
    """A rank of the real run."""

    def __init__(self, rank: int, algorithm: Any) -> None:
        self.rank, self.algorithm = rank, algorithm
        self.index = 0  # of the action
        self.ddp = DistributedDataParallel(_model())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=LR)
        self.handle = attach(self.ddp, self.optimizer, algorithm)
        self.losses: list[torch.Tensor] = []

    def state(self) -> State:
        counts = self.handle.num_steps, self.handle.num_communications
        return flat_weights(self.ddp).clone(), *counts

    def _loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.ddp(_input(self.rank, self.index)).square().mean()
        return loss

    def forward(self) -> None:
        self.losses.append(self._loss())

    def forward_in_eval_mode(self) -> None:
        self.ddp.eval()
        self.forward()
        self.ddp.train()

    def forget(self) -> None:
        self.losses.clear()

    def backward(self) -> None:
        torch.stack(self.losses).sum().backward()
        self.losses.clear()

    def evaluate(self) -> None:
        with torch.no_grad():
            self._loss()

    def accumulate(self) -> None:
        with self.ddp.no_sync():
            self._loss().backward()

    def update(self) -> None:
        self.optimizer.step()

    def update_one(self) -> None:
        if self.rank == 0:
            self.update()

    def write(self) -> None:
        _write(self.ddp)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def pause(self) -> None:
        with self.handle.paused(), self.handle.paused():
            self._loss().backward()

    def average(self) -> None:
        self.handle.average()

    def save(self) -> None:
        # The handle's first: it may end a step, which moves weights.
        self.saved = copy.deepcopy((self.handle.state_dict(), self.ddp.state_dict()))

    def load(self) -> None:
        of_handle, of_ddp = self.saved
        self.ddp.load_state_dict(of_ddp)
        self.handle.load_state_dict(of_handle)

    def detach(self) -> None:
        self.handle.detach()
        self.handle.detach()
        self.clear()
        self._loss().backward()
        self.update()
        self.handle = attach(self.ddp, self.optimizer, self.algorithm)


class Simulated:
    """All ranks in one process, with plain modules and plain arithmetic."""

    def __init__(self, algorithm: Decentralized) -> None:
        self.interval = algorithm.communication_interval
        self.index = 0
        self.models = [_model() for _ in range(NUM_RANKS)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in self.models]
        self.losses: list[list[torch.Tensor]] = []
        self._begin()

    def _begin(self) -> None:
        self.num_steps = self.num_communications = 0
        self.open_ranks: set[int] = set()  # those whose step has begun and has not ended
        self.has_run_backward = False
        # By rank, from a step's begin to its end.
        self.sent: dict[int, torch.Tensor] = {}
        self.mean: torch.Tensor | None = None

    def states(self) -> list[State]:
        counts = self.num_steps, self.num_communications
        return [(flat_weights(model).clone(), *counts) for model in self.models]

    # ---- Steps ---------------------------------------------------------------------------------

    def _open(self) -> None:
        self.open_ranks, self.has_run_backward = set(range(NUM_RANKS)), False
        if self.num_steps % self.interval == 0:
            self.sent = {r: flat_weights(model).clone() for r, model in enumerate(self.models)}
            self.mean = _mean(self.sent.values())
            self.num_communications += 1
        self.num_steps += 1

    def _end_step(self, ranks: Sequence[int] = range(NUM_RANKS)) -> None:
        """Take over the mean, as before a step's update, and end the step."""
        for rank in ranks:
            self.open_ranks.discard(rank)
            if rank in self.sent:
                moved = self.mean - self.sent.pop(rank)
                _assign(self.models[rank], flat_weights(self.models[rank]) + moved)

    def _begin_forward(self) -> bool:
        """Whether this forward is the first after a backward."""
        is_first = not self.open_ranks or self.has_run_backward
        if is_first:
            self._end_step()
        return is_first

    # ---- Actions -------------------------------------------------------------------------------

    def _losses(self) -> list[torch.Tensor]:
        return [
            model(_input(rank, self.index)).square().mean()
            for rank, model in enumerate(self.models)
        ]

    def forward(self) -> None:
        if self._begin_forward():
            self._open()
        self.losses.append(self._losses())

    def forward_in_eval_mode(self) -> None:
        self._begin_forward()
        self.losses.append(self._losses())

    def forget(self) -> None:
        self.losses.clear()

    def backward(self) -> None:
        if not self.open_ranks:
            self._open()
        self.has_run_backward = True
        for losses in zip(*self.losses, strict=True):
            torch.stack(losses).sum().backward()
        self.losses.clear()

    def evaluate(self) -> None:
        pass

    def accumulate(self) -> None:
        for loss in self._losses():
            loss.backward()

    def update(self) -> None:
        self._end_step()
        for optimizer in self.optimizers:
            optimizer.step()

    def update_one(self) -> None:
        self._end_step([0])
        self.optimizers[0].step()

    def write(self) -> None:
        for model in self.models:
            _write(model)

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def pause(self) -> None:
        self._end_step()
        self.accumulate()

    def average(self) -> None:
        self._end_step()
        mean = _mean(flat_weights(model) for model in self.models)
        for model in self.models:
            _assign(model, mean)

    def save(self) -> None:
        self._end_step()
        self.saved = self.states()

    def load(self) -> None:
        self._end_step()
        for model, (weights, *counts) in zip(self.models, self.saved, strict=True):
            _assign(model, weights)
            self.num_steps, self.num_communications = counts

    def detach(self) -> None:
        self.average()
        self.clear()
        self.accumulate()
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = _mean(parameter.grad for parameter in parameters)
            for parameter in parameters:
                parameter.grad = mean.clone()
        self.update()
        self._begin()


def _mean(values: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(values)).mean(0)


def _assign(model: torch.nn.Module, weights: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(weights.detach().clone(), model.parameters())


def _follow(loop: Any, script: Sequence[str], note: Callable[[], Any]) -> list[Any]:
    """Do a script's actions; what is noted after each."""
    notes = []
    for index, name in enumerate(script):
        loop.index = index
        getattr(loop, name)()
        notes.append(note())
    return notes


def run_script(rank: int, algorithm: Any, script: Sequence[str]) -> list[State]:
    """The states of a rank after each action of a script."""
    loop = OnRank(rank, algorithm)
    states: list[State] = _follow(loop, script, loop.state)
    loop.handle.detach()
    return states


def simulate(algorithm: Any, script: Sequence[str]) -> list[list[State]]:
    """The states of all ranks after each action of a script, by action."""
    loop = Simulated(algorithm)
    return _follow(loop, script, loop.states)
