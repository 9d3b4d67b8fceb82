"""Run a case on the ranks, eagerly and compiled, and say what came of it.

`check` runs on each rank, `run_case` in the process that started them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpopt
from ddpopt import _torch
from ddpopt.split.cut import Cut
from tests.support.ranks import RankError, Ranks
from tests.system.fuzzing import planted
from tests.system.fuzzing.codes import CodeChecks, checking_code
from tests.system.fuzzing.rounding import TOLERANCES, relative_error
from tests.system.fuzzing.spec import Case
from tests.system.fuzzing.training import Compile, Notes, group_of_trainings, leave_group, train

OUR_ERRORS = ("SPLIT_FAILED", "BACKWARD_FAILED", "NOT_PROVEN", "TORCH_DRIFT", "BACKWARD_DRIFT")

EQUAL = "equal"
EQUAL_TO_UNSPLIT = "equal to the unsplit compile, and to eager within rounding"
ROUNDED = "equal within rounding"
AS_EXACT = "as near as eager to what float64 gives"
AS_UNSPLIT = "as the unsplit compile, which differs from eager"
REFUSED = "discarded: eager DDP raises"
REFUSED_UNSPLIT = "discarded: the unsplit compile raises"
OTHER_FRAMES = "discarded: Dynamo compiles other frames in a recomputation"
NOT_SPLIT = "not split, for an error"
DIFFERS = "differs"
CODE_DIFFERS = "a section's code differs from its graph"
RAISES = "raises"
STUCK = "stuck or dead"
OUTCOMES = (
    EQUAL,
    EQUAL_TO_UNSPLIT,
    ROUNDED,
    AS_EXACT,
    AS_UNSPLIT,
    REFUSED,
    REFUSED_UNSPLIT,
    OTHER_FRAMES,
    NOT_SPLIT,
    DIFFERS,
    CODE_DIFFERS,
    RAISES,
    STUCK,
)  # from good to bad
FAILURES = (DIFFERS, CODE_DIFFERS, RAISES, NOT_SPLIT, STUCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of a case.

    `sections` are those of each graph: 1 for one that is whole. `reasons` are why graphs are whole,
    or are cut in forward instead. `num_codes` counts the backward sections whose code was compared
    with their graphs.
    """

    outcome: str
    detail: str = ""
    sections: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    num_codes: int = 0

    @property
    def is_failure(self) -> bool:
        """Whether ddpopt is to blame."""
        return self.outcome in FAILURES

    @property
    def is_discarded(self) -> bool:
        """Whether the case says nothing of ddpopt."""
        return self.outcome in (REFUSED, REFUSED_UNSPLIT, OTHER_FRAMES)


def run_case(ranks: Ranks, case: Case, plant: str = "", *, checks_code: bool = False) -> Finding:
    """Run a case on all ranks; return the worst of what they found.

    `plant` names a bug of `planted.py` to run it with. With `checks_code`, each compiled backward
    section is compared with its graph as well, see `codes.py`, and there is no warm start.
    """
    return worst_of(ranks, OUTCOMES, Finding, check, case, plant, checks_code)


def worst_of(
    ranks: Ranks, order: Sequence[str], kind: Any, function: Callable[..., Any], *args: Any
) -> Any:
    """Run `function` on all ranks; return the worst of what they found, each of a `kind`.

    `order` has outcomes from good to bad.
    """
    try:
        found = ranks.run(function, *args)
    except RankError as error:
        return kind(outcome=STUCK, detail=str(error))
    worst = max(found, key=lambda each: order.index(each.outcome))
    if worst.outcome in (REFUSED, REFUSED_UNSPLIT, OTHER_FRAMES, RAISES):
        ranks.stop()  # an error in mid-backward may have left the processes in any state
    return worst


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Let nothing be logged or warned of in this block."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def check(rank: int, case: Case, plant: str, checks_code: bool = False) -> Finding:
    """Train a case eagerly and compiled, and compare; on all ranks at once."""
    # Inductor's own random numbers are others where a graph is cut. Dynamo takes recurrent layers
    # for what cannot be compiled, unless it is told otherwise.
    allows_layers = torch._dynamo.config.patch(allow_rnn=True)
    with quietly(), _torch.drawing_as_eager(), allows_layers:
        if not checks_code:
            return _check(rank, case, plant)
        with checking_code() as checks:
            finding = _check(rank, case, plant, checks)
    finding = dataclasses.replace(finding, num_codes=checks.num_sections)
    if anywhere(bool(checks.differences)) and not finding.is_discarded:
        detail = "\n".join(checks.differences)
        finding = dataclasses.replace(finding, outcome=CODE_DIFFERS, detail=detail)
    return finding


def _check(rank: int, case: Case, plant: str, checks: CodeChecks | None = None) -> Finding:
    eager = _attempt(case, rank, lambda module: module)
    compile_ = functools.partial(_compile, case)
    compiled = functools.partial(_attempt, case, rank, compile_)
    with planted.bug(plant):
        ours = compiled()
    if eager.raised_anywhere:
        return Finding(outcome=REFUSED, detail=eager.error)
    if case.inner == "inductor" and not ours.raised_anywhere and checks is None:
        warm = compiled()
        if warm.raised_anywhere or anywhere(not _are_same(warm, ours) or warm.cuts != ours.cuts):
            why = warm.error or _difference(case, warm, ours) or "another cut, or other bits"
            return Finding(outcome=RAISES if warm.error else DIFFERS, detail=f"warm start: {why}")
    outcome = ""
    if not ours.raised_anywhere and not anywhere(not _are_same(ours, eager)):
        outcome = EQUAL
    elif checks is not None and not ours.raised_anywhere:
        # The unsplit compile, which tells a fault of torch's from ours, is made for those that
        # differ: it takes as long as all sections.
        outcome = "" if anywhere(bool(_difference(case, ours, eager))) else ROUNDED
    if outcome:
        return _judge(outcome, ours)
    with torch._dynamo.config.patch(optimize_ddp=False):  # torch's own, and whole
        unsplit = _attempt(case, rank, _unsplit(case))
    if unsplit.raised_anywhere:
        return Finding(outcome=REFUSED_UNSPLIT, detail=unsplit.error, sections=ours.sections)
    if ours.raised_anywhere:
        is_named = anywhere("a checkpoint's recomputation does not run" in ours.error)
        return Finding(outcome=OTHER_FRAMES if is_named else RAISES, detail=ours.error)
    return _compare(case, rank, ours, eager, unsplit)


def _compare(case: Case, rank: int, ours: _Attempt, eager: _Attempt, unsplit: _Attempt) -> Finding:
    """Find out how far a training that is not equal to eager's in all bits is from it."""
    difference = _difference(case, ours, eager)
    if not anywhere(bool(difference)):
        is_rounded = anywhere(not _are_same(ours, unsplit))
        return _judge(ROUNDED if is_rounded else EQUAL_TO_UNSPLIT, ours)
    if not anywhere(bool(_difference(case, ours, unsplit))):
        return _judge(AS_UNSPLIT, ours, difference)
    if case.delayed:
        # The unsplit compile has DDP reduce delayed parameters before it makes their gradients
        # (torch 2.13), so that nothing can be compared with it: tell without them.
        finding = _check(rank, dataclasses.replace(case, delayed=""), plant="")
        if finding.outcome == AS_UNSPLIT:
            return _judge(AS_UNSPLIT, ours, difference)
    if "bfloat16" in case.dtypes:
        exact = _attempt(case.in_double(), rank, lambda module: module)
        if not exact.raised_anywhere and not anywhere(not _are_as_near(ours, eager, exact)):
            return _judge(AS_EXACT, ours, difference)
    return Finding(outcome=DIFFERS, detail=difference, sections=ours.sections)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One training: what was noted, or the error, and whether any rank raised."""

    notes: Notes
    error: str
    cuts: tuple[Cut, ...]
    raised_anywhere: bool

    @property
    def sections(self) -> tuple[int, ...]:
        return tuple(max(1, len(cut.sections)) for cut in self.cuts)


def _attempt(case: Case, rank: int, compile_: Compile) -> _Attempt:
    notes, cuts, error = Notes(), (), ""
    group = group_of_trainings()
    try:
        notes, ddp = train(case, rank, compile_, group)
        cuts = ddpopt.explain(ddp).cuts
    except Exception:
        error = traceback.format_exc()
    raised_anywhere = anywhere(bool(error))
    if raised_anywhere:
        leave_group()
    error = error or "another rank raised" * raised_anywhere
    return _Attempt(notes=notes, error=error, cuts=cuts, raised_anywhere=raised_anywhere)


def anywhere(is_so: bool) -> bool:
    """Whether it is so on any rank, so that all go on alike."""
    count = torch.tensor(float(is_so))
    dist.all_reduce(count)
    return bool(count)


def _compile(case: Case, module: nn.Module) -> Callable[..., Any]:
    options = {"inner": case.inner, "split": case.split}
    return torch.compile(module, backend="ddpopt", options=options)


def _unsplit(case: Case) -> Compile:
    return functools.partial(torch.compile, backend=case.inner)


def _judge(outcome: str, ours: _Attempt, detail: str = "") -> Finding:
    """Return what was found, unless something went wrong that changes no value."""
    given = [
        (cut, why.name) for cut in ours.cuts for why in (cut.fallback, cut.backward_fallback) if why
    ]
    reasons = tuple(name for _, name in given)
    for cut, name in given:
        if name in OUR_ERRORS:
            outcome, detail = NOT_SPLIT, f"{name}: {cut}"
    return Finding(outcome=outcome, detail=detail, sections=ours.sections, reasons=reasons)


def _are_same(actual: _Attempt, expected: _Attempt) -> bool:
    """Whether two trainings are equal in all bits, except the signs of zeros and NaNs."""
    ours, theirs = actual.notes, expected.notes
    return (
        ours.texts == theirs.texts
        and ours.values.keys() == theirs.values.keys()
        and all(relative_error(ours.values[n], v) == 0.0 for n, v in theirs.values.items())
    )


def _difference(case: Case, actual: _Attempt, expected: _Attempt) -> str:
    """Say in what two trainings differ by more than rounding, "" if they do not."""
    ours, theirs = actual.notes, expected.notes
    found = [
        f"{name}: {ours.texts.get(name)!r} instead of {text!r}"
        for name, text in theirs.texts.items()
        if ours.texts.get(name) != text
    ]
    tolerance = max(TOLERANCES[dtype] for dtype in case.dtypes)
    for name in dict.fromkeys([*theirs.values, *ours.values]):
        if name not in ours.values or name not in theirs.values:
            found.append(f"{name}: missing in one")
            continue
        error = relative_error(ours.values[name], theirs.values[name])
        if error > tolerance:
            found.append(f"{name}: relative error {error:.1e}")
    return "\n".join(found)


def _are_as_near(ours: _Attempt, eager: _Attempt, exact: _Attempt) -> bool:
    """Whether two trainings in bfloat16 are equally far from an `exact` one, in float64.

    A batch norm's gradients are sums in which most cancels. What is left may have few right bits
    in bfloat16, and others where three addends are added in another order. Each training is
    followed up to the first step in which it differs: later ones start from other parameters.
    """
    mine, theirs, values = ours.notes.values, eager.notes.values, exact.notes.values
    if ours.notes.texts != eager.notes.texts or not mine.keys() == theirs.keys() == values.keys():
        return False
    # The step in which each training differs first: of the model, and of a second one.
    differs_in: dict[bool, str] = {}
    for name, value in values.items():
        is_second = name.startswith("second: ")
        step = name.removeprefix("second: ").partition(".")[0]  # of "step 1.0 gradient last.bias"
        if differs_in.get(is_second, step) != step:
            continue
        if (mine[name].shape, mine[name].dtype) != (theirs[name].shape, theirs[name].dtype):
            return False
        far = relative_error(theirs[name].double(), value.double())
        # Nothing is shown by values that eager itself gets wrong, as with other random numbers.
        if far > 0.5 or relative_error(mine[name].double(), value.double()) > 4 * far + 0.02:
            return False
        if relative_error(mine[name], theirs[name]) > TOLERANCES["bfloat16"]:
            differs_in.setdefault(is_second, step)
    return True
