"""Lines of `benchmarks/gpu` that pass, fail, hang and skip, for the test of its runner."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.findings import Findings, UnavailableError


def say(findings: Findings, _device: str, *, said: str) -> None:
    findings.check("says something", lambda: said)
    findings.found.figures["said"] = said


def break_one(findings: Findings, _device: str) -> None:
    def fail() -> None:
        raise AssertionError("two is not three")

    findings.check("is right", lambda: None)
    findings.check("is wrong", fail)


def stop_early(findings: Findings, _device: str) -> None:
    raise RuntimeError("no device")


def hang(findings: Findings, _device: str) -> None:
    """Wait for a process that it started."""
    sleeper = [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(600)"]
    findings.check("ends", lambda: subprocess.run(sleeper, check=True))


def miss(findings: Findings, _device: str) -> None:
    def ask() -> None:
        raise UnavailableError("there is no such kernel")

    findings.check("has it", ask)
