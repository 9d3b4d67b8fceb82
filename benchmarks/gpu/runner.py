"""Run lines, each in a process of its own with a time limit, and go on whatever becomes of one.

Lines that are not alone run beside each other. What does not fit the budget is not run, and the
page says so; so lines come in the order of their worth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.child import Request
from benchmarks.gpu.findings import Found
from benchmarks.gpu.lines import Line

ROOT = Path(__file__).parents[2]
_LOG_LINES = 20
# What an installed ddpopt tells Dynamo, so that every process knows the backend, at no cost.
_ENTRY_POINTS = "[torch_dynamo_backends]\nddpopt = ddpopt.backend:backend\n"
_METADATA = "Metadata-Version: 2.1\nName: ddpopt\nVersion: 0+sources\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a line; `result` is passed, failed, skipped or not run, and `why` says why."""

    line: Line
    result: str
    why: str = ""
    seconds: float = 0.0
    found: Found = dataclasses.field(default_factory=Found)
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Equal for all lines; `budget_s` is for all of them, `folder` for what they leave."""

    device: str
    folder: Path
    budget_s: float
    num_jobs: int


def run_lines(
    lines: Sequence[Line], setting: Setting, say: Callable[[Outcome], None]
) -> list[Outcome]:
    """Return what came of the lines, in their order; each is said when it is known."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="ddpopt-gpu-", ignore_cleanup_errors=True) as place:
        running = _Running(setting, Path(place), say)
        for is_alone, group in itertools.groupby(lines, key=lambda line: line.is_alone):
            with ThreadPoolExecutor(1 if is_alone else setting.num_jobs) as pool:
                try:
                    outcomes += pool.map(running.run, group)
                except BaseException:  # a Ctrl-C, which children in sessions of their own miss
                    running.stop()
                    raise
    return outcomes


class _Running:
    """Runs lines, any number at a time; what is of no use afterwards goes to `place`."""

    def __init__(self, setting: Setting, place: Path, say: Callable[[Outcome], None]) -> None:
        self._setting = setting
        self._place = place
        self._say = say
        self._end_s = time.monotonic() + setting.budget_s
        self._environment = _environment(setting.device, place)
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        (setting.folder / "lines").mkdir(parents=True, exist_ok=True)

    def run(self, line: Line) -> Outcome:
        """Run a line, if there is time."""
        left_s = self._end_s - time.monotonic()
        if left_s < line.least_s:
            outcome = Outcome(line=line, result="not run", why="out of time")
        else:
            outcome = self._run(line, min(line.limit_s, left_s))
        with self._lock:
            self._say(outcome)
        return outcome

    def stop(self) -> None:
        """Kill what runs, and begin nothing more."""
        self._end_s = 0.0
        for child in list(self._children):
            _kill(child)

    def _run(self, line: Line, limit_s: float) -> Outcome:
        stem = "".join(c if c.isalnum() else "-" for c in line.name)
        output, log = (self._setting.folder / "lines" / f"{stem}.{end}" for end in ("json", "log"))
        output.unlink(missing_ok=True)
        request = Request(
            run=line.run,
            device=self._setting.device,
            arguments=dict(line.arguments),
            output=str(output),
        )
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self._place / stem)}
        start_s = time.monotonic()
        with log.open("wb") as written, self._process(request, cache, written) as child:
            try:
                status, late = child.wait(limit_s), ""
            except subprocess.TimeoutExpired:
                status, late = 0, f"killed after {limit_s:.0f} s"
        seconds = time.monotonic() - start_s
        found = Found.load(output)
        result, why = _judge(found, status, late)
        words = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return Outcome(
            line=line,
            result=result,
            why=why,
            seconds=seconds,
            found=found,
            log=tuple(words) if result == "failed" else (),
        )

    @contextlib.contextmanager
    def _process(
        self, request: Request, environment: Mapping[str, str], log: IO[bytes]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a line in a session of its own; in the end nothing of that session is left."""
        text = json.dumps(dataclasses.asdict(request))
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", text],
            cwd=ROOT,
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._children.add(child)
        try:
            yield child
        finally:
            _kill(child)
            child.wait()
            self._children.remove(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _environment(device: str, place: Path) -> Mapping[str, str]:
    """Make this checkout known as an installed ddpopt would be."""
    info = place / "path" / "ddpopt-0+sources.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [str(info.parent), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    defaults = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each of many processes
    }
    return {
        **defaults,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TEST_DEVICE": device,
        "HF_HUB_OFFLINE": "1",
    }


def _judge(found: Found, status: int, why: str) -> tuple[str, str]:
    """Return the result of a line, and why."""
    running = [check.name for check in found.checks if check.outcome == "running"]
    if not why and not found.is_done:
        why = found.error or f"the process ended with status {status}"
    if why:
        return "failed", f"{why}, in {running[0]}" if running else why
    failed = [check for check in found.checks if check.outcome == "failed"]
    skipped = [check for check in found.checks if check.outcome == "skipped"]
    if failed:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return "failed", f"{failed[0].name}: {failed[0].why}{others}"
    if skipped and len(skipped) == len(found.checks):
        return "skipped", skipped[0].why
    return "passed", ""
