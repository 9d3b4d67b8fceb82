"""When the gradients of a step arrive, allreduces are launched, and backwards end.

[Note: times of a step]
Hooks on the autograd nodes that accumulate gradients note when each gradient arrives. DDP's own
hook runs between our two on the same node, and launches the allreduces of the buckets that are
complete, so our second hook gives the time of the launch. A step's backward ends with the last that
got one of its gradients, since reentrant checkpoints run backwards within the backward; a gradient
that arrives once more after an end is of another backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._indices import ParameterIndex
from ddpopt.steps.clock import Clock
from ddpopt.steps.observing import observing


@dataclass(slots=True)
class Step:
    """The times of one step, as a `Clock` has them; 0 is unknown.

    `ready` and `launched` are the times around DDP's own hook on each gradient, see [Note: times of
    a step]. `gradient_of_backward` has one gradient that arrived in each backward that ran, by
    autograd's number of the backward.
    """

    began: float
    num_forwards: int = 1
    forward_ended: float = 0.0  # of the last one
    backward_ended: float = 0.0
    ready: dict[ParameterIndex, float] = field(default_factory=dict)
    launched: dict[ParameterIndex, float] = field(default_factory=dict)
    gradient_of_backward: dict[int, ParameterIndex] = field(default_factory=dict)


class StepTimer:
    """Notes the steps of a DDP module, for somebody who tells it of forwards.

    `on_ready` gets the index of each gradient that arrives in a step. `on_launched` is called after
    DDP's own hook on each gradient, and makes the timer note launches too; `on_end` at the end of
    each backward of a step. `has_unreduced` says that a gradient has arrived outside of any step
    since the last step's backward ended: DDP has yet to reduce that gradient.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        clock: Clock,
        *,
        on_ready: Callable[[ParameterIndex], None] = lambda _: None,
        on_launched: Callable[[], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps: list[Step] = []
        self.has_unreduced = False
        self._ddp = weakref.ref(ddp)  # holding this must not keep its module alive
        self._clock = clock
        self._on_ready, self._on_launched, self._on_end = on_ready, on_launched, on_end
        self._is_in_forward = False
        # Whether a gradient that arrives now is of no step: something else than the last step's
        # backward has begun.
        self._is_step_over = False
        self._ends = _torch.BackwardEnds(observing(self._end_backward))
        parameters = _torch.reducer_parameters(ddp)
        self._parameters = tuple(parameters)
        # In each step. A static graph does so in its first alone, and follows that arrival order.
        self._looks_for_unused = not _torch.follows_arrival_order(ddp)
        # Autograd's nodes live only as long as somebody holds them.
        self._nodes = {p.index: _torch.accumulate_node(tensor) for tensor, p in parameters.items()}
        self._hooks: dict[ParameterIndex, list[Any]] = {}
        for index, node in self._nodes.items():
            self._hooks[index] = [
                node.register_prehook(observing(functools.partial(self._arrive, index)))
            ]
            if on_launched is not None:
                launch = functools.partial(self._launch, index)
                self._hooks[index].append(node.register_hook(observing(launch)))

    @property
    def step(self) -> Step | None:
        """The step that a gradient would belong to, None between steps."""
        return self.steps[-1] if self.steps and not self._is_step_over else None

    @property
    def num_backwards(self) -> int:
        """How many steps' backwards have ended."""
        return sum(bool(step.backward_ended) for step in self.steps)

    def begin_forward(self) -> bool:
        """Note that a forward that communicates begins; return whether a step begins with it.

        A forward with all parameters frozen, such as of a GAN's discriminator, is in no step.
        """
        ddp = self._ddp()
        if ddp is None or not any(parameter.requires_grad for parameter in self._parameters):
            return False
        self._is_in_forward = True
        # Several forwards before a backward are one step's.
        if self.step is not None and not self.step.ready:
            self.step.num_forwards += 1
            return False
        self.steps.append(Step(began=self._clock.now()))
        self._is_step_over = False
        return True

    def end_forward(self) -> None:
        """Note that a forward has ended, unless it is in no step."""
        if self._is_in_forward:
            self._is_in_forward = False
            self.steps[-1].forward_ended = self._clock.now()

    def skip_forward(self) -> None:
        """Note a forward that does not communicate; its backward is in no step."""
        # Between a step's forward and its backward it may be an evaluation, which ends nothing.
        if self.steps and self.steps[-1].backward_ended:
            self._is_step_over = True

    def watch_only(self, indices: Collection[ParameterIndex]) -> None:
        """Note no other gradients from here on: hooks on hundreds of them cost time."""
        for index in self._hooks.keys() - indices:
            for hook in self._hooks.pop(index):
                hook.remove()

    def stop(self) -> None:
        self.watch_only(())
        self._nodes.clear()
        self._parameters = ()

    def _arrive(self, index: ParameterIndex, _gradients: object) -> None:
        """Note a gradient, of the present step or of none, before DDP's own hook takes it."""
        step = self.step
        if step is None:
            self.has_unreduced = True
            return
        # The backward that ended may have been one within the step's, as of a reentrant checkpoint.
        # Then the step's other gradients follow, and one that comes a second time is of another
        # backward, unless the one around it is pending. If DDP looks for unused parameters, it
        # allows no backward within another.
        is_another = index in step.ready or self._looks_for_unused
        if step.backward_ended and is_another and not self._ends.is_pending:
            self._is_step_over = self.has_unreduced = True
            return
        # Lightning's manual optimization runs the backward within forward, which then goes on.
        self.end_forward()  # does nothing if it has ended
        self._ends.watch()
        # One gradient a backward: with its hook alone `ddpopt.record` still notices the end.
        step.gradient_of_backward[_torch.running_backward()] = index
        step.ready[index] = self._clock.now()
        self._on_ready(index)

    def _launch(self, index: ParameterIndex, _inputs: object, _outputs: object) -> None:
        if self._on_launched is not None:
            self._on_launched()
        if self.step is not None:
            self.step.launched[index] = self._clock.now()

    def _end_backward(self) -> None:
        if self.step is not None:
            self.step.backward_ended = self._clock.now()
            self.has_unreduced = False
            self._on_end()
