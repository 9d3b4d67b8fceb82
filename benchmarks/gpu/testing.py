"""Lines that are tests of ours, run on the device: see `tests/support/device.py`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from benchmarks.gpu.findings import Check, Findings
from tests.system.scenarios.rows import ON_INDUCTOR, SCENARIOS


def run_tests(findings: Findings, device: str, *, select: Sequence[str]) -> None:
    """Run tests by pytest's arguments; each is a check, noted when all have run."""
    report = findings.folder / f"{findings.stem}-tests.xml"
    options = ("-q", "-p", "no:cacheprovider", "--show-capture=no", f"--junitxml={report}")
    status = pytest.main([*options, *select])
    for case in ET.parse(report).iter("testcase"):
        findings.found.checks.append(_check(case))
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")


def run_rows(
    findings: Findings, device: str, *, inner: str, split: str, part: int, num_parts: int
) -> None:
    """Run the k-th of `num_parts` parts of `tests/system/scenarios`, with parts of each table."""
    names = list(ON_INDUCTOR if inner == "inductor" else SCENARIOS)[part::num_parts]
    test = "tests/system/test_training.py::test_training_equals_eager_ddp"
    run_tests(findings, device, select=[f"{test}[{name}-{inner}-{split}]" for name in names])


def _check(case: ET.Element) -> Check:
    """Return what pytest tells of one test."""
    check = Check(
        name=case.get("name", ""), outcome="passed", seconds=float(case.get("time") or 0.0)
    )
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            check.outcome, check.why = outcome, _shorten(found.get("message") or kind)
    return check


def _shorten(text: str, most: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} ..."
