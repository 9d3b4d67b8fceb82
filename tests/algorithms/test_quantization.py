"""MinMaxUInt8: golden codes, what is lost at most, and what shows that values are not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.algorithms.bytegrad import (
    EPSILON,
    RANGE_BYTES,
    are_finite,
    compress,
    decompress,
    read_ranges,
)

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
    """One value after the other, as [Note: codes] says."""
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
    """Beside float32 rounding of values that are large for their range."""
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
    given_ = torch.tensor([values])
    torch.testing.assert_close(decompress(compress(given_)), given_, rtol=1e-6, atol=3e-3)


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
    """Also after a mean of what was decompressed, which is how ranks tell each other."""
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
