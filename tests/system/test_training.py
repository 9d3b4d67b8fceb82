"""Two ranks with different data train to eager DDP's gradients, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import Reason
from tests.support.beside import compiled
from tests.support.ranks import Ranks
from tests.system.fuzzing.blocks import WIDTH
from tests.system.fuzzing.building import Model
from tests.system.fuzzing.spec import Block
from tests.system.scenarios.rows import (
    ROWS,
    TABLES,
    TRANSFORMER,
    Row,
    case_of,
    checkpointed,
    names_of,
)
from tests.system.scenarios.running import Trained, count_graphs, run_row
from tests.system.training.outcomes import (
    AS_UNSPLIT,
    BOTH_RAISE,
    EQUAL,
    EQUAL_TO_UNSPLIT,
    ROUNDED,
)

SPLITS = ("forward", "auto")
_SPLIT_OF = {"forward": "forward", "auto": "backward"}
# Each row of Inductor takes a minute. By day: those that are compiled for a warm start anyway.
_NIGHTLY = ("inductor", "forward")
ALL = [
    pytest.param(name, inner, split, marks=[pytest.mark.nightly] * ((inner, split) == _NIGHTLY))
    for split in SPLITS
    for inner in ("aot_eager", "inductor")
    for name in names_of(inner, split)
]


_trained: dict[tuple[str, str, str], list[Trained]] = {}


def _run_row(ranks: Ranks, name: str, split: str, inner: str) -> list[Trained]:
    """Run a row, once in a session, however many tests look at what comes of it."""
    key = (name, split, inner)
    if key not in _trained:
        _trained[key] = ranks.run(run_row, *key)
    return _trained[key]


@pytest.mark.quick
def test_the_first_row_of_each_table_trains(ranks: Ranks) -> None:
    """The very first is cut in backward; these are the quick set's of all rows."""
    first, *others = (next(iter(table)) for table in TABLES)
    _check_row(ranks, first, "auto", "aot_eager")
    for name in others:
        _check_row(ranks, name, "forward", "aot_eager")


@pytest.mark.parametrize(("name", "inner", "split"), ALL)
def test_training_equals_eager_ddp(ranks: Ranks, name: str, inner: str, split: str) -> None:
    """All losses, the last gradients, parameters and buffers do; or a row fails as eager DDP does.

    Each graph is split as asked for unless the row says why not, in the same way on both ranks,
    and the Reducer's buckets are those predicted where there is one graph to predict them from.
    """
    _check_row(ranks, name, split, inner)


def _check_row(ranks: Ranks, name: str, split: str, inner: str) -> None:
    row = ROWS[name]
    one, other = _run_row(ranks, name, split, inner)
    assert one.cuts == other.cuts, "ranks must cut at the same places"
    for finding, _, buckets, cuts in (one, other):
        if row.eager_error is not None:
            assert finding.outcome == BOTH_RAISE, finding
            assert finding.detail.startswith(row.eager_error)
            continue
        assert finding.outcome in _good_outcomes(row, inner, split), finding
        expected = row.fallbacks
        if split == "auto":
            expected = {reason for reason in expected if reason.is_expected}
        assert {cut.fallback for cut in cuts} - {None} == expected
        assert {cut.split for cut in cuts if cut.sections} <= {_SPLIT_OF[split]}
        # A region is compiled without the layers around it, which may share buckets with its own.
        has_one_graph = len(cuts) == 1 and expected != {Reason.NO_GRAD} and not row.case.regions
        if has_one_graph and buckets[0] is not None:
            planned = tuple(tuple(p.index for p in b.parameters) for b in cuts[0].buckets)
            assert buckets[0] == planned


def _good_outcomes(row: Row, inner: str, split: str) -> set[str]:
    """A graph that is fused otherwise rounds otherwise than eager; cut in backward it is not."""
    may_differ = split != "forward" or not row.is_exact_on_inductor
    is_as_unsplit = inner == "inductor" and may_differ
    return {EQUAL, EQUAL_TO_UNSPLIT, ROUNDED, *[AS_UNSPLIT] * is_as_unsplit}


@pytest.mark.parametrize("name", names_of("inductor", "auto"))
def test_a_warm_start_trains_alike(ranks: Ranks, name: str) -> None:
    """Code of a row from torch's caches trains as the code that was compiled, in equal sections."""
    cold = _run_row(ranks, name, "auto", "inductor")
    for first, second in zip(cold, ranks.run(run_row, name, "auto", "inductor"), strict=True):
        assert second.finding.outcome == first.finding.outcome, second.finding
        assert second.cuts == first.cuts


RECOMPILING = (
    "dynamic batch",
    "last short batch",
    "sizes found to be constant",
    "alternating branch",
    "no_sync",
    "eval between steps",
    "graph break",
    "LSTM",
    "DDP within a compiled function",
    "torch.cond",
    "torch._dynamo.reset",
)


@pytest.mark.parametrize("name", RECOMPILING)
def test_dynamo_makes_as_many_graphs_as_without_splitting(ranks: Ranks, name: str) -> None:
    """Splitting adds neither recompiles nor graph breaks."""
    split = [len(trained.pieces) for trained in _run_row(ranks, name, "forward", "aot_eager")]
    assert split == ranks.run(count_graphs, name)


class _CountProducts:
    """An inner compiler that counts the matrix products of all backward graphs."""

    def __init__(self) -> None:
        self.num_products = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            bw_compiler=self._count,
            partition_fn=min_cut_rematerialization_partition,
        )(gm, example_inputs)

    def _count(self, graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.num_products += sum(node.target in products for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)


def _products_in_backward(*blocks: Block, enabled: bool = True) -> int:
    torch._dynamo.reset()
    inner = _CountProducts()
    ddp = DistributedDataParallel(Model(case_of(*blocks)), bucket_cap_mb=1e-3)
    compiled(ddp, inner, enabled=enabled)(torch.randn(4, WIDTH)).sum().backward()
    assert (len(ddpopt.explain(ddp).cuts[0].sections) > 1) == enabled
    return inner.num_products


def test_a_checkpointing_policy_is_applied_within_sections(one_rank: None) -> None:
    """Products are recomputed as often as without splitting: not where the policy saves them."""
    for choice in (0, 1, 3):
        blocks = checkpointed(choice)
        assert _products_in_backward(*blocks) == _products_in_backward(*blocks, enabled=False)
    plain = _products_in_backward(*TRANSFORMER)
    full, selective = (_products_in_backward(*checkpointed(choice)) for choice in (0, 3))
    assert plain == selective < full
