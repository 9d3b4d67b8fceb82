"""Profiles from the graph alone, compared with hand formulas and with real backward passes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ddpopt.errors import PlanError
from ddpopt.planning import Device, estimates, measure_device
from ddpopt.planning.costs import Gradient, Profile
from ddpopt.planning.estimates import call_costs, estimate, scale
from ddpopt.split import state
from tests.support.models import MLP, WAYS, Blocks, state_of

FLOPS = Device(flops_per_s={torch.float32: 1}, bytes_per_s=1e30)  # seconds are FLOPs
DEVICE = Device(flops_per_s={torch.float32: 4e10}, bytes_per_s=1e10, launch_s=2e-6)


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, tokens, width)), 0.1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class GPT(nn.Module):
    """Like GPT-2, its embedding tied to the head, with positions as a buffer."""

    def __init__(self, *, width: int = 32, depth: int = 2, heads: int = 4, words: int = 50) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("positions", torch.arange(16))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Output:
        x = self.words(tokens) + self.places(self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)


class ConvNet(nn.Module):
    """Convolutions with batch norms, in-place activations and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        return self.head(F.relu_(x + self.body(x)).mean((2, 3)))


TOKENS = torch.zeros(2, 16, dtype=torch.int64)
IMAGES = torch.randn(2, 3, 12, 12)


def _names(profile: Profile) -> list[str]:
    return [gradient.name for gradient in profile.gradients]


def _total(output: Any) -> torch.Tensor:
    if isinstance(output, Output):
        return output.logits.sum() if output.loss is None else output.loss
    return output.sum()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (MLP(), (torch.randn(4, 64),)),
        (GPT(), (TOKENS, TOKENS)),
        (GPT(), (TOKENS,)),
        (ConvNet(), (IMAGES,)),
    ],
    ids=["MLP", "GPT with a loss", "GPT", "conv net"],
)
def test_gradients_are_in_the_order_in_which_hooks_see_them(
    model: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> None:
    """The hooks are those of an eager backward; a tied weight comes once, at its last use."""
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    _total(model(*inputs)).backward()
    assert _names(estimate(model, inputs, device=DEVICE)) == seen


def test_times_follow_from_flops_and_rates() -> None:
    """Two layers of 16 by 16 and 8 rows; the first one needs no gradient of its input."""
    model = MLP(depth=2, width=16)
    profile = estimate(model, torch.randn(8, 16), device=FLOPS)
    product = 2 * 8 * 16 * 16
    assert profile.forward_s == pytest.approx(2 * product)
    assert profile.backward_s == pytest.approx(3 * product)
    ready_s = {gradient.name: gradient.ready_s for gradient in profile.gradients}
    # The gradient of the input is made before that of the weight.
    assert ready_s["layers.1.weight"] == pytest.approx(2 * product)
    assert ready_s["layers.0.weight"] == pytest.approx(3 * product)


def test_gradients_have_the_sizes_and_groups_of_their_parameters() -> None:
    """Parameters of one dtype on one device are a group."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[0].register_forward_hook(lambda module, args, output: output.double())
    gradients = estimate(model, torch.ones(2, 4), device=DEVICE).gradients
    assert {g.name: (g.num_bytes, g.group) for g in gradients} == {
        "0.weight": (64, "torch.float32 on cpu"),
        "0.bias": (16, "torch.float32 on cpu"),
        "1.weight": (128, "torch.float64 on cpu"),
        "1.bias": (32, "torch.float64 on cpu"),
    }


def test_a_model_on_the_meta_device_has_the_same_profile() -> None:
    """A meta model is traced as if it were on the accelerator, or on the CPU if there is none."""
    with torch.device("meta"):
        planned = GPT()
    inputs = {"tokens": TOKENS, "targets": TOKENS}
    expected = estimate(GPT(), inputs, device=DEVICE)
    if torch.accelerator.current_accelerator(check_available=True) is None:
        assert estimate(planned, inputs, device=DEVICE) == expected
    else:
        assert _names(estimate(planned, inputs, device=DEVICE)) == _names(expected)


def test_a_large_model_is_planned_without_its_memory() -> None:
    """Layers as wide as GPT-2-large's; its parameters stay on the meta device."""
    with torch.device("meta"):
        model = GPT(width=1280, depth=2, heads=20, words=50257)
    profile = estimate(model, TOKENS.to("meta"), device=DEVICE)
    assert profile.num_bytes == sum(4 * p.numel() for p in model.parameters())
    assert all(p.is_meta for p in model.parameters())
    assert _names(profile)[-1] == "words.weight"


def test_an_unused_parameter_is_ready_at_the_end_and_a_frozen_one_never() -> None:
    """The Reducer waits for the first, and has nothing to do with the second."""
    model = MLP(depth=3)
    model.unused = nn.Parameter(torch.ones(3))
    model.layers[1].bias.requires_grad_(False)
    profile = estimate(model, torch.randn(2, 64), device=DEVICE, loss_fn=torch.sum)
    assert _names(profile)[-1] == "unused"
    assert profile.gradients[-1].ready_s == profile.backward_s
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(_names(profile)) == sorted(trained)


@pytest.mark.parametrize("is_returned", [False, True])
def test_what_only_an_unknown_loss_uses_is_ready_first(is_returned: bool) -> None:
    """As the weight of a policy's or a language model's output layer; DDP refuses unused ones."""
    model = MLP(depth=3)
    model.head = nn.Linear(64, 64, bias=False)
    if is_returned:
        model.register_forward_hook(lambda module, args, output: (output, module.head.weight))
    profile = estimate(model, torch.randn(2, 64), device=DEVICE)
    assert _names(profile)[0] == "head.weight"


def test_a_parameter_used_by_two_layers_is_ready_after_its_last_gradient() -> None:
    """Tied weights are one parameter, with the name that named_parameters() gives."""
    model = MLP(depth=4)
    model.layers[3].weight = model.layers[0].weight
    assert _names(estimate(model, torch.randn(2, 64), device=DEVICE))[-1] == "layers.0.weight"


@pytest.mark.parametrize(
    "arrange",
    [
        lambda out: out,
        lambda out: {"loss": out.sum(), "hidden": out},
        lambda out: {"hidden": [out, "name"]},
        lambda out: Output(loss=out.sum(), logits=out),
        lambda out: Output(loss=None, logits=out),
        lambda out: (out,),
    ],
    ids=["tensor", "dict with a loss", "dict", "dataclass with a loss", "dataclass", "tuple"],
)
def test_the_loss_is_found_in_what_the_model_returns(arrange: Callable[..., Any]) -> None:
    """All of these are the sum of the same tensor."""
    model = MLP(depth=2)
    expected = estimate(model, torch.ones(2, 64), device=DEVICE)
    model.register_forward_hook(lambda module, args, output: arrange(output))
    assert estimate(model, torch.ones(2, 64), device=DEVICE) == expected


def test_a_loss_function_is_called_with_the_models_output() -> None:
    """The model returns the outputs of two layers; the loss is computed from the first."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.forward = lambda x: {name: layer(x) for name, layer in model.items()}
    profile = estimate(model, torch.ones(2, 4), device=DEVICE, loss_fn=lambda out: out["a"].sum())
    at_end = [g.name for g in profile.gradients if g.ready_s == profile.backward_s]
    assert at_end[-2:] == ["b.weight", "b.bias"]


def test_the_loss_ends_forward() -> None:
    """A loss that multiplies matrices adds its FLOPs to forward."""
    model, x = nn.Linear(16, 16, bias=False), torch.ones(8, 16)
    profile = estimate(model, x, device=FLOPS, loss_fn=lambda out: (out @ out.t().detach()).sum())
    assert profile.forward_s == pytest.approx(2 * 8 * 16 * 16 + 2 * 8 * 16 * 8)


def test_a_checkpointed_forward_is_computed_again_in_backward() -> None:
    """Backward then has all products of forward once more."""

    class Checkpointed(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forward = super().forward
            return checkpoint(lambda x: forward(x) * 2, x, use_reentrant=False)

    x = torch.ones(8, 64)
    plain, again = (estimate(model, x, device=FLOPS) for model in (MLP(), Checkpointed()))
    assert again.forward_s == pytest.approx(plain.forward_s)
    assert again.backward_s == pytest.approx(plain.backward_s + plain.forward_s)


def test_neither_the_model_nor_random_numbers_change() -> None:
    """Buffers of batch norms, gradients and the generator stay as they were; no_grad is no harm."""
    model = nn.Sequential(ConvNet(), nn.Dropout(0.5))
    before, generator = state_of(model), torch.get_rng_state()
    with torch.no_grad():
        estimate(model, IMAGES, device=DEVICE)
    after = state_of(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_without_rates_those_of_the_models_device_and_dtypes_are_measured() -> None:
    model, x = MLP(depth=2).bfloat16(), torch.ones(2, 64, dtype=torch.bfloat16)
    rates = Device(flops_per_s={torch.bfloat16: 1e9}, bytes_per_s=1e9)
    with mock.patch.object(estimates, "measure_device", return_value=rates) as measure:
        profile = estimate(model, x)
    measure.assert_called_once_with(torch.device("cpu"), [torch.bfloat16])
    assert profile == estimate(model, x, device=rates)
    assert profile.source == "estimated"


class DataDependent(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Constant(MLP):
    constant = torch.ones(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.constant


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (nn.ReLU(), torch.ones(2), "no parameter of ReLU exists"),
        (nn.Linear(2, 2).requires_grad_(False), torch.ones(2), "no parameter .* requires grad"),
        (DataDependent(), torch.ones(2, 64), "DataDependent cannot be traced .*torch.where"),
        (DataDependent().to("meta"), torch.ones(2, 64), "DataDependent cannot be traced"),
        (MLP(), torch.ones(2, 63), "MLP cannot be traced .* inputs must fit"),
        (MLP(), 3, "batch is a int"),
        (nn.Embedding(4, 4, sparse=True), torch.tensor([1]), "gradient of weight is sparse"),
    ],
)
def test_a_model_that_cannot_be_estimated_is_refused_with_a_remedy(
    model: nn.Module, inputs: Any, message: str
) -> None:
    """The error names the model and the reason."""
    with pytest.raises(PlanError, match=message):
        estimate(model, inputs, device=DEVICE)


def test_tensors_in_attributes_are_constants() -> None:
    """A rotary table is one, which the model made in an earlier forward."""
    expected = estimate(MLP(), torch.ones(2, 64), device=DEVICE)
    assert len(estimate(Constant(), torch.ones(2, 64), device=DEVICE).gradients) == len(
        expected.gradients
    )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, r"the loss is a tensor of shape \(2, 64\); it must be a tensor of one"),
        (lambda out: out.sum().detach(), "depends on a parameter"),
        (lambda out: 3.0, r"the loss is a float; it must be a tensor"),
    ],
)
def test_a_loss_must_be_a_scalar_with_a_gradient(loss: Callable[..., Any], message: str) -> None:
    """Backward runs from it."""
    with pytest.raises(PlanError, match=message):
        estimate(MLP(), torch.ones(2, 64), device=DEVICE, loss_fn=loss)


def test_an_output_without_a_floating_tensor_needs_a_loss() -> None:
    """The largest element's index has no gradient; the error asks for a loss."""
    model = MLP()
    model.register_forward_hook(lambda module, args, output: output.argmax())
    with pytest.raises(PlanError, match="give a loss"):
        estimate(model, torch.ones(2, 64), device=DEVICE)


# ---- Measured times ---------------------------------------------------------------------------

PROFILE = Profile(
    gradients=(
        Gradient(name="b", num_bytes=4, ready_s=1.0),
        Gradient(name="a", num_bytes=8, ready_s=3.0),
    ),
    backward_s=3.0,
    forward_s=1.0,
    between_s=0.5,
    source="estimated",
)


def test_a_profile_is_stretched_to_measured_times() -> None:
    """Gradients keep their order and their share of backward; the rest stays."""
    scaled = scale(PROFILE, forward_s=5.0, backward_s=6.0)
    assert [(g.name, g.num_bytes, g.ready_s) for g in scaled.gradients] == [
        ("b", 4, 2.0),
        ("a", 8, 6.0),
    ]
    assert (scaled.forward_s, scaled.backward_s, scaled.between_s) == (5.0, 6.0, 0.5)
    assert scaled.source == "estimated, scaled"


@pytest.mark.parametrize("backward_s", [0.1, 0.7, 1e-9, 123.456])
def test_rounding_leaves_no_gradient_behind_the_end(backward_s: float) -> None:
    """Profile would refuse a gradient that is ready after its backward."""
    last = dataclasses.replace(PROFILE.gradients[1], ready_s=0.3)
    profile = Profile(gradients=(last,), backward_s=0.3)
    assert scale(profile, 0.0, backward_s).gradients[0].ready_s <= backward_s


def test_a_backward_of_no_time_cannot_be_stretched() -> None:
    """A measured time of less than nothing is refused too."""
    with pytest.raises(PlanError, match="backward_s is 0"):
        scale(Profile(gradients=(Gradient(name="a", num_bytes=1, ready_s=0),), backward_s=0), 1, 1)
    with pytest.raises(PlanError, match="is -1"):
        scale(PROFILE, 1.0, -1.0)


@pytest.mark.quick("torch.compile(DDP(m))")
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_estimated_as_it_is_uncompiled(one_rank: None, way: str) -> None:
    """That holds for all ways to compile it; `plan` and the command line estimate too."""
    torch.manual_seed(0)
    ddp = WAYS[way](Blocks(), lambda: {"backend": "ddpopt", "options": {"inner": "eager"}}, {})
    profile, expected = (
        estimate(model, torch.randn(4, 64), device=DEVICE)
        for model in (state.ddp_of(ddp).module, Blocks())
    )
    times = {g.name.replace("_orig_mod.", ""): g.ready_s for g in profile.gradients}
    assert times == {g.name: g.ready_s for g in expected.gradients}


# ---- What calls cost, and the rates of devices --------------------------------------------------

# One byte a second and no arithmetic: seconds are bytes; and the other way round.
BYTES = Device(flops_per_s={torch.float32: 1e30}, bytes_per_s=1)


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
    """Its 8 rows are one row in memory."""
    graph = trace(lambda x, y: x.expand(8, 16) @ y, torch.ones(1, 16), torch.ones(16, 2))
    assert attribute(graph, "moved_bytes")["mm"] == 4 * (16 + 16 * 2 + 8 * 2)


def test_a_value_with_one_reader_in_the_same_loop_is_never_in_memory() -> None:
    """Exp, neg and sum are one loop, which is launched once; the product is a library's."""
    device = Device(flops_per_s={torch.float32: 1e30}, bytes_per_s=1, launch_s=1000)
    graph = trace(lambda x: x.exp().view(32).neg().sum() + (x @ x.t()).sum(), torch.ones(4, 8))
    moved_bytes, seconds = attribute(graph, "moved_bytes"), attribute(graph, "seconds", device)
    expected = {"exp": 128, "view": 0, "neg": 0, "mm": 4 * (32 + 32 + 16)}
    assert {name: moved_bytes[name] for name in expected} == expected
    assert [seconds[name] for name in ("exp", "neg", "mm")] == [128, 0, 1000 + expected["mm"]]


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
    """A value that is fused with one reader has to be in memory for the other."""
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
    """Nodes that make_fx has not traced have no size to count."""
    with pytest.raises(PlanError, match=r"node input_1 .* no meta\['val'\]; trace .* make_fx"):
        call_costs(fx.symbolic_trace(nn.ReLU()).graph, BYTES)


def test_a_call_that_returns_nothing_has_no_value_and_is_no_error() -> None:
    """It reads what it is given, here one byte; a call that is used has to have a value."""
    graph = trace(lambda x: (torch._assert_async(x.any()), x.exp())[1], torch.ones(4))
    assert attribute(graph, "moved_bytes")["_assert_async"] == 1


def test_a_graph_that_hands_its_input_through_costs_nothing() -> None:
    """Its graph has no calls."""
    assert call_costs(trace(lambda x: x, torch.ones(2)), BYTES) == {}


def test_a_value_that_is_written_in_place_is_read_from_memory() -> None:
    """An operation in place overwrites what is in memory, and is fused with nothing."""
    graph = trace(lambda x: x.exp().relu_() @ x, torch.ones(4, 4))
    assert attribute(graph, "moved_bytes")["mm"] == 3 * 64


def test_a_graph_of_symbolic_shapes_is_refused() -> None:
    """Costs are numbers, and a symbol's is not known."""
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
