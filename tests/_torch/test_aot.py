"""Kernels that Inductor is not waited for: they come before anybody calls them, or are an error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

from ddpopt._torch import aot
from ddpopt._torch.aot import collecting, coming_later, finish
from tests.support.models import MLP, WIDTH


def _graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: (x.sin() + 1).relu())


def test_a_graph_runs_once_its_kernels_were_waited_for() -> None:
    """And not before; afterwards Inductor waits as always."""
    wait, x = AsyncCompile.wait, torch.randn(8)
    with fresh_cache(), coming_later([x]):
        with collecting() as waits:
            compiled = compile_fx.compile_fx(_graph(), [x])
        with pytest.raises(TypeError, match="not callable"):
            compiled(x)
        torch.testing.assert_close(finish(waits, compiled)(x), (x.sin() + 1).relu())
    assert AsyncCompile.wait is wait


def test_inductor_waits_where_it_needs_kernels_at_once() -> None:
    """To measure them, or on devices where it collects them."""
    wait = AsyncCompile.wait
    with coming_later([torch.empty(1, device="meta")]):
        assert AsyncCompile.wait is wait
    measuring = torch._inductor.config.patch(profile_bandwidth_output="bandwidths.csv")
    with measuring, coming_later([torch.empty(1)]):
        assert AsyncCompile.wait is wait


def test_no_two_threads_have_inductors_wait_replaced_at_once(one_rank: None) -> None:
    """It is, for the process, under the lock with which Dynamo compiles a graph at a time."""
    replaced, could_compile = aot._replaced_wait, []

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with replaced():
            other = threading.Thread(
                target=lambda: could_compile.append(compile_lock.acquire(blocking=False))
            )
            other.start()
            other.join()
            yield

    def train() -> None:
        ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
        torch.compile(ddp, backend="ddpopt")(torch.randn(2, WIDTH)).sum().backward()

    wait = AsyncCompile.wait
    with mock.patch.object(aot, "_replaced_wait", watched):
        train()
        torch._dynamo.reset()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert could_compile == [False, False]
    assert AsyncCompile.wait is wait
