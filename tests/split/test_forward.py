"""The sections of a forward give the results of the whole graph, bitwise; how they are compiled."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import Reason
from ddpopt.split.cut import Section
from ddpopt.split.facts import read_forward
from ddpopt.split.forward import copy_for_cutting, make_stitched_graph
from ddpopt.split.nodes import call_nodes
from tests.support.beside import Beside, compiled
from tests.support.cuts import only_cut
from tests.support.graphs import Capture, forward_of
from tests.support.models import MLP, assert_equal_states, batches, state_of, twins
from tests.system.fuzzing.subclasses import pair, unpair

CAP = {"bucket_cap_mb": 0.03}


def _section(index: int, start: int, stop: int) -> Section:
    return Section(index=index, start=start, stop=stop, first_node="", parameters=(), completes=())


def test_a_copy_has_the_hooks_on_saved_tensors() -> None:
    """AOTAutograd's cache tells graphs by them, and no node refers to them."""
    pack, unpack = (torch.fx.symbolic_trace(f) for f in (lambda x: x + 1, lambda x: x - 1))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        capture = _capture(MLP(1), torch.ones(2, 64))
    hooks = {n: m for n, m in capture.gm.named_children() if n.startswith("saved_tensors_hooks")}
    assert len(hooks) == 2
    assert hooks.items() <= dict(copy_for_cutting(capture.gm).named_children()).items()


def _capture(module: nn.Module, *inputs: torch.Tensor, **options: Any) -> Capture:
    torch._dynamo.reset()
    capture = Capture()
    torch.compile(module, backend=capture, fullgraph=True, **options)(*inputs)
    return capture


def _split_at(capture: Capture, cuts: list[int]) -> torch.fx.GraphModule:
    copied = copy_for_cutting(capture.gm)
    bounds = [0, *cuts, len(call_nodes(copied.graph))]
    return make_stitched_graph(
        copied,
        [_section(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(bounds))],
    )


def _assert_same(split: torch.fx.GraphModule, capture: Capture) -> None:
    """Outputs and gradients are equal to the bit."""
    ours, whole = (_run(gm, capture.example_inputs) for gm in (split, capture.gm))
    # Squares of squares overflow, and then both are NaN.
    torch.testing.assert_close(ours, whole, rtol=0, atol=0, equal_nan=True)


def _run(gm: torch.nn.Module, inputs: list[Any]) -> list[torch.Tensor]:
    """Return the outputs and the gradients of their sum with respect to all leaves."""
    leaves = [i.detach().requires_grad_(i.requires_grad) for i in inputs]
    outputs = [o for o in gm(*leaves) if o.requires_grad]
    grads = torch.autograd.grad(
        sum(o.sum() for o in outputs), [i for i in leaves if i.requires_grad], allow_unused=True
    )
    return [*outputs, *(g for g in grads if g is not None)]


def _write_in_place(values: list[torch.Tensor]) -> torch.Tensor:
    """Write to the second value in place, and return the last one."""
    values[1].add_(values[-1])
    return values[-1]


def _write_through_a_view(values: list[torch.Tensor]) -> torch.Tensor:
    """Write to a column of the second value in place, and return one made of the last."""
    values[1][:, 0].mul_(2)
    return values[-1] + 1


OPERATIONS = (
    lambda p, values: values[-1] @ p,
    lambda p, values: values[-1].relu(),
    lambda p, values: values[0] + values[-1],
    lambda p, values: torch.cat(values[-1].split(2, dim=1)[::-1], dim=1),
    lambda p, values: F.layer_norm(values[-1], (4,), p[0]),
    lambda p, values: torch.stack([values[-1], values[0]]).sum(0),
    lambda p, values: values[-1].t(),
    lambda p, values: values[-1].max(dim=1, keepdim=True)[0] * values[-1],
    lambda p, values: _write_in_place(values),
    lambda p, values: _write_through_a_view(values),
)


_CHAINS = st.lists(st.integers(0, len(OPERATIONS) - 1), min_size=3, max_size=12)


@settings(deadline=None, max_examples=12)
@given(_CHAINS, st.data())
def test_random_graphs_split_anywhere_legal_give_bitwise_equal_results(
    chosen: list[int], data: st.DataObject
) -> None:
    """Outputs and gradients are equal, for random chains with random skips and any legal cuts."""
    _check_chain(chosen, data)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(_CHAINS, st.data())
def test_many_random_graphs_give_bitwise_equal_results(
    chosen: list[int], data: st.DataObject
) -> None:
    _check_chain(chosen, data)


def _check_chain(chosen: list[int], data: st.DataObject) -> None:

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        values = [x @ p[0], x * 2, x @ p[1]]  # the second is written to in place
        for position, choice in enumerate(chosen):
            values.append(OPERATIONS[choice](p[position % 2], values))
        return values[-1] + values[1]

    torch.manual_seed(len(chosen))
    capture = _capture(forward_of(forward, (4, 4), (4, 4)), torch.randn(4, 4))
    legal = read_forward(copy_for_cutting(capture.gm), {}).legal_bounds
    places = [p for p, is_legal in enumerate(legal) if is_legal]
    cuts = sorted(data.draw(st.sets(st.sampled_from(places)))) if places else []
    stitched = _split_at(capture, cuts)
    assert len(stitched.graph.find_nodes(op="call_module")) == len(cuts) + 1
    _assert_same(stitched, capture)


def test_copies_of_both_kinds_at_one_boundary_stand_in_their_sections() -> None:
    """split_module wants the calls of each section together where there is an autocast region."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            detached, written = x @ p[0], x * 2
            written.add_(1)  # the second section begins here
            return (written @ p[1]) * detached.detach()

    capture = _capture(forward_of(forward, (4, 4), (4, 4)), torch.randn(4, 4))
    names = [node.name for node in call_nodes(copy_for_cutting(capture.gm).graph)]
    (cut,) = (place for place, name in enumerate(names) if name.startswith("add_"))
    stitched = _split_at(capture, [cut])
    kinds = [str(node.target) for part in stitched.children() for node in call_nodes(part.graph)]
    assert kinds.index("detach") < kinds.index("clone")
    _assert_same(stitched, capture)


def test_what_is_copied_of_a_tensor_is_copied_behind_writes_to_the_tensor() -> None:
    """Elements of a tuple are taken right where it is made, and elements of a tensor are not."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ p[0]
        y.add_(1)
        return y[[0, 1]]

    capture = _capture(forward_of(forward, (4, 4)), torch.randn(4, 4))
    _assert_same(copy_for_cutting(capture.gm), capture)


def test_dynamos_graph_is_left_as_it_is() -> None:
    """Dynamo goes on using it."""
    capture = _capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    before = capture.gm.print_readable(print_output=False)
    sources = [n._dynamo_source for n in capture.gm.graph.find_nodes(op="placeholder")]
    _split_at(capture, [1])
    assert capture.gm.print_readable(print_output=False) == before
    assert [n._dynamo_source for n in capture.gm.graph.find_nodes(op="placeholder")] == sources


def test_sections_carry_dynamos_metadata() -> None:
    """They have sources of parameters, None for values of another section, and the compile id."""
    capture = _capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    section = _split_at(capture, [1]).get_submodule("submod_1")
    sources = [n._dynamo_source for n in section.graph.find_nodes(op="placeholder")]
    assert [source is None for source in sources] == [True, False, False]
    assert section.meta["dynamo_compile_id"] == capture.gm.meta["dynamo_compile_id"]
    assert section._param_name_to_source is capture.gm._param_name_to_source


def test_a_higher_order_ops_body_keeps_its_own_metadata() -> None:
    """The policy of a checkpoint lives there."""

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
    """They are needed both as values and as sizes of tensors."""

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x @ p[0]).reshape(x.shape[0] * 2, 2).relu().reshape(x.shape[0], 4)) @ p[1]

    x = torch.randn(6, 4)
    capture = _capture(forward_of(forward, (4, 4), (4, 4)), x, dynamic=True)
    inputs = [int(i) if isinstance(i, torch.SymInt) else i for i in capture.example_inputs]
    assert any(isinstance(i, int) for i in inputs)
    for cut in range(1, len(call_nodes(capture.gm.graph))):
        stitched = _split_at(capture, [cut])
        assert torch.equal(stitched(*inputs)[0], capture.gm(*inputs)[0])


class _FailsOn:
    """An inner compiler that raises on its `n`-th call."""

    __name__ = "fails"

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.n -= 1
        if self.n == 0:
            raise ZeroDivisionError("no such kernel")
        return gm.forward


def test_a_section_that_cannot_be_compiled_costs_overlap_not_training(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph is compiled whole; one warning names the section and the error."""
    beside = Beside(MLP(), ddp_options=CAP, inner=_FailsOn(2))
    beside.train(batches(0, [(2, 64)] * 3))
    (text,) = [r.message for r in caplog.records if Reason.SECTION_FAILED.value in r.message]
    for word in ("ZeroDivisionError", "section 1 of 3", "no such kernel"):
        assert word in text
    assert not beside.cut.sections


def test_what_fails_whole_too_raises_what_the_unsplit_compile_raises(one_rank: None) -> None:
    """The error says nothing about sections."""
    raised = []
    for enabled in (True, False):
        torch._dynamo.reset()
        model = compiled(DistributedDataParallel(MLP(), **CAP), _never_compiles, enabled=enabled)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
            model(torch.randn(2, 64))
        raised.append(str(error.value).splitlines()[:2])
    assert raised[0] == raised[1]
    assert "ZeroDivisionError: no such machine" in raised[0][1]


def _never_compiles(_gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
    raise ZeroDivisionError("no such machine")


@pytest.mark.slow
def test_a_section_sees_the_strides_that_inductor_chose_for_the_one_before(one_rank: None) -> None:
    """A convolution's output changes to channels last; the next section must not assume else."""

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    options = {"inner": "inductor", "layout_optimization": True}
    beside = Beside(Convolutions(), ddp_options={"bucket_cap_mb": 0.002}, **options)
    beside.train(batches(0, [(2, 8, 6, 6)] * 2))
    assert len(beside.cut.sections) == 2


def test_each_backward_compile_sees_its_own_sections_metadata(one_rank: None) -> None:
    """It does also when backward runs for some sections only, and in another order."""
    seen: list[tuple[int, int]] = []

    def inner(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        num_inputs = len(example_inputs)

        def backward_compiler(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
            metadata = torch._guards.TracingContext.get().fw_metadata
            seen.append((num_inputs, len(metadata.input_info)))
            return make_boxed_func(graph.forward)

        return aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            bw_compiler=backward_compiler,
        )(gm, example_inputs)

    class Uneven(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            second = self.layers[1](first.relu()) + self.layers[2](x) * self.layers[3](x)
            return second, first

    ddp = DistributedDataParallel(Uneven(4), bucket_cap_mb=0.01, find_unused_parameters=True)
    second, first = compiled(ddp, inner)(torch.randn(2, 64))
    torch.autograd.grad(first.sum(), [ddp.module.layers[0].weight], retain_graph=True)
    second.sum().backward()
    assert len(seen) == len(only_cut(ddp).sections) >= 2
    assert len({n for n, _ in seen}) > 1, "the sections must differ for this test to mean anything"
    assert all(num_inputs == num_recorded for num_inputs, num_recorded in seen)


class _Summing(MLP):
    """An auxiliary loss that every layer adds to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        auxiliary = x.new_zeros(())
        for layer in self.layers:
            x = layer(x).relu()
            auxiliary += x.square().mean()
        return x + auxiliary


class _Filling(MLP):
    """A result that every layer writes its part of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x.new_zeros(x.shape[0], len(self.layers), x.shape[1])
        for i, layer in enumerate(self.layers):
            x = layer(x).sigmoid()
            result[:, i] = x
        return result


class _Residual(MLP):
    """A stream that every layer adds to in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            x += layer(x.tanh())
        return x


class _Scaling(MLP):
    """A stream that every layer multiplies in place, whose old value the gradients need."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for layer in self.layers:
            x.mul_(layer(x.tanh()).sigmoid())
        return x


@pytest.mark.quick("_Summing-eager")
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("model", [_Summing, _Filling, _Residual, _Scaling])
def test_a_value_that_all_sections_write_to_is_passed_on_as_a_copy(
    one_rank: None, model: type[MLP], inner: str
) -> None:
    """No section's backward finds what it saved changed, and every bucket has its section."""
    beside = Beside(model(), ddp_options=CAP, inner=inner)
    beside.train(batches(0, [(2, 64)] * 4))
    assert len(beside.cut.sections) == 3


@pytest.mark.slow
def test_retain_graph_is_right_when_the_cache_has_a_backward_without(one_rank: None) -> None:
    """Inductor's cache does not tell backwards that overwrite saved tensors from others."""
    x = torch.randn(8, 64)
    counters.clear()
    with fresh_cache():
        for retain_graph in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            eager, ddp = twins(MLP(4), **CAP)
            for forward in (eager, compiled(ddp, "inductor", split="forward")):
                loss = forward(x).sigmoid().sum()
                if retain_graph:
                    loss.backward(retain_graph=True)
                loss.backward()
            assert_equal_states(state_of(ddp), state_of(eager))
    assert counters["inductor"]["fxgraph_cache_hit"] > 0


# ---- Functions that Dynamo does not look into ----------------------------------------------------


@dataclasses.dataclass
class _Pair:
    first: torch.Tensor
    second: torch.Tensor


torch.utils._pytree.register_dataclass(_Pair)


@torch._dynamo.nonstrict_trace
def _mix(pair: _Pair, options: dict[str, float]) -> tuple[_Pair, dict[str, list[torch.Tensor]]]:
    mixed = _Pair(pair.first * options["scale"], pair.second + pair.first.sin())
    return mixed, {"more": [pair.first.tanh()]}


@torch._dynamo.nonstrict_trace
def _double(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


class _Untraced(MLP):
    """Calls with pytrees, and one with a tensor, in several sections; one is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place in (1, 3):
                pair, more = _mix(_Pair(x, x + 1), {"scale": 2.0})
                x = pair.first + pair.second + more["more"][0]
            if place in (2, 4):
                x = _double(x)
        return x


def test_a_function_that_dynamo_does_not_look_into_is_called_in_its_section(one_rank: None) -> None:
    """The graph has the function, and the structure of its arguments, as attributes."""
    beside = Beside(_Untraced(), ddp_options={"bucket_cap_mb": 0.02}, split="forward")
    beside.train(batches(0, [(4, 64)] * 3))
    assert beside.cut.fallback is None
    assert len(beside.cut.sections) > 2


def test_sections_get_tensors_that_are_attributes_as_arguments() -> None:
    """So they are in torch 2.11 with inline_inbuilt_nn_modules off; no section has its own."""
    gm = torch.fx.symbolic_trace(forward_of(lambda p, x: (x @ p[0]).relu() @ p[0], (4, 4)))
    stitched = make_stitched_graph(copy_for_cutting(gm), [_section(0, 0, 2), _section(1, 2, 3)])
    sections = [stitched.get_submodule(f"submod_{k}") for k in range(2)]
    assert [list(section.parameters()) for section in sections] == [[], []]
    x = torch.randn(4, 4)
    assert torch.equal(stitched(x), gm(x))


def test_a_write_to_a_view_of_an_attribute_reaches_the_attribute() -> None:
    """As the view of an input, so that of an attribute is no value of the graph's own to copy."""
    count = torch.zeros(2, 2)
    graph = torch.fx.Graph()
    values = [graph.get_attr("count")]
    values.append(graph.call_method("view", (values[0], 4)))
    result = graph.call_method("relu", (graph.placeholder("x"),))
    values.append(graph.call_method("add_", (values[1], 1)))
    graph.output(result)
    for node, value in zip(values, [count, count.view(4), count.view(4)], strict=True):
        node.meta["example_value"] = value
    root = nn.Module()
    root.register_buffer("count", count)
    gm = torch.fx.GraphModule(root, graph)
    stitched = make_stitched_graph(copy_for_cutting(gm), [_section(0, 0, 2), _section(1, 2, 3)])
    stitched(torch.ones(2))
    assert count.sum() == 4


class _InParts(MLP):
    """Returns a tensor that consists of two, then one, and a view of that one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = super().forward(x)
        plain = x[:, :6] * 2
        return pair(x * 2, x * 3), plain, plain.view(-1, 2, 2)


def test_a_composite_tensor_may_be_returned_beside_plain_ones(one_rank: None) -> None:
    """Compiled code returns its parts, so a view would be made of one in place of the plain one."""

    def loss_of(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
        one, other = unpair(output[0])
        return (one * other).mean() + output[1].pow(2).mean() + output[2].pow(2).mean()

    beside = Beside(_InParts(3), ddp_options=CAP, loss_of=loss_of, split="forward")
    beside.step(torch.randn(4, 64))
    assert len(beside.cut.sections) > 1
