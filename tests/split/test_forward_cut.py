"""Splitting a graph and running the pieces gives what the graph gives, bitwise."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddpopt.split.forward_cut import copy_for_splitting, split_forward
from ddpopt.split.forward_plan import read_facts
from ddpopt.split.nodes import call_nodes
from ddpopt.split.plan import Section
from tests.split.test_forward_facts import Capture, forward_of


def _section(index: int, start: int, stop: int) -> Section:
    return Section(index=index, start=start, stop=stop, first_node="", parameters=(), completes=())


def _capture(module: nn.Module, *inputs: torch.Tensor, **options: Any) -> Capture:
    torch._dynamo.reset()
    capture = Capture()
    torch.compile(module, backend=capture, fullgraph=True, **options)(*inputs)
    return capture


def _split_at(capture: Capture, cuts: list[int]) -> torch.fx.GraphModule:
    copied = copy_for_splitting(capture.gm)
    bounds = [0, *cuts, len(call_nodes(copied.graph))]
    return split_forward(
        copied,
        [_section(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(bounds))],
    )


def _run(gm: torch.nn.Module, inputs: list[Any]) -> list[torch.Tensor]:
    """Return the outputs and the gradients of their sum with respect to all leaves."""
    leaves = [i.detach().requires_grad_(i.requires_grad) for i in inputs]
    outputs = [o for o in gm(*leaves) if o.requires_grad]
    grads = torch.autograd.grad(
        sum(o.sum() for o in outputs), [i for i in leaves if i.requires_grad], allow_unused=True
    )
    return [*outputs, *(g for g in grads if g is not None)]


OPERATIONS = (
    lambda p, values: values[-1] @ p,
    lambda p, values: values[-1].relu(),
    lambda p, values: values[0] + values[-1],
    lambda p, values: torch.cat(values[-1].split(2, dim=1)[::-1], dim=1),
    lambda p, values: F.layer_norm(values[-1], (4,), p[0]),
    lambda p, values: torch.stack([values[-1], values[0]]).sum(0),
    lambda p, values: values[-1].t(),
    lambda p, values: values[-1].max(dim=1, keepdim=True)[0] * values[-1],
    lambda p, values: (values[1].add_(values[-1]), values[-1])[1],
    lambda p, values: (values[1][:, 0].mul_(2), values[-1] + 1)[1],
)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, len(OPERATIONS) - 1), min_size=3, max_size=12), st.data())
def test_random_graphs_split_anywhere_legal_give_bitwise_equal_results(
    chosen: list[int], data: st.DataObject
) -> None:
    """Outputs and gradients, for random chains with random skips and any set of legal cuts."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        values = [x @ p[0], x * 2, x @ p[1]]  # the second is written to in place
        for position, choice in enumerate(chosen):
            values.append(OPERATIONS[choice](p[position % 2], values))
        return values[-1] + values[1]

    torch.manual_seed(len(chosen))
    capture = _capture(forward_of(forward, (4, 4), (4, 4)), torch.randn(4, 4))
    legal = read_facts(copy_for_splitting(capture.gm), {}).legal_cuts
    places = [p for p, is_legal in enumerate(legal) if is_legal]
    cuts = sorted(data.draw(st.sets(st.sampled_from(places)))) if places else []
    stitched = _split_at(capture, cuts)
    assert len(stitched.graph.find_nodes(op="call_module")) == len(cuts) + 1
    for split, whole in zip(
        _run(stitched, capture.example_inputs),
        _run(capture.gm, capture.example_inputs),
        strict=True,
    ):
        # Squares of squares overflow, and then both are NaN.
        torch.testing.assert_close(split, whole, rtol=0, atol=0, equal_nan=True)


def test_the_given_graph_is_left_as_it_is() -> None:
    """Dynamo goes on using it."""
    capture = _capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    before = capture.gm.print_readable(print_output=False)
    sources = [n._dynamo_source for n in capture.gm.graph.find_nodes(op="placeholder")]
    _split_at(capture, [1])
    assert capture.gm.print_readable(print_output=False) == before
    assert [n._dynamo_source for n in capture.gm.graph.find_nodes(op="placeholder")] == sources


def test_sections_carry_dynamos_metadata() -> None:
    """Sources of parameters, None for what another section computed, and the compile id."""
    capture = _capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    section = _split_at(capture, [1]).get_submodule("submod_1")
    sources = [n._dynamo_source for n in section.graph.find_nodes(op="placeholder")]
    assert [source is None for source in sources] == [True, False, False]
    assert section.meta["dynamo_compile_id"] == capture.gm.meta["dynamo_compile_id"]
    assert section._param_name_to_source is capture.gm._param_name_to_source


def test_a_higher_order_ops_body_keeps_its_own_metadata() -> None:
    """A checkpoint's policy lives there."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.utils.checkpoint.checkpoint(lambda v: (v @ p[0]).relu(), x, use_reentrant=False)
        return y @ p[1]

    capture = _capture(forward_of(forward, (4, 4), (4, 4)), torch.randn(4, 4))
    body = next(n.target for n in capture.gm.graph.find_nodes(op="get_attr"))
    capture.gm.get_submodule(body).meta["policy"] = "kept"
    first = _split_at(capture, [1]).get_submodule("submod_0")
    assert first.get_submodule(body).meta["policy"] == "kept"
    assert "policy" not in first.meta


def test_symbolic_sizes_become_inputs_of_the_sections_that_need_them() -> None:
    """Both as values and as sizes of tensors."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x @ p[0]).reshape(x.shape[0] * 2, 2).relu().reshape(x.shape[0], 4)) @ p[1]

    x = torch.randn(6, 4)
    capture = _capture(forward_of(forward, (4, 4), (4, 4)), x, dynamic=True)
    inputs = [int(i) if isinstance(i, torch.SymInt) else i for i in capture.example_inputs]
    assert any(isinstance(i, int) for i in inputs)
    for cut in range(1, len(call_nodes(capture.gm.graph))):
        stitched = _split_at(capture, [cut])
        assert torch.equal(stitched(*inputs)[0], capture.gm(*inputs)[0])
