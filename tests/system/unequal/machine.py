"""Scripts drawn by rules: each rule is something that a loop does, where eager DDP can do it.

The machine only writes the script; it is run when the machine ends, see `running.py`. What it knows
meanwhile is what the preconditions ask: scripts in which eager DDP raises or hangs say little, and
a hang takes as long as the limit.
"""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.system.campaigns.campaign import one_example
from tests.system.unequal import actions
from tests.system.unequal.actions import ALL_RANKS, NUM_RANKS, Action, Step
from tests.system.unequal.script import COMMUNICATING, KINDS, PARTLY_UNUSED, Block, Script

# Kinds of scripts that can be left out, while a fault of theirs is known and not yet mended.
OWN_COLLECTIVES = "models with collectives of their own"
NEW_REDUCERS = "what a new Reducer does once more"
AVOIDABLE = (OWN_COLLECTIVES, NEW_REDUCERS)

_MOST_ACTIONS = 8  # beside the steps at both ends
_FIRST_SIZE = (2, 3)

# What varies in a script: the batch size, the sequence length, or both. Dynamo compiles for the
# first shape, then for any, and for a batch of one row by itself. Most of a script's time goes into
# compiles, and of that most into the arithmetic of sizes that vary.
_SHAPES = (
    (_FIRST_SIZE, (4, 3), (1, 3)),
    (_FIRST_SIZE, (2, 5), (2, 12)),
    (_FIRST_SIZE, (3, 5), (1, 12)),
)
_shape = st.runner().flatmap(lambda loop: st.sampled_from(loop.shapes))
_sizes = st.one_of(_shape.map(lambda shape: (shape,) * NUM_RANKS), st.tuples(*[_shape] * NUM_RANKS))
_subsets = [subset for size in ALL_RANKS for subset in itertools.combinations(ALL_RANKS, size + 1)]
_ranks = st.sampled_from(_subsets)
_one_rank = st.sampled_from(_subsets[:NUM_RANKS])
_rarely = st.sampled_from([False, False, False, True])

# Steps with which a search for buckets, or a comparison after it, has just ended or is about to.
_NUM_FIRST_STEPS = {"ddp": (0, 1, 2, 3), "plan": (0, 1, 2, 3), "auto": (1, 2, 5, 7, 8, 9, 16, 17)}


@st.composite
def _models(draw: st.DrawFn, avoided: frozenset[str]) -> tuple[Block, ...]:
    # With parameters that some steps do not use, eager DDP keeps its first buckets: not too often.
    left_out = () if draw(_rarely) else PARTLY_UNUSED
    if OWN_COLLECTIVES in avoided:
        left_out += COMMUNICATING
    kinds = [kind for kind in KINDS if kind not in left_out]
    blocks = st.builds(
        Block, kind=st.sampled_from(kinds), has_positions=_rarely, is_checkpointed=_rarely
    )
    # In a checkpoint eager counts a batch norm's statistics twice, and no compiler does.
    blocks = blocks.filter(lambda block: block.kind != "batchnorm" or not block.is_checkpointed)
    drawn = draw(st.lists(blocks, min_size=1, max_size=3))
    return (*drawn, Block(kind="linear"))


@st.composite
def setups(draw: st.DrawFn, avoided: frozenset[str]) -> Script:
    """A script without actions: its model and its options, which fit each other."""
    blocks = draw(_models(avoided))
    kinds = {block.kind for block in blocks}
    find_unused, static_graph = draw(
        st.sampled_from([(False, False), (False, False), (False, True), (True, False)])
    )
    if "branch" in kinds or ("unused" in kinds and not static_graph):
        find_unused, static_graph = True, False
    return Script(
        blocks=blocks,
        actions=(),
        num_before_break=draw(st.sampled_from([0, 0, *range(1, len(blocks))])),
        second=draw(st.sampled_from(["", "", "", "after", "beside"])),
        cap_bytes=draw(st.sampled_from([300, 700, 1500, 5000])),
        static_graph=static_graph,
        find_unused=find_unused,
        bucket_view=draw(_rarely),
        broadcasts_buffers=draw(_rarely),
        compiles_inside=draw(_rarely),
        is_dynamic=draw(_rarely),
        is_registered_in_reverse=draw(_rarely),
        split=draw(st.sampled_from(["auto", "auto", "backward", "forward"])),
        buckets=draw(st.sampled_from(["ddp", "auto", "plan"])),
        num_planned=draw(st.integers(1, 6)),
        takes_back=draw(_rarely),
        optimizer=draw(st.sampled_from(["SGD", "momentum", "AdamW"])),
        clears_to_none=not draw(_rarely),
    )


class Loop(RuleBasedStateMachine):
    """A loop that is being written. Subclasses say what comes of it, in `end`."""

    avoided: frozenset[str] = frozenset()
    script: Script | None = None
    shapes = _SHAPES[0]

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Action] = []
        # How many backwards have reduced gradients; in eager DDP's second forward after one, its
        # buckets are rebuilt, which is collective.
        self.num_steps = 0
        # Whether gradients are accumulated that no backward has reduced.
        self.is_accumulating = False
        # Whether a forward has prepared DDP for a backward that did not come. The next one would
        # reduce gradients, even under `no_sync`.
        self.is_prepared = False
        self.is_rebucketed = False
        # Whether there was a `join`: DDP goes on asking other ranks in each forward.
        self.is_joined = False

    def end(self, script: Script) -> None:
        """What to do with the script."""

    def teardown(self) -> None:
        if self.script is not None:
            self._step(sizes=(_FIRST_SIZE,) * NUM_RANKS, times=2)
            self.end(Script(**_fields(self.script) | {"actions": tuple(self.actions)}))

    def _step(self, **fields: Any) -> None:
        self._add(Step(**fields))
        self.num_steps += self.actions[-1].times
        self.is_accumulating = self.is_prepared = False

    def _add(self, action: Action) -> None:
        self.actions.append(action)

    # ---- What a loop is at ---------------------------------------------------------------------

    @property
    def has_settled(self) -> bool:
        """Whether eager DDP does nothing any more that it does once."""
        return self.num_steps >= 2

    @property
    def can_act_alone(self) -> bool:
        """Whether a rank can run a forward that others do not run."""
        script = self.script
        is_collective = script.communicates or script.broadcasts_any or self.is_joined
        return self.has_settled and not is_collective and not self.avoids_new_reducer

    @property
    def can_differentiate_input(self) -> bool:
        """Whether `autograd.grad` may come before a backward, or without one."""
        return self.has_settled and not (self.script.static_graph and self.avoids_new_reducer)

    @property
    def avoids_new_reducer(self) -> bool:
        """Whether DDP may have got a new Reducer, and what is peculiar to it is left out."""
        has_new_one = self.script.buckets != "ddp" or self.is_rebucketed
        return has_new_one and NEW_REDUCERS in self.avoided

    @property
    def can_change_what_is_used(self) -> bool:
        """Whether another set of parameters may have gradients than in the step before."""
        return self.script.find_unused and not self.script.static_graph

    @property
    def can_use_no_sync(self) -> bool:
        """Whether a backward under `no_sync` reduces nothing."""
        is_first_of_static_graph = self.script.static_graph and not self.has_settled
        return not self.is_prepared and not is_first_of_static_graph

    # ---- Rules ---------------------------------------------------------------------------------

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.script = data.draw(setups(self.avoided))
        self.shapes = data.draw(st.sampled_from(_SHAPES))
        times = data.draw(st.sampled_from(_NUM_FIRST_STEPS[self.script.buckets]))
        if times:
            self._step(sizes=data.draw(_sizes), times=times)

    @rule(sizes=_sizes, times=st.integers(1, 3))
    def train(self, sizes: actions.Sizes, times: int) -> None:
        self._step(sizes=sizes, times=times)

    @rule(shape=_shape, times=st.integers(1, 3))
    def train_alike(self, shape: tuple[int, int], times: int) -> None:
        self._step(sizes=(shape,) * NUM_RANKS, times=times)

    @precondition(lambda self: self.script.buckets == "auto")
    @rule(sizes=_sizes, times=st.sampled_from([5, 6, 7, 8]))
    def train_long(self, sizes: actions.Sizes, times: int) -> None:
        self._step(sizes=sizes, times=times)

    @precondition(lambda self: self.can_change_what_is_used)
    @rule(sizes=_sizes, branches=st.tuples(*[st.integers(0, 1)] * NUM_RANKS))
    def train_branches(self, sizes: actions.Sizes, branches: tuple[int, ...]) -> None:
        self._step(sizes=sizes, branches=branches)

    @rule(sizes=_sizes, ranks=_ranks)
    def train_and_skip_updates(self, sizes: actions.Sizes, ranks: tuple[int, ...]) -> None:
        self._step(sizes=sizes, skips=ranks)

    @precondition(lambda self: self.can_differentiate_input)
    @rule(sizes=_sizes, ranks=_ranks)
    def train_and_differentiate_input(self, sizes: actions.Sizes, ranks: tuple[int, ...]) -> None:
        if self.script.communicates:
            ranks = ALL_RANKS
        self._step(sizes=sizes, differentiates_input=ranks)

    @rule(sizes=_sizes)
    def train_and_sum_loss(self, sizes: actions.Sizes) -> None:
        self._step(sizes=sizes, sums_loss=True)

    @rule(sizes=_sizes)
    def train_on_two_forwards(self, sizes: actions.Sizes) -> None:
        self._step(sizes=sizes, num_forwards=2)

    @precondition(lambda self: self.can_use_no_sync)
    @rule(sizes=_sizes, times=st.integers(1, 2))
    def accumulate(self, sizes: actions.Sizes, times: int) -> None:
        self._add(actions.Accumulate(sizes=sizes, times=times))
        self.is_accumulating = True

    @rule(sizes=_sizes, is_training=st.booleans(), has_gradients=st.booleans())
    def evaluate(self, sizes: actions.Sizes, is_training: bool, has_gradients: bool) -> None:
        self._evaluate(ALL_RANKS, sizes, is_training, has_gradients)

    @precondition(lambda self: self.can_act_alone)
    @rule(ranks=_one_rank, sizes=_sizes, is_training=st.booleans(), has_gradients=st.booleans())
    def evaluate_alone(
        self, ranks: tuple[int, ...], sizes: actions.Sizes, is_training: bool, has_gradients: bool
    ) -> None:
        self._evaluate(ranks, sizes, is_training, has_gradients)

    def _evaluate(
        self, ranks: tuple[int, ...], sizes: actions.Sizes, is_training: bool, has_gradients: bool
    ) -> None:
        self._add(
            actions.Evaluate(
                ranks=ranks, sizes=sizes, is_training=is_training, has_gradients=has_gradients
            )
        )
        self.is_prepared |= has_gradients

    @precondition(lambda self: self.can_differentiate_input)
    @rule(sizes=_sizes)
    def differentiate_input(self, sizes: actions.Sizes) -> None:
        self._differentiate_input(ALL_RANKS, sizes)

    @precondition(lambda self: self.can_act_alone)
    @rule(ranks=_one_rank, sizes=_sizes)
    def differentiate_input_alone(self, ranks: tuple[int, ...], sizes: actions.Sizes) -> None:
        self._differentiate_input(ranks, sizes)

    def _differentiate_input(self, ranks: tuple[int, ...], sizes: actions.Sizes) -> None:
        self._add(actions.DifferentiateInput(ranks=ranks, sizes=sizes))
        self.is_prepared = True

    @rule()
    def raise_in_forward(self) -> None:
        self._add(actions.RaiseInForward(ranks=ALL_RANKS))

    @precondition(lambda self: self.can_act_alone)
    @rule(ranks=_ranks)
    def raise_in_forward_alone(self, ranks: tuple[int, ...]) -> None:
        self._add(actions.RaiseInForward(ranks=ranks))

    @precondition(lambda self: not self.is_accumulating)
    @rule(sizes=_sizes)
    def raise_before_backward(self, sizes: actions.Sizes) -> None:
        self._add(actions.RaiseInBackward(sizes=sizes))
        self.is_prepared = True

    # Eager DDP does not go on after a reduction that has begun; without one it does.
    @precondition(lambda self: self.can_use_no_sync and not self.is_accumulating)
    @rule(sizes=_sizes)
    def raise_in_backward(self, sizes: actions.Sizes) -> None:
        self._add(actions.RaiseInBackward(sizes=sizes, where="middle", is_under_no_sync=True))
        self.is_accumulating = True  # as far as ddpopt knows

    @precondition(
        lambda self: (
            self.has_settled
            and not self.is_accumulating
            and not self.script.communicates
            and not self.script.second
            and not self.script.static_graph
        )
    )
    @rule(sizes=_sizes, num_batches=st.tuples(*[st.integers(1, 3)] * NUM_RANKS))
    def join(self, sizes: actions.Sizes, num_batches: tuple[int, ...]) -> None:
        self._add(actions.Join(sizes=sizes, num_batches=num_batches))
        self.is_joined, self.is_prepared = True, False

    @rule(kind=st.sampled_from(actions.COLLECTIVES))
    def communicate(self, kind: str) -> None:
        self._add(actions.Communicate(kind=kind))

    @rule(ranks=_ranks)
    def be_late(self, ranks: tuple[int, ...]) -> None:
        self._add(actions.BeLate(ranks=ranks))

    @rule(ranks=_ranks)
    def reset(self, ranks: tuple[int, ...]) -> None:
        self._add(actions.Reset(ranks=ranks))

    # In eager a checkpoint issues its collectives again. A compiled one, by whatever backend, does
    # not if nothing in backward needs what they return: then the ranks issue different numbers.
    @precondition(lambda self: not self.script.communicates_in_checkpoints)
    @rule(ranks=_ranks, limit=st.integers(1, 2))
    def limit_recompiles(self, ranks: tuple[int, ...], limit: int) -> None:
        self._add(actions.LimitRecompiles(ranks=ranks, limit=limit))

    # In its own views of gradients eager DDP finds none of a parameter that is frozen everywhere.
    @precondition(lambda self: self.can_change_what_is_used and not self.script.bucket_view)
    @rule(is_frozen=st.booleans())
    def freeze(self, is_frozen: bool) -> None:
        self._add(actions.Freeze(is_frozen=is_frozen))

    # Documented: a new Reducer would know nothing of gradients that wait, or of a join; and with a
    # static graph it has to be told how often gradients arrive, which takes two steps to learn.
    @precondition(
        lambda self: (
            self.num_steps >= (2 if self.script.static_graph else 1)
            and not self.is_accumulating
            and not self.is_joined
            and self.script.clears_to_none
        )
    )
    @rule(num_buckets=st.integers(1, 6))
    def rebucket(self, num_buckets: int) -> None:
        self._add(actions.Rebucket(num_buckets=num_buckets))
        self.is_rebucketed = True


def draw_script(number: int, avoided: frozenset[str] = frozenset()) -> Script:
    """The script of a number; see [Note: one run of hypothesis a case]."""
    drawn: list[Script] = []

    class Drawn(Loop):
        def end(self, script: Script) -> None:
            drawn.append(script)

    Drawn.avoided = avoided
    run_state_machine_as_test(
        hypothesis.seed(number)(Drawn),
        settings=one_example(stateful_step_count=_MOST_ACTIONS),
    )
    return drawn[-1]


def _fields(script: Script) -> dict[str, Any]:
    return {name: getattr(script, name) for name in script.__dataclass_fields__}
