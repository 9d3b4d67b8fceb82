"""Run a training on all ranks at once, and judge it beside eager DDP's.

[Note: what judges a training]
Eager DDP is the measure. What is not equal to it in all bits is compared with the unsplit compile,
which tells a fault of torch's from ours: its graphs are those that ddpopt cuts.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _torch
from ddpopt.split.cut import Cut
from tests.support.ranks import RankError, Ranks
from tests.system.training.comparing import Measure, differences, in_bits, lines_of
from tests.system.training.outcomes import (
    AS_UNSPLIT,
    BREAKS,
    DIFFERS,
    ENDED_EARLY,
    EQUAL,
    EQUAL_TO_UNSPLIT,
    NOT_SPLIT,
    OUTCOMES,
    RAISES,
    REFUSED,
    REFUSED_UNSPLIT,
    ROUNDED,
    STUCK,
    Finding,
)

COLLECTIVE_LIMIT_S = 60  # after which a rank whose peer raised gives up its allreduce
OUR_ERRORS = ("SPLIT_FAILED", "BACKWARD_FAILED", "NOT_PROVEN", "TORCH_DRIFT", "BACKWARD_DRIFT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What can be compared of a training: values by name, and what is said of outputs."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def value(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value.detach().clone()

    def named(self, prefix: str, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note copies of parameters, or of what else has names."""
        for name, value in values:
            self.value(f"{prefix} {name}", value)

    def gradients(self, prefix: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note the gradients of those that have one."""
        for name, parameter in parameters:
            if parameter.grad is not None:
                self.values[f"{prefix} {name}"] = parameter.grad.detach().clone().to_dense()

    def add(self, whose: str, others: Notes) -> None:
        """Add the notes of another training."""
        self.values.update({f"{whose}: {name}": value for name, value in others.values.items()})
        self.texts.update({f"{whose}: {name}": text for name, text in others.texts.items()})


Buckets = tuple[tuple[int, ...], ...]
Train = Callable[[dist.ProcessGroup], tuple[Notes, nn.Module]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One training on this rank, or the error that ended it, which all ranks have if one has.

    `cuts` are ddpopt's, of each graph that it compiled. `buckets` are those of each Reducer at the
    end, by parameter index where it tells. `error` is a traceback, and `raised` the exception's
    type and text in one line.
    """

    notes: Notes = field(default_factory=Notes)
    cuts: tuple[Cut, ...] = ()
    num_buckets: int = 0
    buckets: tuple[Buckets | None, ...] = ()
    error: str = ""
    raised: str = ""

    @property
    def raised_anywhere(self) -> bool:
        return bool(self.error)

    @property
    def sections(self) -> tuple[int, ...]:
        return tuple(max(1, len(cut.sections)) for cut in self.cuts)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why graphs are whole, or are cut in forward instead."""
        return tuple(name for _, name in self._reasons())

    @property
    def trouble(self) -> str:
        """The cuts that an error of ours decided, "" for none."""
        return "\n".join(f"{name}: {cut}" for cut, name in self._reasons() if name in OUR_ERRORS)

    def _reasons(self) -> list[tuple[Cut, str]]:
        return [
            (cut, reason.name)
            for cut in self.cuts
            for reason in (cut.fallback, cut.backward_fallback)
            if reason is not None
        ]

    def differences(self, expected: Attempt, measure: Measure = in_bits) -> dict[str, str]:
        """Return in what this differs from another, by name."""
        found = {}
        ours, theirs = self.notes.texts, expected.notes.texts
        for name in dict.fromkeys([*theirs, *ours]):
            if ours.get(name) != theirs.get(name):
                found[name] = f"{ours.get(name)!r} instead of {theirs.get(name)!r}"
        return found | differences(self.notes.values, expected.notes.values, measure)


def attempt(train: Train) -> Attempt:
    """Train on all ranks at once, in a group where nobody waits long for a rank that raised."""
    done, error, raised = Attempt(), "", ""
    group = group_of_trainings()
    try:
        notes, module = train(group)
        ddps = find_ddps(module)
        done = Attempt(
            notes=notes,
            cuts=tuple(cut for ddp in ddps for cut in ddpopt.explain(ddp).cuts),
            num_buckets=sum(map(num_buckets, ddps)),
            buckets=tuple(map(_torch.final_buckets, ddps)),
        )
    except Exception as problem:
        # Of whatever kind: a model's, DDP's, Dynamo's or ours. It is what the training shows.
        error = traceback.format_exc()
        raised = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    if not anywhere(bool(error)):
        return done
    leave_group()
    return Attempt(error=error or "another rank raised", raised=raised)


def judge(  # noqa: PLR0911  # one for each outcome
    ours: Attempt,
    eager: Attempt,
    train_unsplit: Callable[[], Attempt],
    *,
    measure: Measure,
    tells_rounding: bool = True,
    is_one_step: bool = False,
) -> Finding:
    """Return what came of a training, alike on all ranks but for details.

    What the `measure` lets through is called rounding. The unsplit compile is trained only where it
    is needed: to say that something is rounded, if this `tells_rounding`, which is then said to be
    as the unsplit compile rounds it or not. In a training of one step no value comes of another:
    each may be as eager has it, or the unsplit compile.
    """

    def found(outcome: str, detail: str = "") -> Finding:
        return Finding(
            outcome=outcome,
            detail=detail,
            sections=ours.sections,
            remarks=ours.remarks,
            num_buckets=ours.num_buckets,
        )

    if eager.raised_anywhere:
        return found(REFUSED, eager.error)
    is_rounded = False
    if not ours.raised_anywhere:
        if anywhere(bool(ours.trouble)):
            return found(NOT_SPLIT, ours.trouble)
        if not differ_anywhere(ours, eager):
            return found(EQUAL)
        is_rounded = not differ_anywhere(ours, eager, measure)
        if is_rounded and not tells_rounding:
            return found(ROUNDED)
    unsplit = train_unsplit()
    if unsplit.raised_anywhere:
        is_break = anywhere("torch._dynamo.exc.Unsupported" in unsplit.error)
        return found(BREAKS if is_break else REFUSED_UNSPLIT, unsplit.error)
    if ours.raised_anywhere:
        return found(RAISES, ours.error)
    if is_rounded:
        return found(ROUNDED if differ_anywhere(ours, unsplit) else EQUAL_TO_UNSPLIT)
    from_eager, from_unsplit = (ours.differences(t, measure) for t in (eager, unsplit))
    if is_one_step:
        from_unsplit = {name: text for name, text in from_unsplit.items() if name in from_eager}
    if not anywhere(bool(from_unsplit)):
        return found(AS_UNSPLIT, lines_of(from_eager))
    return found(DIFFERS, lines_of(from_unsplit if is_one_step else from_eager))


def differ_anywhere(ours: Attempt, theirs: Attempt, measure: Measure = in_bits) -> bool:
    """Whether two trainings differ on any rank."""
    return anywhere(bool(ours.differences(theirs, measure)))


def worst_of(ranks: Ranks, function: Callable[..., Finding], *args: Any) -> Finding:
    """Run `function` on all ranks; return the worst of what they found."""
    try:
        found: list[Finding] = ranks.run(function, *args)
    except RankError as error:
        return Finding(outcome=STUCK, detail=str(error))
    worst = max(found, key=lambda finding: OUTCOMES.index(finding.outcome))
    if worst.outcome in ENDED_EARLY:
        ranks.stop()
    return worst


def anywhere(is_so: bool) -> bool:
    """Whether it is so on any rank, so that all go on alike."""
    count = torch.tensor(float(is_so))
    dist.all_reduce(count)
    return bool(count)


@contextlib.contextmanager
def quietly(level: int = logging.WARNING) -> Iterator[None]:
    """Let nothing be logged or warned of in this block."""
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def find_ddps(module: nn.Module) -> tuple[DistributedDataParallel, ...]:
    """Return the DDP modules in a module, or the one that composable `replicate` has beside it."""
    found = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    return tuple(found) or (replicate.state(module)._ddp,)


def num_buckets(ddp: DistributedDataParallel) -> int:
    """Return how many buckets the Reducer has now."""
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return len(sizes.split(","))


# No group is ever destroyed, so torch keeps it. Where a Reducer is the last to hold one, gloo's
# destructor waits, with the GIL, for its thread, and that may wait for the GIL to free what a work
# has of Python's (torch 2.13: cudagraph trees leave objects in what each work notes of its thread).
_group: dist.ProcessGroup | None = None


def group_of_trainings() -> dist.ProcessGroup:
    """Return the group for the next training. Collective, in the first and after `leave_group`."""
    global _group  # noqa: PLW0603  # a rank is a process
    if _group is None:
        _group = dist.new_group(timeout=datetime.timedelta(seconds=COLLECTIVE_LIMIT_S))
    return _group


def leave_group() -> None:
    """Have the next training use another group: an error may have left this one in disorder."""
    global _group  # noqa: PLW0603  # as above
    _group = None
