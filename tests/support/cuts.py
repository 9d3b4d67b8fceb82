"""How a DDP module's graphs were cut, and whether its buckets are those that they are cut for."""

from __future__ import annotations

from typing import Any

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
