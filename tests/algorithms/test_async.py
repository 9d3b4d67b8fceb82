"""AsyncModelAverage: rounds beside training, which lose no update, start and stop; the lock."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.algorithms import AsyncModelAverage, AsyncModelAverageHandle, attach
from ddpopt.algorithms.async_ import FairLock
from ddpopt.errors import OptionError, PeerError
from tests.support.algorithms import flat_weights
from tests.support.groups import first_ranks
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import MakeRanks, Ranks, error_of

HARD_TIMEOUT_S = 300  # of each collective, and of each wait
OFTEN = AsyncModelAverage(sync_interval_ms=2)
HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS = {"forward_sync_buffers" if HAS_NEW_NAME else "broadcast_buffers": False}


class Vector(nn.Module):
    """Its gradient is 1 everywhere. So wide that an update takes longer than a thread's switch."""

    def __init__(self, size: int = 200_000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


class Trial:
    """A DDP model with the algorithm on the first ranks, and how to train it."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        algorithm: AsyncModelAverage,
        model: nn.Module | None = None,
        lr: float = 2**-6,
    ) -> None:
        torch.manual_seed(0)
        self.group = group
        self.rank = dist.get_rank(group)
        self.model = Vector() if model is None else model
        self.x = torch.zeros(()) if model is None else torch.ones(2, WIDTH)
        self.ddp = DistributedDataParallel(self.model, process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=lr)
        self.handle: AsyncModelAverageHandle = attach(self.ddp, self.optimizer, algorithm)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(self.x).sum().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def steps_until_rounds(self, count: int) -> None:
        """Train until so many further rounds were made."""
        target = self.handle.num_communications + count
        self.until(lambda: self.handle.num_communications >= target, self.step)

    def until(self, is_done: Callable[[], bool], meanwhile: Callable[[], object]) -> None:
        end_s = time.monotonic() + HARD_TIMEOUT_S
        while not is_done():
            assert time.monotonic() < end_s, f"nothing happened within {HARD_TIMEOUT_S} s"
            meanwhile()

    def flat(self) -> torch.Tensor:
        return flat_weights(self.ddp)

    def mean(self) -> torch.Tensor:
        """The mean of all ranks' weights. Collective, while no rounds are made."""
        values = self.flat().double()
        dist.all_reduce(values, group=self.group)
        return values / self.group.size()

    def is_still(self) -> bool:
        """Whether no weight changes for many intervals."""
        before = self.flat()
        time.sleep(0.05)
        return torch.equal(before, self.flat())

    def equals_peers(self) -> bool:
        values = self.flat()
        dist.broadcast(values, group=self.group, group_src=0)
        answer = torch.tensor(int(torch.equal(values, self.flat())))
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=self.group)
        return bool(answer)


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "ddpopt-async"]


# ---- what rounds do ---------------------------------------------------------------------------


def _train_apart(rank: int, num_repetitions: int) -> tuple[list[float], list[int]] | None:
    """Unequal numbers of steps on 3 ranks; return the mean's relative errors, and the rounds."""
    errors, rounds = [], []
    group = first_ranks(3, HARD_TIMEOUT_S)
    if group is None:
        return None
    for interval_ms in (1, 2, 5, 12.5):
        trial = Trial(group, AsyncModelAverage(sync_interval_ms=interval_ms))
        expected = -(2**-6) * (60 + 90 + 120) / 3
        for _ in range(num_repetitions // 4):
            for k in range((60, 90, 120)[rank]):
                trial.step()
                time.sleep(1e-4 * ((k + rank) % 4))
            trial.handle.abort()
            errors.append(float((trial.mean() / expected - 1).abs().max()))
            rounds.append(trial.handle.num_communications)
            assert trial.is_still()
            with torch.no_grad():
                trial.model.weight.zero_()
            trial.handle.resume()
        trial.handle.detach()
    return errors, rounds


def test_the_mean_moves_by_the_updates_alone_however_many_steps_each_rank_makes(
    four_ranks: Ranks,
) -> None:
    """In 20 runs no update is lost to a round; ranks count the same rounds, and abort stops all."""
    errors, rounds = zip(*[r for r in four_ranks.run(_train_apart, 20) if r], strict=True)
    assert len(errors[0]) == 20
    assert max(map(max, errors)) < 1e-5
    assert rounds[0] == rounds[1] == rounds[2]
    assert rounds[0][0] > 1


def _reach_mean(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    group = first_ranks(num_ranks, HARD_TIMEOUT_S)
    if group is None:
        return None
    trial = Trial(group, OFTEN, Vector(1000), lr=0.0)
    trial.x = torch.zeros(())
    with torch.no_grad():
        trial.model.weight.normal_(generator=torch.Generator().manual_seed(rank))
    expected = trial.mean()
    trial.steps_until_rounds(1)
    trial.handle.abort()
    trial.handle.detach(average=False)
    return trial.flat(), expected.float()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_one_round_gives_all_ranks_the_mean(four_ranks: Ranks, num_ranks: int) -> None:
    for answer in four_ranks.run(_reach_mean, num_ranks)[:num_ranks]:
        assert answer is not None
        torch.testing.assert_close(answer[0], answer[1], rtol=1e-6, atol=1e-6)


def _warm_up(rank: int) -> list[list[torch.Tensor]]:
    """Weights after each update: with a warm-up of 3 steps, and of a DDP module without it.

    The optimizer's first hook runs before the algorithm's, when no round can have changed them.
    """
    results = []
    for is_attached in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(MLP(2))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        seen: list[torch.Tensor] = []

        def note_weights(*_: object, ddp: Any = ddp, seen: Any = seen) -> None:
            seen.append(flat_weights(ddp))

        optimizer.register_step_post_hook(note_weights)
        if is_attached:
            handle = attach(ddp, optimizer, AsyncModelAverage(sync_interval_ms=1, warmup_steps=3))
        for x in batches(rank, [(4, WIDTH)] * 4):
            optimizer.zero_grad()
            ddp(x).pow(2).mean().backward()
            optimizer.step()
        if is_attached:
            handle.detach()
        results.append(seen)
    return results


def test_the_warm_up_is_ddps_own_training_and_ranks_part_right_after_it(ranks: Ranks) -> None:
    (first, plain), (second, _) = ranks.run(_warm_up)
    for k in range(3):
        assert torch.equal(first[k], second[k])
        assert torch.equal(first[k], plain[k])
    assert not torch.equal(first[3], second[3])


# ---- abort, resume, paused --------------------------------------------------------------------


def _abort_before_start(trial: Trial) -> None:
    trial.handle.abort()
    trial.steps(3)
    assert trial.handle.num_communications == 0
    assert not _threads()
    trial.handle.resume()
    trial.steps_until_rounds(2)


def _abort_twice(trial: Trial) -> None:
    for _ in range(3):
        trial.steps_until_rounds(1)
        trial.handle.abort()
        trial.handle.abort()
        assert trial.is_still()
        trial.handle.resume()
        trial.handle.resume()
    trial.steps_until_rounds(1)


def _abort_between_forward_and_backward(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    trial.optimizer.zero_grad()
    loss = trial.ddp(trial.x).sum()
    trial.handle.abort()
    loss.backward()
    trial.optimizer.step()
    assert trial.is_still()
    trial.handle.resume()
    trial.steps_until_rounds(2)


def _abort_after_a_forward_alone(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    trial.ddp(trial.x)
    trial.ddp(trial.x)
    trial.handle.abort()
    trial.handle.resume()
    trial.steps_until_rounds(1)
    trial.ddp.eval()
    trial.ddp(trial.x)
    trial.handle.abort()
    trial.ddp.train()
    trial.handle.resume()
    trial.steps_until_rounds(1)


def _abort_after_unequal_steps(trial: Trial) -> None:
    """Abort where one rank has not begun: it takes part in rounds while it waits in abort."""
    if trial.rank == 0:
        trial.step()  # not a second one: there DDP has ranks agree on buckets
        trial.until(lambda: trial.handle.num_communications >= 2, lambda: time.sleep(0.001))
    trial.handle.abort()
    trial.handle.resume()
    trial.steps_until_rounds(1)


def _pause(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    with trial.handle.paused(), trial.handle.paused():
        assert trial.is_still()
        trial.optimizer.step()
    trial.steps_until_rounds(1)
    trial.handle.abort()
    with trial.handle.paused():
        pass
    rounds = trial.handle.num_communications
    trial.steps(3)
    assert trial.handle.num_communications == rounds
    with trial.handle.paused():
        trial.handle.resume()
        trial.handle.abort()
        trial.handle.resume()
    trial.steps_until_rounds(1)
    with trial.handle.paused():
        trial.handle.abort()
    rounds = trial.handle.num_communications
    trial.steps(3)
    assert trial.handle.num_communications == rounds
    trial.handle.resume()


def _average(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    trial.handle.average()
    trial.steps_until_rounds(1)
    trial.handle.abort()
    trial.steps(2 + trial.rank)
    trial.handle.average()
    assert trial.equals_peers()


def _step_without_forward(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    for _ in range(5):
        trial.optimizer.step()
    trial.steps_until_rounds(1)


def _resume_in_warm_up(trial: Trial) -> None:
    trial.steps(2)
    trial.handle.resume()
    trial.steps(1)
    trial.handle.abort()
    trial.handle.resume()
    trial.steps(2)
    assert trial.handle.num_communications == 0
    assert trial.equals_peers()
    trial.steps_until_rounds(2)


def _abort_in_warm_up(trial: Trial) -> None:
    trial.steps(2)
    trial.handle.abort()
    trial.steps(5)
    assert trial.handle.num_communications == 0
    trial.handle.resume()
    assert not _threads()
    trial.steps_until_rounds(2)


def _pause_in_warm_up(trial: Trial) -> None:
    with trial.handle.paused():
        trial.ddp(trial.x).sum().backward()
    trial.steps(5)
    with trial.handle.paused():
        trial.ddp(trial.x).sum().backward()
    trial.steps_until_rounds(2)


STATES = {
    0: [
        _abort_before_start,
        _abort_twice,
        _abort_between_forward_and_backward,
        _abort_after_a_forward_alone,
        _abort_after_unequal_steps,
        _pause,
        _average,
        _step_without_forward,
    ],
    5: [_resume_in_warm_up, _abort_in_warm_up, _pause_in_warm_up, _abort_before_start],
}


def _run_state(rank: int, warmup_steps: int, run: Callable[[Trial], None]) -> tuple[bool, int]:
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    trial = Trial(group, AsyncModelAverage(sync_interval_ms=1, warmup_steps=warmup_steps))
    run(trial)
    trial.handle.abort()
    rounds = trial.handle.num_communications
    is_still = trial.is_still()
    trial.handle.detach()
    return is_still and not _threads() and trial.equals_peers(), rounds


@pytest.mark.quick("0-_abort_before_start")
@pytest.mark.parametrize(
    ("warmup_steps", "run"), [(steps, run) for steps, runs in STATES.items() for run in runs]
)
def test_abort_resume_and_paused_work_in_each_state(
    ranks: Ranks, warmup_steps: int, run: Callable[[Trial], None]
) -> None:
    """After the last abort ranks have made equally many rounds; detaching leaves them equal."""
    (is_fine, rounds), other = ranks.run(_run_state, warmup_steps, run)
    assert is_fine
    assert other == (True, rounds)


def _abort_in_a_long_interval(rank: int) -> list[int]:
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    trial = Trial(group, AsyncModelAverage(sync_interval_ms=3.6e6))
    rounds = []
    for _ in range(3):
        trial.steps_until_rounds(1)
        trial.handle.abort()
        rounds.append(trial.handle.num_communications)
        trial.handle.resume()
    trial.handle.detach()
    return rounds


def test_abort_does_not_wait_for_the_interval_and_resume_begins_with_a_round(ranks: Ranks) -> None:
    assert ranks.run(_abort_in_a_long_interval) == [[1, 2, 3], [1, 2, 3]]


def _detach_at_work(rank: int) -> tuple[bool, bool, list[str]]:
    """Detach without abort, with and without the average, and train on by DDP's allreduce."""
    answers = []
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    for average in (True, False):
        trial = Trial(group, OFTEN)
        trial.steps_until_rounds(2)
        trial.handle.detach(average=average)
        trial.handle.detach()
        assert trial.is_still()
        if average:
            trial.steps(2)
            answers.append(trial.equals_peers())
    errors = [error_of(call) for call in (trial.handle.abort, trial.handle.resume)]
    dist.barrier(group)
    return answers[0], not _threads(), errors


def test_detaching_while_rounds_are_made_ends_them(ranks: Ranks) -> None:
    for is_equal, is_ended, errors in ranks.run(_detach_at_work):
        assert is_equal
        assert is_ended
        assert all(text.startswith("AttachError: this AsyncModelAverage was") for text in errors)


# ---- how steps go -----------------------------------------------------------------------------


def _accumulate(rank: int) -> tuple[float, int]:
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    trial = Trial(group, OFTEN)
    num_steps = 20 + 10 * rank
    for _ in range(num_steps):
        trial.optimizer.zero_grad()
        with trial.ddp.no_sync():
            trial.ddp(trial.x).backward()
            trial.ddp(trial.x).backward()
        trial.ddp(trial.x).backward()
        trial.optimizer.step()
    trial.handle.abort()
    assert trial.handle.num_steps == num_steps
    error = float((trial.mean() / (-(2**-6) * 3 * (20 + 30) / 2) - 1).abs().max())
    rounds = trial.handle.num_communications
    trial.handle.detach()
    return error, rounds


def test_gradients_are_accumulated_under_no_sync(ranks: Ranks) -> None:
    """No round changes weights from the first micro-batch on, and the mean is conserved."""
    for error, rounds in ranks.run(_accumulate):
        assert error < 1e-5
        assert rounds > 0


def _skip_updates(rank: int) -> bool:
    """Run forwards and backwards alone, as GradScaler does after overflows; never an update."""
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    trial = Trial(group, OFTEN)

    def without_update() -> None:
        trial.optimizer.zero_grad()
        trial.ddp(trial.x).sum().backward()

    target = 5
    trial.until(lambda: trial.handle.num_communications >= target, without_update)
    trial.handle.abort()
    is_unmoved = not bool(trial.flat().any())
    trial.handle.detach()
    return is_unmoved


def test_rounds_go_on_while_updates_are_skipped(ranks: Ranks) -> None:
    assert ranks.run(_skip_updates) == [True, True]


class Watched(nn.Module):
    """Waits in its backward long enough for many rounds, and says whether a weight changed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))
        self.has_changed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.weight.detach().clone()

        def compare(gradient: torch.Tensor) -> None:
            time.sleep(0.01)
            self.has_changed = self.has_changed or not torch.equal(before, self.weight)

        y = (x + self.weight).sum()
        y.register_hook(compare)
        return y


def _hold_weights(rank: int) -> tuple[bool, int]:
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    trial = Trial(group, AsyncModelAverage(sync_interval_ms=1), Watched())
    trial.x = torch.full((), float(rank))
    for k in range(20 + 5 * rank):
        trial.optimizer.param_groups[0]["lr"] = 0.01 * (rank + k)
        trial.step()
    trial.handle.abort()
    rounds = trial.handle.num_communications
    trial.handle.detach()
    return trial.model.has_changed, rounds


def test_no_weight_changes_between_forward_and_backward(ranks: Ranks) -> None:
    for has_changed, rounds in ranks.run(_hold_weights):
        assert not has_changed
        assert rounds > 0


def _compiled(rank: int, split: str) -> tuple[bool, int, int]:
    """Train eager, compiled, and compiled without the algorithm; count what is compiled."""
    weights, graphs = [], []
    model = MLP(4)
    for is_compiled, is_attached in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.03)
        count = [0]

        def inner(gm: Any, inputs: Any, count: list[int] = count) -> Any:
            count[0] += 1
            return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

        options = {"inner": inner if split == "forward" else "aot_eager", "split": split}
        forward: Any = torch.compile(ddp, backend="ddpopt", options=options) if is_compiled else ddp
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = attach(forward, optimizer, OFTEN) if is_attached else None
        if handle is not None:
            handle.abort()  # local steps, so that both can be compared
        inputs = batches(rank, [(4, WIDTH)] * 6)
        for x in inputs[:3]:
            _step(forward, optimizer, x)
        weights.append(flat_weights(ddp))
        if handle is not None:
            handle.resume()
            end_s = time.monotonic() + HARD_TIMEOUT_S
            while handle.num_communications < 3 and time.monotonic() < end_s:
                _step(forward, optimizer, inputs[3])
            handle.detach()
        plans = ddpopt.explain(ddp).to_dict()["graphs"] if is_compiled else []
        graphs.append(count[0] + len(plans))
    return torch.equal(weights[0], weights[1]), graphs[1], graphs[2]


def _step(forward: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    forward(x).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_a_compiled_model_trains_alike_and_attaching_makes_no_graphs(
    ranks: Ranks, split: str
) -> None:
    for is_equal, attached, alone in ranks.run(_compiled, split):
        assert is_equal
        assert attached == alone


def _save_and_load(rank: int) -> list[str]:
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    algorithm = AsyncModelAverage(sync_interval_ms=1, warmup_steps=2)
    trial = Trial(group, algorithm)
    trial.steps(3 + rank)
    trial.steps_until_rounds(2)
    with trial.handle.paused():
        state = copy.deepcopy(trial.handle.state_dict())
    trial.handle.detach()
    assert state["num_communications"] >= 2
    other = Trial(group, algorithm)
    errors = [
        error_of(lambda: other.handle.load_state_dict({**state, "num_steps": rank})),
        error_of(lambda: other.handle.load_state_dict({**state, "algorithm": "QAdam"})),
    ]
    other.handle.load_state_dict(state)
    assert other.handle.state_dict() == state
    other.steps_until_rounds(2)  # past the warm-up at once
    assert other.handle.num_communications >= state["num_communications"] + 2
    other.handle.detach()
    return errors


def test_a_state_continues_the_counters_of_ranks_with_different_numbers_of_steps(
    ranks: Ranks,
) -> None:
    for errors in ranks.run(_save_and_load):
        assert errors[0].startswith("AttachError: rank 1 differs from rank 0: steps of the warm-up")
        assert errors[1].startswith("OptionError: on rank 0: the state's 'algorithm' is 'QAdam'")


# ---- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        (
            {"sync_interval_ms": 0},
            OptionError,
            "sync_interval_ms is 0; it must be above 0, and finite",
        ),
        ({"sync_interval_ms": -1.5}, OptionError, "is -1.5"),
        ({"sync_interval_ms": math.nan}, OptionError, "is nan"),
        ({"sync_interval_ms": math.inf}, OptionError, "is inf"),
        ({"sync_interval_ms": True}, TypeError, "bool"),
        ({"sync_interval_ms": "500"}, TypeError, "str"),
        (
            {"warmup_steps": -1},
            OptionError,
            "warmup_steps is -1; it must be a whole number",
        ),
        ({"warmup_steps": 1.0}, TypeError, "float"),
        ({"warmup_steps": True}, TypeError, "bool"),
    ],
)
def test_bad_values_are_refused_when_the_algorithm_is_made(
    options: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        AsyncModelAverage(**options)


def _with_buffers() -> nn.Module:
    model = MLP(1)
    model.norm = nn.BatchNorm1d(WIDTH)
    return model


def test_ddp_modules_whose_forwards_communicate_are_refused(one_rank: None) -> None:
    unused = DistributedDataParallel(MLP(1), find_unused_parameters=True)
    buffers = DistributedDataParallel(_with_buffers())
    norm = DistributedDataParallel(_with_buffers(), **NO_BUFFERS)
    norm.module.norm = nn.SyncBatchNorm(WIDTH)  # DDP takes it with an accelerator only
    for ddp, names in (
        (unused, "give find_unused_parameters=False"),
        (buffers, "give broadcast_buffers=False"),
        (norm, "SyncBatchNorm"),
    ):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with pytest.raises(OptionError, match=names):
            attach(ddp, optimizer, OFTEN)


def test_models_whose_buffers_ddp_does_not_send_are_taken(one_rank: None) -> None:
    """One model has no buffers, and the other's DDP has broadcast_buffers=False."""
    for model, options in ((MLP(1), {}), (_with_buffers(), NO_BUFFERS)):
        ddp = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        attach(ddp, optimizer, OFTEN).detach()


# ---- what ends a thread -----------------------------------------------------------------------


def _lose_rank_2(rank: int) -> tuple[list[str], list[str]]:
    """Kill rank 2, and return what each call raises on the others, and the threads that are left.

    Unlike `lose_rank_1` it waits for two rounds first, however many steps those take.
    """
    group = dist.new_group(timeout=timedelta(seconds=10))
    trial = Trial(group, OFTEN)
    trial.steps_until_rounds(2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    errors: list[str] = []
    trial.until(lambda: bool(errors), lambda: errors.extend(_failures(trial.step)))
    stops = (trial.handle.abort, trial.handle.resume, trial.handle.average)
    errors += [error_of(call) for call in stops]
    errors += [error_of(trial.handle.detach), error_of(trial.handle.detach)]
    return errors, _threads()


def _failures(call: Callable[[], object]) -> list[str]:
    return [text for text in [error_of(call)] if text != "nothing"]


def test_a_rank_that_dies_makes_the_others_fail_clearly(make_ranks: MakeRanks) -> None:
    """The next forward fails, and all calls that stop the rounds; the thread has ended."""
    answers = make_ranks(3).run_survivors([0, 1], _lose_rank_2)
    for errors, threads in answers.values():
        assert len(errors) == 6
        for error in errors[:5]:
            assert error.startswith("PeerError: averaging weights in the background of step ")
            assert "another rank has ended" in error
        assert errors[5] == "nothing"  # it was detached all the same
        assert not threads


def _leave_alone(rank: int, ending: str) -> tuple[list[str], bool, list[str]]:
    """Train on rank 1 while rank 0 aborts, or drops its model."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    trial = Trial(group, OFTEN)
    trial.steps_until_rounds(2)
    errors: list[str] = []
    if rank == 1:
        step = trial.step
        trial.until(lambda: bool(errors), lambda: errors.extend(_failures(step)))
        del step
    elif ending == "abort":
        errors += _failures(trial.handle.abort)
    if rank == 1 or ending == "abort":
        with contextlib.suppress(PeerError):
            trial.handle.detach()
    weak = weakref.ref(trial.ddp)
    del trial
    _wait_for_end(weak)
    return errors, weak() is None, _threads()


@pytest.mark.parametrize("ending", ["abort", "drop"])
def test_a_rank_that_is_left_alone_is_told_so(ending: str, make_ranks: MakeRanks) -> None:
    """None waits for ever, and nothing keeps the model or the thread."""
    answers = make_ranks().run(_leave_alone, ending)
    first, second = (errors for errors, *_ in answers)
    if ending == "abort":
        assert "did not stop averaging within the process group's timeout of 5 s" in first[0]
    assert second[0].startswith("PeerError: averaging weights in the background of step")
    assert [rest for _, *rest in answers] == [[True, []], [True, []]]


def _wait_for_end(weak: weakref.ref[Any]) -> None:
    end_s = time.monotonic() + HARD_TIMEOUT_S
    while (weak() is not None or _threads()) and time.monotonic() < end_s:
        gc.collect()
        time.sleep(0.05)


def _drop(rank: int) -> tuple[bool, list[str]]:
    """Drop the model while rounds are made and training has the lock."""
    group = first_ranks(2, HARD_TIMEOUT_S)
    assert group is not None
    trial = Trial(group, OFTEN)
    trial.steps_until_rounds(2)
    trial.ddp(trial.x)
    weak = weakref.ref(trial.ddp)
    del trial
    _wait_for_end(weak)
    return weak() is None, _threads()


def test_a_model_that_is_dropped_takes_its_thread_along(ranks: Ranks) -> None:
    assert ranks.run(_drop) == [(True, []), (True, [])]


EXITS = """
    import sys, time
    sys.path.insert(0, {tests!r})
    import torch, torch.distributed as dist
    from tests.algorithms.test_async import OFTEN, AsyncModelAverage, Trial

    rank, ending = int(sys.argv[1]), sys.argv[2]
    store = dist.FileStore(sys.argv[3], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    trial = Trial(dist.group.WORLD, OFTEN)
    trial.steps_until_rounds(2)
    print("trained", flush=True)
    if ending == "late" and rank == 0:
        time.sleep(1)  # the other one has gone by then
    if ending == "forward":
        trial.ddp(trial.x)
    if ending == "destroyed":
        dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["plain", "late", "forward", "destroyed"])
def test_a_process_that_exits_without_abort_ends_promptly(ending: str, tmp_path: Path) -> None:
    """Its code is 0 and its stderr has no error, as its thread is not inside torch by then."""
    source = textwrap.dedent(EXITS).format(tests=str(Path(__file__).parents[2]))
    arguments = [ending, str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=HARD_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], answers
    assert all("trained" in out for out, _ in answers)
    assert not any("Traceback" in text or "terminate" in text for _, text in answers), answers


# ---- FairLock ----------------------------------------------------------------------------------


CPU = torch.device("cpu")


def _waits(lock: FairLock, count: int) -> None:
    """Wait until that many threads stand in line."""
    done = threading.Event()
    for _ in range(HARD_TIMEOUT_S * 100):
        if len(lock._line) == count:
            return
        done.wait(0.01)
    raise AssertionError(f"{len(lock._line)} in line, expected {count}")


def _start(call: Callable[[], Any]) -> Future[Any]:
    """Run a call in a thread, which ends with the process; its result, or its error, is to come."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # for who asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_who_waits_comes_before_who_gave_it_back() -> None:
    """Training that takes the lock again at once does not keep the other thread from it."""
    lock = FairLock(CPU)
    order: list[str] = []
    lock.acquire()

    def average() -> None:
        lock.acquire()
        order.append("averaging")
        lock.release()

    averaged = _start(average)
    _waits(lock, 2)
    lock.release()
    lock.acquire()
    order.append("training")
    lock.release()
    averaged.result(HARD_TIMEOUT_S)
    assert order == ["averaging", "training"]


def test_threads_get_it_in_the_order_of_their_arrival_and_one_at_a_time() -> None:
    lock, alone = FairLock(CPU), threading.Lock()
    lock.acquire()
    order: list[int] = []

    def work(k: int) -> None:
        lock.acquire()
        assert alone.acquire(blocking=False), "two threads have it"
        time.sleep(0.001)  # so that another one would be seen
        order.append(k)
        alone.release()
        lock.release()

    futures = []
    for k in range(8):
        futures.append(_start(functools.partial(work, k)))
        _waits(lock, 2 + k)
    lock.release()
    _, late = wait(futures, HARD_TIMEOUT_S, FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()  # an error of the thread, if there was one
    assert not late
    assert order == list(range(8))


def test_closing_sends_who_waits_away_and_leaves_who_has_it() -> None:
    lock = FairLock(CPU)
    assert lock.acquire()
    is_acquired = _start(lock.acquire)
    _waits(lock, 2)
    lock.close()
    assert is_acquired.result(HARD_TIMEOUT_S) is False
    lock.release()
    assert not lock.acquire()
