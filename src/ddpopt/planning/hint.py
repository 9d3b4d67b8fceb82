"""How long iterations wait for communication where DDP keeps its buckets, by DDP's own timers.

`explain` shows it as long as nothing is recorded. If it is much, there is a hint in the log, and in
`explain`, with what could be done about it.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._text import format_ms
from ddpopt._torch import Forward
from ddpopt.planning.rebucket import find_lasting_obstacle, plan_of
from ddpopt.split import state
from ddpopt.steps.clock import IterationClock
from ddpopt.steps.forwards import subscribe, unsubscribe, will_communicate

# The part of an iteration that has to be exposed to be worth a line.
MUCH_EXPOSED = 0.1
# The steps whose times count: earlier ones compile, later ones DDP does not time.
_STEPS = range(5, 11)

_REMEDY = "options={'buckets': 'auto'} looks for buckets that hide more of it"


class Wait(NamedTuple):
    """Medians over some of the first steps, which `steps` names.

    `exposed_s` is how long backward waits for communication: from the end of its computation until
    DDP has all reduced gradients. It is part of `backward_s`, as that is of `iteration_s`.
    """

    backward_s: float
    exposed_s: float
    iteration_s: float
    steps: str


# None until the steps are over, and once the module has other buckets than in these steps.
_waits: ModuleSlot[Wait | None] = ModuleSlot(lambda: None, Lifetime.REDUCER)
# The hint, "" if there is none to give, and None until somebody has begun to watch for it.
_hints: ModuleSlot[str | None] = ModuleSlot(lambda: None, Lifetime.MODULE)


def wait_of(ddp: DistributedDataParallel) -> Wait | None:
    """How long a module's iterations waited; None until known, and on ranks that log no hint."""
    return _waits.get(ddp)


def hint_of(ddp: DistributedDataParallel) -> str:
    """What to do where iterations wait for a tenth or more of their time.

    "" if they do not, if that is not known (yet, or on this rank), and where buckets cannot be
    changed, so that nothing can be done. The text has no measured time: `explain` shows a
    recording's, or that of `wait_of`, beside it.
    """
    if not _hints.get(ddp):
        return ""
    return f"waiting is {MUCH_EXPOSED:.0%} of an iteration or more; {_REMEDY}"


def watch(ddp: DistributedDataParallel) -> None:
    """Log once, on rank 0, how long an iteration waits for communication, if a tenth or more.

    The times are those that DDP takes anyway.
    """
    if _hints.get(ddp) is not None:
        return
    _hints.set(ddp, "")  # no hint so far, and somebody watches for it
    if state.logs_for_all_ranks(ddp):
        subscribe(ddp, _Watch())


class _Watch(IterationClock):
    """Collects DDP's times of some of the first steps, and then gives the hint and is gone."""

    def __init__(self) -> None:
        super().__init__()
        # By step number: what DDP logged of the step, and how long its iteration took.
        self._steps: dict[int, tuple[_torch.LoggedStep, float]] = {}

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Note the times of the last step, which ends where this forward begins.

        Only `_STEPS` count. After the last of them the hint is found.
        """
        if not will_communicate(ddp):
            return
        super().before_forward(ddp, forward)  # sets `last_s`, how long the last iteration took
        try:
            step = _torch.last_logged_step(ddp)
            if step.number in _STEPS and self.last_s is not None:
                # DDP's log shows a step until DDP times another, but only at the first look is
                # `last_s` the iteration of that step.
                self._steps.setdefault(step.number, (step, self.last_s))
            if step.number >= _STEPS[-1]:
                unsubscribe(ddp, _Watch)
                hint = self._find_hint(ddp)
                _hints.set(ddp, hint)
                if hint:
                    _logs.info("%s", hint)
        except Exception as error:
            # Whatever torch's logger raises, it costs the hint, and nothing else.
            unsubscribe(ddp, _Watch)
            _logs.info("how long iterations wait for communication is not known: %r", error)

    def _find_hint(self, ddp: DistributedDataParallel) -> str:
        """Keep the medians for `wait_of`; return the line to log, "" for none."""
        if not self._steps:
            return ""
        steps = [step for step, _ in self._steps.values()]
        first, last = min(self._steps), max(self._steps)
        # DDP's `backward_s` is that of the computation, after which it waits for allreduces.
        wait = Wait(
            backward_s=statistics.median(step.backward_s + step.exposed_s for step in steps),
            exposed_s=statistics.median(step.exposed_s for step in steps),
            iteration_s=statistics.median(step_s for _, step_s in self._steps.values()),
            steps=f"medians of steps {first} to {last}" if first < last else f"of step {first}",
        )
        _waits.set(ddp, wait)
        if wait.exposed_s < MUCH_EXPOSED * wait.iteration_s:
            return ""
        # The remedy is for modules with DDP's own buckets and allreduce, whose buckets can change.
        if plan_of(ddp) or _torch.has_comm_hook(ddp) or find_lasting_obstacle(ddp):
            return ""
        return (
            f"of an iteration of {format_ms(wait.iteration_s)} ms, {format_ms(wait.exposed_s)} are "
            f"spent waiting for communication ({wait.steps}, by DDP's timers); {_REMEDY}"
        )
