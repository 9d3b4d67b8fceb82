"""The state of a DDP module, who is told when it changes, and the modes that keep its Reducer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt.errors import DDPMode
from ddpopt.split import state
from ddpopt.split.phases import Goal, Origin
from ddpopt.split.state import (
    MODES_WITHOUT_ALGORITHM,
    MODES_WITHOUT_REBUCKET,
    MODES_WITHOUT_REHEARSAL,
    find_mode,
)
from tests.support.beside import compiled
from tests.support.models import MLP, batches, train


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(MLP(), bucket_cap_mb=0.03)


def test_graphs_are_compared_with_buckets_again_once_these_change(one_rank: None) -> None:
    """Another module's buckets make no difference."""
    ddp, others = _ddp(), _ddp()
    train(ddp, batches(0, [(2, 64)] * 4), compiled(ddp, split="backward"))
    in_one = [list(range(len(list(ddp.parameters()))))]
    state.get(others).give_buckets(in_one, Origin.PLANNED)
    assert len(state.get(ddp).compared) == 1
    state.get(ddp).give_buckets(in_one, Origin.PLANNED)
    assert not state.get(ddp).compared


def test_given_buckets_are_known_until_the_reducer_tells_its_own(one_rank: None) -> None:
    """A plan that is in force has given the buckets."""
    ddp = _ddp()
    train(ddp, batches(0, [(2, 64)] * 4), compiled(ddp, split="backward"))
    known = state.get(ddp)
    reported = known.reported_buckets
    assert reported is not None
    assert len(reported) == len(ddpopt.explain(ddp).cuts[0].buckets) > 1
    assert known.buckets == reported
    everything = [[index for bucket in reported for index in bucket]]
    known.give_buckets(everything, Origin.PLANNED)
    assert (known.reported_buckets, known.buckets) == (None, everything)
    assert len(known.cuts[0].buckets) == 1


def test_limits_are_those_of_the_compile_until_new_ones_are_taken(one_rank: None) -> None:
    """DDP's own may change with its Reducer; code that was cut for the old ones goes on."""
    ddp = _ddp()
    known = state.get(ddp)
    before = known.rules
    ddp.bucket_bytes_cap_list = [1000, 2000]
    assert known.rules == before
    known.recompile_by_new_limits()
    assert known.rules.caps_bytes == (1000, 2000)


def test_a_search_is_part_of_the_rules_only_where_its_code_is_replaced(one_rank: None) -> None:
    """A backward that is cut finely serves any buckets."""
    ddp = _ddp()
    known = state.get(ddp)
    rules = known.rules
    known.begin_search(is_provisional=False)
    assert known.goal is Goal.SEARCHED
    assert known.rules == rules
    known.begin_search(is_provisional=True)
    assert known.rules != rules
    known.end_search()
    assert known.goal is Goal.IN_FORCE
    assert known.rules == rules


def test_who_asks_for_buckets_leaves_no_answer_behind(one_rank: None) -> None:
    """A Reducer that looks for unused parameters keeps its buckets, until the graph is static."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.01, find_unused_parameters=True)
    known = state.get(ddp)
    assert known.buckets
    ddp._set_static_graph()
    assert known.buckets is None


def test_a_reset_clears_what_goes_with_compiled_code_and_nothing_else(one_rank: None) -> None:
    """The tuner goes on with the next compile; the buckets that were in force are unknown."""
    ddp = _ddp()
    known = state.get(ddp)
    known.begin_search(is_provisional=True)
    known.give_buckets([list(range(len(list(ddp.parameters()))))], Origin.PLANNED)
    kept, dropped = ModuleSlot(str, Lifetime.MODULE), ModuleSlot(str, Lifetime.CODE)
    for slot in (kept, dropped):
        slot.set(ddp, "something")
    state.forget_all()
    assert state.get(ddp) is known
    assert (kept.get(ddp), dropped.get(ddp)) == ("something", "")
    assert known.goal is Goal.IN_FORCE
    assert not known.is_provisional
    assert not known.has_planned_buckets


def test_a_copy_stays_one_at_a_reset(one_rank: None) -> None:
    """One rank alone may reset, and ranks act otherwise on a copy than on what users train."""
    original, copied = state.get(_ddp()), state.get(_ddp())
    copied.mark_as_copy_of(original)
    state.forget_all()
    assert [original.is_copy, copied.is_copy] == [False, True]


class _Scaled(MLP):
    """Scales its input in a graph of its own, which has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_graph_without_parameters_is_among_those_of_the_last_forward(one_rank: None) -> None:
    ddp = DistributedDataParallel(_Scaled(), bucket_cap_mb=0.03)
    train(ddp, batches(0, [(2, 64)] * 2), compiled(ddp, split="backward"))
    assert [bool(cut.arrival) for cut in state.get(ddp).last_cuts] == [False, True]


@pytest.mark.parametrize(
    ("rank", "num_ranks", "is_copy", "speaks"),
    [(0, 2, False, True), (1, 2, False, False), (0, 1, False, False), (0, 2, True, False)],
)
def test_the_first_of_several_ranks_tells_users_what_is_so_on_all(
    one_rank: None, rank: int, num_ranks: int, is_copy: bool, speaks: bool
) -> None:
    """Nobody does of a copy that a check made."""
    ddp = _ddp()
    state.get(ddp).is_copy = is_copy
    ddp.process_group = SimpleNamespace(rank=lambda: rank, size=lambda: num_ranks)
    assert state.logs_for_all_ranks(ddp) is speaks


def _ddp_in_mode(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(2, 2), **options)


def _mixed() -> DistributedDataParallel:
    ddp = _ddp_in_mode()
    ddp.mixed_precision = object()
    return ddp


def _stepping() -> DistributedDataParallel:
    model = torch.nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return DistributedDataParallel(model)


def _delaying() -> DistributedDataParallel:
    model = torch.nn.Linear(2, 2)
    return DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("weight", model.weight)],
        param_to_hook_all_reduce=model.bias,
    )


def _frozen() -> DistributedDataParallel:
    ddp = _ddp_in_mode()
    ddp.requires_grad_(False)
    return ddp


_ALL = {MODES_WITHOUT_REBUCKET, MODES_WITHOUT_ALGORITHM, MODES_WITHOUT_REHEARSAL}
# By mode: what makes a module that is in it, and the lists of modes that have to name it.
DDP_IN_MODE = {
    DDPMode.MIXED_PRECISION: (_mixed, _ALL),
    DDPMode.OPTIMIZER_IN_BACKWARD: (_stepping, _ALL),
    DDPMode.DELAYED_PARAMETERS: (_delaying, _ALL - {MODES_WITHOUT_REBUCKET}),
    DDPMode.FROZEN: (_frozen, {MODES_WITHOUT_REHEARSAL}),
}


@pytest.mark.quick("MIXED_PRECISION")
@pytest.mark.parametrize("mode", DDP_IN_MODE, ids=lambda mode: mode.name)
def test_a_mode_is_found_by_what_it_stands_in_the_way_of(one_rank: None, mode: DDPMode) -> None:
    """It is not found by anything else."""
    make, naming = DDP_IN_MODE[mode]
    ddp = make()
    for modes in _ALL:
        assert find_mode(ddp, modes) is (mode if modes in naming else None)


def test_an_open_join_keeps_buckets_and_allreduces(one_rank: None) -> None:
    """It does so while its context is open, and not before."""
    ddp = _ddp_in_mode()
    assert find_mode(ddp, MODES_WITHOUT_REBUCKET) is None
    with ddp.join():
        for modes in (MODES_WITHOUT_REBUCKET, MODES_WITHOUT_ALGORITHM):
            assert find_mode(ddp, modes) is DDPMode.JOIN
