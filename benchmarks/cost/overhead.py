"""Measure what cutting costs by itself.

    python -m benchmarks.cost.overhead

There are thousands of parameters of four elements, so that a section's own work is next to
nothing, one process, one thread, and an allreduce that does nothing. A tiny matrix product stands
wherever a backward section ends, where the whole backward has no fusion to lose. Models take turns;
differences are taken within each round, and are shown as their median and quartiles. Times are
those of the one thread on its processor, so that they hold on a machine that does other things.
"""
# test: skip, minutes

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.harness.report import spread, table

_MIB = 1024 * 1024
_ELEMENTS = 4
_BYTES = 16  # of a parameter
_WARM_UP_STEPS = 25  # DDP rebuilds its buckets after the first; ddpopt compares them until the 20th
_STEPS_PER_TURN = 3
_ARMS: dict[str, dict[str, Any]] = {
    "unsplit": {"enabled": False},
    "backward": {"enabled": True, "split": "backward"},
    "forward": {"enabled": True, "split": "forward"},
    "unsplit again": {"enabled": False, "split": "backward"},  # how far the figures can be trusted
}

Step = Callable[[], torch.Tensor]


class Times(NamedTuple):
    """Microseconds that a forward, its backward and both took."""

    forward_us: float
    backward_us: float
    step_us: float


class Chain(nn.Module):
    """Multiplies by one tiny parameter after the other; each `period`-th is a matrix."""

    def __init__(self, num_parameters: int, period: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(_ELEMENTS) for _ in range(num_parameters))
        self.period = period

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, factor in enumerate(self.factors, start=1):
            x = x * factor if index % self.period else (x.view(2, 2) @ factor.view(2, 2)).view(-1)
        return x.sum()


def compare_arms(inner: str, num_parameters: int, num_sections: int, rounds: int) -> list[str]:
    """Compile the chain in each way, and measure them in turns; return a table."""
    period = num_parameters // num_sections
    cap_mb = period * _BYTES / _MIB
    # All before the first compile, so that all lie in memory alike.
    chains = {name: Chain(num_parameters, period) for name in _ARMS}
    ddps = {
        name: DistributedDataParallel(chain, bucket_cap_mb=cap_mb) for name, chain in chains.items()
    }
    x = torch.ones(_ELEMENTS)
    steps: dict[str, Step] = {}
    for name, ddp in ddps.items():
        ddp.register_comm_hook(None, noop_hook)
        options = {"inner": inner, **_ARMS[name]}
        compiled = torch.compile(ddp, backend="ddpopt", options=options)
        steps[name] = functools.partial(compiled, x)
        for _ in range(_WARM_UP_STEPS):
            steps[name]().backward()
    times = _take_turns(steps, rounds)
    base = times["unsplit"]
    rows = []
    for name, ddp in ddps.items():
        (cut,) = ddpopt.explain(ddp).cuts
        num_cut = len(cut.sections)
        # What is not cut is divided as if it were, so that its noise can be compared.
        parts = num_cut if num_cut > 1 else num_sections
        more = [
            (own.step_us - its.step_us) / parts for own, its in zip(times[name], base, strict=True)
        ]
        medians = _medians(times[name])
        rows.append(
            (
                name,
                str(max(1, num_cut)),
                *(f"{value_us / 1e3:.2f}" for value_us in medians),
                f"{medians.step_us / _medians(base).step_us:.3f}",
                spread(more).shown(".1f"),
            )
        )
    header = (
        "split", "sections", "forward ms", "backward ms", "step ms", "step of unsplit's",
        "a section adds to the step us",
    )  # fmt: skip
    return table(header, rows)


def _take_turns(steps: Mapping[str, Step], rounds: int) -> dict[str, list[Times]]:
    """Return for each step the medians of each round; what else the machine does falls on all."""
    times: dict[str, list[Times]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, step in steps.items():
            _time(step)  # the caches are the one before's
            times[name].append(_medians([_time(step) for _ in range(_STEPS_PER_TURN)]))
        gc.collect()
    gc.enable()
    return times


def _time(step: Step) -> Times:
    start = time.thread_time()
    loss = step()
    middle = time.thread_time()
    loss.backward()
    stop = time.thread_time()
    return Times((middle - start) * 1e6, (stop - middle) * 1e6, (stop - start) * 1e6)


def _medians(times: Sequence[Times]) -> Times:
    return Times(*(statistics.median(column) for column in zip(*times, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost.overhead", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--sections", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    arms = compare_arms(given.inner, given.parameters, given.sections, given.rounds)
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()
    print(f"\n{given.parameters} parameters, {given.inner}, torch {torch.__version__}\n")
    print("\n".join(arms))


if __name__ == "__main__":
    main()
