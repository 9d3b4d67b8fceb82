"""Measure how the cost of planning and cutting grows: `python -m benchmarks.cost.scale`.

Graphs are made by hand, as Dynamo and AOTAutograd make them: layers of one matrix product and
pointwise calls. For the forward split the clock runs from the call of the backend to the first
call of the inner compiler, for the backward split while a backward graph is read, planned, cut, and
compared with its sections.
What the compilers themselves take is in neither. Times are those of the one thread on its
processor, so that they hold on a machine that does other things as well. An exponent is the power
of the number of calls (or of sections) that fits the times best.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.report import table
from ddpopt.backend import backend
from ddpopt.reducer import Parameter, ReducerRules, predict_buckets
from ddpopt.split.arrival import final_places, order_arrival
from ddpopt.split.backward import make_section_graphs
from ddpopt.split.cut import Cut
from ddpopt.split.facts import ReachableMemory, read_backward
from ddpopt.split.proof import prove_backward
from ddpopt.split.sections import choose_backward_sections

_MIB = 1024 * 1024
_WIDTH = 2
_BYTES = _WIDTH * _WIDTH * 4  # of a parameter
_CALLS = 10  # of a layer
_SECTIONS = 10  # while calls vary
_FIT_FROM = 1000  # calls; below, what does not depend on the size counts
_REPEATS = 5
_ENOUGH_S = 5.0
_aten = torch.ops.aten


class Row(NamedTuple):
    num_calls: int
    num_sections: int
    seconds: float


class _ReachedInnerError(Exception):
    """Stops a compilation where our own work is done."""


def measure_forward(num_calls: int, num_sections: int) -> Row:
    """Plan and split a forward graph for that many buckets."""
    module = nn.Module()
    module.weights = nn.ParameterList(
        torch.ones(_WIDTH, _WIDTH) for _ in range(num_calls // _CALLS)
    )
    ddp = DistributedDataParallel(module, bucket_cap_mb=_cap_bytes(num_calls, num_sections) / _MIB)
    gm = forward_graph(len(module.weights))
    inputs = [*module.weights, torch.ones(_WIDTH, _WIDTH)]
    first_sections: list[float] = []

    def inner(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        first_sections.append(time.thread_time())
        raise _ReachedInnerError

    def once() -> float:
        first_sections.clear()
        start = time.thread_time()
        try:
            with ddp._inside_ddp_forward():
                backend(gm, inputs, options={"inner": inner})
        except _ReachedInnerError:
            return first_sections[0] - start
        raise AssertionError("the graph was not split")

    return Row(num_calls, num_sections, _median(once))


def forward_graph(num_layers: int) -> fx.GraphModule:
    """Return a graph like Dynamo's."""
    graph, with_value = _new_graph("example_value", requires_grad=True)
    weights = [with_value(graph.placeholder(f"weight_{i}")) for i in range(num_layers)]
    x = with_value(graph.placeholder("x"))
    for weight in weights:
        x = with_value(graph.call_function(F.linear, (x, weight)))
        for _ in range(_CALLS - 1):
            x = with_value(graph.call_function(torch.sin, (x,)))
    graph.output((x,))
    return fx.GraphModule(nn.Module(), graph)


def measure_backward(num_calls: int, num_sections: int) -> Row:
    """Read, plan, cut and prove a backward graph for that many buckets."""
    num_layers = num_calls // _CALLS
    gm = backward_graph(num_layers)
    parameters = [
        Parameter(index=i, name=f"weights.{i}", num_bytes=_BYTES, group="float32 on cpu")
        for i in range(num_layers)
    ]
    arguments = {i: i for i in range(num_layers)}
    reachable = ReachableMemory(memory_of={f"primals_{i}": i for i in range(num_layers)})
    rules = ReducerRules(caps_bytes=(_cap_bytes(num_calls, num_sections),), is_rebuilt=True)
    num_made = []

    def once() -> float:
        start = time.thread_time()
        facts = read_backward(gm, reachable)
        final = final_places(facts, arguments, ())
        buckets = predict_buckets(order_arrival(parameters, final), rules)
        cuts = choose_backward_sections(facts, buckets, arguments, final)
        sections = make_section_graphs(gm, cuts, reachable)
        arrival = tuple(parameters)
        plan = Cut(graph="", inner="", num_nodes=0, sections=cuts.sections, arrival=arrival)
        prove_backward(gm, plan, sections, reachable, arguments)
        num_made.append(len(sections))
        return time.thread_time() - start

    seconds = _median(once)
    return Row(num_calls, num_made[-1], seconds)


def backward_graph(num_layers: int) -> fx.GraphModule:
    """Return a graph like AOTAutograd's: saved values and a tangent to gradients."""
    graph, with_value = _new_graph("val", requires_grad=False)

    def call(target: Any, *arguments: Any) -> fx.Node:
        return with_value(graph.call_function(target, arguments))

    weights = [with_value(graph.placeholder(f"primals_{i}")) for i in range(num_layers)]
    saved = [with_value(graph.placeholder(f"saved_{i}")) for i in range(num_layers)]
    gradient = with_value(graph.placeholder("tangents_1"))
    of_weights = []
    for weight, value in reversed(list(zip(weights, saved, strict=True))):
        for _ in range(_CALLS - 5):
            gradient = call(_aten.mul.Tensor, gradient, value)
        transposed = call(_aten.permute.default, gradient, [1, 0])
        product = call(_aten.mm.default, transposed, value)
        scaled = call(_aten.neg.default, product)
        of_weights.append(call(_aten.permute.default, scaled, [1, 0]))
        gradient = call(_aten.mm.default, gradient, weight)
    output = graph.output(tuple(reversed(of_weights)))
    output.meta["desc"] = [GradAOTOutput(PlainAOTInput(i)) for i in range(num_layers)]
    return fx.GraphModule(nn.Module(), graph)


def _new_graph(key: str, *, requires_grad: bool) -> tuple[fx.Graph, Callable[[fx.Node], fx.Node]]:
    """Return a graph, and what gives a node the fake tensor that compilers find under `key`."""
    fake_mode = FakeTensorMode()

    def with_value(node: fx.Node) -> fx.Node:
        with fake_mode:
            node.meta[key] = torch.empty(_WIDTH, _WIDTH, requires_grad=requires_grad)
        return node

    return fx.Graph(), with_value


def _cap_bytes(num_calls: int, num_sections: int) -> int:
    return math.ceil(num_calls / _CALLS / num_sections) * _BYTES


def _median(once: Callable[[], float]) -> float:
    """Return the median of some calls, of fewer where they take long."""
    times = []
    gc.collect()
    gc.disable()
    while len(times) < _REPEATS and sum(times) < _ENOUGH_S:
        times.append(once())
    gc.enable()
    return statistics.median(times)


def _table(split: str, rows: Sequence[Row]) -> list[str]:
    cells = (
        (
            split,
            str(row.num_calls),
            str(row.num_sections),
            f"{row.seconds:.3f}",
            f"{row.seconds / row.num_calls * 1e6:.0f}",
        )
        for row in rows
    )
    return table(("split", "calls", "sections", "seconds", "us a call"), cells)


def exponent(rows: Sequence[Row], column: str) -> float:
    """Return the power of a size that fits the times best: the slope among logarithms."""
    sizes = [math.log(getattr(row, column)) for row in rows]
    return statistics.linear_regression(sizes, [math.log(row.seconds) for row in rows]).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--calls", type=_numbers, default=[100, 1000, 3000, 10000, 25000, 50000])
    parser.add_argument("--sections", type=_numbers, default=[10, 30, 100, 300, 1000])
    parser.add_argument("--at-calls", type=int, default=20000, help="while sections vary")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, one core")
    for split, measure in (("forward", measure_forward), ("backward", measure_backward)):
        by_calls = [measure(number, _SECTIONS) for number in given.calls]
        by_sections = [measure(given.at_calls, number) for number in given.sections]
        print("\n".join(["", *_table(split, by_calls + by_sections), ""]))
        large = [row for row in by_calls if row.num_calls >= _FIT_FROM]
        print(
            f"{split}: calls to the power of {exponent(large, 'num_calls'):.2f} (from {_FIT_FROM} "
            f"on), sections to the power of {exponent(by_sections, 'num_sections'):.2f}"
        )
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
