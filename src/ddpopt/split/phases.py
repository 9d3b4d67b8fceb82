"""What a DDP module's graphs are cut for, and whose buckets its Reducer has.

                                 graphs are cut for    the Reducer has
    a compile                    IN_FORCE              FORMED
    with buckets="auto"          SEARCHED              FORMED
      better buckets are found   IN_FORCE              PLANNED
      but steps take longer      IN_FORCE              RETURNED
    with buckets="plan.json"     EXPECTED              FORMED
      ranks apply the plan       IN_FORCE              PLANNED

These are two enumerations because each goal goes with each origin: somebody may call
`ddpopt.rebucket` before a search or during one. Whether the Reducer has told its buckets is a third
one: it tells those of a plan too, some steps later.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._indices import ParameterIndex

Buckets = Sequence[Sequence[ParameterIndex]]  # in launch order


class Goal(enum.Enum):
    """Which buckets a module's graphs are cut for."""

    IN_FORCE = "those that the Reducer has, or will form by its rules"
    SEARCHED = "any: graphs are cut finely while better buckets are searched for"
    EXPECTED = "those of a plan that ranks are about to apply"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGoal:
    """What a module's graphs are cut for; each transition makes another one."""

    goal: Goal = Goal.IN_FORCE
    # The plan's buckets. EXPECTED alone has them.
    expected: Buckets | None = None
    # Whether the code that is compiled now is compiled anew once a search ends, or a plan is
    # applied. Guards compare it, as a part of `ReducerRules`, so that such code is not run any more
    # then. It is no goal of its own: a search needs it only where forwards are cut, in which
    # needless sections cost time; and the copy of a module that a check makes, which runs the
    # original's code, has the original's value, whatever the copy's goal is.
    is_provisional: bool = False

    def __post_init__(self) -> None:
        assert (self.goal is Goal.EXPECTED) == (self.expected is not None)


class Origin(enum.Enum):
    """Whose the buckets are that the Reducer has."""

    FORMED = "DDP's own: the Reducer forms them by its rules"
    PLANNED = "those of a plan that is in force"
    RETURNED = "those that DDP had before a plan, which was taken back"


class Answer(enum.Enum):
    """Whether the Reducer has told its buckets."""

    AWAITED = "not yet: it is asked in each step until DDP's log has them"
    TOLD = "it has, and they stay until it is given others"
    NONE = "it never will: asking raised, as where a release of torch has another log"


class ReducerBuckets:
    """What is known of the buckets of one Reducer; where a module gets another, this is made anew.

    `ddp`, in all methods, is the module that has the Reducer.
    """

    def __init__(self, origin: Origin = Origin.FORMED, given: Buckets | None = None) -> None:
        """Note whose the buckets are; all but those that DDP forms itself are `given`."""
        assert (origin is Origin.FORMED) == (given is None)
        self.origin = origin
        self.answer = Answer.AWAITED
        # As they were given, then as the Reducer has told them; None before either.
        self._known = given
        self._num_questions = 0

    def ask(self, ddp: DistributedDataParallel) -> int:
        """Ask the Reducer for its buckets, and keep them; return how often it was asked.

        The runners of graphs do so in each step that communicates, until there is an answer, or
        this number says that they have asked often.

        Raises:
            TorchDriftError: this release does not report them, now or later.
        """
        self._num_questions += 1
        self.answer = Answer.NONE  # which it stays if asking raises
        told = _torch.final_buckets(ddp)
        if told is None:
            self.answer = Answer.AWAITED
        else:
            self.answer, self._known = Answer.TOLD, told
        return self._num_questions

    @property
    def told(self) -> Buckets | None:
        """The buckets as the Reducer told them, None if it has not."""
        return self._known if self.answer is Answer.TOLD else None

    def find(self, ddp: DistributedDataParallel) -> Buckets | None:
        """The Reducer's buckets; None if it has yet to form them, or does not tell.

        A compile may need them before any runner has asked: DDP may have had them from the start,
        or since steps that ran no code of ours. What the Reducer says here is not kept: with
        `find_unused_parameters` buckets are final until somebody calls `_set_static_graph()`. DDP
        refuses that as soon as a step communicates, and only in such steps `ask` is called.
        """
        if self._known is not None:
            return self._known
        if self.answer is Answer.NONE or _torch.will_rebuild_buckets(ddp):
            return None
        return _torch.final_buckets(ddp)
