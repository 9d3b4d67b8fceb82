"""ByteGrad: rounded as the codes say, equal on all ranks, behind backward; and the codes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import ByteGrad, attach
from ddpopt.algorithms.bytegrad import (
    EPSILON,
    RANGE_BYTES,
    are_finite,
    compress,
    decompress,
    read_ranges,
)
from ddpopt.errors import NonFiniteError
from tests.support.algorithms import flat_weights, lose_rank_1
from tests.support.groups import first_ranks
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import MakeRanks, Ranks

LR = 0.1
CAP_MB = 0.02  # one layer a bucket


def _gradient(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.float().flatten() for p in module.parameters()])


def _setting(
    num_ranks: int,
    options: dict[str, Any],
    model: nn.Module | None = None,
    timeout_s: float = 300,
) -> tuple[Any, Any, Any] | None:
    """Return DDP on the first ranks with a bucket for each layer, its optimizer and the handle."""
    group = first_ranks(num_ranks, timeout_s)
    if group is None:
        return None
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model or MLP(3), process_group=group, bucket_cap_mb=CAP_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    algorithm = ByteGrad(**{"hierarchical": False, **options})
    return ddp, optimizer, attach(ddp, optimizer, algorithm)


def _backward(forward: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    forward(x).float().pow(2).mean().backward()


# ---- one bucket -------------------------------------------------------------------------------


class Vector(nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, num_values: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_values, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _gradient_of(rank: int, num_values: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_values, generator=generator).to(dtype)


def _reduce(
    rank: int, num_ranks: int, num_values: int, dtype: torch.dtype, options: dict[str, Any]
) -> Any:
    setting = _setting(num_ranks, options, Vector(num_values, dtype))
    if setting is None:
        return None
    ddp, _, handle = setting
    ddp(_gradient_of(rank, num_values, dtype)).backward()
    handle.detach(average=False)
    return ddp.module.weight.grad


def _simulate(
    num_ranks: int, num_values: int, dtype: torch.dtype, options: dict[str, Any]
) -> torch.Tensor:
    """All ranks in one process, in plain lists: the slow reference."""
    node = options.get("local_world_size", 1)
    gradients = [_gradient_of(rank, num_values, dtype) for rank in range(num_ranks)]
    nodes = [sum(gradients[k : k + node]) / node for k in range(0, num_ranks, node)]
    chunk = -(-num_values // len(nodes))
    padded = [
        torch.cat([g, torch.zeros(chunk * len(nodes) - num_values, dtype=dtype)]) for g in nodes
    ]
    pieces = []
    for index in range(len(nodes)):
        received = [g[index * chunk : (index + 1) * chunk].view(1, -1) for g in padded]
        mean = torch.cat([decompress(compress(piece)) for piece in received]).mean(0)
        pieces.append(decompress(compress(mean.view(1, -1))).view(-1))
    return torch.cat(pieces)[:num_values].to(dtype)


CASES = [
    (2, 100, torch.float32, {}),
    (3, 100, torch.float32, {}),  # padded
    (4, 3, torch.float32, {}),  # a chunk of padding only
    (4, 101, torch.float32, {}),
    (3, 50, torch.bfloat16, {}),
    (2, 50, torch.float16, {}),
    (2, 50, torch.float64, {}),
    (4, 101, torch.float32, {"hierarchical": True, "local_world_size": 2}),
]


@pytest.mark.parametrize(("num_ranks", "num_values", "dtype", "options"), CASES)
def test_a_bucket_is_reduced_as_the_simulator_does(
    four_ranks: Ranks, num_ranks: int, num_values: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """It is bitwise equal on all ranks, also on those that computed a chunk themselves."""
    gradients = four_ranks.run(_reduce, num_ranks, num_values, dtype, options)[:num_ranks]
    expected = _simulate(num_ranks, num_values, dtype, options)
    for gradient in gradients:
        assert torch.equal(gradient, gradients[0])
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("num_ranks", [6, 8])
def test_a_bucket_is_reduced_as_the_simulator_does_on_more_ranks(
    eight_ranks: Ranks, num_ranks: int
) -> None:
    case = (num_ranks, 50, torch.float32, {})
    gradients = eight_ranks.run(_reduce, *case)[:num_ranks]
    for gradient in gradients:
        assert torch.equal(gradient, gradients[0])
        torch.testing.assert_close(gradient, _simulate(*case))


@pytest.mark.parametrize(
    ("num_ranks", "options"), [(1, {}), (2, {"hierarchical": True, "local_world_size": 2})]
)
def test_nothing_is_compressed_where_nothing_leaves_the_node(
    four_ranks: Ranks, num_ranks: int, options: dict[str, Any]
) -> None:
    gradients = four_ranks.run(_reduce, num_ranks, 50, torch.float32, options)[:num_ranks]
    mean = sum(_gradient_of(rank, 50, torch.float32) for rank in range(num_ranks)) / num_ranks
    for gradient in gradients:
        torch.testing.assert_close(gradient, mean, rtol=1e-6, atol=1e-7)


# ---- training ---------------------------------------------------------------------------------


def _train(rank: int, num_ranks: int, is_compressed: bool) -> Any:
    """Train with ByteGrad or DDP's own allreduce; the second micro-batch of two is synchronised."""
    setting = _setting(num_ranks, {})
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    if not is_compressed:
        handle.detach()
    gradients = []
    inputs = batches(rank, [(8, WIDTH)] * 12)
    for first, second in zip(inputs[::2], inputs[1::2], strict=True):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(first).pow(2).mean().backward()
        ddp(second).pow(2).mean().backward()
        optimizer.step()
        gradients.append(_gradient(ddp))
    counts = (handle.num_steps, handle.num_communications)
    handle.detach()
    return gradients, flat_weights(ddp), counts


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_training_is_close_to_allreduce(four_ranks: Ranks, num_ranks: int) -> None:
    """Gradients and weights are bitwise equal on all ranks, and close to those of DDP alone."""
    results = four_ranks.run(_train, num_ranks, True)[:num_ranks]
    exact_gradients, exact_weights, _ = four_ranks.run(_train, num_ranks, False)[0]
    first_gradients, first_weights, _ = results[0]
    for gradients, weights, (num_steps, num_communications) in results:
        assert num_steps == 6
        assert num_communications > 6  # more than one bucket
        assert torch.equal(weights, first_weights)
        torch.testing.assert_close(weights, exact_weights, rtol=0, atol=1e-4)
        for step, reference in enumerate(exact_gradients):
            assert torch.equal(gradients[step], first_gradients[step])
            assert not torch.equal(gradients[step], reference)
            # The codes of several ranks are rounded, and then those of the mean.
            width = float(reference.max() - reference.min())
            assert (gradients[step] - reference).abs().max() < width / 40


def _compile(rank: int, split: str) -> Any:
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        setting = _setting(2, {}, MLP(3, bias=False))
        assert setting is not None
        ddp, optimizer, handle = setting
        options = {"inner": "aot_eager", "split": split}
        forward = torch.compile(ddp, backend="ddpopt", options=options) if is_compiled else ddp
        torch._dynamo.utils.counters.clear()
        for x in batches(rank, [(8, WIDTH)] * 5):
            _backward(forward, optimizer, x)
            optimizer.step()
        results.append((flat_weights(ddp), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        handle.detach(average=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = DistributedDataParallel(MLP(3, bias=False), bucket_cap_mb=CAP_MB)
    forward = torch.compile(plain, backend="ddpopt", options=options)
    for x in batches(rank, [(8, WIDTH)] * 5):
        _backward(forward, torch.optim.SGD(plain.parameters(), lr=LR), x)
    return *results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_compiled_training_equals_eager_and_adds_no_graphs(ranks: Ranks, split: str) -> None:
    for (eager, _), (compiled, num_graphs), num_plain in ranks.run(_compile, split):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
        assert num_graphs == num_plain > 0


class Optional(nn.Module):
    """A model of which a part is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = MLP(2)
        self.unused = MLP(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _train_with(rank: int, ddp_options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = MLP(2) if "gradient_as_bucket_view" in ddp_options else Optional()
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    handle = attach(ddp, optimizer, ByteGrad(hierarchical=False))
    messages = []
    for step, x in enumerate(batches(rank, [(8, WIDTH)] * 5)):
        bad = x.fill_(float("nan")) if (rank, step % 3) == (0, 0) else x
        try:
            _backward(ddp, optimizer, bad)
        except NonFiniteError as error:
            messages.append(str(error)[:19])
        else:
            optimizer.step()
    handle.detach(average=False)
    return messages, flat_weights(ddp)


@pytest.mark.quick("ddp_options0")
@pytest.mark.parametrize(
    "ddp_options",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
)
def test_nan_is_raised_in_its_step_under_ddps_options(
    ranks: Ranks, ddp_options: dict[str, Any]
) -> None:
    """The first step, in which a static graph's buckets are reduced elsewhere, is one of them."""
    results = ranks.run(_train_with, ddp_options)
    for messages, weights in results:
        assert messages == ["gradients in step 1", "gradients in step 4"]
        assert torch.equal(weights, results[0][1])


# ---- what goes wrong --------------------------------------------------------------------------


def _poison(rank: int, options: dict[str, Any], value: float) -> Any:
    """Train with bad gradients on one rank once, where all leave the update out."""
    setting = _setting(4, options)
    assert setting is not None
    ddp, optimizer, handle = setting
    message = ""
    for step, x in enumerate(batches(rank, [(2, WIDTH)] * 3)):
        bad = x.fill_(value) if (rank, step) == (1, 1) else x
        try:
            _backward(ddp, optimizer, bad)
        except NonFiniteError as error:
            message = str(error)
        else:
            optimizer.step()
    handle.detach(average=False)
    return message, flat_weights(ddp)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hierarchical": True, "local_world_size": 2},
        {"hierarchical": True, "local_world_size": 4},
    ],
)
def test_gradients_not_finite_on_one_rank_are_raised_by_backward_on_all(
    four_ranks: Ranks, options: dict[str, Any], value: float
) -> None:
    """DDP is in order afterwards: training can go on."""
    results = four_ranks.run(_poison, options, value)
    for message, weights in results:
        assert message.startswith("gradients in step 2 are NaN")
        assert weights.isfinite().all()
        assert torch.equal(weights, results[0][1])


def _die(rank: int) -> str:
    setting = _setting(3, {}, timeout_s=20)
    if setting is None:
        return ""
    ddp, optimizer, handle = setting
    return lose_rank_1(rank, handle, lambda: _backward(ddp, optimizer, torch.ones(2, WIDTH)))


def test_a_killed_rank_fails_the_backward_of_the_others(make_ranks: MakeRanks) -> None:
    errors = make_ranks(3).run_survivors({0, 2}, _die)
    for rank in (0, 2):
        assert re.match(r"reducing gradients in step [234] failed: ", errors[rank])
        assert "another rank has ended" in errors[rank]


# ---- codes -------------------------------------------------------------------------------------


# Bagua's values with the clamp: values, codes, what they are decompressed to.
GOLDEN = [
    ([-1, 0, 1], [0, 127, 255], [-0.996078, 0, 1.003922]),
    ([-0.5, 0.25, 0.5], [1, 192, 255], [-0.498039, 0.25098, 0.498039]),
    ([0, 0.1, 0.2, 0.3], [0, 85, 170, 255], [0, 0.1, 0.2, 0.3]),
    ([-3, -1, 2], [0, 102, 255], [-3, -1, 2]),
]

FLOATS = st.floats(-1e6, 1e6, width=32)
BLOCKS = st.lists(st.lists(FLOATS, min_size=7, max_size=7), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@pytest.mark.parametrize(("values", "codes", "decoded"), GOLDEN)
def test_golden_values_have_golden_codes(
    values: list[float], codes: list[int], decoded: list[float]
) -> None:
    message = compress(torch.tensor([values], dtype=torch.float32))
    assert message.dtype == torch.uint8
    assert _codes(message).tolist() == [codes]
    torch.testing.assert_close(
        decompress(message), torch.tensor([decoded], dtype=torch.float32), rtol=1e-6, atol=1e-6
    )


def _codes(message: torch.Tensor) -> torch.Tensor:
    return message[:, RANGE_BYTES:]


def _reference(values: list[float]) -> tuple[list[int], torch.Tensor]:
    """The codes of one value after the other, as [Note: codes] says, and what they stand for."""
    x = torch.tensor(values, dtype=torch.float32)
    scale = 255 / (x.max() - x.min() + EPSILON)
    highest = torch.round(x.max() * scale)
    lowest = highest - 255
    codes = [
        int(torch.clamp(torch.minimum(torch.round(v * scale), highest) - lowest, 0, 255)) for v in x
    ]
    return codes, torch.stack([(code + lowest) / scale for code in codes])


@given(BLOCKS)
def test_each_chunk_is_compressed_as_if_alone(block: list[list[float]]) -> None:
    message = compress(torch.tensor(block))
    decoded = decompress(message)
    for index, values in enumerate(block):
        codes, expected = _reference(values)
        assert _codes(message)[index].tolist() == codes
        assert torch.equal(decoded[index], expected)


@given(BLOCKS, DTYPES)
def test_at_most_half_a_level_is_lost(block: list[list[float]], dtype: torch.dtype) -> None:
    """Values that are large for their range lose float32's rounding besides."""
    values = torch.tensor(block).clamp(-6e4, 6e4).to(dtype)
    lost = (decompress(compress(values)) - values.float()).abs()
    exact = values.float()
    width = exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)
    rounding = exact.abs().amax(1, keepdim=True) * 5e-7
    assert (lost <= (width + EPSILON) / 510 * 1.00001 + rounding).all()


@given(st.lists(FLOATS, min_size=1, max_size=9))
def test_zero_stays_zero(values: list[float]) -> None:
    decoded = decompress(compress(torch.tensor([[*values, 0.0]])))
    assert decoded[0, -1] == 0


@given(FLOATS, st.integers(1, 5))
def test_equal_values_stay_as_they_are(value: float, num_values: int) -> None:
    values = torch.full((2, num_values), value)
    torch.testing.assert_close(decompress(compress(values)), values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("values", [[1e5, 1e5 + 1], [-1e5 - 1, -1e5], [1e-30, 0.0], [0.0, 0.0]])
def test_values_that_are_large_for_their_range_do_not_wrap(values: list[float]) -> None:
    """Their levels are beyond what float32 counts by one, where codes of 256 come from."""
    chunk = torch.tensor([values])
    torch.testing.assert_close(decompress(compress(chunk)), chunk, rtol=1e-6, atol=3e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ranges_of_half_precision_are_float32(dtype: torch.dtype) -> None:
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    ranges = read_ranges(compress(values))
    assert ranges.dtype == torch.float32
    assert torch.equal(ranges[:, 1], values.amax(1).float())
    assert torch.equal(compress(values), compress(values.float()))


@pytest.mark.parametrize(
    "values",
    [
        [float("nan"), 1.0],
        [float("inf"), 1.0],
        [float("-inf"), float("inf")],
        [3e38, -3e38],
        [1e35, 1e35],
        [-1e35, -1e35],
    ],
)
def test_ranges_show_what_cannot_be_compressed(values: list[float]) -> None:
    """They show it after a mean of what was decompressed too: that is how ranks tell each other."""
    bad = torch.tensor([values])
    message = compress(torch.cat([torch.ones(1, 2), bad]))
    assert are_finite(message[:1])
    assert not are_finite(message)
    mean = decompress(message).mean(dim=0, keepdim=True)
    assert not are_finite(compress(mean))


def test_a_chunk_is_read_wherever_its_row_begins() -> None:
    """Rows of 15 bytes are not aligned to floats."""
    message = compress(torch.randn(3, 7))
    assert (message.dtype, message.shape) == (torch.uint8, (3, 15))
    for row, part in enumerate(torch.split(message.view(-1), 15)):
        assert torch.equal(decompress(part.view(1, -1))[0], decompress(message)[row])
