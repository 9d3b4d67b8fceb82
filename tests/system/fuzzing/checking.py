"""Run a case on the ranks, eagerly and compiled, and say what came of it.

`check` runs on each rank, `run_case` in the process that started them.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from ddpopt import _torch
from tests.support.beside import compiled
from tests.support.ranks import Ranks
from tests.system.campaigns.planted import planting
from tests.system.fuzzing.codes import CodeChecks, checking_code
from tests.system.fuzzing.spec import Case
from tests.system.fuzzing.training import train
from tests.system.fuzzing.wrapping import Compile
from tests.system.training.comparing import TOLERANCES, lines_of, relative_error, within
from tests.system.training.outcomes import (
    AS_EXACT,
    AS_UNSPLIT,
    CODE_DIFFERS,
    DIFFERS,
    OTHER_FRAMES,
    RAISES,
    Finding,
)
from tests.system.training.running import (
    Attempt,
    anywhere,
    attempt,
    judge,
    quietly,
    worst_of,
)


def run_case(ranks: Ranks, case: Case, plant: str = "", *, checks_code: bool = False) -> Finding:
    """Run a case on all ranks; return the worst of what they found.

    `plant` names a fault of `planted.py` to run it with. With `checks_code`, each compiled backward
    section is compared with its graph as well, see `codes.py`, and there is no warm start.
    """
    return worst_of(ranks, check, case, plant, checks_code)


def check(rank: int, case: Case, plant: str, checks_code: bool = False) -> Finding:
    """Train a case eagerly and compiled, and compare; on all ranks at once."""
    # Inductor's own random numbers are others where a graph is cut.
    with quietly(), _torch.drawing_as_eager():
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
    eager = _attempt(case, rank, lambda module, **_: module)
    train_ours = functools.partial(
        _attempt, case, rank, functools.partial(compiled, inner=case.inner, split=case.split)
    )
    with planting(plant, rank):
        ours = train_ours()
    is_warm = case.inner == "inductor" and checks is None
    if is_warm and not (eager.raised_anywhere or ours.raised_anywhere):
        warm = train_ours()
        if warm.raised_anywhere or anywhere(bool(warm.differences(ours)) or warm.cuts != ours.cuts):
            why = warm.error or lines_of(warm.differences(ours)) or "another cut"
            return Finding(outcome=RAISES if warm.error else DIFFERS, detail=f"warm start: {why}")
    # The unsplit compile takes as long as all sections, whose code is compared by itself.
    finding = judge(
        ours,
        eager,
        functools.partial(_train_unsplit, case, rank),
        measure=within(max(TOLERANCES[dtype] for dtype in case.dtypes)),
        tells_rounding=checks is None,
    )
    if finding.outcome == RAISES:
        is_named = anywhere("a checkpoint's recomputation does not run" in ours.error)
        return dataclasses.replace(finding, outcome=OTHER_FRAMES) if is_named else finding
    if finding.outcome != DIFFERS:
        return finding
    if case.delayed:
        # The unsplit compile has DDP reduce delayed parameters before it makes their gradients
        # (torch 2.13), so that nothing can be compared with it: tell without them.
        without = _check(rank, dataclasses.replace(case, delayed=""), plant="")
        if without.outcome == AS_UNSPLIT:
            return dataclasses.replace(finding, outcome=AS_UNSPLIT)
    if "bfloat16" in case.dtypes:
        exact = _attempt(case.in_double(), rank, lambda module, **_: module)
        if not exact.raised_anywhere and not anywhere(not _are_as_near(ours, eager, exact)):
            return dataclasses.replace(finding, outcome=AS_EXACT)
    return finding


def _attempt(case: Case, rank: int, compile_: Compile) -> Attempt:
    return attempt(lambda group: train(case, rank, compile_, group))


def _train_unsplit(case: Case, rank: int) -> Attempt:
    with torch._dynamo.config.patch(optimize_ddp=False):  # torch's own, and whole
        return _attempt(case, rank, functools.partial(torch.compile, backend=case.inner))


def _are_as_near(ours: Attempt, eager: Attempt, exact: Attempt) -> bool:
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
