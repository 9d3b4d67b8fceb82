"""`AsyncModelAverage`: a thread averages weights, while each rank trains at its own speed.

[Note: the lock on weights] Training has it from the first forward with gradients to the end of the
update, so that no weight changes between a forward and its backward, and no update is lost to an
average that is added at the same time. Averaging has it while it copies weights and while it adds
the difference, never while it communicates.

Source: asynchronous model average as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

import contextlib
import copy
import threading
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt._values import POSITIVE, check_number
from ddpopt.algorithms.algorithm import Algorithm, check_count
from ddpopt.algorithms.background import THREAD_IS_OVER, leave_in_flight, start_thread
from ddpopt.algorithms.comm import Communicator, own_stream
from ddpopt.algorithms.handle import Bucket, GradientFuture, Handle
from ddpopt.algorithms.training import Training
from ddpopt.errors import AttachError, OptionError, PeerError
from ddpopt.ranks.agree import Fact, communicating

# Between two looks at whether a collective has ended.
_SHORTEST_POLL_S, _LONGEST_POLL_S = 2e-4, 0.02
# For a thread that is told to end: it is between two looks, or adding to weights.
_EXIT_S = 10.0


class FairLock:
    """A lock that goes to whoever has waited longest, as training wants it back right away.

    On an accelerator (untried) the stream of a thread that acquires the lock waits for what was
    queued when the lock was last released.
    """

    def __init__(self, device: torch.device) -> None:
        self._changed = threading.Condition()
        # Who has the lock, and behind it who waits.
        self._line: list[object] = []
        self._is_closed = False
        self._queued_at_release = None if device.type == "cpu" else torch.Event(device)

    def acquire(self) -> bool:
        """Wait for the lock; return False, without it, if it was closed first."""
        place_in_line, is_acquired = object(), False
        with self._changed:
            self._line.append(place_in_line)
            try:
                self._changed.wait_for(lambda: self._is_closed or self._line[0] is place_in_line)
                is_acquired = not self._is_closed
            finally:
                if not is_acquired:  # closed, or KeyboardInterrupt
                    self._leave(place_in_line)
        if is_acquired and self._queued_at_release is not None:
            self._queued_at_release.wait()
        return is_acquired

    def release(self) -> None:
        """Give the lock to whoever is next in line; only who has it may call this."""
        if self._queued_at_release is not None:
            self._queued_at_release.record()
        with self._changed:
            self._leave(self._line[0])

    def close(self) -> None:
        """Send all away who wait, or come later; who has the lock keeps it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _leave(self, place_in_line: object) -> None:
        self._line.remove(place_in_line)
        self._changed.notify_all()


class _OverError(Exception):
    """The thread was told to end, or its owner is gone."""


class AveragingLoop:
    """A thread that makes rounds with the other ranks.

    In each round ranks first agree whether to stop, which they do when all of them want to.
    Otherwise they average weights as `AsyncModelAverage` says. The thread ends by `stop` or
    `close`, before the process, when a round fails, or when `owner` is collected: it refers to
    `owner` only while it copies or changes the weights.
    """

    def __init__(self, owner: Handle, interval_s: float) -> None:
        group, device = owner.training.group, owner.training.device
        self.weights_lock = FairLock(device)  # see [Note: the lock on weights]
        # A gloo group even if the data's group is NCCL's: agreeing needs no accelerator.
        assert owner.groups.agreement is not None, "AsyncModelAverage.agrees_on_cpu"
        self._agreement = owner.groups.agreement
        self._data = owner.groups.everyone
        self._timeout_s: float = _torch.group_timeout(group, device).total_seconds()
        self._interval_s = interval_s
        self._owner = weakref.ref(owner)
        self._thread: threading.Thread | None = None
        # The error that ended the thread, or a `stop` that timed out.
        self._error: Exception | None = None
        # This rank wants all to stop together; this thread has to end by itself.
        self._wants_stop, self._is_over = threading.Event(), threading.Event()
        # Not at exit, where this hung; see [Note: the end of a process] for what is done then.
        weakref.finalize(owner, self.end).atexit = False

    def check(self) -> None:
        """Raise the error that ended the thread, or a `stop` that timed out."""
        if self._error is not None:
            # A copy: the original would collect frames, which keep the owner alive.
            raise copy.copy(self._error) from self._error

    def run(self) -> threading.Thread:
        """Begin unless running, and return the thread; raise what ended it."""
        self.check()
        if self._thread is None:
            self._thread = start_thread("ddpopt-async", self._run, self._end_at_exit)
        return self._thread

    def stop(self) -> None:
        """Make the threads of all ranks end after the same round. Collective.

        A rank that has not begun takes part in the others' rounds until all stop.
        """
        self._wants_stop.set()
        thread = self.run()
        thread.join(self._timeout_s)
        if thread.is_alive():
            self._error = PeerError(
                "another rank hangs, or did not stop averaging within the process group's timeout "
                f"of {self._timeout_s:g} s; call abort, resume, paused and average on all ranks"
            )
            self.end()
        self.check()
        self._thread = None
        self._wants_stop.clear()

    def end(self) -> None:
        """End the thread without the other ranks; their next round fails on the timeout."""
        self._is_over.set()
        self._wants_stop.set()  # wakes the thread between two rounds
        self.weights_lock.close()

    def _end_at_exit(self) -> None:
        """As `end`, when the process ends; whoever trains or averages after that gets an error.

        For a new thread's rounds would not be those of other ranks.
        """
        self._error = self._error or AttachError(THREAD_IS_OVER)
        self.end()

    def close(self) -> None:
        """As `end`, and wait until the thread has ended."""
        self.end()
        if self._thread is not None:
            self._thread.join(_EXIT_S)

    def _run(self) -> None:
        try:
            with own_stream(self._data.device), torch.no_grad(), contextlib.suppress(_OverError):
                while not self._all_stop():
                    self._make_round()
                    self._wants_stop.wait(self._interval_s)
        except Exception as error:
            # Whatever a collective raised, `check` raises it in the thread that trains. Its frames
            # would keep the owner alive.
            traceback.clear_frames(error.__traceback__)
            self._error = error

    def _all_stop(self) -> bool:
        """Whether all ranks want to stop. Collective."""
        wants_stop = torch.tensor(int(self._wants_stop.is_set()), device="cpu")
        self._reduce(wants_stop, self._agreement, dist.ReduceOp.MIN)
        return bool(wants_stop)

    def _make_round(self) -> None:
        """Average the weights of all ranks once, as `AsyncModelAverage` says. Collective."""
        with self._locked_owner() as owner:
            copies = owner.weights.copy()
            del owner  # it may be collected while ranks communicate
        before_sum, after_sum = self._data.divisors  # a float16 sum might overflow
        change = []
        for copied in copies:
            mean = copied.clone()
            self._reduce(mean.div_(before_sum), self._data, dist.ReduceOp.SUM)
            change.append(mean.div_(after_sum).sub_(copied))
        with self._locked_owner() as owner:
            owner.weights.add(change)
            owner.num_communications += 1

    def _reduce(self, values: torch.Tensor, communicator: Communicator, op: Any) -> None:
        """Reduce `values` over all ranks, in place; stop if the thread was told to end.

        It polls the collective, since a thread that waits inside torch cannot be told to end.
        """
        if self._is_over.is_set():
            raise _OverError
        work = communicator.all_reduce(values, op)
        poll_s = _SHORTEST_POLL_S
        while not work.is_completed():
            if self._is_over.wait(poll_s):
                # The collective may still write to `values`, which must live until then.
                leave_in_flight(work, values, communicator.group)
                raise _OverError
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        work.wait()  # raises its error; on an accelerator the stream waits

    @contextlib.contextmanager
    def _locked_owner(self) -> Iterator[Handle]:
        """The owner, with the lock on its weights; _OverError ends the thread if either is gone."""
        if not self.weights_lock.acquire():
            raise _OverError
        try:
            owner = self._owner()
            if owner is None:
                raise _OverError
            yield owner
        finally:
            self.weights_lock.release()


class AsyncModelAverageHandle(Handle):
    """As `Handle`, with `abort` and `resume`.

    Rounds run from the first step after the warm-up, and are counted as `num_communications`.
    Stop them (`paused`, `abort`) to evaluate, and to load or save weights. If a round fails, the
    next step's forward and the methods that stop the rounds raise PeerError. Ranks need not make
    the same number of steps, but each has to make at least two: in its second forward, DDP itself
    waits for all ranks, once.
    """

    algorithm: AsyncModelAverage

    def __init__(self, training: Training, algorithm: AsyncModelAverage) -> None:
        super().__init__(training, algorithm)
        self._loop = AveragingLoop(self, algorithm.sync_interval_ms / 1000)
        self._is_aborted = False
        # Whether training has the lock on weights. The thread that releases it may be another than
        # took it.
        self._has_lock = False

    def abort(self) -> None:
        """Stop the rounds: afterwards communication changes no weights. Collective.

        Ranks may call this after different numbers of steps: the early ones keep making rounds
        until all have called it. Afterwards each rank trains by itself.

        Raises:
            PeerError: a round failed, or a rank did not call this within the group's timeout.
        """
        self.settle()  # ends an open step
        if not self.is_paused:  # in a pause the rounds are stopped already
            self.begin_pause()
        self._is_aborted = True

    def resume(self) -> None:
        """Resume rounds after `abort`, with the next step that is not paused. Collective."""
        self.check_attached()
        self._is_aborted = False
        with self._communicating():
            self._loop.check()

    def settle(self) -> None:
        super().settle()
        # Training has not the lock on weights any more, so that rounds write to them.
        self._updates.forget_baseline()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.paused():  # or a round would count itself while counters are loaded
            super().load_state_dict(state)

    def reduce(self, bucket: Bucket) -> GradientFuture:
        # Behind the warm-up, and in a pause, gradients stay this rank's own.
        if self.num_steps <= self.algorithm.warmup_steps and not self.is_paused:
            return self.allreduce(bucket)
        return super().reduce(bucket)

    def on_forward(self) -> None:
        super().on_forward()
        if torch.is_grad_enabled() and not self.is_paused:
            self._take_lock()

    def begin_step(self) -> None:
        if self.num_steps > self.algorithm.warmup_steps and not self._is_aborted:
            with self._communicating():
                self._loop.run()

    def before_update(self) -> None:
        self._take_lock()  # even if no forward came before

    def after_update(self) -> None:
        self._release_lock()

    def _take_lock(self) -> None:
        """See [Note: the lock on weights]."""
        if not self._has_lock:
            self._has_lock = self._loop.weights_lock.acquire()

    def _release_lock(self) -> None:
        if self._has_lock:
            self._has_lock = False
            self._loop.weights_lock.release()

    def begin_pause(self) -> None:
        # After a forward without an update training still has the lock, for which a round may wait.
        self._release_lock()
        if not self._is_aborted:
            with self._communicating():
                self._loop.stop()

    def close(self) -> None:
        self._loop.close()
        self._release_lock()

    def check_state(self, state: dict[str, Any]) -> list[Fact]:
        # Its facts are left out, because ranks may have made different numbers of steps.
        super().check_state(state)
        num_steps = min(state["num_steps"], self.algorithm.warmup_steps)
        return [Fact("steps of the warm-up", str(num_steps))]

    def _communicating(self) -> contextlib.AbstractContextManager[None]:
        """Make a PeerError of what ended the thread, where this block raises that."""
        return communicating(f"averaging weights in the background of step {self.num_steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncModelAverage(Algorithm[AsyncModelAverageHandle]):
    """Each rank trains by itself, and a thread averages the weights of all ranks now and then.

    In each round the thread copies its rank's weights x_i to t_i, sums the copies of all n ranks,
    and adds the difference, x_i <- x_i + sum_j(t_j) / n - t_i, which keeps what training changed
    meanwhile. No rank waits for another's step.

    Attributes:
        sync_interval_ms: Milliseconds from the end of a round to the start of the next.
        warmup_steps: Initial steps in which gradients are averaged instead, as DDP does.
    """

    handle_type = AsyncModelAverageHandle
    agrees_on_cpu = True
    sync_interval_ms: float = 500
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        interval_ms = self.sync_interval_ms
        check_number("sync_interval_ms", interval_ms, POSITIVE, OptionError, wrong_type=TypeError)
        check_count("warmup_steps", self.warmup_steps, 0)

    def check(self, training: Training) -> None:
        ddp = training.ddp
        if ddp.find_unused_parameters:
            reason = "find_unused_parameters=True; give find_unused_parameters=False"
        elif ddp.broadcast_buffers and len(ddp.modules_buffers) > 0:
            reason = (
                "buffers that it sends at each forward; give broadcast_buffers=False (or "
                "forward_sync_buffers=False, as torch 2.13 names it)"
            )
        elif any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.modules()):
            reason = "SyncBatchNorm, which communicates at each forward; use BatchNorm"
        else:
            return
        raise OptionError(
            "AsyncModelAverage lets ranks make different numbers of steps, and this DDP module "
            f"makes them wait for each other: it has {reason}"
        )
