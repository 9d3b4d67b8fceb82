"""Random trainings have numbers, are printed as their source, and are made small if they fail."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.documents import run_python
from tests.support.ranks import Ranks
from tests.system.campaigns import program
from tests.system.campaigns.campaign import Campaign
from tests.system.campaigns.source import value_of
from tests.system.fuzzing import simplifying as of_cases
from tests.system.fuzzing.spec import Block, Case
from tests.system.fuzzing.strategies import draw_case
from tests.system.training.outcomes import DIFFERS, EQUAL, Finding
from tests.system.unequal import simplifying as of_scripts
from tests.system.unequal.actions import BeLate
from tests.system.unequal.machine import draw_script
from tests.system.unequal.script import Block as ScriptBlock
from tests.system.unequal.script import Script, script_of


def case_of(line: str) -> Case:
    case: Case = value_of(line, Case, {"Block": Block, "Case": Case})
    return case


class Fuzzer(NamedTuple):
    """What draws, reads and simplifies trainings.

    `fails` stands for a fault, which some have, and `is_least` says whether nothing else is left.
    """

    place: str
    draw: Callable[[int], Any]
    read: Callable[[str], Any]
    simpler: Callable[[Any], Iterator[Any]]
    fails: Callable[[Any], bool]
    is_least: Callable[[Any], bool]


FUZZERS = {
    "fuzzing": Fuzzer(
        "tests.system.fuzzing.strategies.draw_case",
        draw_case,
        case_of,
        of_cases.simpler_cases,
        lambda c: "block dropout" in c.features() and c.split == "forward",
        lambda c: c == Case(blocks=(Block(kind="dropout"),), split="forward"),
    ),
    "unequal": Fuzzer(
        "tests.system.unequal.machine.draw_script",
        draw_script,
        script_of,
        of_scripts.simpler_scripts,
        lambda s: "action BeLate" in s.features(),
        lambda s: (
            isinstance(s.actions[0], BeLate)
            and s == Script(blocks=(ScriptBlock(kind="linear"),), actions=s.actions[:1])
        ),
    ),
}
each = pytest.mark.parametrize("fuzzer", [pytest.param(FUZZERS[name], id=name) for name in FUZZERS])


def _campaign(fuzzer: Fuzzer) -> Campaign[Any]:
    def run(case: Any) -> Finding:
        return Finding(outcome=DIFFERS if fuzzer.fails(case) else EQUAL)

    return Campaign("the.program", run, fuzzer.simpler, simplify_s=60)


@each
def test_a_failing_case_is_made_small(fuzzer: Fuzzer) -> None:
    campaign = _campaign(fuzzer)
    failure = campaign.first_failure(map(fuzzer.draw, range(1000)))
    assert failure is not None
    assert fuzzer.is_least(failure.case)
    assert campaign.tally.num_failures == 1
    assert campaign.tally.num_simpler > 0


@each
def test_a_case_is_printed_as_the_source_that_makes_it(fuzzer: Fuzzer) -> None:
    """A case that is printed can be kept, and replayed."""
    for number in range(10):
        case = fuzzer.draw(number)
        assert fuzzer.read(f"{case},") == case


@each
def test_a_case_has_the_same_number_everywhere(fuzzer: Fuzzer) -> None:
    """A case can be run again by its number, also in a process that orders sets otherwise."""
    module, _, name = fuzzer.place.rpartition(".")
    code = f"from {module} import {name}; print({name}(7))"
    assert run_python("-c", code, PYTHONHASHSEED="7").strip() == str(fuzzer.draw(7))
    assert fuzzer.draw(7) != fuzzer.draw(8)


@pytest.mark.quick
def test_a_program_prints_how_to_replay_what_failed(tmp_path: Path) -> None:
    """Cases that are drawn or kept, and the line that a failure shows, are run alike."""
    fuzzer, log = FUZZERS["fuzzing"], tmp_path / "fuzz.log"
    parser = program.parser_of("the.program", None, num_cases=None)

    def draw(number: int) -> Case | None:
        kind = ("linear", "dropout", "norm")[number]
        return Case(blocks=(Block(kind=kind),), split="forward") if kind != "norm" else None

    def run(*words: str) -> int:
        arguments = parser.parse_args(["--log", str(log), *words])
        kept = {"kept": Case(blocks=(Block(kind="linear"),))}
        return program.run(
            arguments, _campaign(fuzzer), Ranks(), draw=draw, read=fuzzer.read, kept=kept
        )

    assert run("--kept") == 0
    assert run("--cases", "3") == 1
    text = log.read_text()
    assert "2 cases of 4 steps" in text
    (line,) = (line for line in text.splitlines() if "--replay" in line)
    assert run(*shlex.split(line)[3:]) == 1
