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
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import AsyncModelAverage, attach
from ddpopt.algorithms.async_ import FairLock
from ddpopt.algorithms.comm import Communicator
from ddpopt.errors import AttachError, OptionError, PeerError
from tests.algorithms import step_machine
from tests.support import algorithms
from tests.support.algorithms import inputs_of
from tests.support.models import MLP, WIDTH
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import MakeRanks, Ranks, error_of

HARD_TIMEOUT_S = 300  # of each wait
OFTEN = AsyncModelAverage(sync_interval_ms=2)
HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS = {"forward_sync_buffers" if HAS_NEW_NAME else "broadcast_buffers": False}
LR = 2**-6


class Vector(nn.Module):
    """Its gradient is 1 everywhere. So wide that an update takes longer than a thread's switch."""

    def __init__(self, size: int = 200_000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


class Trial(algorithms.Trial):
    """A vector in training, each of whose steps takes LR from all weights, with rounds."""

    def __init__(
        self,
        algorithm: Any = OFTEN,
        model: nn.Module | None = None,
        *,
        lr: float = LR,
        **options: Any,
    ) -> None:
        super().__init__(
            algorithm,
            model or Vector(),
            make_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
            **options,
        )
        self.rank = dist.get_rank()

    def backward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.ddp(torch.zeros(()) if x is None else x).sum()
        loss.backward()
        return loss

    def step(self, x: torch.Tensor | None = None) -> torch.Tensor:
        loss = self.backward(x)
        self.optimizer.step()
        return loss

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def rounds(self) -> int:
        return int(self.handle.num_communications)

    def steps_until_rounds(self, count: int) -> None:
        """Train until so many further rounds were made."""
        target = self.rounds + count
        self.until(lambda: self.rounds >= target, self.step)

    def until(self, is_done: Callable[[], bool], meanwhile: Callable[[], object]) -> None:
        end_s = time.monotonic() + HARD_TIMEOUT_S
        while not is_done():
            assert time.monotonic() < end_s, f"nothing happened within {HARD_TIMEOUT_S} s"
            meanwhile()

    def mean(self) -> torch.Tensor:
        """The mean of all ranks' weights. Collective, while no rounds are made."""
        values = self.weights.double()
        dist.all_reduce(values)
        return values / dist.get_world_size()

    def check_still(self) -> None:
        """No weight changes for many intervals."""
        before = self.weights
        time.sleep(0.05)
        assert torch.equal(before, self.weights)

    def check_equal(self) -> None:
        """All ranks have the same weights."""
        first, *others = gather(self.weights)
        assert all(torch.equal(first, other) for other in others)


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "ddpopt-async"]


# ---- what rounds do ---------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize("interval_ms", [1, 2, 5, 12.5])
def test_the_mean_moves_by_the_updates_alone_however_many_steps_each_rank_makes(
    rank: int, interval_ms: float
) -> None:
    """No update is lost to a round; ranks count the same rounds, and abort stops all."""
    trial = Trial(AsyncModelAverage(sync_interval_ms=interval_ms))
    for _ in range(5):
        for k in range((60, 90, 120)[rank]):
            trial.step()
            time.sleep(1e-4 * ((k + rank) % 4))
        trial.handle.abort()
        torch.testing.assert_close(trial.mean() / -LR / 90, torch.ones(200_000).double())
        rounds = gather(trial.rounds)
        assert rounds[0] == rounds[1] == rounds[2] > 1
        trial.check_still()
        with torch.no_grad():
            trial.model.weight.zero_()
        trial.handle.resume()
    trial.handle.detach()


@on_ranks()
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_one_round_gives_all_ranks_the_mean(rank: int, num_ranks: int) -> None:
    trial = Trial(OFTEN, Vector(1000), lr=0.0)
    nn.init.normal_(trial.model.weight, generator=torch.Generator().manual_seed(rank))
    expected = trial.mean().float()
    trial.steps_until_rounds(1)
    trial.handle.abort()
    torch.testing.assert_close(trial.weights, expected, rtol=1e-6, atol=1e-6)
    trial.handle.detach(average=False)


@on_ranks(2)
def test_the_warm_up_is_ddps_own_training_and_ranks_part_right_after_it(rank: int) -> None:
    """The optimizer's first hook runs before the algorithm's, when no round can have changed it."""
    seen = []
    for warmup_steps in (3, 9):  # the second one is plain DDP, as far as it goes
        weights: list[torch.Tensor] = []

        def make(model: nn.Module, weights: list[torch.Tensor] = weights) -> Any:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.register_step_post_hook(
                lambda *_: weights.append(algorithms.flat_weights(model))
            )
            return optimizer

        algorithm = AsyncModelAverage(sync_interval_ms=1, warmup_steps=warmup_steps)
        trial = algorithms.Trial(algorithm, make_optimizers=make)
        if warmup_steps == 9:
            trial.handle.detach()
        trial.train(inputs_of(rank, 4))
        trial.handle.detach()
        seen.append(weights)
    for k in range(4):
        first, second = gather(seen[0][k])
        assert torch.equal(first, second) == torch.equal(seen[0][k], seen[1][k]) == (k < 3)


@pytest.mark.quick("4")
@pytest.mark.parametrize("num_scripts", [4, 12])
def test_whatever_a_loop_does_async_without_rounds_trains_as_its_simulator(
    ranks: Ranks, num_scripts: int
) -> None:
    """A warm-up, and then local steps; see `step_machine`."""
    step_machine.check(ranks, AsyncModelAverage(warmup_steps=3), num_scripts)


# ---- abort, resume, paused --------------------------------------------------------------------


def _abort_before_start(trial: Trial) -> None:
    trial.handle.abort()
    trial.steps(3)
    assert trial.rounds == 0
    assert not _threads()
    trial.handle.resume()
    trial.steps_until_rounds(2)


def _abort_twice(trial: Trial) -> None:
    for _ in range(3):
        trial.steps_until_rounds(1)
        trial.handle.abort()
        trial.handle.abort()
        trial.check_still()
        trial.handle.resume()
        trial.handle.resume()
    trial.steps_until_rounds(1)


def _abort_between_forward_and_backward(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    trial.optimizer.zero_grad()
    loss = trial.ddp(torch.zeros(()))
    trial.handle.abort()
    loss.backward()
    trial.optimizer.step()
    trial.check_still()
    trial.handle.resume()
    trial.steps_until_rounds(2)


def _abort_after_a_forward_alone(trial: Trial) -> None:
    for is_training in (True, False):
        trial.steps_until_rounds(1)
        trial.ddp.train(is_training)
        trial.ddp(torch.zeros(()))
        trial.ddp(torch.zeros(()))
        trial.handle.abort()
        trial.ddp.train()
        trial.handle.resume()
    trial.steps_until_rounds(1)


def _abort_after_unequal_steps(trial: Trial) -> None:
    """Abort where one rank has not begun: it takes part in rounds while it waits in abort."""
    if trial.rank == 0:
        trial.step()  # not a second one: there DDP has ranks agree on buckets
        trial.until(lambda: trial.rounds >= 2, lambda: time.sleep(0.001))
    trial.handle.abort()
    trial.handle.resume()
    trial.steps_until_rounds(1)


def _pause(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    with trial.handle.paused(), trial.handle.paused():
        trial.check_still()
        trial.optimizer.step()
    trial.steps_until_rounds(1)
    trial.handle.abort()
    with trial.handle.paused():
        pass
    _check_aborted(trial)
    with trial.handle.paused():
        trial.handle.resume()
        trial.handle.abort()
        trial.handle.resume()
    trial.steps_until_rounds(1)
    with trial.handle.paused():
        trial.handle.abort()
    _check_aborted(trial)
    trial.handle.resume()


def _check_aborted(trial: Trial) -> None:
    rounds = trial.rounds
    trial.steps(3)
    assert trial.rounds == rounds


def _average(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    trial.handle.average()
    trial.steps_until_rounds(1)
    trial.handle.abort()
    trial.steps(2 + trial.rank)
    trial.handle.average()
    trial.check_equal()


def _step_without_forward(trial: Trial) -> None:
    trial.steps_until_rounds(1)
    for _ in range(5):
        trial.optimizer.step()
    trial.steps_until_rounds(1)


def _skip_updates(trial: Trial) -> None:
    """As GradScaler does after overflows."""
    trial.until(lambda: trial.rounds >= 5, trial.backward)
    assert not trial.weights.any()


def _resume_in_warm_up(trial: Trial) -> None:
    trial.steps(2)
    trial.handle.resume()
    trial.step()
    trial.handle.abort()
    trial.handle.resume()
    trial.steps(2)
    assert trial.rounds == 0
    trial.check_equal()
    trial.steps_until_rounds(2)


def _abort_in_warm_up(trial: Trial) -> None:
    trial.steps(2)
    trial.handle.abort()
    trial.steps(5)
    assert trial.rounds == 0
    trial.handle.resume()
    assert not _threads()
    trial.steps_until_rounds(2)


def _pause_in_warm_up(trial: Trial) -> None:
    for _ in range(2):
        with trial.handle.paused():
            trial.backward()
        trial.steps(5)
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
        _skip_updates,
    ],
    5: [_resume_in_warm_up, _abort_in_warm_up, _pause_in_warm_up],
}


@on_ranks(2)
@pytest.mark.quick("0-_abort_before_start", "0-_pause", "5-_resume_in_warm_up")
@pytest.mark.parametrize(
    ("warmup_steps", "run"), [(steps, run) for steps, runs in STATES.items() for run in runs]
)
def test_abort_resume_and_paused_work_in_each_state(
    rank: int, warmup_steps: int, run: Callable[[Trial], None]
) -> None:
    """After the last abort ranks have made equally many rounds; detaching leaves them equal."""
    trial = Trial(AsyncModelAverage(sync_interval_ms=1, warmup_steps=warmup_steps))
    run(trial)
    trial.handle.abort()
    first, second = gather(trial.rounds)
    assert first == second
    trial.check_still()
    trial.handle.detach()
    assert not _threads()
    trial.check_equal()


@on_ranks(2)
def test_abort_does_not_wait_for_the_interval_and_resume_begins_with_a_round(rank: int) -> None:
    trial = Trial(AsyncModelAverage(sync_interval_ms=3.6e6))
    for num_rounds in (1, 2, 3):
        trial.steps_until_rounds(1)
        trial.handle.abort()
        assert trial.rounds == num_rounds
        trial.handle.resume()
    trial.handle.detach()


@on_ranks(2)
def test_a_thread_that_is_told_to_end_between_two_rounds_begins_no_other(rank: int) -> None:
    """What it began would be left in flight, and the next collective would meet it."""
    trial = Trial(AsyncModelAverage(sync_interval_ms=3.6e6))
    trial.steps_until_rounds(1)
    gather(None)  # both are between two rounds
    with mock.patch.object(Communicator, "all_reduce") as all_reduce:
        trial.handle.detach(average=False)
    assert not all_reduce.called
    assert not _threads()


@on_ranks(2)
@pytest.mark.parametrize("average", [True, False])
def test_detaching_while_rounds_are_made_ends_them(rank: int, average: bool) -> None:
    """DDP's own allreduce trains on."""
    trial = Trial()
    trial.steps_until_rounds(2)
    trial.handle.detach(average=average)
    trial.handle.detach()
    trial.check_still()
    assert not _threads()
    if average:
        trial.steps(2)
        trial.check_equal()
    for call in (trial.handle.abort, trial.handle.resume):
        with pytest.raises(AttachError, match="AsyncModelAverage"):
            call()
    gather(None)


# ---- how steps go -----------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_are_accumulated_under_no_sync(rank: int) -> None:
    """No round changes weights from the first micro-batch on, and the mean is conserved."""
    trial = Trial()
    x, num_steps = torch.zeros(()), 20 + 10 * rank
    for _ in range(num_steps):
        trial.optimizer.zero_grad()
        with trial.ddp.no_sync():
            trial.ddp(x).backward()
            trial.ddp(x).backward()
        trial.ddp(x).backward()
        trial.optimizer.step()
    trial.handle.abort()
    assert trial.handle.num_steps == num_steps
    assert trial.rounds > 0
    torch.testing.assert_close(trial.mean() / -LR / 75, torch.ones(200_000).double())
    trial.handle.detach()


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


@on_ranks(2)
def test_no_weight_changes_between_forward_and_backward(rank: int) -> None:
    trial = Trial(AsyncModelAverage(sync_interval_ms=1), Watched())
    for k in range(20 + 5 * rank):
        trial.optimizer.param_groups[0]["lr"] = 0.01 * (rank + k)
        trial.step()
    trial.handle.abort()
    assert not trial.model.has_changed
    assert trial.rounds > 0
    trial.handle.detach()


@on_ranks(2)
def test_a_state_continues_the_counters_of_ranks_with_different_numbers_of_steps(
    rank: int,
) -> None:
    algorithm = AsyncModelAverage(sync_interval_ms=1, warmup_steps=2)
    trial = Trial(algorithm)
    trial.steps(3 + rank)
    trial.steps_until_rounds(2)
    with trial.handle.paused():
        state = copy.deepcopy(trial.handle.state_dict())
    trial.handle.detach()
    other = Trial(algorithm)
    with pytest.raises(AttachError, match=r"rank 1 .* warm-up"):
        other.handle.load_state_dict({**state, "num_steps": rank})
    with pytest.raises(OptionError, match="'QAdam'"):
        other.handle.load_state_dict({**state, "algorithm": "QAdam"})
    other.handle.load_state_dict(state)
    assert other.handle.state_dict() == state
    other.steps_until_rounds(2)  # past the warm-up at once
    other.handle.detach()


# ---- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"sync_interval_ms": 0}, OptionError, "sync_interval_ms is 0"),
        ({"sync_interval_ms": -1.5}, OptionError, "is -1.5"),
        ({"sync_interval_ms": math.nan}, OptionError, "is nan"),
        ({"sync_interval_ms": math.inf}, OptionError, "is inf"),
        ({"sync_interval_ms": True}, TypeError, "bool"),
        ({"sync_interval_ms": "500"}, TypeError, "str"),
        ({"warmup_steps": -1}, OptionError, "warmup_steps is -1"),
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
        (unused, "find_unused_parameters"),
        (buffers, "broadcast_buffers"),
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


def _lose_rank_2(rank: int, end: signal.Signals) -> tuple[list[str], list[str]]:
    """End or stop rank 2; return what each call raises on the others, and the threads left there.

    It waits for two rounds first, however many steps those take.
    """
    trial = Trial(timeout_s=10)
    trial.steps_until_rounds(2)
    if rank == 2:
        os.kill(os.getpid(), end)
    errors: list[str] = []
    trial.until(lambda: bool(errors), lambda: errors.extend(_failures(trial.step)))
    stops = (trial.handle.abort, trial.handle.resume, trial.handle.average)
    errors += [error_of(call) for call in stops]
    errors += [error_of(trial.handle.detach), error_of(trial.handle.detach)]
    return errors, _threads()


def _failures(call: Callable[[], object]) -> list[str]:
    return [text for text in [error_of(call)] if text != "nothing"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_makes_the_others_fail_clearly(
    make_ranks: MakeRanks, end: signal.Signals
) -> None:
    """The next forward fails, and all calls that stop the rounds; the thread has ended."""
    answers = make_ranks(3).run_survivors([0, 1], _lose_rank_2, end)
    for errors, threads in answers.values():
        assert len(errors) == 6
        for error in errors[:5]:
            assert error.startswith("PeerError: averaging weights in the background of step ")
            assert "another rank has ended" in error
        assert errors[5] == "nothing"  # it was detached all the same
        assert not threads


def _leave_alone(rank: int, ending: str) -> tuple[list[str], bool, list[str]]:
    """Train on rank 1 while rank 0 aborts, or drops its model."""
    trial = Trial(timeout_s=5)
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
        assert "timeout of 5 s" in first[0]
    assert second[0].startswith("PeerError: averaging weights in the background of step")
    assert [rest for _, *rest in answers] == [[True, []], [True, []]]


def _wait_for_end(weak: weakref.ref[Any]) -> None:
    end_s = time.monotonic() + HARD_TIMEOUT_S
    while (weak() is not None or _threads()) and time.monotonic() < end_s:
        gc.collect()
        time.sleep(0.05)


@on_ranks(2)
def test_a_model_that_is_dropped_takes_its_thread_along(rank: int) -> None:
    """Rounds are made, and training has the lock."""
    trial = Trial()
    trial.steps_until_rounds(2)
    trial.ddp(torch.zeros(()))
    weak = weakref.ref(trial.ddp)
    del trial
    _wait_for_end(weak)
    assert weak() is None
    assert not _threads()


EXITS = """
    import sys, time
    sys.path.insert(0, {tests!r})
    import torch, torch.distributed as dist
    from tests.algorithms.test_async import Trial

    rank, ending = int(sys.argv[1]), sys.argv[2]
    store = dist.FileStore(sys.argv[3], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    trial = Trial()
    trial.steps_until_rounds(2)
    print("trained", flush=True)
    if ending == "late" and rank == 0:
        time.sleep(1)  # the other one has gone by then
    if ending == "forward":
        trial.ddp(torch.zeros(()))
    if ending == "destroyed":
        dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["late", "forward", "destroyed"])
def test_a_process_that_exits_without_abort_ends_promptly(ending: str, tmp_path: Path) -> None:
    """Its code is 0 and its stderr has no error, as its thread is not inside torch by then."""
    source = textwrap.dedent(EXITS).format(tests=str(Path(__file__).parents[2]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(rank), ending, str(tmp_path / "store")],
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
