"""Measure what cutting costs by itself.

    python -m benchmarks.cost.overhead

There are thousands of parameters of four elements, so that a section's own work is next to
nothing, one process, one thread, and an allreduce that does nothing. The first table compares
compiled models. A tiny matrix product stands wherever a backward section ends, where the whole
backward has no fusion to lose. The second table has no compiler in it: gates and sections that do
nothing, by how many gradients each releases. Whatever is compared takes turns; differences are
taken within each round, and are shown as their median and quartiles. Times are those of the one
thread on its processor, so that they hold on a machine that does other things as well.
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
from benchmarks.harness.report import Spread, spread, table
from ddpopt._events import Label
from ddpopt.split.backward_plan import ANY
from ddpopt.split.runtime import Boxed, CompiledSection, GatedGraph, run_first_section

_MIB = 1024 * 1024
_ELEMENTS = 4
_BYTES = 16  # of a parameter
_WARM_UP_STEPS = 25  # DDP rebuilds its buckets after the first; ddpopt compares them until the 20th
_STEPS_PER_TURN = 3
_GATES = 50
_PARAMETERS_PER_SECTION = (0, 10, 40)
_ARMS: dict[str, dict[str, Any]] = {
    "unsplit": {"enabled": False},
    "backward": {"enabled": True, "split": "backward"},
    "forward": {"enabled": True, "split": "forward"},
    "unsplit again": {"enabled": False, "split": "backward"},  # how far the figures can be trusted
}
_DEVICE = torch.device("cpu")

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


# ---- compiled models --------------------------------------------------------------------------


def compare_arms(inner: str, num_parameters: int, num_sections: int, rounds: int) -> list[str]:
    """Compile the chain in each way, and measure them in turns; return a table."""
    # All before the first compile, so that all lie in memory alike.
    period = num_parameters // num_sections
    ddps = {name: _wrap(Chain(num_parameters, period)) for name in _ARMS}
    models, first_steps_s = {}, {}
    for name, options in _ARMS.items():
        start_s = time.perf_counter()
        models[name] = _compile(ddps[name], {"inner": inner, **options})
        first_steps_s[name] = time.perf_counter() - start_s
    x = torch.ones(_ELEMENTS)
    steps = {name: functools.partial(model, x) for name, model in models.items()}
    times = _take_turns(steps, rounds)
    base = times["unsplit"]
    rows = []
    for name, ddp in ddps.items():
        (plan,) = ddpopt.explain(ddp).plans
        # What is not cut is divided as if it were, so that its noise can be compared.
        num_cut = len(plan.sections)
        _, backward, step = _differences(
            times[name], base, num_cut if num_cut > 1 else num_sections
        )
        medians = _medians(times[name])
        rows.append(
            (
                name,
                str(max(1, num_cut)),
                *(f"{value_us / 1e3:.2f}" for value_us in medians),
                f"{medians.step_us / _medians(base).step_us:.3f}",
                backward.shown(".1f"),
                step.shown(".1f"),
                f"{first_steps_s[name]:.0f}",
            )
        )
    header = (
        "split", "sections", "forward ms", "backward ms", "step ms", "step of unsplit's",
        "a section adds to backward us", "to the step us", "first steps s",
    )  # fmt: skip
    return table(header, rows)


def _wrap(chain: Chain) -> DistributedDataParallel:
    ddp = DistributedDataParallel(chain, bucket_cap_mb=chain.period * _BYTES / _MIB)
    ddp.register_comm_hook(None, noop_hook)
    return ddp


def _compile(ddp: DistributedDataParallel, options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    compiled: Callable[..., torch.Tensor] = torch.compile(ddp, backend="ddpopt", options=options)
    for _ in range(_WARM_UP_STEPS):
        compiled(torch.ones(_ELEMENTS)).backward()
    return compiled


# ---- gates and empty sections -----------------------------------------------------------------


class _Forward(torch.autograd.Function):
    """Stands for the node that AOTAutograd makes."""

    @staticmethod
    def forward(ctx: Any, backward: Boxed, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.made = backward
        return torch.zeros(()), arguments[-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, *ctx.made(list(gradients)))


def measure_gates(num_parameters: int, rounds: int) -> Sequence[str]:
    """Compare a graph with `_GATES` gates with one whose first section releases everything."""
    whole = _empty_graph(num_parameters, num_gates=0)
    gated = _empty_graph(num_parameters, num_gates=_GATES)
    times = _take_turns({"whole": whole, "gated": gated}, rounds)
    forward, backward, _ = _differences(times["gated"], times["whole"], _GATES)
    return (str(num_parameters), forward.shown(".1f"), backward.shown(".1f"))


def _empty_graph(num_parameters: int, num_gates: int) -> Step:
    """Return a forward whose backward has `num_gates` sections of so many parameters each."""
    total = num_parameters * _GATES
    # The last one is for the first section to release.
    arguments = [nn.Parameter(torch.zeros(_ELEMENTS)) for _ in range(total + 1)]
    chunks = [range(k * num_parameters, (k + 1) * num_parameters) for k in range(num_gates)]
    further = [_empty_section(chunk) for chunk in chunks]
    in_first = [total] if num_gates else range(total + 1)
    backward = run_first_section(
        _empty_section(in_first),
        range(total + 2),
        token_argument=total + 1,
        num_kept=num_gates + 1,
        device=_DEVICE,
        has_descent=False,
    )
    graph = GatedGraph(functools.partial(_forward, backward), further, _DEVICE, num_outputs=0)
    return lambda: graph(*arguments)[0]


def _empty_section(released: Sequence[int]) -> CompiledSection:
    """Return a section that takes what the one before it kept, and releases ready gradients."""
    made = [torch.zeros(1), *(torch.zeros(_ELEMENTS) for _ in released)]

    def call(values: list[Any]) -> Sequence[Any]:
        values.clear()
        return made

    return CompiledSection(
        call=call,
        takes=(2,),
        keeps=(2,),
        drops=(2,),
        releases=tuple(released),
        descent=(ANY,) * len(released),
        label=Label("empty", 0),
    )


def _forward(backward: Boxed, *arguments: torch.Tensor) -> Sequence[torch.Tensor]:
    made: Sequence[torch.Tensor] = _Forward.apply(backward, *arguments)
    return made


# ---- measuring --------------------------------------------------------------------------------


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


def _differences(times: Sequence[Times], base: Sequence[Times], parts: int) -> list[Spread]:
    """Return by how much forward, backward and both differ from `base`, for each of the parts."""
    columns = zip(zip(*times, strict=True), zip(*base, strict=True), strict=True)
    return [
        spread([(a - b) / parts for a, b in zip(column, base_column, strict=True)])
        for column, base_column in columns
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--sections", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gates = [measure_gates(number, 2 * given.rounds) for number in _PARAMETERS_PER_SECTION]
    arms = compare_arms(given.inner, given.parameters, given.sections, given.rounds)
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()
    header = ("parameters a section", "gate, forward us", "gate and section, backward us")
    print(f"\n{given.parameters} parameters, {given.inner}, torch {torch.__version__}\n")
    print("\n".join([*arms, "", *table(header, gates)]))


if __name__ == "__main__":
    main()
