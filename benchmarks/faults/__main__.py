r"""What becomes of training when a rank, its process or its link fails: one table.

    sudo python -m benchmarks.faults [--only 'link|compile']

Three ranks on an emulated cluster train a compiled DDP model (Inductor, gloo, a timeout of 20 s).
Each fault strikes in a place of its own: a rank that is killed ends itself there. After each, the
same ranks train undisturbed, with the same caches. A row fails if survivors hang, end without an
error, go on with other gradients than undisturbed, or if a process is left behind.
"""
# test: skip, it needs root, and takes ten minutes

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any, NamedTuple

from benchmarks.faults import cases
from benchmarks.faults.cases import Case, Task
from benchmarks.harness.cluster import FREE, Cluster, open_cluster, own_namespaces, why_not_emulated

_ROOT = Path(__file__).parents[2]
_NUM_STEPS = 12
_MARK = "FAULTS_RUN"  # the variable by which all processes of a run are known
_RUN_LIMIT_S = 240.0
_ORPHAN_LIMIT_S = 15.0  # a C++ compiler may have to end its file
_POLL_S = 0.02
_LOG_CHARACTERS = 1500
_HEADER = "| fault | where | split | outcome | noticed after |\n|---|---|---|---|---:|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    process: subprocess.Popen[bytes]
    log: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
                event = json.loads(line)
                if event["event"] == kind:
                    found.append(event)
        return found


class Row(NamedTuple):
    """What came of one fault; `problems` is empty if all was as it has to be."""

    case: Case
    outcome: str
    noticed_s: float | None
    problems: Sequence[str]

    def __str__(self) -> str:
        noticed = "" if self.noticed_s is None else f"{self.noticed_s:.1f} s"
        outcome = f"FAILED: {'; '.join(self.problems)}" if self.problems else self.outcome
        outcome = " ".join(outcome.split()).replace("|", "/")
        return f"| {self.case.row} | {outcome} | {noticed} |"


def run_case(cluster: Cluster, case: Case, caches: Path) -> Row:
    if case.where == cases.COMPILE:  # there has to be something to compile
        caches = caches / f"{case.where}-{case.split}"
    with _running(cluster, case, caches) as (ranks, mark):
        fault_s = _strike(cluster, case, ranks)
        problems = _wait(case, ranks)
        digests = _digests(ranks)
        errors = {r: e for r, rank in enumerate(ranks) for e in rank.events("error")}
    problems += _orphans(mark)
    calm_digests, calm_problems = _run_calmly(cluster, case, caches)
    problems += [f"afterwards: {text}" for text in calm_problems]
    if len(set(calm_digests)) != 1 or len(calm_digests) != cases.NUM_RANKS:
        problems.append("ranks differ in the run afterwards")
    if case.is_survived:
        if set(digests) != set(calm_digests) or len(digests) != cases.NUM_RANKS:
            problems.append("training did not go on as if undisturbed")
        return Row(case, "training goes on, bitwise as undisturbed", None, problems)
    survivors = [rank for rank in range(cases.NUM_RANKS) if rank != case.rank]
    problems += [f"rank {rank} got no error" for rank in survivors if rank not in errors]
    found = [errors[rank] for rank in survivors if rank in errors]
    if not found:
        return Row(case, "no error", None, problems)
    said = f"survivors, in {found[0]['place']}: {_sentence(found[0])}"
    if case.rank in errors:
        said += f"; rank {case.rank}: {_sentence(errors[case.rank])}"
    return Row(case, said, max(error["time_s"] for error in found) - fault_s, problems)


def _run_calmly(cluster: Cluster, case: Case, caches: Path) -> tuple[list[str], list[str]]:
    """Train as in a case, without its fault; return digests of the ranks, and problems."""
    calm = dataclasses.replace(case, fault=cases.NO_FAULT, where="", rate=FREE)
    with _running(cluster, calm, caches) as (ranks, mark):
        problems, digests = _wait(calm, ranks), _digests(ranks)
    return digests, problems + _orphans(mark)


def _digests(ranks: Sequence[Rank]) -> list[str]:
    return [event["digest"] for rank in ranks for event in rank.events("done")]


def _sentence(error: dict[str, Any]) -> str:
    """Return the beginning of a text without the place in gloo's source."""
    return re.sub(r"^\[[^]]*\] ", "", str(error["text"])).partition(". ")[0]


# ---- running ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(cluster: Cluster, case: Case, caches: Path) -> Iterator[tuple[list[Rank], str]]:
    cluster.set_rate(case.rate)
    mark, port = secrets.token_hex(8), _free_port()
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="ddpopt-faults-") as folder:
        try:
            for rank in range(cases.NUM_RANKS):
                is_victim = rank == case.rank and case.fault == cases.KILL
                task = Task(
                    rank=rank,
                    split=case.split,
                    where=case.where if is_victim else "",
                    num_steps=_NUM_STEPS,
                    is_slow=case.fault in (cases.LINK, cases.STOP),
                    timeout_s=cases.LONG_TIMEOUT_S
                    if case.fault == cases.NO_FAULT
                    else cases.TIMEOUT_S,
                )
                log = Path(folder) / f"rank{rank}.log"
                own = {
                    "MASTER_ADDR": cluster.address(0),
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(cases.NUM_RANKS),
                    "TORCHINDUCTOR_CACHE_DIR": str(caches / f"rank{rank}"),
                    _MARK: mark,
                }
                ranks.append(_start(cluster, task, log, own))
            yield ranks, mark
        finally:
            for started in ranks:
                if started.process.poll() is None:
                    started.process.send_signal(SIGKILL)
                started.process.wait()
            for rank in range(cases.NUM_RANKS):
                cluster.set_link(rank, is_up=True)


def _start(cluster: Cluster, task: Task, log: Path, own: dict[str, str]) -> Rank:
    worker = [sys.executable, "-m", "benchmarks.faults.worker"]
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {**os.environ, **cluster.environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*cluster.command_prefix(task.rank), *worker, json.dumps(dataclasses.asdict(task))],
            env={**shared, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Rank(process=process, log=log)


def _strike(cluster: Cluster, case: Case, ranks: list[Rank]) -> float:
    """Let the fault happen, and end if it is to; return the time of it."""
    victim = ranks[case.rank]
    end_s = time.monotonic() + _RUN_LIMIT_S
    while time.monotonic() < end_s and victim.process.poll() is None:
        if any(event["step"] == cases.FAULT_STEP for event in victim.events("step")):
            break
        time.sleep(_POLL_S)
    fault_s = time.monotonic()
    if case.fault == cases.LINK:
        cluster.set_link(case.rank, is_up=False)
        if case.duration_s is not None:
            time.sleep(case.duration_s)
            cluster.set_link(case.rank, is_up=True)
    elif case.fault == cases.STOP:
        victim.process.send_signal(SIGSTOP)
        if case.duration_s is not None:
            time.sleep(case.duration_s)
            victim.process.send_signal(SIGCONT)
    elif case.fault == cases.KILL:
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.process.wait(_RUN_LIMIT_S)
        told = victim.events("fault")
        fault_s = told[0]["time_s"] if told else fault_s
    return fault_s


def _wait(case: Case, ranks: list[Rank]) -> list[str]:
    """Wait for those ranks that have to end by themselves; return what was wrong."""
    problems = []
    end_s = time.monotonic() + _RUN_LIMIT_S
    for rank, started in enumerate(ranks):
        if case.fault == cases.STOP and rank == case.rank and case.duration_s is None:
            continue
        try:
            code = started.process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            problems.append(f"rank {rank} hangs")
            continue
        is_killed = case.fault == cases.KILL and rank == case.rank
        if is_killed and (code != -SIGKILL or not started.events("fault")):
            problems.append(f"the fault did not strike rank {rank}")
        if case.is_survived and code != 0:
            text = started.log.read_text(errors="replace")[-_LOG_CHARACTERS:]
            problems.append(f"rank {rank} ended with {code}:\n{text}")
    return problems


def _orphans(mark: str) -> list[str]:
    """Return what processes of a run are left, after those that are ending had time to."""
    end_s = time.monotonic() + _ORPHAN_LIMIT_S
    while (left := _marked(mark)) and time.monotonic() < end_s:
        time.sleep(10 * _POLL_S)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(int(pid), SIGKILL)
    return [f"processes are left: {sorted(left.values())}"] if left else []


def _marked(mark: str) -> dict[str, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[folder.name] = (folder / "cmdline").read_text().replace("\0", " ")[:100]
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", default="", help="a regular expression, as 'link|compile'")
    arguments = parser.parse_args()
    if reason := why_not_emulated():
        sys.exit(f"no network can be emulated here: {reason}")
    chosen = [case for case in cases.CASES if re.search(arguments.only, case.row)]
    before = set(own_namespaces())
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="ddpopt-faults-caches-") as folder,
        open_cluster(cases.NUM_RANKS) as cluster,
    ):
        caches = Path(folder)
        for split in sorted({case.split for case in chosen if case.where != cases.COMPILE}):
            # With cold caches ranks would compile for longer than the group's timeout.
            _run_calmly(cluster, Case(fault=cases.NO_FAULT, where="", split=split), caches)
        for case in chosen:
            rows.append(run_case(cluster, case, caches))
            print(rows[-1], file=sys.stderr, flush=True)
    leaked = sorted(set(own_namespaces()) - before)
    print("\n".join([_HEADER, *map(str, rows)]))
    print(f"\ntimeout of the process group: {cases.TIMEOUT_S:g} s; leaked: {leaked}")
    return 1 if leaked or any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
