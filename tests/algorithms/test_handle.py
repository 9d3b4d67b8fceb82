"""`Handle`: what a step is, what it leaves when it goes, and what fails behind a backward."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import re
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt import _torch
from ddpopt.algorithms import (
    Algorithm,
    ByteGrad,
    Decentralized,
    Handle,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    attach,
)
from ddpopt.algorithms.handle import BackgroundHandle
from ddpopt.errors import AttachError, OptionError, PeerError
from ddpopt.planning import tuner
from tests.algorithms import step_machine
from tests.support.algorithms import ALGORITHMS, FLAT, Trial, X, flat_weights, inputs_of
from tests.support.beside import compiled
from tests.support.documents import blocks
from tests.support.logs import logged
from tests.support.models import MLP
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import MakeRanks, Ranks


def _gather_equal(values: torch.Tensor) -> bool:
    """Whether all ranks have the same."""
    first, *others = gather(values)
    return all(torch.equal(first, other) for other in others)


# ---- what a step is ---------------------------------------------------------------------------


@pytest.mark.quick("options0-4", "options1-4", "options2-4")
@pytest.mark.parametrize("num_scripts", [4, 12])
@pytest.mark.parametrize(
    "options", [{}, {"communication_interval": 2}, {"peer_selection": "shift_one"}]
)
def test_whatever_a_loop_does_decentralized_trains_as_its_simulator(
    ranks: Ranks, options: dict[str, Any], num_scripts: int
) -> None:
    """Weights and counts are those of plain arithmetic, whatever a loop does, after each action."""
    step_machine.check(ranks, Decentralized(hierarchical=False, **options), num_scripts)


@on_ranks(2)
@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_backward_in_eval_mode_makes_a_step(rank: int, name: str) -> None:
    """As with a frozen batch norm. An evaluation that forgot `no_grad` makes none."""
    trial = Trial(ALGORITHMS[name])
    trial.ddp.eval()
    for step, x in enumerate(inputs_of(rank, 3)):
        trial.ddp(x)
        assert trial.handle.num_steps == step
        trial.step(x)
        assert trial.handle.num_steps == step + 1
    end_s = time.monotonic() + 60
    while not trial.handle.num_communications and time.monotonic() < end_s:  # in the background
        time.sleep(0.001)
    assert trial.handle.num_communications > 0
    trial.handle.detach()
    assert _gather_equal(trial.weights)


@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_joins_forwards_are_refused(one_rank: None, name: str) -> None:
    """In it, an algorithm would not take part on a rank without inputs."""
    trial = Trial(ALGORITHMS[name])
    with pytest.raises(AttachError, match=rf"{name} .*join\(\)"), trial.ddp.join():
        trial.ddp(X)
    trial.handle.detach()


def test_several_optimizers_make_one_step_and_closures_are_refused(one_rank: None) -> None:
    trial = Trial(make_optimizers=lambda m: [torch.optim.SGD(p.parameters()) for p in m.layers])
    trial.train([X] * 3)
    assert trial.handle.num_steps == 3
    for arguments, options in (([lambda: 0.0], {}), ([], {"closure": lambda: 0.0})):
        with pytest.raises(OptionError, match="closure"):
            trial.optimizer.step(*arguments, **options)
    trial.handle.detach()


class Watching(Handle):
    """Notes how often a backward ended, and the gradients that it then had."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ends: list[list[torch.Tensor]] = []

    def reduce(self, bucket: Any) -> Any:
        return self.allreduce(bucket)

    def end_backward(self) -> None:
        parameters = list(self.training.ddp.module.parameters())
        self.ends.append([p.grad.clone() for p in parameters if p.grad is not None])


@dataclass(frozen=True)
class Watched(Algorithm[Watching]):
    handle_type = Watching


class Nested(MLP):
    """An MLP whose layers but the first may be recomputed, in backwards of their own.

    A layer has another dtype, so that DDP's first backward has two buckets.
    """

    def __init__(self, is_recomputed: bool) -> None:
        super().__init__(4)
        self.layers[-1].double()
        self.is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = x.to(layer.weight.dtype)
            is_plain = k == 0 or not self.is_recomputed
            x = layer(x) if is_plain else checkpoint(layer, x, use_reentrant=True)
        return x


@on_ranks(2)
@pytest.mark.quick("dynamic-recomputed", "static-plain")
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_a_backward_ends_once_when_all_gradients_are_final(
    rank: int, is_static: bool, is_recomputed: bool
) -> None:
    """One that raises never ends."""
    trial = Trial(Watched(), Nested(is_recomputed), bucket_cap_mb=0.005, static_graph=is_static)
    for step, x in enumerate(inputs_of(rank, 3), 1):
        trial.backward(x)
        assert len(trial.handle.ends) == step
        expected = [p.grad for p in trial.model.parameters() if p.grad is not None]
        assert len(trial.handle.ends[-1]) == len(expected) == 8
        assert all(map(torch.equal, trial.handle.ends[-1], expected))
        trial.optimizer.step()
    hook = trial.model.layers[0].weight.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        trial.backward(x)
    hook.remove()
    assert len(trial.handle.ends) == 3
    trial.handle.detach(average=False)


# ---- attach and detach ------------------------------------------------------------------------


@on_ranks(2)
def test_a_model_that_is_dropped_takes_its_algorithm_and_thread_along(rank: int) -> None:
    trial = Trial()
    trial.step()
    optimizer, weak = trial.optimizer, weakref.ref(trial.ddp)
    del trial
    for _ in range(10_000):
        gc.collect()  # again: the thread may have been at work in the first
        # Not the thread of the group, which makes meetings and stays as long as that.
        names = [t.name for t in threading.enumerate() if t.name.startswith("ddpopt-")]
        if not names:
            break
        time.sleep(0.01)
    assert weak() is None
    assert not names
    assert optimizer.param_groups  # it has stayed
    gather(None)  # nobody goes before the others' collectives have ended


# Algorithms, ranks, and the steps after which a checkpoint is saved.
RESUMED: dict[str, tuple[Any, int, int]] = {
    "Decentralized": (Decentralized(hierarchical=False, communication_interval=2), 2, 3),
    "QAdam-warm-up": (QAdam(hierarchical=False), 2, 2),
    "QAdam-end": (QAdam(hierarchical=False), 2, 4),
    "QAdam-later": (QAdam(hierarchical=False), 2, 6),
    "LowPrecision": (LowPrecisionDecentralized(local_world_size=2), 4, 2),
}


@on_ranks()
@pytest.mark.parametrize(
    ("num_ranks", "name"), [(num_ranks, name) for name, (_, num_ranks, _) in RESUMED.items()]
)
def test_a_checkpoint_of_each_rank_continues_it_bitwise(
    rank: int, num_ranks: int, name: str
) -> None:
    algorithm, _, at_step = RESUMED[name]
    inputs = inputs_of(rank, 8)

    def make() -> tuple[Trial, dict[str, Any]]:
        # Two layers, without biases: DDP forms its buckets anew in the second step of a process.
        trial = Trial(algorithm, MLP(2, bias=False), make_optimizers=optimizer_of)
        parts = {"model": trial.ddp, "optimizer": trial.optimizer, "handle": trial.handle}
        return trial, parts

    def optimizer_of(model: nn.Module) -> Any:
        if isinstance(algorithm, QAdam):
            return QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    trial, parts = make()
    trial.train(inputs[:at_step])
    file = io.BytesIO()
    torch.save({part: value.state_dict() for part, value in parts.items()}, file)
    file.seek(0)
    trial.train(inputs[at_step:])
    expected = trial.weights, trial.counts
    trial.handle.detach(average=False)
    resumed, parts = make()
    for part, state in torch.load(file, weights_only=True).items():
        parts[part].load_state_dict(state)
    resumed.train(inputs[at_step:])
    assert torch.equal(resumed.weights, expected[0])
    assert resumed.counts == expected[1]
    resumed.handle.detach(average=False)


@on_ranks(2)
def test_a_state_of_something_else_is_refused_on_all_ranks(rank: int) -> None:
    handle = Trial().handle
    state = handle.state_dict()
    for bad, error, names in (
        ({**state, "algorithm": "ByteGrad"}, OptionError, "rank 0: .*'ByteGrad'"),
        ({**state, "num_steps": -rank}, OptionError, "rank 1: .*'num_steps' is -1"),
        ({**state, "num_steps": 3 + rank}, AttachError, "num_steps is 4"),
        (None, TypeError, "NoneType"),
    ):
        with pytest.raises(error, match=names):
            handle.load_state_dict(bad)
    handle.detach()


@on_ranks(2)
@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ["Decentralized", "LowPrecisionDecentralized"])
def test_a_checkpoint_that_is_loaded_in_an_open_step_is_not_averaged(rank: int, name: str) -> None:
    """As after a loss that is NaN, before the update."""
    trial = Trial(ALGORITHMS[name])
    trial.train(inputs_of(rank, 2))
    with trial.handle.paused():
        weights, state = copy.deepcopy(trial.ddp.state_dict()), trial.handle.state_dict()
        saved = trial.weights
    trial.backward(inputs_of(rank, 1)[0])
    trial.ddp.load_state_dict(weights)
    trial.handle.load_state_dict(state)
    assert torch.equal(trial.weights, saved)
    trial.handle.detach()


@on_ranks(2)
def test_copies_and_pickles_leave_the_algorithm_behind(rank: int) -> None:
    """They train by themselves, as plain DDP does, and can get an algorithm."""
    trial = Trial()
    (x,) = inputs_of(rank, 1)
    trial.step(x)
    copy.deepcopy(trial.model)
    torch.save(trial.model, io.BytesIO())
    for other in (copy.deepcopy(trial.ddp), pickle.loads(pickle.dumps(trial.ddp))):
        other.zero_grad()
        other(x).square().mean().backward()
        assert _gather_equal(torch.cat([p.grad.flatten() for p in other.parameters()]))
        again = attach(other, torch.optim.SGD(other.parameters()), FLAT)
        other(x).square().mean().backward()
        assert again.num_steps == 1
        again.detach()
    assert trial.handle.num_steps == 1
    trial.handle.detach()


# ---- an algorithm that a user writes ------------------------------------------------------------


@on_ranks(2)
def test_the_algorithm_of_the_page_equals_plain_python(rank: int) -> None:
    """docs/your-algorithm.md has it; it goes on bitwise from what it saved between exchanges."""
    page = next(b for b in blocks("docs/your-algorithm.md") if b.language == "python")
    namespace: dict[str, Any] = {}
    exec(page.text, namespace)
    algorithm = namespace["LocalMomentum"](interval=2, momentum=0.5, lr=0.7)
    trial = Trial(algorithm)
    inputs = [inputs_of(r, 6) for r in range(2)]
    models = [copy.deepcopy(trial.model) for _ in range(2)]
    start, momentum = trial.weights, torch.zeros_like(trial.weights)
    saved: list[Any] = []
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy([trial.ddp.state_dict(), trial.handle.state_dict()])
        trial.step(inputs[rank][step])
        for model, of_rank in zip(models, inputs, strict=True):
            model.zero_grad()
            model(of_rank[step]).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        if step % 2:
            momentum = 0.5 * momentum + sum(flat_weights(model) - start for model in models) / 2
            start = start + 0.7 * momentum
            for model in models:
                nn.utils.vector_to_parameters(start.clone(), model.parameters())
    torch.testing.assert_close(trial.weights, start)
    trained = trial.weights
    trial.handle.detach()
    resumed = Trial(algorithm)
    resumed.ddp.load_state_dict(saved[0])
    resumed.handle.load_state_dict(saved[1])
    resumed.train(inputs[rank][3:])
    assert torch.equal(resumed.weights, trained)
    resumed.handle.detach(average=False)


# ---- after detach -------------------------------------------------------------------------------


def test_a_handle_that_was_detached_refuses_its_work(one_rank: None) -> None:
    handle = Trial().handle
    handle.detach()
    with pytest.raises(AttachError, match="Decentralized was detached"):
        handle.average()


@on_ranks(2)
@pytest.mark.parametrize("is_detached", [False, True])
def test_after_detach_nothing_says_that_there_is_a_comm_hook(is_detached: bool) -> None:
    """Better buckets are looked for again, as the hook that stays only runs DDP's allreduce."""
    trial = Trial(ByteGrad(hierarchical=False), MLP(4), bucket_cap_mb=0.02)
    if is_detached:
        trial.handle.detach()
    trial.run = compiled(trial.ddp, buckets="auto")
    trial.train([X] * 3)
    states = [type(hook_state).__name__ for hook_state in _torch.hook_states(trial.ddp)]
    assert states == ([] if is_detached else ["BucketReduction"])
    assert _torch.has_comm_hook(trial.ddp) != is_detached
    assert ("comm hook" in str(ddpopt.explain(trial.ddp))) != is_detached
    assert ("comm hook" in tuner._find_lasting_obstacle(trial.ddp, "auto")) != is_detached
    trial.handle.detach()


# ---- compiled ---------------------------------------------------------------------------------


def _unique_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@on_ranks(2)
@pytest.mark.quick("Decentralized-forward", "ByteGrad-backward")
@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_compiled_training_equals_eager_and_attaching_makes_no_graphs(
    rank: int, name: str, split: str
) -> None:
    def make() -> Trial:
        trial = Trial(ALGORITHMS[name], MLP(4, bias=False), bucket_cap_mb=0.03)
        if name == "AsyncModelAverage":
            trial.handle.abort()  # local steps, so that both can be compared
        return trial

    expected = make().train(inputs_of(rank, 4))
    num_graphs = []
    for is_attached in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trial = make()
        if not is_attached:
            trial.handle.detach()
        trial.run = compiled(trial.ddp, split=split)
        found = trial.train(inputs_of(rank, 4))
        if is_attached:
            # Gradients of a matrix product in another order may be another code.
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        num_graphs.append((_unique_graphs(), len(ddpopt.explain(trial.ddp).to_dict()["graphs"])))
    assert num_graphs[0] == num_graphs[1]
    assert min(num_graphs[0]) > 0


# ---- a rank that dies -------------------------------------------------------------------------


def _lose_rank_1(rank: int, algorithm: Any) -> str:
    """Kill rank 1 before its third step, and return what that raises on the others."""
    trial = Trial(algorithm, timeout_s=20)
    try:
        for index in range(4):
            if (rank, index) == (1, 2):  # in the second forward DDP itself communicates, once
                os.kill(os.getpid(), signal.SIGKILL)
            trial.step()
    except PeerError as error:
        trial.handle.detach(average=False)
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("num_ranks", "algorithm", "doing"),
    [
        (2, FLAT, "averaging weights in step 3 "),
        (2, Decentralized(peer_selection="shift_one", hierarchical=False), "averaging weights in"),
        (3, ALGORITHMS["LowPrecisionDecentralized"], "exchanging compressed weights in step [23] "),
        (3, ALGORITHMS["ByteGrad"], "reducing gradients in step [234] "),
    ],
)
def test_a_rank_that_dies_makes_the_others_fail_clearly(
    num_ranks: int, algorithm: Any, doing: str, make_ranks: MakeRanks
) -> None:
    survivors = {0, num_ranks - 1} - {1}
    errors = make_ranks(num_ranks).run_survivors(survivors, _lose_rank_1, algorithm)
    for error in errors.values():
        assert re.match(f"{doing}.*another rank has ", error)


# ---- in the background -------------------------------------------------------------------------


class _FailingHandle(BackgroundHandle):
    def reduce(self, bucket):  # type: ignore[no-untyped-def]
        def fail(_values: torch.Tensor) -> None:
            raise ArithmeticError(f"bucket {bucket.index()}")

        return self.run_behind_backward(bucket, fail)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failing(Algorithm[_FailingHandle]):
    handle_type = _FailingHandle


@pytest.mark.quick("False")
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_failure_in_the_background_is_raised_by_that_backward(
    one_rank: None, static_graph: bool
) -> None:
    """Each backward raises it, a static graph's first too, whose buckets do not tell the last."""
    trial = Trial(_Failing(), static_graph=static_graph)
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="bucket 0"):
            trial.backward()
    trial.handle.detach()


# ---- parameters that are frozen, unfrozen or empty ---------------------------------------------


@on_ranks(2)
def test_a_layer_that_is_unfrozen_later_is_averaged_too(rank: int) -> None:
    """DDP reduces it, and it is frozen at `attach` only."""
    model = MLP(2)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    model.layers[0].requires_grad_(False)
    handle = attach(ddp, optimizer, FLAT)
    model.layers[0].requires_grad_(True)
    for x in inputs_of(rank, 2):
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
        optimizer.step()
    handle.detach()
    assert _gather_equal(flat_weights(ddp))


@pytest.mark.parametrize("name", ["ByteGrad", "Decentralized", "Decentralized, later"])
def test_a_layer_that_is_unfrozen_is_averaged_or_named_once(one_rank: None, name: str) -> None:
    """DDP does not reduce it. Those that average weights need not mind, unless it was too late."""
    name, _, is_late = name.partition(", ")
    model = MLP(2)
    weight = model.layers[0].weight.requires_grad_(False)
    make_sgd = functools.partial(torch.optim.SGD, model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model)
    weight.requires_grad_(not is_late)
    handle = attach(ddp, make_sgd(), ALGORITHMS[name])
    with logged("warning") as lines:
        for step in range(3):
            weight.requires_grad_(not is_late or step > 0)
            ddp(X).sum().backward()
    handle.detach()
    if name == "ByteGrad" or is_late:
        (line,) = lines
        assert line.startswith("layers.0.weight ")
    else:
        assert not lines


class WithEmpty(nn.Module):
    """Has a parameter without elements, of a type of its own, alone in its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.mlp = MLP(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.empty.sum().float()


@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_parameter_without_elements_is_left_alone(one_rank: None, name: str) -> None:
    trial = Trial(ALGORITHMS[name], WithEmpty())
    before = trial.weights
    trial.train([X] * 2)
    trial.handle.detach()
    assert not torch.equal(trial.weights, before)
