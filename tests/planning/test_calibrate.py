"""`calibrate`: what two ranks measure, and what it does on a GPU, shown without one."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddpopt
from ddpopt.planning import AllreduceCost, calibrate
from ddpopt.steps import clock
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Ranks


def _calibrate(rank: int) -> AllreduceCost:
    if rank:
        torch.randn(200, 200) @ torch.randn(200, 200)  # ranks need not do the same before
    return ddpopt.calibrate()


def test_all_ranks_measure_the_same_cost(ranks: Ranks) -> None:
    first, second = ranks.run(_calibrate)
    assert first == second
    assert first.seconds(2**20) > 0  # on busy processors all of it may be start-up
    assert first.contention >= 1
    assert first.launch_s >= 0


class _Machine:
    """A machine whose time goes on by what it does, with what `calibrate` is to find.

    An allreduce takes 1 ms and 10 ns a byte, beside products of matrices half as long again. A
    product takes 0.1 ms, beside a large transfer a quarter more, and twice as long where it is the
    first since ranks met. A launch takes 20 us.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.large_ends_s = self.all_end_s = 0.0
        self.is_cold = True

    def barrier(self, **_options: object) -> None:
        self.is_cold = True

    def all_reduce(
        self, values: torch.Tensor, *_args: object, async_op: bool = False, **_options: object
    ) -> mock.Mock | None:
        if values.numel() == 1:  # ranks compare what they measured
            return None
        takes_s = 1e-3 + 1e-8 * values.nbytes
        if not async_op:
            self.now_s += takes_s
            return None
        self.now_s += 2e-5
        self.all_end_s = ends_s = max(self.now_s, self.all_end_s) + 1.5 * takes_s
        if values.nbytes > calibrate._SMALL_BYTES:
            self.large_ends_s = ends_s

        def wait() -> None:
            self.now_s = max(self.now_s, ends_s)

        return mock.Mock(wait=wait, is_completed=lambda: self.now_s >= ends_s)

    def mm(self, *_factors: torch.Tensor, out: torch.Tensor) -> None:
        takes_s = 1e-4 * (1.25 if self.now_s < self.large_ends_s else 1.0)
        self.now_s += 2 * takes_s if self.is_cold else takes_s
        self.is_cold = False


def test_the_cost_is_what_the_machine_takes() -> None:
    """Of a machine that is simulated: a real one's is known to nobody."""
    machine = _Machine()
    with (
        mock.patch.multiple(dist, all_reduce=machine.all_reduce, barrier=machine.barrier),
        mock.patch.object(torch, "mm", machine.mm),
        mock.patch.object(clock, "time", mock.Mock(perf_counter=lambda: machine.now_s)),
    ):
        cost = calibrate._measure(calibrate._Bench(None, torch.device("cpu")))
    assert cost.startup_s == pytest.approx(1e-3, rel=1e-3)
    assert cost.s_per_byte == pytest.approx(1e-8, rel=1e-3)
    assert cost.interference == pytest.approx(0.2, rel=0.02)
    assert cost.contention == pytest.approx(1.5, rel=0.02)
    assert cost.launch_s == pytest.approx(2e-5)


def test_sizes_are_of_float32_whatever_the_default_dtype_is(one_rank: None) -> None:
    sizes = []

    def note(values: torch.Tensor, *_args: object, **_options: object) -> None:
        sizes.append(values.nbytes)

    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(dist, "all_reduce", note):
            bench = calibrate._Bench(None, torch.device("cpu"))
            bench.time_allreduce(4096)
    finally:
        torch.set_default_dtype(torch.float32)
    assert 4096 in sizes
    assert bench._matrix.dtype == torch.float32


def test_a_group_of_one_rank_has_no_cost(one_rank: None) -> None:
    with pytest.raises(ddpopt.errors.PlanError, match="one rank"):
        ddpopt.calibrate()


@on_ranks(2)
def test_a_rank_that_calls_alone_is_told_of_the_others(rank: int) -> None:
    """Not by gloo's words alone, which name no rank and no remedy."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(ddpopt.errors.PeerError, match="calibrate failed: another rank"):
            ddpopt.calibrate(group)
    dist.barrier()


# ---- On a GPU -----------------------------------------------------------------------------------


def test_products_beside_an_allreduce_wait_for_their_own_stream_alone() -> None:
    """One that waited for the allreduce would seem to take as long."""
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
    """Gradients are there; a backend that the processor has too does not say where they are."""
    device = accelerator and torch.device(accelerator)
    with (
        mock.patch.object(dist, "get_backend_config", return_value=backends),
        mock.patch.multiple(
            torch.accelerator,
            current_accelerator=lambda check_available: device,
            current_device_index=lambda: 3,
        ),
    ):
        assert calibrate._device_of(None) == torch.device(expected)


def test_a_real_group_tells_its_backends(one_rank: None) -> None:
    """A group of gloo alone has the processor's path measured, one of NCCL the GPU's."""
    device = torch.device("cuda")
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=device):
        is_gloo = dist.get_backend() == "gloo"
        assert calibrate._device_of(None).type == ("cpu" if is_gloo else "cuda")
