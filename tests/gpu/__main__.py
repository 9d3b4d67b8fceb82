"""Prove on a device that ddpopt is right, that it overlaps, and what it costs: one page.

    make gpu
    PYTHONPATH=src python -m tests.gpu --device cpu --output build/gpu-cpu

Each of the lines in `lines.py` is a pytest in a process of its own with a time limit, and the
others go on whatever becomes of it. Lines that are not alone run beside each other. What does not
fit the budget is not run, and the page says so. The status is 1 if a line failed, and 2 if there
is no such device.
"""
# test: skip, minutes; tests/system/test_gpu.py runs a few lines on the CPU

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from tests.gpu import notes, page
from tests.gpu.page import Outcome

if TYPE_CHECKING:
    from tests.gpu.lines import Line

ROOT = Path(__file__).parents[2]
_BUDGETS_S = {"cuda": 525.0, "cpu": 7200.0}  # nine minutes, with what comes before and after
_CORES_PER_LINE = 2  # ranks
_LOG_LINES = 20
# What an installed ddpopt tells Dynamo, so that every process knows the backend, at no cost.
_ENTRY_POINTS = "[torch_dynamo_backends]\nddpopt = ddpopt.backend:backend\n"
_METADATA = "Metadata-Version: 2.1\nName: ddpopt\nVersion: 0+sources\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs lines, any number at a time; each is told when it is known."""

    folder: Path
    environment: Mapping[str, str]
    end_s: float
    tell: Callable[[Outcome], None]
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, lines: Sequence[Line], num_jobs: int) -> None:
        """Run all for which there is time."""
        (self.folder / "lines").mkdir(parents=True, exist_ok=True)
        for is_alone, group in itertools.groupby(lines, key=lambda line: line.is_alone):
            with ThreadPoolExecutor(1 if is_alone else num_jobs) as pool:
                try:
                    list(pool.map(self._run, group))
                except BaseException:  # a Ctrl-C, which sessions of their own miss
                    pool.shutdown(wait=False, cancel_futures=True)
                    list(map(_kill, list(self.running)))
                    raise

    def _run(self, line: Line) -> None:
        left_s = self.end_s - time.monotonic()
        outcome = Outcome(line=line, result="not run", why="out of time")
        if left_s >= line.least_s:
            outcome = self._try(line, min(line.limit_s, left_s))
        with self.lock:
            self.tell(outcome)

    def _try(self, line: Line, limit_s: float) -> Outcome:
        stem = "".join(c if c.isalnum() else "-" for c in line.name)
        noted, log = (self.folder / "lines" / f"{stem}.{end}" for end in ("jsonl", "log"))
        noted.unlink(missing_ok=True)
        start_s, status, late = time.monotonic(), 0, ""
        with log.open("wb") as output, self._process(line, noted, output) as process:
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                late = f"killed after {limit_s:.0f} s"
        notes_of_line = notes.read(noted)
        result, why = page.judge(notes_of_line, status, late)
        words = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return Outcome(
            line=line,
            result=result,
            why=why,
            seconds=time.monotonic() - start_s,
            notes=notes_of_line,
            log=words if result == "failed" else (),
        )

    @contextlib.contextmanager
    def _process(
        self, line: Line, noted: Path, log: IO[bytes]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a line in a session of its own; in the end nothing of that session is left."""
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.gpu.notes", "--show-capture=no"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *line.select],
            cwd=ROOT,
            env={**self.environment, notes.PATH: str(noted)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.add(process)
        try:
            yield process
        finally:
            _kill(process)
            process.wait()
            self.running.remove(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def environment_for(folder: Path) -> Mapping[str, str]:
    """Have processes know this checkout as an installed ddpopt, by metadata in a folder."""
    info = folder / "ddpopt-0+sources.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [str(folder), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each of many processes
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lines, and write the page after each."""
    args = _parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch.cuda.is_available() is False; give `--device cpu`", file=sys.stderr)
        return 2
    os.environ["TEST_DEVICE"] = args.device
    from tests.gpu.lines import all_lines  # which looks at it

    names = tuple(args.lines or [""])
    lines = [line for line in all_lines() if line.name.startswith(names)]
    if not lines:
        there = "\n".join(line.name for line in all_lines())
        print(f"no line begins with any of {args.lines}; there are\n{there}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    budget_s = args.budget_s or _BUDGETS_S[args.device]
    outcomes: list[Outcome] = []
    facts, start_s = _facts(args), time.monotonic()

    def tell(outcome: Outcome) -> None:
        print(f"{outcome.line.name}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
        if outcome.why:
            print(f"    {outcome.why}", flush=True)
        outcomes.append(outcome)
        outcomes.sort(key=lambda known: lines.index(known.line))
        facts["seconds"] = f"{time.monotonic() - start_s:.0f} of {budget_s:.0f}"
        page.write(outcomes, facts, args.output)

    with tempfile.TemporaryDirectory(prefix="ddpopt-gpu-") as metadata:
        runner = Runner(
            folder=args.output.resolve(),
            environment=environment_for(Path(metadata)),
            end_s=start_s + budget_s,
            tell=tell,
        )
        runner.run(lines, args.jobs)
    print(f"{page.summary(outcomes)}; written to {args.output}/gpu.md and gpu.json")
    return 1 if any(outcome.result == "failed" for outcome in outcomes) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    jobs = max(1, (os.cpu_count() or 1) // _CORES_PER_LINE)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--output", type=Path, default=Path("build/gpu"), help="a folder")
    add("--lines", nargs="+", metavar="NAME", help="only those whose names begin so")
    add("--budget-s", type=float, help="for all lines: nine minutes on a GPU, else two hours")
    add("--jobs", type=int, default=jobs, help="lines beside each other")
    return parser.parse_args(arguments)


def _facts(args: argparse.Namespace) -> dict[str, str]:
    is_cuda = args.device == "cuda"
    cuda = f", CUDA {torch.version.cuda}" if is_cuda else ""
    now = datetime.datetime.now(datetime.timezone.utc)
    in_place = "cpu: gloo in place of NCCL, aot_eager and Inductor's C++ in place of Triton"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else in_place,
        "command": f"python -m tests.gpu {shlex.join(sys.argv[1:])}",
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"torch {torch.__version__}{cuda}, Python {platform.python_version()}",
        "sources": _sources(),
        "machine": f"{os.cpu_count()} cores, {args.jobs} lines beside each other",
    }


def _sources() -> str:
    """Return the commit, if this is a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
