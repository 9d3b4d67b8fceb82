"""How a DDP module's graphs were cut, and whether its buckets are those that they are cut for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.utils import counters

import ddpopt
from ddpopt.split.cut import Cut


def only_cut(module: Any) -> Cut:
    """Return the cut of a module with one graph; of several, this fails."""
    (cut,) = ddpopt.explain(module).cuts
    return cut


def assert_as_planned(module: Any) -> None:
    """DDP has buckets, and they are those for which the graphs were cut."""
    buckets = ddpopt.explain(module).buckets
    assert buckets
    assert [bucket for bucket in buckets if not bucket.is_as_planned] == []


@contextlib.contextmanager
def compiling_nothing() -> Iterator[None]:
    """Check that Dynamo has compiled graphs before this block, and compiles none in it."""
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    yield
    assert counters["stats"]["unique_graphs"] == num_graphs
