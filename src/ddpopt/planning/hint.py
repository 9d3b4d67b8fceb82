"""A hint where DDP keeps its buckets: how long iterations wait for communication.

It is a line of the log, and of `explain`, with what could be done about it.
"""

from __future__ import annotations

import statistics

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._slots import Lifetime, Slot
from ddpopt._text import format_ms
from ddpopt._torch import Forward
from ddpopt.planning.rebucket import find_lasting_obstacle, plan_of
from ddpopt.split import state
from ddpopt.steps.clock import IterationClock
from ddpopt.steps.forwards import subscribe, unsubscribe, will_communicate

# The part of an iteration that has to be exposed to be worth a line.
_MUCH_EXPOSED = 0.1
# The steps whose times count: earlier ones compile, later ones DDP does not time.
_STEPS = range(5, 11)

# The hint, "" if there is none to give, and None until somebody has begun to watch for it.
_hints: Slot[str | None] = Slot(lambda: None, Lifetime.MODULE)


def hint_of(ddp: DistributedDataParallel) -> str:
    """How much communication was found to be exposed, as a sentence for users; "" without one."""
    return _hints.get(ddp) or ""


def watch(ddp: DistributedDataParallel) -> None:
    """Log once, on rank 0, how long an iteration waits for communication, if a tenth or more.

    The times are those that DDP takes anyway.
    """
    if _hints.get(ddp) is not None:
        return
    _hints.set(ddp, "")
    if state.speaks_for_others(ddp):
        subscribe(ddp, _Watch())


class _Watch(IterationClock):
    def __init__(self) -> None:
        super().__init__()
        # By step number: what DDP logged of the step, and how long its iteration took.
        self._steps: dict[int, tuple[_torch.LoggedStep, float]] = {}

    def before_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Note the times of the step that ends where the next begins."""
        if not will_communicate(ddp):
            return
        super().before_forward(ddp, forward)
        try:
            step = _torch.last_logged_step(ddp)
            if step.number in _STEPS and self.last_s is not None:
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
        if not self._steps or plan_of(ddp) or _torch.has_comm_hook(ddp):
            return ""
        exposed_s = statistics.median(step.exposed_s for step, _ in self._steps.values())
        iteration_s = statistics.median(step_s for _, step_s in self._steps.values())
        if exposed_s < _MUCH_EXPOSED * iteration_s or find_lasting_obstacle(ddp):
            return ""
        return (
            f"of an iteration of {format_ms(iteration_s)} ms, {format_ms(exposed_s)} are spent "
            "waiting for communication; options={'buckets': 'auto'} looks for buckets that hide "
            "more of it"
        )
