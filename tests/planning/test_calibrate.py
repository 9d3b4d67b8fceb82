"""What `calibrate` does on a GPU, and when, shown without one.

`test_rebucket.py` measures real ranks.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddpopt.planning import calibrate


def test_products_beside_an_allreduce_do_not_wait_for_it() -> None:
    """Only for their own stream: else each would seem to take as long as the allreduce."""
    bench = calibrate._Bench(None, torch.device("meta"))
    is_wanted = iter([True, True, False])
    with mock.patch.multiple(
        torch.accelerator, synchronize=mock.DEFAULT, current_stream=mock.DEFAULT
    ) as mocks:
        count, _ = bench._multiply_while(lambda: next(is_wanted))
    assert count == 2
    assert mocks["current_stream"].return_value.synchronize.call_count == count
    mocks["synchronize"].assert_not_called()


@pytest.mark.parametrize(
    ("accelerator", "backends", "expected"),
    [
        ("cuda", "cuda:nccl", "cuda:3"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda:3"),
        ("xpu", "cpu:gloo,xpu:xccl", "xpu:3"),
        ("cuda", "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda", "cpu:gloo", "cpu"),
        (None, "cpu:gloo,cuda:nccl", "cpu"),
    ],
)
def test_a_backend_that_only_the_gpu_has_is_measured(
    accelerator: str | None, backends: str, expected: str
) -> None:
    """There the gradients are; one that the processor has too says nothing of where they are."""
    found = accelerator and torch.device(accelerator)
    with (
        mock.patch.object(dist, "get_backend_config", return_value=backends),
        mock.patch.multiple(
            torch.accelerator, current_accelerator=lambda _: found, current_device_index=lambda: 3
        ),
    ):
        assert calibrate._device_of(None) == torch.device(expected)


def test_a_real_group_tells_its_backends(one_rank: None) -> None:
    """In torch's words; of gloo alone the processor's path is measured."""
    found = torch.device("cuda")
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=found):
        is_gloo = dist.get_backend() == "gloo"
        assert calibrate._device_of(None).type == ("cpu" if is_gloo else "cuda")
