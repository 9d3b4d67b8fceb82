"""One warning says how many gradients leave early, and why the others do not, if most do not."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import Reason
from ddpopt.planning import early
from ddpopt.planning.early import find_departures
from ddpopt.reducer import Parameter
from ddpopt.split.cut import Cut, Section
from tests.support.logs import logged
from tests.support.models import MLP, WIDTH, batches, train
from tests.support.ranks import Ranks


class Broken(nn.Module):
    """A small part behind a break, and a large one in front, all of it in DDP's second bucket."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.body, self.head, self.breaks = MLP(4), nn.Linear(WIDTH, WIDTH), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x)


def _train(
    rank: int, breaks: bool, sizes: list[int], lost: str = "", has_hook: bool = False
) -> list[str]:
    """Train with batches of these sizes; return what is said of gradients that leave.

    Each new size is compiled. `lost` is a function that raises; with `has_hook` a comm hook
    communicates.
    """
    torch._dynamo.reset()
    ddp = DistributedDataParallel(Broken(breaks), bucket_cap_mb_list=[0.01, 1])
    if has_hook:
        ddp.register_comm_hook(None, allreduce_hook)
    options = {"inner": "aot_eager"}
    compiled = torch.compile(ddp, backend="ddpopt", options=options, dynamic=False)
    failing: Any = contextlib.nullcontext()
    if lost:
        failing = mock.patch.object(early, lost, side_effect=KeyError("lost"))
    with logged("warning") as warnings, logged("info") as lines, failing:
        train(ddp, batches(rank, [(size, WIDTH) for size in sizes]), compiled)
    return [line for line in (*warnings, *lines) if "leave" in line]


def test_one_line_on_one_rank_says_what_keeps_most_gradients(ranks: Ranks) -> None:
    """The line comes once, though something is compiled later."""
    (line,), second = ranks.run(_train, True, [2] * 12 + [3] * 12)
    assert line.startswith("only 20 % of the gradients")
    assert f"because {Reason.ONE_BUCKET.value.partition(';')[0]}" in line
    assert not second


@pytest.mark.quick("False-sizes0")
@pytest.mark.parametrize(
    ("breaks", "sizes"), [(False, [2] * 12), (True, [2, 2, 2, 3, 4, 5, 6, 7, 8])]
)
def test_nothing_is_said_where_graphs_are_cut_or_training_has_not_settled(
    ranks: Ranks, breaks: bool, sizes: list[int]
) -> None:
    """All but the first bucket is in the last section of the uncut graph, as it has to be."""
    assert ranks.run(_train, breaks, sizes) == [[], []]


def test_nothing_is_said_where_a_comm_hook_communicates_when_it_pleases(ranks: Ranks) -> None:
    assert ranks.run(_train, True, [2] * 12, "", True) == [[], []]


def test_training_has_settled_after_five_forwards_that_compiled_nothing(one_rank: None) -> None:
    """The first one, which compiled the graph, does not count."""
    ddp = DistributedDataParallel(MLP())
    watch = early._Watch()
    known = SimpleNamespace(cuts=[_whole("4/0", 1, Reason.ONE_BUCKET)], goal=None)
    with (
        mock.patch.object(early.state, "get", return_value=known),
        mock.patch.object(watch, "_warn_of_late_gradients") as warn,
    ):
        for _ in range(6):
            warn.assert_not_called()
            watch.after_forward(ddp, mock.Mock())
    warn.assert_called_once()


def test_an_error_costs_the_line_and_nothing_else(ranks: Ranks) -> None:
    first, second = ranks.run(_train, True, [2] * 12, "find_departures")
    assert first == ["when gradients leave is not known: KeyError('lost')"]
    assert not second


P = [Parameter(index=i, name=f"p{i}", num_bytes=10, group="f32") for i in range(4)]


def _whole(graph: str, num_nodes: int, reason: Reason) -> Cut:
    return Cut(graph=graph, inner="eager", num_nodes=num_nodes, fallback=reason)


def _cut(graph: str, num_nodes: int, *parameters: Parameter) -> Cut:
    """A backward with a section of so many nodes for each parameter."""
    sections = [
        Section(index=i, start=0, stop=num_nodes, first_node="", parameters=(p.name,))
        for i, p in enumerate(parameters)
    ]
    total = num_nodes * len(sections)
    return Cut(
        graph=graph, inner="eager", num_nodes=total, sections=tuple(sections), split="backward"
    )


def test_a_small_graph_in_front_does_not_make_a_large_ones_gradients_early() -> None:
    """An embedding's backward is next to nothing; allreduces that begin before it hide nothing.

    Here the large graph's backward, 99 of 100 calls, runs first. Its gradients are final when only
    one call is still to come, so none is early.
    """
    runs = [
        (_whole("4/0", 1, Reason.ONE_BUCKET), P[:1]),
        # NO_PARAMETERS: another graph was taken to use all of this one's parameters first.
        (_whole("5/0", 99, Reason.NO_PARAMETERS), P[1:]),
    ]
    found = find_departures(runs, [P[2:], P[:2]])
    assert (found.early_bytes, found.total_bytes) == (0, 40)
    assert found.late_in_whole_bytes == {Reason.NO_PARAMETERS: 30, Reason.ONE_BUCKET: 10}
    assert found.is_low


def test_graphs_one_after_the_other_have_early_gradients() -> None:
    """What stays whole is no loss there: buckets leave between graphs."""
    runs = [(_whole(f"{i}/0", 10, Reason.ONE_BUCKET), [p]) for i, p in enumerate(P)]
    found = find_departures(runs, [[p] for p in reversed(P)])
    assert found.early_bytes == 30
    assert not found.is_low


def test_a_bucket_waits_for_those_before_it_and_for_nothing_that_no_graph_uses() -> None:
    runs = [(_cut("4/0", 10, P[3], P[2], P[1]), P[1:])]
    found = find_departures(runs, [[P[0], P[3]], [P[2]], [P[1]]])
    assert (found.early_bytes, found.late_in_cut_bytes) == (30, 10)
    found = find_departures(runs, [[P[1]], [P[2], P[3]], [P[0]]])
    assert (found.early_bytes, found.waiting_bytes, found.late_in_cut_bytes) == (0, 30, 10)
    assert "in buckets that wait" in str(found)
