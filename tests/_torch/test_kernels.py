"""Kernels that Inductor is not waited for: they come before anybody calls them, or are an error."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from ddpopt._torch.kernels import collecting, coming_later, finish


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
