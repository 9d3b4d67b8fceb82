"""`AsyncModelAverage`: a thread averages weights, while each rank trains at its own speed.

Source: asynchronous model average as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.algorithms._runtime.averaging_loop import AveragingLoop
from ddpopt.algorithms._runtime.handle import Algorithm, Bucket, GradientFuture, Handle, Training
from ddpopt.algorithms.api import check_count
from ddpopt.errors import AttachError, OptionError
from ddpopt.ranks.agreement import Fact, communicating


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
        self._has_turn = False  # whether training has it, in any thread

    def abort(self) -> None:
        """Stop the rounds: afterwards communication changes no weights. Collective.

        Ranks may call this after different numbers of steps: the early ones keep making rounds
        until all have called it. Afterwards each rank trains by itself.

        Raises:
            PeerError: a round failed, or a rank did not call this within the group's timeout.
        """
        self.settle()
        self._is_aborted = True
        self.begin_pause()

    def resume(self) -> None:
        """Resume rounds after `abort`, with the next step that is not paused. Collective."""
        self.check_attached()
        self._is_aborted = False
        if not self._num_pauses:
            with self._communicating():
                self._loop.allow()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Handle.load_state_dict`; ranks may have made different numbers of steps."""
        with self.paused():
            super().load_state_dict(state)

    def detach(self, *, average: bool = True) -> None:
        """As `Handle.detach`."""
        if not self._is_attached:
            return
        if average:
            try:
                self.abort()  # otherwise rounds would begin again after the last average
            except Exception:
                super().detach(average=False)
                raise
        super().detach(average=average)
        if average:
            dist.destroy_process_group(self._loop.agreement)

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """Average a bucket in the warm-up; later gradients stay as they are."""
        if 0 < self.num_steps <= self.algorithm.warmup_steps and not self._num_pauses:
            return self.allreduce(bucket)
        return super().reduce(bucket)

    def on_forward(self) -> None:
        """As `Handle.on_forward`; take the weights from here on, see [Note: turns]."""
        if torch.is_grad_enabled() and not self._num_pauses:
            if _torch.is_in_join(self.training.ddp):
                raise AttachError(
                    "AsyncModelAverage cannot work in DDP's join() context, in which ranks wait "
                    "for each other (and go on to do so after it); leave it out, since ranks may "
                    "make different numbers of steps"
                )
            self.before_update()
        super().on_forward()

    def begin_step(self) -> None:
        """Begin the rounds once the warm-up is over."""
        if self.num_steps > self.algorithm.warmup_steps:
            with self._communicating():
                self._loop.run()
        self.before_update()  # settling a step whose update was skipped gave the weights away

    def before_update(self) -> None:
        """Take the weights, even if no forward came before."""
        self._has_turn = self._has_turn or self._loop.turns.take()

    def after_update(self) -> None:
        """Give the weights away, so that a round may change them."""
        if self._has_turn:
            self._has_turn = False
            self._loop.turns.give()

    def begin_pause(self) -> None:
        """Stop the rounds."""
        self.after_update()  # a forward without an update holds the weights; a round may want them
        with self._communicating():
            self._loop.stop()

    def end_pause(self) -> None:
        """Allow rounds again, unless they were aborted."""
        if not self._is_aborted:
            self._loop.allow()

    def close(self) -> None:
        """End the thread."""
        self._loop.close()
        self.after_update()

    def check_state(self, state: dict[str, Any]) -> list[Fact]:
        """As `Handle.check_state`; only the steps of the warm-up have to be equal."""
        super().check_state(state)
        num_steps = min(state["num_steps"], self.algorithm.warmup_steps)
        return [Fact("steps of the warm-up", str(num_steps))]

    def _communicating(self) -> contextlib.AbstractContextManager[None]:
        return communicating(f"averaging weights in the background of step {self.num_steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncModelAverage(Algorithm[AsyncModelAverageHandle]):
    """Each rank trains by itself, and a thread averages the weights of all ranks now and then.

    In each round the thread copies its rank's weights x_i to t_i, sums the copies of all n ranks,
    and adds the difference, x_i <- x_i + sum_j(t_j) / n - t_i, which keeps what training changed
    meanwhile. No rank waits for another one's step.

    Attributes:
        sync_interval_ms: Milliseconds from the end of a round to the start of the next.
        warmup_steps: Initial steps in which gradients are averaged instead, as DDP does.
    """

    handle_type = AsyncModelAverageHandle
    sync_interval_ms: float = 500
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        value = self.sync_interval_ms
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                f"sync_interval_ms is {value!r}, a {type(value).__name__}; give a number of "
                "milliseconds"
            )
        if not 0 < value < math.inf:
            raise OptionError(f"sync_interval_ms is {value}; give a finite number above 0")
        check_count("warmup_steps", self.warmup_steps, 0)

    def check(self, training: Training) -> None:
        """Raise OptionError if DDP communicates in its forwards."""
        ddp, reason = training.ddp, ""
        if ddp.find_unused_parameters:
            reason = "find_unused_parameters=True; give find_unused_parameters=False"
        elif ddp.broadcast_buffers and len(ddp.modules_buffers) > 0:
            reason = (
                "buffers that it sends at each forward; give broadcast_buffers=False (or "
                "forward_sync_buffers=False, as torch 2.13 names it)"
            )
        elif any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.modules()):
            reason = "SyncBatchNorm, which communicates at each forward; use BatchNorm"
        if reason:
            raise OptionError(
                "AsyncModelAverage lets ranks make different numbers of steps, and this DDP "
                f"module makes them wait for each other: it has {reason}"
            )
