"""What is read of a graph before anything is cut, and the buckets for which it is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import Reason, TorchDriftError
from ddpopt.reducer import Parameter, ReducerRules
from ddpopt.split.arrival import OthersArrive
from ddpopt.split.buckets import Source, which_buckets
from ddpopt.split.cut import Cut
from ddpopt.split.phases import Goal
from tests.support.cuts import only_cut
from tests.support.models import MLP


@pytest.mark.parametrize("split", ["auto", "forward"])
def test_names_that_only_a_cut_forward_needs_cost_no_cut_of_a_backward(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """Ten names tell regions, which no boundary in a forward may divide."""

    def moved() -> Any:
        raise TorchDriftError("torch has no such name")

    monkeypatch.setattr(_torch, "region_partners", moved)
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.01)
    options = {"inner": "aot_eager", "split": split}
    torch.compile(ddp, backend="ddpopt", options=options)(torch.randn(4, 64)).sum().backward()
    cut = only_cut(ddp)
    if split == "auto":
        assert cut.split == "backward"
        assert len(cut.sections) > 1
    else:
        assert cut.fallback is Reason.TORCH_DRIFT


def _graph(*, is_shared: bool = False, expected: Any = None, **known: Any) -> Any:
    parameters = [
        Parameter(index=index, name=f"p{index}", num_bytes=8, group="float32")  # type: ignore[arg-type]
        for index in range(4)
    ]
    rules = ReducerRules(caps_bytes=(16,), follows_arrival=True)
    unknown = {
        "goal": Goal.IN_FORCE if expected is None else Goal.EXPECTED,
        "expected_buckets": expected,
        "buckets": None,
        "rules": rules,
    }
    return SimpleNamespace(
        ddp_state=SimpleNamespace(**{**unknown, **known}),
        empty_cut=Cut(graph="0/0", inner="", num_nodes=4, is_shared=is_shared),
        reduced=parameters,
        arrives_before=(),
        arrives_after=(),
        others=OthersArrive.FIRST,
        of_root=(),
    )


@pytest.mark.parametrize(
    ("graph", "source", "cut_at", "recorded"),
    [
        (_graph(), Source.PREDICTED, [[3, 2], [1, 0]], [[3, 2], [1, 0]]),
        (_graph(buckets=[[0, 1, 2], [3]]), Source.OWN, [[0, 1, 2], [3]], [[0, 1, 2], [3]]),
        (
            _graph(buckets=[[0, 1, 2], [3]], expected=[[3], [2, 1, 0]]),
            Source.EXPECTED,
            [[3], [2, 1, 0]],
            [[0, 1, 2], [3]],
        ),
        (_graph(goal=Goal.SEARCHED), Source.SEARCHED, [[3], [2], [1], [0]], [[3, 2], [1, 0]]),
        (
            _graph(expected=[[3], [2, 1, 0]]),
            Source.EXPECTED,
            [[3], [2, 1, 0]],
            [[3, 2], [1, 0]],
        ),
        (
            _graph(is_shared=True, expected=[[3], [2, 1, 0]]),
            Source.SEARCHED,
            [[3], [2]],
            [[3, 2]],
        ),
    ],
)
def test_one_function_says_which_buckets_a_graph_is_cut_for_and_whence(
    graph: Any, source: Source, cut_at: list[list[int]], recorded: list[list[int]]
) -> None:
    """Code that modules share is cut for the parameters of one of them, here the last two."""
    own = (3, 2) if graph.empty_cut.is_shared else (3, 2, 1, 0)
    chosen = which_buckets(graph, {index: -index for index in own})
    indices = [
        [[p.index for p in b.parameters] for b in buckets]
        for buckets in (chosen.to_cut_at, chosen.in_force)
    ]
    assert (chosen.source, *indices) == (source, cut_at, recorded)
