"""Where a backward graph is cut, on facts written by hand and on random ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ddpopt.errors import NotCutError, Reason
from ddpopt.split.facts import BackwardFacts, Tie
from ddpopt.split.sections import BackwardSections, choose_backward_sections
from tests.support.graphs import buckets_of, cut_from_sections


def _facts(  # noqa: PLR0913, PLR0917  # all but two have defaults
    reads: Sequence[dict[int, Tie]],
    gradients: dict[int, tuple[int, ...]],
    num_bytes: Sequence[int] | None = None,
    ordered: Sequence[int] = (),
    memory_users: dict[int, tuple[int, ...]] | None = None,
    epilogue_copies: dict[int, int] | None = None,
    snapshot_reads: dict[int, frozenset[int]] | None = None,
    collectives: Sequence[int] = (),
) -> BackwardFacts:
    """Facts in which each call is an autograd node of its own."""
    count = len(reads)
    bound = {*ordered, *collectives, *itertools.chain.from_iterable((memory_users or {}).values())}
    observable_calls = {call: call for call in bound - (snapshot_reads or {}).keys()}
    for call, argument in (epilogue_copies or {}).items():
        others = [other for other in (memory_users or {}).get(argument, ()) if other < call]
        observable_calls[call] = max((*reads[call], *others), default=-1)
    return BackwardFacts(
        call_names=[f"n{i}" for i in range(count)],
        is_view_or_constant=[False] * count,
        has_effects=[i in {*ordered, *collectives} for i in range(count)],
        communicates=[i in collectives for i in range(count)],
        reads=reads,
        num_bytes=num_bytes or [1] * count,
        gradients=gradients,
        memory_users=memory_users or {},
        epilogue_copies=epilogue_copies or {},
        observable_calls=observable_calls,
        release_places={a: max(calls, default=-1) for a, calls in gradients.items()},
        snapshot_reads=snapshot_reads or {},
    )


def _choose(facts: BackwardFacts, buckets: Sequence[Sequence[int]]) -> BackwardSections | Reason:
    """Plan with parameter i as argument i, and these parameters in each bucket, or say why not."""
    parameters, made = buckets_of(facts.gradients, buckets)
    final = {a: max(calls, default=-1) for a, calls in facts.gradients.items()}
    final = {a: place for a, place in final.items() if any(a in b for b in buckets)}
    try:
        cuts = choose_backward_sections(facts, made, {a: a for a in parameters}, final)
    except NotCutError as refusal:
        return refusal.reason
    return dataclasses.replace(cuts, sections=cut_from_sections(cuts).with_buckets(made).sections)


def _cut(facts: BackwardFacts, buckets: Sequence[Sequence[int]]) -> BackwardSections:
    chosen = _choose(facts, buckets)
    assert isinstance(chosen, BackwardSections), chosen
    return chosen


def _sections(chosen: BackwardSections | Reason) -> list[list[int]]:
    assert isinstance(chosen, BackwardSections), chosen
    return [list(chosen.order[s.start : s.stop]) for s in chosen.sections]


NO = Tie.NONE


def test_a_cut_stands_behind_a_buckets_last_gradient_where_fewest_bytes_live() -> None:
    """Calls 1 and 4 make gradients. Behind 1 a large value lives, behind 2 a small one."""
    facts = _facts([{}, {0: NO}, {0: NO}, {2: NO}, {3: NO}], {0: (1,), 1: (4,)}, [8, 8, 1, 8, 8])
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 1, 2], [3, 4]]
    even = _facts([{}, {0: NO}, {0: NO}, {2: NO}, {3: NO}], {0: (1,), 1: (4,)})
    assert _sections(_choose(even, [[0], [1]])) == [[0, 1], [2, 3, 4]], "a tie goes to the earliest"


def test_a_value_that_a_fusion_would_not_write_counts_twice() -> None:
    """Call 0's value is fused with 2; call 2's, as large, is read by a kernel of its own."""
    reads = [{}, {0: NO}, {0: Tie.FUSED}, {2: NO}, {3: NO}]
    assert _sections(_choose(_facts(reads, {0: (1,), 1: (4,)}), [[0], [1]])) == [[0, 1, 2], [3, 4]]


def test_rounding_counts_before_bytes() -> None:
    """The cheaper cut in bytes would round a value that the whole graph does not round."""
    reads = [{}, {0: NO}, {0: Tie.UNROUNDED}, {2: NO}, {3: NO}]
    facts = _facts(reads, {0: (1,), 1: (4,)}, [1, 1, 8, 8, 8])
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 1, 2], [3, 4]]


def test_a_tuple_is_taken_apart_in_its_own_section() -> None:
    """Call 0 returns a tuple, from which 1, 2 and 4 take elements; 1 and 4 are gradients."""
    one = Tie.TUPLE
    reads = [{}, {0: one}, {0: one}, {2: NO}, {0: one}, {3: NO}]
    facts = _facts(reads, {0: (1,), 1: (4,), 2: (5,)})
    assert _sections(_choose(facts, [[0], [1, 2]])) == [[0, 1, 2, 4], [3, 5]]


def test_buckets_that_are_complete_at_one_cut_have_no_section_between_them() -> None:
    """Bucket 0 waits for nothing; no cut parts calls 0 to 2, in which bucket 1's gradient is."""
    reads = [{}, {0: Tie.TUPLE}, {1: Tie.TUPLE}, {1: NO}, {}]
    facts = _facts(reads, {0: (0,), 1: (4,), 2: ()}, ordered=(4,))
    assert _sections(_choose(facts, [[2], [0], [1]])) == [[0, 1, 2], [3, 4]]


def test_a_gradient_waits_for_what_it_needs_only() -> None:
    """Call 1 serves bucket 1 alone: it runs after bucket 0 is released, out of graph order."""
    facts = _facts([{}, {}, {0: NO}, {1: NO}], {0: (2,), 1: (3,)})
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 2], [1, 3]]


def test_calls_with_effects_keep_their_order() -> None:
    """Call 1 draws random numbers before call 2 does, although bucket 0 needs only call 2."""
    facts = _facts([{}, {}, {0: NO}, {1: NO}], {0: (2,), 1: (3,)}, ordered=(1, 2))
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 1, 2], [3]]


def test_no_cut_moves_past_a_call_with_effects_for_bytes() -> None:
    """Call 2 may communicate: on a rank with larger values it must not change sides."""
    reads = [{}, {0: NO}, {1: NO}, {2: NO}, {3: NO}]
    gradients = {0: (1,), 1: (4,)}
    for sizes in ([1, 9, 9, 1, 1], [9, 1, 1, 9, 9]):
        without = _facts(reads, gradients, sizes)
        facts = _facts(reads, gradients, sizes, ordered=(2,))
        assert _sections(_choose(facts, [[0], [1]])) == [[0, 1], [2, 3, 4]]
        moved = [[0, 1], [2, 3, 4]] if sizes[1] == 1 else [[0, 1, 2, 3], [4]]
        assert _sections(_choose(without, [[0], [1]])) == moved


def test_no_cut_moves_past_where_a_gradient_in_no_bucket_is_released_for_bytes() -> None:
    """Gradient 2 is there after call 0, but its parameter is read by call 2. Its hook may send."""
    reads = [{}, {0: NO}, {1: NO}, {2: NO}, {3: NO}]
    gradients = {0: (1,), 1: (4,), 2: (0,)}
    for sizes in ([1, 9, 9, 1, 1], [9, 1, 1, 9, 9]):
        chosen = _cut(_facts(reads, gradients, sizes, memory_users={2: (2,)}), [[0], [1]])
        assert _sections(chosen) == [[0, 1], [2, 3, 4]]
        assert chosen.releases == ((0,), (1, 2))


def test_a_parameter_is_not_read_after_its_gradient_is_released() -> None:
    """Call 2 reads parameter 0, which a hook may update as soon as it gets the gradient, call 1."""
    reads = [{}, {0: NO}, {0: NO}, {2: NO}, {3: NO}]
    facts = _facts(reads, {0: (1,), 1: (4,)}, memory_users={0: (2,)})
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 1, 2], [3, 4]]


def test_what_a_hook_could_write_is_read_before_a_release_that_the_read_stands_before() -> None:
    """Call 1 reads argument 9 for gradient 1, and stands before gradient 0, call 2."""
    reads = [{}, {0: NO}, {0: NO}, {1: NO}]
    gradients = {0: (2,), 1: (3,)}
    assert _sections(_choose(_facts(reads, gradients), [[0], [1]])) == [[0, 2], [1, 3]]
    facts = _facts(reads, gradients, memory_users={9: (1,)})
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 1, 2], [3]]
    behind = _facts([{}, {0: NO}, {0: NO}, {2: NO}], {0: (1,), 1: (3,)}, memory_users={9: (2,)})
    assert _sections(_choose(behind, [[0], [1]])) == [[0, 1], [2, 3]]


def test_a_write_back_stands_where_its_value_is_made_and_the_old_one_was_read() -> None:
    """Calls 4 and 5 write what calls 0 and 3 make, before and behind gradient 0, call 1."""
    reads = [{}, {0: NO}, {1: NO}, {2: NO}, {0: NO}, {3: NO}]
    gradients = {0: (1,), 1: (3,)}
    written = {"memory_users": {8: (4,), 9: (5,)}, "epilogue_copies": {4: 8, 5: 9}}
    facts = _facts(reads, gradients, ordered=(4, 5), **written)
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 1, 4], [2, 3, 5]]
    read_late = {**written, "memory_users": {8: (2, 4), 9: (5,)}}
    facts = _facts(reads, gradients, ordered=(4, 5), **read_late)
    assert _sections(_choose(facts, [[0], [1]])) == [[0, 1], [2, 3, 4, 5]]


def test_calls_of_the_forward_that_are_made_again_read_a_snapshot_in_later_sections() -> None:
    """Calls 0 and 2 read argument 9; call 0 is in the first section."""
    reads = [{}, {0: NO}, {}, {2: NO}]
    again = {0: frozenset([9]), 2: frozenset([9])}
    facts = _facts(reads, {0: (1,), 1: (3,)}, memory_users={9: (0, 2)}, snapshot_reads=again)
    chosen = _cut(facts, [[0], [1]])
    assert _sections(chosen) == [[0, 1], [2, 3]]
    assert chosen.snapshot_reads == {2: frozenset([9])}


def test_a_by_product_of_an_earlier_stages_loop_is_made_there() -> None:
    """Call 2, of bucket 1, is fused with 0; it is made with bucket 0, and released with 1.

    That it reads call 1 too, which is there by then, makes no difference.
    """
    reads = [{}, {0: NO}, {0: Tie.FUSED, 1: NO}, {0: NO}, {3: NO}]
    facts = _facts(reads, {0: (1,), 1: (2,), 2: (4,)})
    chosen = _cut(facts, [[0], [1, 2]])
    assert _sections(chosen) == [[0, 1, 2], [3, 4]]
    assert chosen.releases == ((0,), (1, 2))


def test_a_gradient_within_a_by_product_is_still_made_for_its_own_bucket() -> None:
    """Call 2 is made with bucket 1, whose gradient 0 it is fused with; it reads bucket 0's, 1."""
    reads = [{}, {}, {0: Tie.FUSED, 1: Tie.FUSED}, {0: NO}]
    chosen = _cut(_facts(reads, {0: (1,), 1: (0,), 2: (2,), 3: (3,)}), [[0], [1], [2, 3]])
    assert _sections(chosen) == [[1], [0, 2], [3]]
    assert chosen.releases == ((0,), (1,), (2, 3))


def test_a_by_product_with_an_effect_does_not_pass_another_effect() -> None:
    """Call 2 would be made with bucket 0, but call 1 draws random numbers before it."""
    reads = [{}, {}, {0: Tie.FUSED}, {0: NO, 1: NO}, {2: NO}]
    gradients = {0: (0,), 1: (2,), 2: (3,), 3: (4,)}
    facts = _facts(reads, gradients, ordered=(1, 2))
    assert _sections(_choose(facts, [[0], [1, 2, 3]])) == [[0], [1, 2, 3, 4]]


def test_reasons_for_which_a_backward_graph_stays_whole() -> None:
    """These are: no parameter, one bucket, and gradients that one call makes."""
    facts = _facts([{}, {0: NO}, {1: NO}], {0: (1,), 1: (1,), 2: (2,)})
    assert _choose(facts, []) is Reason.NO_PARAMETERS
    assert _choose(facts, [[0, 2]]) is Reason.ONE_BUCKET
    assert _choose(_facts([{}], {0: (0,), 1: (0,)}), [[0], [1]]) is Reason.COMPLETE_TOGETHER
    # A collective before all releases, of one bucket, leaves nothing to divide.
    facts = _facts([{}, {0: NO}], {0: (1,)}, collectives=[0])
    assert _choose(facts, [[0]]) is Reason.ONE_BUCKET


@st.composite
def _random_facts(draw: st.DrawFn) -> tuple[BackwardFacts, list[list[int]]]:
    count = draw(st.integers(2, 30))
    ties = st.sampled_from([Tie.NONE, Tie.FUSED, Tie.UNROUNDED])
    reads: list[dict[int, Tie]] = [
        draw(st.dictionaries(st.integers(0, i - 1), ties, max_size=3)) if i else {}
        for i in range(count)
    ]
    for i in range(1, count):
        if draw(st.integers(0, 5)) == 0:
            reads[i] = {i - 1: Tie.TUPLE}
    makers = draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=8))
    gradients = {a: (maker,) for a, maker in enumerate(makers)}
    if draw(st.booleans()):
        gradients[len(makers)] = ()  # an input handed through
    arguments = draw(st.permutations(list(gradients)))
    cuts = sorted(draw(st.sets(st.integers(1, len(arguments)), max_size=4)))
    bounds = [0, *cuts]
    buckets = [list(arguments[a:b]) for a, b in itertools.pairwise(bounds)]
    sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    ordered = draw(st.sets(st.integers(0, count - 1), max_size=3))
    ordered = {i for i in ordered if Tie.TUPLE not in reads[i].values()}
    read_by = st.dictionaries(
        st.sampled_from(list(gradients)), st.tuples(st.integers(0, count - 1)), max_size=3
    )
    memory_users = draw(read_by)
    # The last call may write back to an argument that others read, and that has no gradient.
    epilogue_copies = {}
    if Tie.TUPLE not in reads[-1].values() and count - 1 not in makers and draw(st.booleans()):
        readers = draw(st.sets(st.integers(0, count - 2), max_size=2)) | {count - 1}
        memory_users[len(gradients)] = tuple(sorted(readers))
        epilogue_copies[count - 1] = len(gradients)
        ordered.add(count - 1)
    facts = _facts(reads, gradients, sizes, sorted(ordered), memory_users, epilogue_copies)
    return facts, [bucket for bucket in buckets if bucket]


@given(_random_facts(), st.randoms(use_true_random=False))
def test_sizes_do_not_decide_in_which_section_an_effect_or_a_release_is(
    drawn: tuple[BackwardFacts, list[list[int]]], random: Random
) -> None:
    """Ranks whose batches differ have the same calls with effects between the same releases."""
    facts, buckets = drawn
    others = dataclasses.replace(facts, num_bytes=[random.randrange(9) for _ in facts.num_bytes])
    seen = []
    for chosen in (_choose(facts, buckets), _choose(others, buckets)):
        if isinstance(chosen, Reason):
            seen.append(chosen)
        else:
            effects = [[c for c in calls if facts.has_effects[c]] for calls in _sections(chosen)]
            seen.append((effects, chosen.releases))
    assert seen[0] == seen[1]


@given(_random_facts())
def test_any_plan_runs_every_call_once_and_releases_what_is_there(
    drawn: tuple[BackwardFacts, list[list[int]]],
) -> None:
    """The order respects what calls read, effects, tuples, and the order of buckets."""
    facts, buckets = drawn
    chosen = _choose(facts, buckets)
    if isinstance(chosen, Reason):
        return
    place = {call: i for i, call in enumerate(chosen.order)}
    assert sorted(chosen.order) == list(range(len(facts.reads)))
    assert all(place[source] < place[call] for call in place for source in facts.reads[call])
    ordered = [c for c in chosen.order if facts.has_effects[c] and c not in facts.epilogue_copies]
    assert ordered == sorted(ordered)
    for epilogue_copy, argument in facts.epilogue_copies.items():
        assert all(place[c] <= place[epilogue_copy] for c in facts.memory_users[argument])
    section_of = {c: k for k, calls in enumerate(_sections(chosen)) for c in calls}
    for call, reads in enumerate(facts.reads):
        if Tie.TUPLE in reads.values() and len(reads) == 1:
            assert section_of[call] == section_of[next(iter(reads))]
    assert sorted(itertools.chain(*chosen.releases)) == sorted(facts.gradients)
    for k, arguments in enumerate(chosen.releases):
        assert all(section_of[c] <= k for a in arguments for c in facts.memory_users.get(a, ()))
    for k, arguments in enumerate(chosen.releases):
        assert all(section_of[call] <= k for a in arguments for call in facts.gradients[a])
    for k, arguments in enumerate(chosen.releases):
        behind = [call for call in facts.observable_calls if section_of[call] > k]
        for a in arguments:
            assert all(facts.observable_calls[c] > facts.release_places[a] for c in behind)
    completed = [bucket for section in chosen.sections for bucket in section.completes]
    assert completed == list(range(len(buckets)))
    for k, section in enumerate(chosen.sections):
        released = set(itertools.chain(*chosen.releases[: k + 1]))
        assert all(released.issuperset(buckets[bucket]) for bucket in section.completes)


# ---- Collectives -----------------------------------------------------------------------------


def test_one_bucket_is_cut_between_collectives() -> None:
    """Gradients 0, 1 and 2 are made by calls 0, 2 and 4; calls 1 and 3 communicate."""
    reads = [{}, {0: NO}, {1: NO}, {2: NO}, {3: NO}]
    facts = _facts(reads, {0: (0,), 1: (2,), 2: (4,)}, collectives=[1, 3])
    chosen = _cut(facts, [[0, 1, 2]])
    assert _sections(chosen) == [[0], [1, 2], [3, 4]]
    assert chosen.releases == ((0,), (1,), (2,))
    assert [section.completes for section in chosen.sections] == [(), (), (0,)]


def test_a_collective_behind_all_releases_has_a_section() -> None:
    """The collective makes an input's gradient, which another rank may not need at all."""
    reads = [{}, {0: NO}, {1: NO}]
    chosen = _cut(_facts(reads, {0: (1,)}, collectives=[2]), [[0]])
    assert _sections(chosen) == [[0, 1], [2]]
    assert chosen.releases == ((0,), ())


def test_a_gradient_that_is_there_from_the_start_leaves_before_the_first_collective() -> None:
    """A bias behind the last collective, where nothing has to be summed: a batch of one."""
    reads = [{}, {0: NO}]
    chosen = _cut(_facts(reads, {0: (), 1: (1,)}, collectives=[0]), [[0, 1]])
    assert _sections(chosen) == [[], [0, 1]]
    assert chosen.releases == ((0,), (1,))


def test_gradients_in_no_bucket_keep_their_place_among_collectives() -> None:
    """A hook of theirs may communicate as well: experts' gradients are reduced by hooks."""
    reads = [{}, {0: NO}, {1: NO}, {2: NO}]
    facts = _facts(reads, {0: (0,), 1: (2,), 2: (3,)}, collectives=[1])
    chosen = _cut(facts, [[1, 2]])
    assert chosen.releases == ((0,), (1, 2))


def test_a_parameter_that_is_read_behind_a_collective_and_its_gradient_forbids_cuts() -> None:
    """The read has to come before the release, which has to come before the collective."""
    reads = [{}, {0: NO}, {1: NO}]
    facts = _facts(reads, {0: (0,), 1: (2,)}, collectives=[1], memory_users={0: (2,)})
    assert _choose(facts, [[0], [1]]) is Reason.COLLECTIVES
    assert _choose(facts, [[0, 1]]) is Reason.COLLECTIVES


def _num_collectives_before(
    facts: BackwardFacts, chosen: BackwardSections | Reason
) -> dict[int, int]:
    """How many collectives come before the release of each gradient: all in a whole graph."""
    if isinstance(chosen, Reason):
        return dict.fromkeys(facts.gradients, sum(facts.communicates))
    num_before, counts = 0, {}
    for calls, arguments in zip(_sections(chosen), chosen.releases, strict=True):
        num_before += sum(facts.communicates[call] for call in calls)
        counts.update(dict.fromkeys(arguments, num_before))
    return counts


@given(_random_facts(), st.randoms(use_true_random=False))
def test_neither_buckets_nor_sizes_decide_which_collectives_come_before_a_release(
    drawn: tuple[BackwardFacts, list[list[int]]], random: Random
) -> None:
    """Ranks compile at different times, for buckets of their own, with batches of their own."""
    facts, buckets = drawn
    communicates = [
        has_some and call not in facts.epilogue_copies and random.random() < 0.7
        for call, has_some in enumerate(facts.has_effects)
    ]
    facts = dataclasses.replace(facts, communicates=communicates)
    if not any(communicates):
        return
    members = list(itertools.chain(*buckets))
    random.shuffle(members)
    half = len(members) // 2
    expected = None
    for others in (buckets, [members], [members[:half], members[half:]], [[m] for m in members]):
        num_bytes = [random.randrange(9) for _ in facts.num_bytes]
        chosen = _choose(dataclasses.replace(facts, num_bytes=num_bytes), [b for b in others if b])
        counts = _num_collectives_before(facts, chosen)
        if not isinstance(chosen, Reason):
            collectives = [call for call, one in enumerate(communicates) if one]
            for argument, place in facts.release_places.items():
                assert counts[argument] == sum(call <= place for call in collectives)
        expected = expected or counts
        assert counts == expected
