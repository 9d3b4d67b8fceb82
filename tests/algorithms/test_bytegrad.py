"""ByteGrad beside its simulator, equal on all ranks, behind backward; and the codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddpopt.algorithms import ByteGrad
from ddpopt.algorithms.bytegrad import (
    EPSILON,
    RANGE_BYTES,
    are_finite,
    compress,
    decompress,
    read_ranges,
)
from ddpopt.errors import NonFiniteError
from tests.algorithms import step_machine
from tests.algorithms.simulators import BesideSimulator, codes_of, flat_gradients
from tests.support.algorithms import ALGORITHMS, Trial, inputs_of
from tests.support.models import MLP
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import Ranks

FLAT = ALGORITHMS["ByteGrad"]
CAP_MB = 0.02  # one layer a bucket


class Vector(nn.Module):
    """One parameter, and so one bucket; its gradient is about the input."""

    def __init__(self, num_values: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_values, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + x


@on_ranks()
@pytest.mark.parametrize(
    ("num_ranks", "num_values", "dtype", "options"),
    [
        (1, 50, torch.float32, {}),
        (2, 100, torch.float32, {}),
        (3, 100, torch.float32, {}),  # padded
        (4, 3, torch.float32, {}),  # a chunk of padding only
        (3, 50, torch.bfloat16, {}),
        (2, 50, torch.float16, {}),
        (2, 50, torch.float64, {}),
        (2, 50, torch.float32, {"hierarchical": True, "local_world_size": 2}),
        (4, 101, torch.float32, {"hierarchical": True, "local_world_size": 2}),
        (6, 50, torch.float32, {}),
    ],
)
def test_a_bucket_is_reduced_as_the_simulator_does(
    num_ranks: int, num_values: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """It is bitwise equal on all ranks, also on those that computed a chunk themselves.

    Nothing is compressed where nothing leaves the node.
    """
    beside = BesideSimulator(
        ByteGrad(**{"hierarchical": False, **options}),
        lambda: Vector(num_values, dtype),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        shape=(num_values,),
    )
    for _ in range(3):
        beside.step()
        first, *others = gather(beside.model.weight.grad)
        assert all(torch.equal(first, other) for other in others)
    beside.handle.detach(average=False)


@pytest.mark.quick("4")
@pytest.mark.parametrize("num_scripts", [4, 12])
def test_whatever_a_loop_does_bytegrad_trains_as_its_simulator(
    ranks: Ranks, num_scripts: int
) -> None:
    """See `step_machine`."""
    step_machine.check(ranks, FLAT, num_scripts)


@on_ranks(3)
def test_training_is_close_to_allreduce(rank: int) -> None:
    """Gradients are bitwise equal on all ranks, and close to those of DDP alone."""
    coded, exact = (Trial(FLAT, MLP(3), bucket_cap_mb=CAP_MB) for _ in range(2))
    exact.handle.detach()
    for x in inputs_of(rank, 6):
        for trial in (coded, exact):
            trial.step(x)
        found, expected = flat_gradients(coded.model), flat_gradients(exact.model)
        first, *others = gather(found)
        assert all(torch.equal(first, other) for other in others)
        # The codes of several ranks are rounded, and then those of the mean.
        width = float(expected.max() - expected.min())
        assert 0 < (found - expected).abs().max() < width / 40
    torch.testing.assert_close(coded.weights, exact.weights, rtol=0, atol=1e-3)
    assert coded.handle.num_communications > 6  # more than one bucket
    coded.handle.detach()


# ---- what goes wrong --------------------------------------------------------------------------


class Optional(nn.Module):
    """A model of which a part is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = MLP(2)
        self.unused = MLP(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _train_beside_bad_values(rank: int, trial: Trial, value: float) -> None:
    """Rank 1 has a bad value in steps 1 and 4, in which all raise; then training goes on."""
    for step, x in enumerate(inputs_of(rank, 5), 1):
        if step not in (1, 4):
            trial.step(x)
            continue
        with pytest.raises(NonFiniteError, match=f"in step {step} "):
            trial.backward(x.fill_(value) if rank == 1 else x)
    first, *others = gather(trial.weights)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)
    trial.handle.detach(average=False)


@on_ranks(2)
@pytest.mark.quick("Optional-ddp_options0")
@pytest.mark.parametrize(
    ("make_model", "ddp_options"),
    [
        (Optional, {"static_graph": True}),
        (Optional, {"find_unused_parameters": True}),
        (MLP, {"gradient_as_bucket_view": True}),
    ],
)
def test_nan_is_raised_in_its_step_under_ddps_options(
    rank: int, make_model: Any, ddp_options: dict[str, Any]
) -> None:
    """The first step, in which a static graph's buckets are reduced elsewhere, is one of them."""
    trial = Trial(FLAT, make_model(), bucket_cap_mb=CAP_MB, **ddp_options)
    _train_beside_bad_values(rank, trial, torch.nan)


@on_ranks(4)
@pytest.mark.parametrize(
    ("node_size", "value"), [(1, torch.nan), (1, torch.inf), (2, torch.nan), (4, torch.inf)]
)
def test_gradients_not_finite_on_one_rank_are_raised_by_backward_on_all(
    rank: int, node_size: int, value: float
) -> None:
    """A node of all ranks compresses nothing, and raises too."""
    algorithm = ByteGrad(hierarchical=node_size > 1, local_world_size=node_size)
    _train_beside_bad_values(rank, Trial(algorithm, bucket_cap_mb=CAP_MB), value)


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


@given(BLOCKS)
def test_each_chunk_is_compressed_as_if_alone(block: list[list[float]]) -> None:
    message = compress(torch.tensor(block))
    decoded = decompress(message)
    for index, values in enumerate(block):
        codes, expected = codes_of(torch.tensor(values))
        assert _codes(message)[index].tolist() == codes.tolist()
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


def test_values_much_smaller_than_the_largest_of_their_chunk_become_zero() -> None:
    """In a chunk of their own they are kept, as with buckets that are small enough."""
    large, small = torch.linspace(-1, 1, 8), torch.linspace(-1e-3, 1e-3, 8)
    beside_large = decompress(compress(torch.cat([large, small])[None]))[0, 8:]
    assert torch.equal(beside_large, torch.zeros(8))
    alone = decompress(compress(torch.stack([large, small])))[1]
    torch.testing.assert_close(alone, small, rtol=0, atol=1e-5)


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
