"""The list of faults: each can still be planted, and running the tests finds one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kills import mutants, planted, results
from tests.kills.equal import EQUAL
from tests.kills.fault import read
from tests.kills.running import SURVIVES, Outcome
from tests.support.documents import ROOT, environment


@pytest.mark.quick
def test_each_fault_that_is_written_down_can_be_planted() -> None:
    """The text of a fault is in the source, once; else this raises."""
    assert len({fault.name for fault in planted.planted_by_name()}) == len(planted.BY_NAME)


def test_each_fault_is_a_change_of_the_source_with_a_name_of_its_own() -> None:
    faults = [*planted.every(), *mutants.draw()]
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        assert ast.dump(ast.parse(fault.text)) != ast.dump(ast.parse(read(fault.module)))


def test_each_family_of_faults_has_some() -> None:
    assert len(planted.unproven()) > 10
    assert len(planted.unrefused()) > 100
    assert len(mutants.draw()) == mutants.NUM_MUTANTS


def test_what_is_called_equal_is_a_fault_that_no_test_has_found() -> None:
    found = results.load(results.FOUND)
    # Among all mutants: more may be tried than the usual ones.
    all_mutants = [fault for module in mutants.modules() for fault in mutants.mutants_of(module)]
    assert set(EQUAL) <= {fault.name for fault in (*planted.every(), *all_mutants)}
    assert all(not found[name].is_found for name in EQUAL if name in found)


def test_a_fault_that_was_found_and_is_not_any_more_is_told() -> None:
    found, survives = Outcome("tests/test_text.py::test_it", 1.0), Outcome(SURVIVES, 1.0)
    before = {"kept": found, "lost": found, "gone": found, "never": survives}
    after = {"kept": found, "lost": survives, "never": survives}
    assert results.lost(before, after) == ["lost"]


@pytest.mark.nightly
def test_a_planted_fault_is_found_by_a_test_of_its_module(tmp_path: Path) -> None:
    """The tests run on a copy of the source; the source stays as it is."""
    only = "not refused: planning/costs.py: if self.algorithm not in ALGORITHMS"
    path = tmp_path / "found.json"
    command = ["-m", "tests.kills", "--only", only, "--own", "--results", str(path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(), check=True)
    (outcome,) = results.load(path).values()
    assert outcome.found_by.startswith("tests/planning/")
