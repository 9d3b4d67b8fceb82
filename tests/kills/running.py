"""Runs tests on a copy of the source that has a fault, each time in a fresh process.

[Note: forked runs]
Most of a short run of pytest goes into importing torch. So a process that has imported torch, and
nothing of ours, forks one for each run. It has no threads that a fork would lose.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.kills.fault import SOURCE, Fault

_ROOT = Path(__file__).parents[2]
_PRELOADED = ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "hypothesis")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_OPTIONS = ("-x", "-q", "-rfE", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider")
_LONGEST_ANSWER = 10_000
SURVIVES, HANGS, TOO_SLOW = "survives", "hangs", "too slow to tell"


class Outcome(NamedTuple):
    """Which test found a fault, or that it survived, or that the tests did not end.

    They hang if they end in time without the fault.
    """

    found_by: str
    seconds: float

    @property
    def is_found(self) -> bool:
        return self.found_by not in {SURVIVES, TOO_SLOW}


@contextlib.contextmanager
def copied_source(folder: str) -> Iterator[Path]:
    """Copy the package into a folder, from which it is imported here and in processes of tests."""
    copy = Path(folder, "src")
    shutil.copytree(SOURCE, copy / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__"))
    os.environ["PYTHONPATH"] = str(copy)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of two sources of one size in one second
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    os.chdir(_ROOT)
    for name in _PRELOADED:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] == SOURCE.name]
    assert not ours, f"imported before there was a fault: {ours}"
    yield copy / SOURCE.name


def run(copy: Path, fault: Fault | None, tests: Sequence[str], limit_s: float) -> Outcome:
    """Run tests until one fails, with a fault in the copied source, or none."""
    began_s = time.monotonic()
    place = copy / fault.module if fault else None
    before = place.read_text() if place else ""
    if place and fault:
        place.write_text(fault.text)
    try:
        found_by = _run_forked(tests, limit_s)
    finally:
        if place:
            place.write_text(before)
    if found_by == HANGS and fault and run(copy, None, tests, limit_s).found_by == HANGS:
        found_by = TOO_SLOW
    return Outcome(found_by, round(time.monotonic() - began_s, 1))


def _run_forked(tests: Sequence[str], limit_s: float) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # so that all that it starts can be ended
        os.close(reading)
        os._exit(_run_tests(tests, writing))
    os.close(writing)
    # Not until the pipe is closed: processes that the tests started may keep it open.
    ready, _, _ = select.select([reading], [], [], limit_s)
    answer = os.read(reading, _LONGEST_ANSWER).decode() if ready else HANGS
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer or "pytest died"


def _run_tests(tests: Sequence[str], writing: int) -> int:
    """Run pytest, and write which test failed, if one did."""
    import pytest  # it looks at the arguments of the process when it is imported

    output = io.StringIO()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main([*_OPTIONS, *tests])
    failed = _FAILED.search(output.getvalue())
    if code == pytest.ExitCode.OK:
        answer = SURVIVES
    elif failed:
        answer = failed[1]
    else:
        answer = f"pytest ends with {code}: {output.getvalue()[-300:]}"
    os.write(writing, answer.encode())
    return 0
