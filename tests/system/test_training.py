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
from tests.support.models import WIDTH, batches
from tests.support.ranks import Ranks
from tests.system.scenarios.architectures import Transformer, checkpointed, selectively_checkpointed
from tests.system.scenarios.rows import SCENARIOS, TABLES, names_of
from tests.system.scenarios.running import Outcome, count_graphs, run_row

SPLITS = ("forward", "auto")
# Each row of Inductor takes a minute. By day: those whose memory is written or has other strides.
_INDUCTOR_BY_DAY = ("channels_last", "in-place operators", "mutated inputs")


def _is_nightly(name: str, inner: str, split: str) -> bool:
    return inner == "inductor" and (split == "forward" or name not in _INDUCTOR_BY_DAY)


ALL = [
    pytest.param(name, inner, split, marks=[pytest.mark.nightly] * _is_nightly(name, inner, split))
    for split in SPLITS
    for inner in ("aot_eager", "inductor")
    for name in names_of(inner, split)
]


_outcomes: dict[tuple[str, str, str], list[Outcome]] = {}


def _run_row(ranks: Ranks, name: str, split: str, inner: str) -> list[Outcome]:
    """Run a row, once in a session, however many tests look at what comes of it."""
    key = (name, split, inner)
    if key not in _outcomes:
        _outcomes[key] = ranks.run(run_row, *key)
    return _outcomes[key]


@pytest.mark.quick
def test_the_first_row_of_each_table_trains_with_both_splits(ranks: Ranks) -> None:
    """The very first is on Inductor; of all tests of rows, this is the quick set's."""
    first, *others = (next(iter(table)) for table in TABLES)
    for split in SPLITS:
        _check_row(ranks, first, split, "inductor")
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
    scenario = SCENARIOS[name]()
    outcomes = _run_row(ranks, name, split, inner)
    assert outcomes[0].cuts == outcomes[1].cuts, "ranks must cut at the same places"
    for outcome in outcomes:
        if scenario.eager_error is not None:
            assert outcome.error == outcome.eager_error
            assert outcome.error.startswith(scenario.eager_error)
            continue
        assert outcome.eager_error is outcome.error is outcome.difference is None
        assert outcome.is_synced == scenario.is_synced
        expected = scenario.fallbacks
        if split == "auto":
            expected = {reason for reason in expected if reason.is_expected}
        assert {plan.fallback for plan in outcome.cuts} - {None} == expected
        cut = {plan.split for plan in outcome.cuts if plan.sections}
        assert cut <= {"backward" if split == "auto" else split}
        has_one_graph = len(outcome.cuts) == 1 and expected != {Reason.NO_GRAD}
        if has_one_graph and outcome.buckets[0] is not None:
            planned = tuple(tuple(p.index for p in b.parameters) for b in outcome.cuts[0].buckets)
            assert outcome.buckets[0] == planned


@pytest.mark.parametrize("name", names_of("inductor", "auto"))
def test_a_warm_start_trains_alike(ranks: Ranks, name: str) -> None:
    """Code of a row from torch's caches trains as the code that was compiled, in equal sections."""
    cold = _run_row(ranks, name, "auto", "inductor")
    for first, second in zip(cold, ranks.run(run_row, name, "auto", "inductor"), strict=True):
        assert second.error is second.difference is None
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
    """So splitting adds neither recompiles nor graph breaks."""
    split = [len(outcome.pieces) for outcome in _run_row(ranks, name, "forward", "aot_eager")]
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


def _products_in_backward(run: Callable[..., Any], *, enabled: bool) -> int:
    torch._dynamo.reset()
    inner = _CountProducts()
    ddp = DistributedDataParallel(Transformer(run=run), bucket_cap_mb=0.03)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": inner, "enabled": enabled})
    compiled(batches(0, [(4, WIDTH)])[0]).sum().backward()
    assert (len(ddpopt.explain(ddp).cuts[0].sections) > 1) == enabled
    return inner.num_products


def test_a_checkpointing_policy_is_applied_within_sections(one_rank: None) -> None:
    """As many products are recomputed as without splitting: none where the policy saves them."""
    for run in (checkpointed, selectively_checkpointed):
        split, unsplit = (_products_in_backward(run, enabled=on) for on in (True, False))
        assert split == unsplit
    plain = _products_in_backward(lambda block, x: block(x), enabled=True)
    selective = _products_in_backward(selectively_checkpointed, enabled=True)
    full = _products_in_backward(checkpointed, enabled=True)
    assert plain == selective < full
