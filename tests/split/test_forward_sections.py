"""Cuts of a forward, as `split/sections.py` chooses them on facts written by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.errors import NotCutError, Reason
from ddpopt.reducer import Bucket, ReducerRules, predict_buckets
from ddpopt.split.arrival import order_arrival
from ddpopt.split.cut import Cut, Section
from ddpopt.split.facts import ForwardFacts
from ddpopt.split.sections import choose_forward_sections, fine_buckets
from tests.support.graphs import parameters


def _facts(
    first_use: dict[int, int],
    num_calls: int = 10,
    illegal: tuple[int, ...] = (),
    by_size: tuple[int, ...] = (),
    collectives: tuple[int, ...] = (),
) -> ForwardFacts:
    """Facts of a forward; boundaries `by_size` are illegal where sizes are symbols."""
    inner = range(num_calls + 1)
    possible = [0 < p < num_calls and p not in illegal for p in inner]
    return ForwardFacts(
        num_calls=num_calls,
        first_use=first_use,
        legal_bounds=[possible[p] and p not in by_size for p in inner],
        legal_bounds_without_sizes=possible,
        needed_until=[position + 1 for position in range(num_calls)],
        call_names=[f"n{position}" for position in range(num_calls)],
        has_effects=[position in collectives for position in range(num_calls)],
        communicates=[position in collectives for position in range(num_calls)],
    )


def _buckets(count: int, first_use: dict[int, int], cap: int) -> tuple[Bucket, ...]:
    """Buckets of so many parameters: backward passes the first use of each last."""
    arrival = order_arrival(parameters(count), {i: -use for i, use in first_use.items()})
    return predict_buckets(arrival, ReducerRules(caps_bytes=(cap,), follows_arrival=True))


def _reason(facts: ForwardFacts, buckets: tuple[Bucket, ...]) -> Reason:
    with pytest.raises(NotCutError) as raised:
        choose_forward_sections(facts, buckets)
    return raised.value.reason


def _sections(facts: ForwardFacts, buckets: tuple[Bucket, ...]) -> tuple[Section, ...]:
    sections = choose_forward_sections(facts, buckets)
    cut = Cut(graph="0/0", inner="eager", num_nodes=facts.num_calls, sections=sections)
    return cut.with_buckets(buckets).sections


def _starts(facts: ForwardFacts, buckets: tuple[Bucket, ...]) -> list[int]:
    return [section.start for section in _sections(facts, buckets)]


def test_cuts_stand_in_front_of_the_use_that_completes_a_bucket() -> None:
    """Two parameters a bucket: the cut is at the first use of the second."""
    facts = _facts({0: 0, 1: 2, 2: 5, 3: 8})
    buckets = _buckets(4, facts.first_use, 20)
    sections = _sections(facts, buckets)
    assert [(s.start, s.stop) for s in sections] == [(0, 5), (5, 10)]
    assert [s.completes for s in sections] == [(1,), (0,)]
    assert [s.parameters for s in sections] == [("p1", "p0"), ("p3", "p2")]


def test_a_bucket_that_waits_for_another_completes_with_it() -> None:
    """Registration-order buckets whose parameters are used out of order: launch order decides."""
    facts = _facts({0: 9, 1: 5, 2: 1})
    buckets = predict_buckets(parameters(3), ReducerRules(caps_bytes=(10,), follows_arrival=False))
    assert [b.parameters[0].index for b in buckets] == [2, 1, 0]
    assert _reason(facts, buckets) is Reason.COMPLETE_TOGETHER


def test_an_illegal_cut_moves_towards_the_start() -> None:
    """An earlier boundary completes the bucket too; two boundaries may become one."""
    uses = {0: 0, 1: 3, 2: 6}
    buckets = _buckets(3, uses, 10)
    assert _starts(_facts(uses), buckets) == [0, 3, 6]
    assert _starts(_facts(uses, illegal=(5, 6)), buckets) == [0, 3, 4]
    assert _starts(_facts(uses, illegal=(4, 5, 6)), buckets) == [0, 3]
    nowhere = _facts(uses, illegal=tuple(range(10)))
    assert _reason(nowhere, buckets) is Reason.NO_LEGAL_CUT


def test_a_section_that_hands_nothing_on_is_merged() -> None:
    """`split_module` would lose it."""
    uses = {0: 0, 1: 3, 2: 6}
    facts = _facts(uses)
    needed_until = [*facts.needed_until]
    needed_until[5] = 5  # what [3, 6) computes is used inside it only
    facts = dataclasses.replace(facts, needed_until=needed_until)
    assert _starts(facts, _buckets(3, uses, 10)) == [0, 3]


def test_a_bucket_that_spans_graphs_is_not_cut_short() -> None:
    """Half of the bucket belongs to another graph, so this graph alone does not fill it."""
    uses = {0: 1, 1: 5}
    assert _starts(_facts(uses), _buckets(3, uses, 20)) == [0, 5]
    assert _reason(_facts(uses), _buckets(3, uses, 30)) is Reason.ONE_BUCKET


def test_a_graph_without_parameters_stays_whole() -> None:
    """All parameters belong to other graphs here."""
    assert _reason(_facts({}), _buckets(3, {}, 10)) is Reason.NO_PARAMETERS


@given(st.lists(st.integers(0, 49), min_size=1, max_size=30), st.integers(1, 100))
def test_sections_tile_the_graph_and_complete_each_bucket_once(uses: list[int], cap: int) -> None:
    """This holds for any uses and caps; and an equal input gives equal sections."""
    facts = _facts(dict(enumerate(uses)), num_calls=50)
    buckets = _buckets(len(uses), facts.first_use, cap)
    if len({min(uses[p.index] for p in bucket.parameters) for bucket in buckets}) == 1:
        assert _reason(facts, buckets) in (Reason.ONE_BUCKET, Reason.COMPLETE_TOGETHER)
        return
    sections = _sections(facts, buckets)
    assert sections == _sections(facts, buckets)
    assert [s.start for s in sections] == [0, *(s.stop for s in sections[:-1])]
    assert sections[-1].stop == 50
    completed = [k for section in reversed(sections) for k in section.completes]
    assert completed == [bucket.index for bucket in buckets]
    for section in sections:
        for k in section.completes:
            assert all(uses[p.index] >= section.start for p in buckets[k].parameters)


# ---- Collectives -----------------------------------------------------------------------------


def test_no_section_has_a_first_use_behind_a_collective() -> None:
    """Autograd's node of a section runs all of its collectives, then releases its gradients."""
    uses = {0: 0, 1: 3, 2: 6}
    facts = _facts(uses, collectives=(1, 5, 8))
    one_bucket = _buckets(3, uses, 100)
    assert _starts(facts, one_bucket) == [0, 3, 6]
    assert _starts(facts, _buckets(3, uses, 10)) == [0, 3, 6]


def test_a_collective_in_front_of_all_uses_is_cut_off() -> None:
    """In backward it comes behind all gradients, though its section completes none."""
    facts = _facts({0: 4}, collectives=(2,))
    assert _starts(facts, _buckets(1, {0: 4}, 100)) == [0, 4]


def test_a_collective_whose_section_hands_nothing_on_leaves_the_graph_whole() -> None:
    """Its section would be merged with the next one, whose first use is to come before it."""
    uses = {0: 0, 1: 3}
    facts = _facts(uses, collectives=(1,))
    facts = dataclasses.replace(facts, needed_until=[1, 2, 2, *facts.needed_until[3:]])
    assert _reason(facts, _buckets(2, uses, 10)) is Reason.COLLECTIVES


def test_a_call_with_a_collective_and_a_first_use_is_one() -> None:
    """A checkpoint, for example: only what follows is cut off."""
    uses = {0: 2, 1: 5}
    facts = _facts(uses, collectives=(2,))
    assert _starts(facts, _buckets(2, uses, 100)) == [0, 5]


def test_where_no_boundary_keeps_the_order_the_graph_is_whole() -> None:
    """If only sizes forbid it, other ranks may cut the graph, and that is said."""
    uses = {0: 0, 1: 3}
    buckets = _buckets(2, uses, 10)
    assert _reason(_facts(uses, illegal=(2, 3), collectives=(1,)), buckets) is Reason.COLLECTIVES
    by_size = _facts(uses, by_size=(2, 3), collectives=(1,))
    assert _reason(by_size, buckets) is Reason.COLLECTIVES_AND_SIZES
    assert not Reason.COLLECTIVES_AND_SIZES.is_alike


# ---- While buckets are searched --------------------------------------------------------------


def test_fine_buckets_are_finer_at_both_ends() -> None:
    """The first bucket and the last one are what cannot be hidden."""
    buckets = fine_buckets(parameters(6400))
    assert [len(bucket.parameters) for bucket in buckets] == [
        *(100, 100, 200),
        *(400 for _ in range(14)),
        *(200, 100, 100),
    ]
