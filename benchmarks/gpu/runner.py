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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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
    end_s = time.monotonic() + setting.budget_s
    environment = _environment(setting)
    one_at_a_time = threading.Lock()

    def run(line: Line) -> Outcome:
        outcome = _run_line(line, setting, environment, end_s - time.monotonic())
        with one_at_a_time:
            say(outcome)
        return outcome

    outcomes: list[Outcome] = []
    for is_alone, group in itertools.groupby(lines, key=lambda line: line.is_alone):
        with ThreadPoolExecutor(1 if is_alone else setting.num_jobs) as pool:
            outcomes += pool.map(run, group)
    return outcomes


def _environment(setting: Setting) -> Mapping[str, str]:
    """Make this checkout known as an installed ddpopt would be."""
    known = setting.folder / "path"
    info = known / "ddpopt-0+sources.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    places = [str(known), str(ROOT / "src"), str(ROOT), *_given("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "DDPOPT_TEST_DEVICE": setting.device,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _given(name: str) -> list[str]:
    value = os.environ.get(name)
    return [value] if value else []


def _run_line(
    line: Line, setting: Setting, environment: Mapping[str, str], left_s: float
) -> Outcome:
    if line.missing:
        return Outcome(line=line, result="skipped", why=line.missing)
    if left_s < line.least_s:
        return Outcome(line=line, result="not run", why="out of time")
    limit_s = min(line.limit_s, left_s)
    stem = "".join(c if c.isalnum() else "-" for c in line.name)
    output, log = setting.folder / f"{stem}.json", setting.folder / f"{stem}.log"
    output.unlink(missing_ok=True)
    request = Request(
        run=line.run,
        device=setting.device,
        arguments=dict(line.arguments),
        output=str(output),
    )
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(setting.folder / "caches" / stem)}
    start_s = time.monotonic()
    with log.open("wb") as written, _process(request, {**environment, **cache}, written) as child:
        try:
            status, is_late = child.wait(limit_s), False
        except subprocess.TimeoutExpired:
            status, is_late = 0, True
    seconds = time.monotonic() - start_s
    found = Found.load(output)
    result, why = _judge(found, status, f"killed after {limit_s:.0f} s" if is_late else "")
    text = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if result == "failed" else []
    return Outcome(line=line, result=result, why=why, seconds=seconds, found=found, log=tuple(text))


@contextlib.contextmanager
def _process(
    request: Request, environment: Mapping[str, str], log: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a line in a session of its own; in the end nothing of that session is left."""
    text = json.dumps(dataclasses.asdict(request))
    command = [sys.executable, "-m", "benchmarks.gpu.child", text]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


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
    why = f"{len(skipped)} of {len(found.checks)} checks skipped" if skipped else ""
    return "passed", why
