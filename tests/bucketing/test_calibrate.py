"""What `calibrate` does on a GPU, shown without one; `test_rebucket.py` measures real ranks."""

from __future__ import annotations

from unittest import mock

import torch

from ddpopt.bucketing import calibrate


def test_products_beside_an_allreduce_do_not_wait_for_it() -> None:
    """Only for their own stream: else each would seem to take as long as the allreduce."""
    bench = calibrate._Bench(None, torch.device("meta"))
    is_on = iter([True, True, False])
    with mock.patch.multiple(
        torch.accelerator, synchronize=mock.DEFAULT, current_stream=mock.DEFAULT
    ) as mocks:
        count, _ = bench._multiply(lambda: next(is_on))
    assert count == 2
    assert mocks["current_stream"].return_value.synchronize.call_count == count
    mocks["synchronize"].assert_not_called()
