"""What is known of a DDP module, and who is told when it changes."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.split import state
from tests.support.models import MLP

OPTIONS = {"inner": "aot_eager", "split": "backward"}


class _Runner:
    """Counts how often it is told to look again."""

    def __init__(self) -> None:
        self.num_looks = 0

    def unsettle(self) -> None:
        self.num_looks += 1


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(MLP(), bucket_cap_mb=0.03)


def test_other_buckets_unsettle_those_who_looked_no_more_once(one_rank: None) -> None:
    """And only the module's own."""
    one, other = state.get(_ddp()), state.get(ddp := _ddp())
    mine, theirs = _Runner(), _Runner()
    one.settle(mine)
    other.settle(theirs)
    other.give_buckets([[0, 1], list(range(2, len(list(ddp.parameters()))))])
    other.give_buckets([list(range(len(list(ddp.parameters()))))])
    assert (mine.num_looks, theirs.num_looks) == (0, 1)


def test_given_buckets_are_known_until_the_reducer_tells_its_own(one_rank: None) -> None:
    """A plan that is in force has them then."""
    ddp = _ddp()
    compiled = torch.compile(ddp, backend="ddpopt", options=OPTIONS)
    for _ in range(4):
        compiled(torch.ones(2, 64)).sum().backward()
    known = state.get(ddp)
    told = known.reported_buckets
    assert told is not None
    assert len(told) == len(ddpopt.explain(ddp).plans[0].buckets) > 1
    assert known.buckets == told
    everything = [[index for bucket in told for index in bucket]]
    known.give_buckets(everything)
    assert (known.reported_buckets, known.buckets) == (None, everything)
    assert len(known.plans[0].buckets) == 1


def test_limits_are_those_of_the_compile_until_new_ones_are_taken(one_rank: None) -> None:
    """DDP's own may change with its Reducer; code that was cut for the old ones goes on."""
    ddp = _ddp()
    known = state.get(ddp)
    before = known.rules
    ddp.bucket_bytes_cap_list = [1000, 2000]
    assert known.rules == before
    known.take_new_limits()
    assert known.rules.caps_bytes == (1000, 2000)


def test_a_search_is_part_of_the_rules_only_where_its_code_is_replaced(one_rank: None) -> None:
    """A backward that is cut finely serves any buckets."""
    ddp = _ddp()
    known = state.get(ddp)
    rules = known.rules
    known.begin_search(is_provisional=False)
    assert known.is_searching
    assert known.rules == rules
    known.begin_search(is_provisional=True)
    assert known.rules != rules
    known.end_search()
    assert not known.is_searching
    assert known.rules == rules


def test_a_reset_clears_what_goes_with_compiled_code_and_nothing_else(one_rank: None) -> None:
    """Parameters that arrive while forward runs still do, so code compiled then has to wait."""
    ddp = _ddp()
    known = state.get(ddp)
    known.wait_in_forward(True)
    known.begin_search(is_provisional=True)
    known.give_buckets([list(range(len(list(ddp.parameters()))))])
    known.bucket_plan = known.tuner = known.tuner_in_use = "something"
    torch._dynamo.reset()
    assert state.get(ddp) is known
    assert (known.waits_in_forward, known.tuner) == (True, "something")
    assert (known.bucket_plan, known.tuner_in_use) == (None, None)
    assert not known.is_searching
    assert not known.is_provisional
    assert not known.has_planned_buckets
