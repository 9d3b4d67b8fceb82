"""`observe`: see in one real step when each bucket's allreduce was launched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from ddpopt import records
from ddpopt.gates import Gate
from ddpopt.plans import Observation

# Names of the profiler's events: the dispatcher's allreduce, which the Reducer calls for each
# bucket in launch order, and the autograd nodes that run a section's backward: those of a graph
# that AOTAutograd compiled, and gates.
_ALLREDUCE = "c10d::allreduce_"
_BACKWARDS = ("CompiledFunctionBackward", f"{Gate.__name__}Backward")


@contextlib.contextmanager
def observe(model: torch.nn.Module) -> Iterator[None]:
    """Record one training step, forward and backward, for `explain` to show.

    As `torch.profiler.profile` around the step, of which it takes only the order of events: when
    each allreduce was launched, counted in the sections whose backward had started. The inner
    compiler must use AOTAutograd, as Inductor and aot_eager do.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
    """
    ddp = records.ddp_of(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    num_backwards = 0
    launched_after = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.name in _BACKWARDS:
            num_backwards += 1
        elif event.name == _ALLREDUCE and num_backwards:
            launched_after.append(num_backwards)
    records.of(ddp).observation = Observation(
        launched_after=tuple(launched_after), num_backwards=num_backwards
    )
