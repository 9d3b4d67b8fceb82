"""Lines that are tests of ours, run on the device: see `tests/support/device.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.gpu.findings import Check, Findings, shorten
from tests.system.scenarios.rows import names_of


def run_tests(findings: Findings, device: str, *, select: Sequence[str]) -> None:
    """Run tests by pytest's arguments; each is a check."""
    options = ("-q", "-p", "no:cacheprovider", "--show-capture=no")
    status = pytest.main([*options, *select], plugins=[_Notes(findings)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")


def run_rows(
    findings: Findings, device: str, *, inner: str, split: str, part: int, num_parts: int
) -> None:
    """Run the k-th of `num_parts` parts of `tests/system/scenarios`, with parts of each table."""
    names = names_of(inner, split)[part::num_parts]
    test = "tests/system/test_training.py::test_training_equals_eager_ddp"
    run_tests(findings, device, select=[f"{test}[{name}-{inner}-{split}]" for name in names])


class _Notes:
    """A plugin that notes each test when it begins, and what came of it."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = nodeid.partition("::")[2]
        self._findings.found.checks.append(Check(name=name, outcome="running"))
        self._findings.save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        check = self._findings.found.checks[-1]
        check.seconds += report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            check.outcome, check.why = "failed", shorten(getattr(crash, "message", "") or "error")
        elif report.skipped:
            check.outcome, check.why = "skipped", shorten(str(report.longrepr))
        elif report.when == "teardown" and check.outcome == "running":
            check.outcome = "passed"
        self._findings.save()
