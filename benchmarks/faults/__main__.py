r"""What becomes of training when a rank, its process or its link fails, or is late: one table.

    sudo python -m benchmarks.faults [--only 'link|compile']

Three ranks on an emulated cluster train a compiled DDP model (Inductor, gloo, a timeout of 20 s).
Each fault strikes in a place of its own: a rank that is killed ends itself there. After each, the
same ranks train undisturbed, with the same caches. A row fails if survivors hang, end without an
error, or go on with other parameters than undisturbed.
"""
# test: skip, it needs root, and takes ten minutes

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import NamedTuple

from benchmarks.faults.worker import ALLREDUCE, COMPILE, FORWARD, OPTIMIZER, SECTIONS, Trained
from benchmarks.harness.cluster import FREE, Cluster, open_cluster, why_not_emulated
from benchmarks.harness.report import table
from benchmarks.harness.teams import Setting, Team, TeamError, open_team

_NUM_RANKS, _NUM_STEPS = 3, 12
_CALM_STEPS = 3  # before the fault
_TIMEOUT_S = 20.0  # of the process group
_LONG_TIMEOUT_S = 600.0  # where nothing is to be noticed, but ranks may compile one after the other
_RUN_LIMIT_S = 240.0
_PAUSE_S = 0.2  # in each step, where it can be disturbed from outside
KILL, LINK, STOP, NO_FAULT = "SIGKILL", "link down", "SIGSTOP", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault: `fault` happens to `rank`, `where` it is in a step or in its first compile.

    `duration_s` is None for good. `rate` is that of the links, as tc wants it.
    """

    fault: str
    where: str = "while training"
    split: str = "forward"
    rank: int = 2
    duration_s: float | None = None
    rate: str = "1gbit"

    @property
    def row(self) -> tuple[str, str, str]:
        """The first cells of its row in the table."""
        lasting = " for good" if self.duration_s is None else f" for {self.duration_s:g} s"
        lasting = "" if self.fault == KILL else lasting
        return f"{self.fault}{lasting}, rank {self.rank}", self.where, self.split


CASES = (
    Case(fault=KILL, where=FORWARD),
    Case(fault=KILL, where=FORWARD, split="backward"),
    Case(fault=KILL, where=FORWARD, rank=0),
    Case(fault=KILL, where=SECTIONS),
    Case(fault=KILL, where=SECTIONS, split="backward"),
    Case(fault=KILL, where=ALLREDUCE, rate="20mbit"),
    Case(fault=KILL, where=ALLREDUCE, split="backward", rate="20mbit"),
    Case(fault=KILL, where=OPTIMIZER),
    Case(fault=KILL, where=COMPILE),
    Case(fault=KILL, where=COMPILE, split="backward"),
    Case(fault=KILL, where=COMPILE, rank=0),  # the others compile without a store
    Case(fault=LINK, duration_s=2.0),
    Case(fault=LINK),
    Case(fault=LINK, rank=0),
    Case(fault=STOP, duration_s=5.0),
    Case(fault=STOP),
)


class RunOutcome(NamedTuple):
    """What became of the ranks, what was wrong with them, and when the fault struck."""

    ranks: dict[int, Trained]
    problems: list[str]
    fault_s: float


class CaseOutcome(NamedTuple):
    """What came of a case: a sentence, what is not as it has to be, and how soon it was noticed."""

    case: Case
    sentence: str
    problems: list[str]
    noticed_after: str

    @property
    def row(self) -> list[str]:
        """Its row in the table."""
        text = f"FAILED: {'; '.join(self.problems)}" if self.problems else self.sentence
        return [*self.case.row, " ".join(text.split()).replace("|", "/"), self.noticed_after]


def run_case(cluster: Cluster, setting: Setting, case: Case, caches: Path) -> CaseOutcome:
    """Train with the fault, then without, and compare."""
    if case.where == COMPILE:  # there has to be something to compile
        caches = caches / f"{case.where}-{case.split}"
    ranks, problems, fault_s = _run(cluster, setting, case, caches)
    calm = _run(cluster, setting, replace(case, fault=NO_FAULT, rate=FREE), caches)
    problems += [f"afterwards: {text}" for text in calm.problems]
    undisturbed = {trained.parameters for trained in calm.ranks.values()}
    if len(undisturbed) != 1:
        problems.append("ranks differ in the run afterwards")
    sentence, noticed_after = "training goes on, bitwise as undisturbed", ""
    if case.duration_s is not None:
        if {trained.parameters for trained in ranks.values()} != undisturbed:
            problems.append("training did not go on as if undisturbed")
    else:
        errors = {rank: trained for rank, trained in ranks.items() if trained.error}
        struck = errors.pop(case.rank, None)
        survivors = [rank for rank in range(_NUM_RANKS) if rank != case.rank]
        problems += [f"rank {rank} got no error" for rank in survivors if rank not in errors]
        if errors:
            first, trained = next(iter(errors.items()))
            sentence = f"rank {first}, in {trained.place}: {_sentence(trained)}"
            if struck is not None:
                sentence += f"; rank {case.rank}: {_sentence(struck)}"
            noticed_s = max(error.time_s for error in errors.values()) - fault_s
            noticed_after = f"{max(0.0, noticed_s):.1f} s"
    return CaseOutcome(case, sentence, problems, noticed_after)


def _sentence(trained: Trained) -> str:
    """Return the beginning of an error without the place in gloo's source."""
    return re.sub(r"^\[[^]]*\] ", "", trained.error).partition(". ")[0]


def _run(cluster: Cluster, setting: Setting, case: Case, caches: Path) -> RunOutcome:
    """Train with a fault; or without one, and with a timeout that no compile reaches."""
    num_calm = 0 if case.where == COMPILE else _CALM_STEPS
    ranks: dict[int, Trained] = {}
    problems: list[str] = []
    cluster.set_rate(case.rate)
    with open_team(cluster, setting, case.split, "faults", None, caches) as team:
        team.wait_until_ready()
        team.ask("start", _LONG_TIMEOUT_S if case.fault == NO_FAULT else _TIMEOUT_S)
        team.ask("train", num_calm, case.rank, "", 0.0)
        where = case.where if case.fault == KILL else ""
        pause_s = _PAUSE_S if case.fault in (LINK, STOP) else 0.0
        team.send("train", _NUM_STEPS - num_calm, case.rank, where, pause_s)
        fault_s = _strike(cluster, case, team)
        is_lost = case.fault in (KILL, STOP) and case.duration_s is None
        for rank in set(range(_NUM_RANKS)) - ({case.rank} if is_lost else set()):
            with _noting(problems):
                ranks[rank] = team.answer_of(rank, _RUN_LIMIT_S)
        team.send("end")
        for rank in ranks:
            with _noting(problems):
                team.processes[rank].popen.wait(_RUN_LIMIT_S)
        if case.fault == KILL and team.processes[case.rank].popen.poll() != -SIGKILL:
            problems.append(f"the fault did not strike rank {case.rank}")
    cluster.set_link(case.rank, is_up=True)
    return RunOutcome(ranks, problems, fault_s)


@contextlib.contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Note a rank that hangs, or has ended where it should not."""
    try:
        yield
    except (TeamError, subprocess.TimeoutExpired) as error:
        problems.append(str(error))


def _strike(cluster: Cluster, case: Case, team: Team) -> float:
    """Let the fault happen, and end if it is to; return the time of it."""
    victim = team.processes[case.rank].popen
    if case.fault == KILL:
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(_RUN_LIMIT_S)
        return time.monotonic()
    time.sleep(_PAUSE_S)  # in the middle of its steps
    fault_s = time.monotonic()
    if case.fault == LINK:
        cluster.set_link(case.rank, is_up=False)
    elif case.fault == STOP:
        victim.send_signal(SIGSTOP)
    if case.fault != NO_FAULT and case.duration_s is not None:
        time.sleep(case.duration_s)
        cluster.set_link(case.rank, is_up=True)
        victim.send_signal(SIGCONT)
    return fault_s


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", default="", help="a regular expression, as 'link|compile'")
    args = parser.parse_args()
    if reason := why_not_emulated():
        sys.exit(f"no network can be emulated here: {reason}")
    chosen = [case for case in CASES if re.search(args.only, " | ".join(case.row))]
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="ddpopt-faults-") as folder_name,
        open_cluster(_NUM_RANKS) as cluster,
    ):
        folder = Path(folder_name)
        setting = Setting(
            inner="inductor", num_threads=1, folder=folder, worker="benchmarks.faults.worker"
        )
        for split in sorted({case.split for case in chosen if case.where != COMPILE}):
            # With cold caches ranks would compile for longer than the group's timeout.
            _run(cluster, setting, Case(fault=NO_FAULT, split=split), folder / "caches")
        for case in chosen:
            outcomes.append(run_case(cluster, setting, case, folder / "caches"))
            print(" | ".join(outcomes[-1].row), file=sys.stderr, flush=True)
    header = ("fault", "where", "split", "outcome", "noticed after")
    print("\n".join(table(header, [outcome.row for outcome in outcomes])))
    print(f"\ntimeout of the process group: {_TIMEOUT_S:g} s")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
