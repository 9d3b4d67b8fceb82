"""What came of a script, from what its ranks report."""

from __future__ import annotations

import tempfile
from unittest import mock

from tests.support import ranks as ranks_module
from tests.support.ranks import RankError, Ranks
from tests.system.training.outcomes import (
    AS_UNSPLIT,
    BOTH_RAISE,
    DIFFERS,
    EQUAL,
    NOT_REPEATED,
    RAISES,
    SILENT,
    STUCK,
    Finding,
)
from tests.system.unequal.actions import ALL_RANKS
from tests.system.unequal.running import Report, progress_of, run_script
from tests.system.unequal.script import Script
from tests.system.unequal.twin import COMPILED, EAGER, UNSPLIT

# How long a rank waits in a collective for others, which compile or have raised; and the second
# time, to be sure that a hang is none of a busy machine's.
LIMIT_S = 25.0
LONGER_LIMIT_S = 60.0

BUCKETS_CHANGED = "buckets changed"


def judge(ranks: Ranks, script: Script, plant: str = "") -> Finding:
    """Run a script, and once more if it fails: patiently, and then without a split."""
    finding = run(ranks, script, plant=plant)
    if not finding.is_failure:
        return finding
    again = run(ranks, script, limit_s=LONGER_LIMIT_S, plant=plant)
    if not again.is_failure:
        return Finding(outcome=NOT_REPEATED, detail=finding.detail)
    if script.communicates and again.outcome != DIFFERS:
        # The unsplit compile runs a graph's collectives before any allreduce of DDP's, and eager
        # does not; so it hangs where one rank alone is eager. We keep the order of eager.
        return again
    unsplit = run(ranks, script, UNSPLIT, limit_s=LONGER_LIMIT_S)
    if unsplit.kind == again.kind:
        return Finding(outcome=AS_UNSPLIT, detail=f"{again.detail}\nunsplit:\n{unsplit.detail}")
    return again


def run(
    ranks: Ranks, script: Script, kind: str = COMPILED, *, limit_s: float = LIMIT_S, plant: str = ""
) -> Finding:
    """Run a script once on all ranks, as a twin of this kind beside eager DDP."""
    finding = _run_once(ranks, script, (EAGER, kind), limit_s, plant)
    if finding.outcome != STUCK or EAGER not in finding.detail:
        return finding
    # gloo ends a process whose collective meets another one of another size.
    ours = _run_once(ranks, script, (kind,), limit_s, plant)
    return Finding(
        outcome=SILENT if ours.outcome == EQUAL else BOTH_RAISE,
        detail=f"{finding.detail}\nours:\n{ours.detail}",
    )


def _run_once(
    ranks: Ranks, script: Script, kinds: tuple[str, ...], limit_s: float, plant: str
) -> Finding:
    with (
        # What hangs in no collective; others have a limit of their own.
        mock.patch.object(ranks_module, "TIMEOUT_S", 20 * limit_s),
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            reports = ranks.run(run_script, script, kinds, limit_s, plant, folder)
        except RankError as error:
            progress = [f"rank {rank}: {progress_of(folder, rank)}" for rank in ALL_RANKS]
            return Finding(outcome=STUCK, detail="\n".join([str(error), *progress]))
    if any(report.eager_error or report.error for report in reports):
        ranks.stop()  # an error in the midst of a collective leaves groups in any state
    return _judge_reports(reports)


def _judge_reports(reports: list[Report]) -> Finding:
    eager_errors = [report.eager_error for report in reports]
    errors = [report.error for report in reports]
    differences = [report.difference for report in reports]
    if any(differences):
        outcome, details = DIFFERS, differences
    elif any(eager_errors):
        outcome, details = (BOTH_RAISE if any(errors) else SILENT), eager_errors
    else:
        outcome, details = (RAISES if any(errors) else EQUAL), errors
    if outcome == DIFFERS and any(errors) and not any(eager_errors):
        outcome, details = RAISES, [e or d for e, d in zip(errors, differences, strict=True)]
    told = [f"rank {rank}, {detail}" for rank, detail in enumerate(details) if detail]
    return Finding(
        outcome=outcome,
        detail="\n".join(told),
        sections=reports[0].sections,
        remarks=(BUCKETS_CHANGED,) * reports[0].changed_buckets,
    )
