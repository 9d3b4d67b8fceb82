"""Loops in which an algorithm takes part: drawn by rules, run on two ranks, and simulated.

The machine only writes scripts; ranks are other processes, and hypothesis is not in them. What a
script does, `OnRank` does with the product, and `InOneProcess` with `simulators`.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import (
    AsyncModelAverage,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    attach,
)
from tests.algorithms.simulators import (
    Place,
    ReferenceQAdam,
    assign,
    flat_gradients,
    simulator_of,
)
from tests.support.algorithms import flat_weights
from tests.support.machines import choose_scripts, run_machine
from tests.support.models import MLP
from tests.support.ranks import Ranks

NUM_RANKS = 2
LR = 0.1
WIDTH = 16
OPTIMIZERS = ("SGD", "momentum", "Adam", "one for each layer")

State = tuple[torch.Tensor, torch.Tensor, int, int]  # weights, gradients, steps, communications


# ---- Scripts -------------------------------------------------------------------------------------


class Script(NamedTuple):
    """`actions` are names of methods of `OnRank` and `InOneProcess`."""

    optimizer: str
    has_views: bool  # DDP's gradients are views of its buckets
    actions: list[str]


class Loop(RuleBasedStateMachine):
    """A training loop that is being written."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script("SGD", False, [])
        self.is_pending = False  # a forward has no backward yet
        self.is_saved = False

    @initialize(optimizer=st.sampled_from(OPTIMIZERS), has_views=st.booleans())
    def choose(self, optimizer: str, has_views: bool) -> None:
        self.script = Script(optimizer, has_views, self.script.actions)

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
    @rule()
    def train_with_micro_batches(self) -> None:
        for name in ("clear", "accumulate", "forward", "backward", "update"):
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
    @rule(name=st.sampled_from(("accumulate", "pause", "average", "resync")))
    def communicate(self, name: str) -> None:
        self._add(name)

    @precondition(lambda self: not self.is_pending)
    @rule(name=st.sampled_from(("update", "update_first", "update_rank_0")))
    def update(self, name: str) -> None:
        self._add(name)

    @precondition(lambda self: not self.is_pending)
    @rule(name=st.sampled_from(("decay", "write_part", "swap_in")))
    def write(self, name: str) -> None:
        self._add(name)

    @rule()
    def clear(self) -> None:
        self._add("clear")

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
        self.script.actions.append(name)
        if is_pending is not None:
            self.is_pending = is_pending


_NUM_DRAWN = 120  # of which those are chosen that do most
_ACTION_IN_PAIRS = 4  # what a new action counts, where a new pair of actions counts one


@functools.cache
def draw_scripts(num_scripts: int, num_rules: int = 14) -> list[Script]:
    """Scripts of up to so many rules each."""
    drawn: list[Script] = []

    class Drawn(Loop):
        def teardown(self) -> None:
            if self.script.actions:
                drawn.append(self.script)

    run_machine(Drawn, _NUM_DRAWN, num_rules)
    return choose_scripts(drawn, num_scripts, _deeds)


def _deeds(script: Script) -> set[Any]:
    """What is done in a script: each action, and each with the one before it."""
    deeds: set[Any] = {script.optimizer, *itertools.pairwise(["", *script.actions])}
    deeds.update(itertools.product(script.actions, range(_ACTION_IN_PAIRS)))
    return deeds


def _for_algorithm(algorithm: Any, script: Script) -> Script:
    """The script as somebody writes it who has read the algorithm's page."""
    if not isinstance(algorithm, QAdam):
        return script
    # A gradient may not be added to a momentum; `zero_grad` belongs where `step` is left out.
    actions, has_momentum = [], False
    for name in script.actions:
        if has_momentum and name in {"accumulate", "backward", "pause", "load"}:
            actions.append("clear")
        # All ranks have one gradient, so that none skips its update alone.
        actions.append("update" if name == "update_rank_0" else name)
        has_momentum = name == "backward" or (has_momentum and name in KEEPING)
    return script._replace(actions=actions)


# Actions after which a gradient is what it was.
KEEPING = {
    "forward",
    "forward_in_eval_mode",
    "forget",
    "evaluate",
    "update_first",
    "decay",
    "write_part",
    "swap_in",
    "average",
    "resync",
    "save",
}


# ---- What ranks and the simulator have in common -------------------------------------------------


def _input(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def _model() -> MLP:
    torch.manual_seed(0)
    return MLP(2, WIDTH, bias=False).double()


def _optimizers(algorithm: Any, kind: str, model: MLP, qadam: Any) -> list[Any]:
    parts = list(model.layers) if kind == "one for each layer" else [model]
    if isinstance(algorithm, QAdam):
        return [qadam(p.parameters(), lr=LR, warmup_steps=2, weight_decay=0.1) for p in parts]
    if kind == "Adam":
        return [torch.optim.Adam(model.parameters(), lr=LR)]
    momentum = 0.5 if kind == "momentum" else 0.0
    return [torch.optim.SGD(p.parameters(), lr=LR, momentum=momentum) for p in parts]


class Writing:
    """What people do to weights between updates. `modules` has those of this loop."""

    modules: Sequence[nn.Module]

    @torch.no_grad()
    def decay(self) -> None:
        for parameter in self._parameters():
            parameter.mul_(0.9)

    def write_part(self) -> None:
        """It gives no new version."""
        for parameter in self._parameters():
            parameter.data[:3] = 0.25

    def swap_in(self) -> None:
        """As with an average of weights (EMA)."""
        for parameter in self._parameters():
            parameter.data = parameter.detach() * 1.1

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]


class OnRank(Writing):
    """A rank of the real run."""

    def __init__(self, rank: int, algorithm: Any, script: Script) -> None:
        self.rank, self.algorithm = rank, algorithm
        self.index = 0  # of the action
        model = _model()
        self.modules = [model]
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=script.has_views)
        self.optimizers = _optimizers(algorithm, script.optimizer, model, QAdamOptimizer)
        self.losses: list[torch.Tensor] = []
        self._attach()

    def _attach(self) -> None:
        self.handle = attach(self.ddp, self.optimizers, self.algorithm)
        if isinstance(self.algorithm, AsyncModelAverage):
            self.handle.abort()  # rounds come at any time, and cannot be simulated

    def state(self) -> State:
        counts = self.handle.num_steps, self.handle.num_communications
        return flat_weights(self.ddp).clone(), flat_gradients(self.ddp), *counts

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
        for optimizer in self.optimizers:
            optimizer.step()

    def update_first(self) -> None:
        self.optimizers[0].step()

    def update_rank_0(self) -> None:
        """As GradScaler does where the other rank's gradients are not finite."""
        if self.rank == 0:
            self.update()
        elif isinstance(self.algorithm, LowPrecisionDecentralized):
            self.handle.settle()  # for which rank 0's update waits

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def pause(self) -> None:
        with self.handle.paused(), self.handle.paused():
            self._loss().backward()

    def average(self) -> None:
        with torch.inference_mode():  # what is made in it cannot be written to outside
            self.handle.average()

    def resync(self) -> None:
        if isinstance(self.algorithm, LowPrecisionDecentralized):
            self.handle.resync()

    def save(self) -> None:
        # The handle's first: it may end a step, which moves weights.
        parts = [self.handle, self.ddp, *self.optimizers]
        self.saved = [copy.deepcopy(part.state_dict()) for part in parts]

    def load(self) -> None:
        of_handle, *others = copy.deepcopy(self.saved)
        for part, saved in zip([self.ddp, *self.optimizers], others, strict=True):
            part.load_state_dict(saved)
        self.handle.load_state_dict(of_handle)

    def detach(self) -> None:
        self.handle.detach()
        self.handle.detach()
        self.clear()
        self._loss().backward()
        self.update()
        self._attach()


class InOneProcess(Writing):
    """All ranks, simulated."""

    def __init__(self, algorithm: Any, script: Script) -> None:
        self.index = 0
        self.modules = [_model() for _ in range(NUM_RANKS)]
        self.optimizers = [
            _optimizers(algorithm, script.optimizer, model, ReferenceQAdam)
            for model in self.modules
        ]
        self.simulator = simulator_of(algorithm, self.modules, self.optimizers)
        self.is_ring = isinstance(algorithm, LowPrecisionDecentralized)
        self.losses: list[list[torch.Tensor]] = []
        self.is_reducer_ready = False  # DDP reduces in the next backward

    def states(self) -> list[State]:
        counts = self.simulator.num_steps, self.simulator.num_communications
        return [(flat_weights(m).clone(), flat_gradients(m), *counts) for m in self.modules]

    def _losses(self) -> list[torch.Tensor]:
        return [m(_input(rank, self.index)).square().mean() for rank, m in enumerate(self.modules)]

    def forward(self) -> None:
        self._forward(is_training=True)

    def forward_in_eval_mode(self) -> None:
        self._forward(is_training=False)

    def _forward(self, is_training: bool) -> None:
        self.simulator.forward(is_training=is_training)
        self.losses.append(self._losses())
        self.is_reducer_ready = True

    def forget(self) -> None:
        self.losses.clear()

    def backward(self) -> None:
        self.simulator.backward([sum(losses) for losses in zip(*self.losses, strict=True)])
        self.losses.clear()
        self.is_reducer_ready = False

    def evaluate(self) -> None:
        pass

    def accumulate(self) -> None:
        if self.is_reducer_ready:
            self.simulator.reduce_in(self._losses(), Place.NO_SYNC)
            self.is_reducer_ready = False
        else:
            for loss in self._losses():
                loss.backward()

    def update(self) -> None:
        self.simulator.update()

    def update_first(self) -> None:
        self.simulator.update(num_optimizers=1)

    def update_rank_0(self) -> None:
        self.simulator.update([0])
        if self.is_ring:
            self.simulator.settle()

    def clear(self) -> None:
        self.simulator.clear()

    def pause(self) -> None:
        self.simulator.settle()
        self.simulator.reduce_in(self._losses(), Place.PAUSE)
        self.is_reducer_ready = False

    def average(self) -> None:
        self.simulator.average()

    def resync(self) -> None:
        if self.is_ring:
            self.simulator.settle()
            self.simulator.resync()

    def save(self) -> None:
        self.simulator.settle()
        of_optimizers = [[o.state_dict() for o in optimizers] for optimizers in self.optimizers]
        replicas = getattr(self.simulator, "sent", None)
        self.saved = copy.deepcopy((self.states(), of_optimizers, replicas))

    def load(self) -> None:
        self.simulator.settle()
        states, of_optimizers, replicas = copy.deepcopy(self.saved)
        for rank, (weights, _, *counts) in enumerate(states):
            assign(self.modules[rank], weights)
            self.simulator.num_steps, self.simulator.num_communications = counts
            for optimizer, saved in zip(self.optimizers[rank], of_optimizers[rank], strict=True):
                optimizer.load_state_dict(saved)
        if replicas is not None:
            self.simulator.sent = replicas

    def detach(self) -> None:
        self.average()
        self.clear()
        for loss in self._losses():
            loss.backward()
        self.simulator.reduce_exactly()
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                optimizer.step()
        self.simulator.attach()
        self.is_reducer_ready = False


# ---- Running them --------------------------------------------------------------------------------


def _run(rank: int, algorithm: Any, scripts: Sequence[Script]) -> list[list[State]]:
    """The states of a rank after each action of each script."""
    states = []
    gc.freeze()  # else `attach`, which looks at all objects for DDP modules, takes most of the time
    for script in scripts:
        loop = OnRank(rank, algorithm, script)
        states.append(_follow(loop, script, loop.state))
        loop.handle.detach()
    gc.unfreeze()
    return states


def _follow(loop: Any, script: Script, note: Any) -> list[Any]:
    notes = []
    for index, name in enumerate(script.actions):
        loop.index = index
        getattr(loop, name)()
        notes.append(note())
    return notes


def check(ranks: Ranks, algorithm: Any, num_scripts: int) -> None:
    """Weights, gradients and counts are the simulator's after each action, whatever a loop does."""
    scripts = [_for_algorithm(algorithm, script) for script in draw_scripts(num_scripts)]
    by_rank = ranks.run(_run, algorithm, scripts)
    for number, script in enumerate(scripts):
        loop = InOneProcess(algorithm, script)
        for index, expected_by_rank in enumerate(_follow(loop, script, loop.states)):
            for rank, expected in enumerate(expected_by_rank):
                found = by_rank[rank][number][index]
                done = f"rank {rank}, {script.optimizer}, after {script.actions[: index + 1]}"
                assert found[2:] == expected[2:], done
                assert torch.allclose(found[0], expected[0], rtol=1e-7, atol=1e-9), done
                assert torch.allclose(found[1], expected[1], rtol=1e-7, atol=1e-9), done
