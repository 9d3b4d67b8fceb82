"""What the calls of a graph cost, and the rates of devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ddpopt.errors import PlanError
from ddpopt.planning.call_costs import call_costs
from ddpopt.planning.device import Device, measure_device

# One byte a second and no arithmetic: seconds are bytes; and the other way round.
BYTES = Device(flops_per_s={torch.float32: 1e30}, bytes_per_s=1)
FLOPS = Device(flops_per_s={torch.float32: 1}, bytes_per_s=1e30)


def trace(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.Graph:
    """Trace a function with fake tensors."""
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def attribute(graph: fx.Graph, name: str, device: Device = BYTES) -> dict[str, Any]:
    """Return a field of each call's cost, by the node's name."""
    costs = call_costs(graph, device)
    return {node: getattr(cost, name) for node, cost in costs.items()}


# ---- Costs of calls ---------------------------------------------------------------------------


def test_a_matrix_product_takes_two_flops_for_each_term() -> None:
    """[8, 16] times [16, 32] is 8 * 16 * 32 products and as many sums."""
    graph = trace(F.linear, torch.ones(8, 16), torch.ones(32, 16), torch.ones(32))
    assert attribute(graph, "flops") == {"t": 0, "addmm": 2 * 8 * 16 * 32}


def test_a_convolution_takes_two_flops_for_each_term() -> None:
    """Each of 2 * 5 * 6 * 6 outputs has 3 * 3 * 3 terms."""
    graph = trace(F.conv2d, torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3))
    assert attribute(graph, "flops")["convolution"] == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def test_the_attention_of_the_cpu_counts_as_two_products() -> None:
    """Torch has no formula under this name, but one for the same operation elsewhere."""
    batch, heads, tokens, width = 2, 3, 8, 16
    graph = trace(F.scaled_dot_product_attention, *[torch.ones(batch, heads, tokens, width)] * 3)
    flops = 2 * (2 * batch * heads * tokens * tokens * width)
    assert attribute(graph, "flops")["_scaled_dot_product_flash_attention_for_cpu"] == flops


def test_a_call_moves_what_it_reads_and_writes_and_a_view_nothing() -> None:
    """A product of [8, 16] and [16, 32] in 4 bytes each."""
    graph = trace(lambda x, w: (x @ w.t()).view(-1), torch.ones(8, 16), torch.ones(32, 16))
    moved = {"t": 0, "mm": 4 * (8 * 16 + 16 * 32 + 8 * 32), "view": 0}
    assert attribute(graph, "moved_bytes") == moved
    assert attribute(graph, "seconds") == moved


def test_the_elements_of_a_tuple_are_moved_by_its_maker_alone() -> None:
    """Taking them out is free."""
    graph = trace(lambda x: torch.max(x, dim=1), torch.ones(8, 16))
    assert attribute(graph, "moved_bytes") == {
        "max_1": 4 * 8 * 16 + (4 + 8) * 8,
        "getitem": 0,
        "getitem_1": 0,
    }


def test_looking_rows_up_does_not_read_the_whole_table() -> None:
    """2 rows of 1,000 with their indices, and the 2 rows written."""
    graph = trace(torch.embedding, torch.ones(1000, 16), torch.tensor([3, 4]))
    assert attribute(graph, "moved_bytes")["embedding"] == 2 * (2 * 16 * 4) + 2 * 8


def test_an_expanded_tensor_is_read_once() -> None:
    """It has 8 rows, which are one row in memory."""
    graph = trace(lambda x, y: x.expand(8, 16) @ y, torch.ones(1, 16), torch.ones(16, 2))
    assert attribute(graph, "moved_bytes")["mm"] == 4 * (16 + 16 * 2 + 8 * 2)


def test_a_pointwise_value_with_one_pointwise_reader_is_never_in_memory() -> None:
    """Exp and neg are one loop, which is launched once; the sum is another."""
    device = Device(flops_per_s={torch.float32: 1e30}, bytes_per_s=1, launch_s=1000)
    graph = trace(lambda x: x.exp().view(32).neg().sum(), torch.ones(4, 8))
    assert attribute(graph, "moved_bytes") == {"exp": 128, "view": 0, "neg": 128, "sum_1": 132}
    assert attribute(graph, "seconds", device) == {
        "exp": 128,
        "view": 0,
        "neg": 1128,
        "sum_1": 1132,
    }


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (e := x.exp()).neg() * e.sum(),
        lambda x: [e := x.exp(), e.neg()],
        lambda x: (e := x.exp()).neg() + e.view(32).view(4, 8).cos(),
    ],
    ids=["two readers", "returned", "two readers, one through views"],
)
def test_a_pointwise_value_with_other_readers_is_written(function: Callable[..., Any]) -> None:
    """Then it has to be in memory."""
    assert attribute(trace(function, torch.ones(4, 8)), "moved_bytes")["exp"] == 256


def test_a_call_is_limited_by_arithmetic_or_by_memory() -> None:
    """The roofline: the larger of the two times; an unknown dtype is as slow as the slowest."""
    rates = {torch.float32: 10.0, torch.bfloat16: 100.0}
    device = Device(flops_per_s=rates, bytes_per_s=2, launch_s=5)
    assert device.seconds(1000, 10, torch.float32) == 100
    assert device.seconds(1000, 10, torch.bfloat16) == 10
    assert device.seconds(1000, 10, torch.float64) == 100
    assert device.seconds(10, 1000) == 500


def test_a_product_runs_at_the_rate_of_its_dtype() -> None:
    """16-bit products are faster than 32-bit ones on most devices."""
    device = Device(flops_per_s={torch.float32: 1, torch.bfloat16: 4}, bytes_per_s=1e30)
    short = trace(torch.mm, *[torch.ones(4, 4, dtype=torch.bfloat16)] * 2)
    assert attribute(short, "seconds", device)["mm"] == 2 * 4**3 / 4
    assert attribute(trace(torch.mm, *[torch.ones(4, 4)] * 2), "seconds", device)["mm"] == 2 * 4**3


def test_a_graph_without_values_is_refused() -> None:
    """Without them there is no size to count."""
    with pytest.raises(PlanError, match=r"node input_1 .* no meta\['val'\]; trace .* make_fx"):
        call_costs(fx.symbolic_trace(nn.ReLU()).graph, BYTES)


def test_a_graph_that_hands_its_input_through_costs_nothing() -> None:
    """It has no calls."""
    assert call_costs(trace(lambda x: x, torch.ones(2)), BYTES) == {}


def test_what_is_written_in_place_is_read_from_its_owner() -> None:
    """A value that an operation in place overwrites is in memory, and fused with nothing."""
    graph = trace(lambda x: x.exp().relu_() @ x, torch.ones(4, 4))
    assert attribute(graph, "moved_bytes")["mm"] == 3 * 64


def test_a_graph_of_symbolic_shapes_is_refused() -> None:
    """Costs are numbers."""
    graph = make_fx(torch.relu, tracing_mode="symbolic")(torch.ones(3, 4)).graph
    with pytest.raises(PlanError, match="symbolic shape"):
        call_costs(graph, BYTES)


# ---- Devices ----------------------------------------------------------------------------------


def test_a_device_is_measured_for_each_dtype() -> None:
    """All rates are positive and finite, which Device itself checks."""
    device = measure_device("cpu", dtypes=(torch.float32, torch.bfloat16))
    assert set(device.flops_per_s) == {torch.float32, torch.bfloat16}
    assert device.launch_s > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops_per_s": {}}, "flops_per_s is empty"),
        ({"flops_per_s": {torch.float32: 0}}, r"flops_per_s\[torch.float32\] is 0"),
        ({"bytes_per_s": math.inf}, "bytes_per_s is inf"),
        ({"launch_s": -1.0}, "launch_s is -1.0"),
    ],
)
def test_a_device_with_impossible_rates_is_refused(changes: dict[str, Any], message: str) -> None:
    """The error names the rate and its value."""
    rates: dict[str, Any] = {"flops_per_s": {torch.float32: 1.0}, "bytes_per_s": 1.0}
    with pytest.raises(PlanError, match=message):
        Device(**{**rates, **changes})
