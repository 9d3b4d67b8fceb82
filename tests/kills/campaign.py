"""Which tests a fault is tried on, and trying many of them in several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.kills.fault import Fault
from tests.kills.running import Outcome, copied_source, run

_TESTS = Path(__file__).parents[1]
OWN_LIMIT_S = 240.0
_ROOM_LIMIT_S = 900.0
# Where the tests of a module are not in the file that mirrors it.
_TESTS_OF = {
    "_torch/aot.py": (
        "tests/_torch/test_aot.py",
        "tests/_torch/test_texts.py",
        "tests/split/test_guesses.py",
    ),
    "_torch/graphs.py": ("tests/_torch/test_graphs.py", "tests/_torch/test_texts.py"),
    "_text.py": ("tests/test_text.py",),
    "_torch/modes.py": ("tests/_torch/test_ddp.py", "tests/_torch/test_reducer_parameters.py"),
    "_torch/new_reducer.py": ("tests/_torch/test_ddp.py", "tests/planning/test_rebucket.py"),
    "_torch/parameters.py": ("tests/_torch/test_reducer_parameters.py",),
    "cli": ("tests/cli", "tests/planning/test_sweep.py"),
    "algorithms/async_.py": ("tests/algorithms/test_async.py",),
    "planning/costs.py": (
        "tests/planning/test_costs.py",
        "tests/planning/test_simulation.py",
        "tests/planning/test_malformed_plans.py",
    ),
    "planning/rebucket.py": (
        "tests/planning/test_rebucket.py",
        "tests/planning/test_accumulation.py",
        "tests/planning/test_static_graph.py",
    ),
    "planning/batch.py": ("tests/planning/test_batch.py", "tests/checks/test_verify.py"),
    "planning/plan.py": ("tests/planning/test_plan.py", "tests/planning/test_malformed_plans.py"),
    "_torch/buckets.py": ("tests/_torch/test_ddp.py", "tests/test_reducer.py"),
    "checks/copies.py": (
        "tests/checks/test_first_step.py",
        "tests/checks/test_verify.py",
        "tests/checks/test_promises.py",
        "tests/test_malformed_calls.py",
        "tests/ranks/test_foreign_group.py",
    ),
    "cli/bench.py": ("tests/cli/test_cli.py",),
    "integrations": ("tests/integrations",),
    "split/buckets.py": ("tests/split/test_graph.py",),
    "split/state.py": (
        "tests/split/test_phases.py",
        "tests/split/test_state.py",
        "tests/test_malformed_calls.py",
    ),
    "split/aliases.py": ("tests/split/test_proof.py", "tests/split/test_facts.py"),
    "split/compiler.py": (
        "tests/split/test_graph.py",
        "tests/split/test_backward.py",
        "tests/split/test_forward.py",
        "tests/split/test_cache.py",
    ),
    "split/cut.py": (
        "tests/split/test_cut.py",
        "tests/split/test_state.py",
        "tests/inspection/test_explain.py",
    ),
    "split/nodes.py": (
        "tests/split/test_nodes.py",
        "tests/split/test_facts.py",
        "tests/split/test_proof.py",
        "tests/split/test_guesses.py",
        "tests/split/test_alike.py",
    ),
    "split/facts.py": (
        "tests/split/test_facts.py",
        "tests/split/test_guesses.py::test_calls_on_streams_of_their_own_are_not_cut",
        "tests/split/test_order.py",
        "tests/split/test_guesses.py::test_gradients_are_those_of_eager_ddp"
        "[effect in backward-auto]",
    ),
    "split/gates.py": (
        "tests/split/test_gates.py",
        "tests/split/test_autograd_doors.py",
        "tests/split/test_order.py",
    ),
    "steps/sections.py": ("tests/steps/test_sections.py", "tests/inspection/test_recorder.py"),
    "split/graph.py": (
        "tests/split/test_graph.py",
        "tests/split/test_arrival.py",
        "tests/split/test_alike.py",
    ),
    "split/runner.py": (
        "tests/split/test_recomputation.py",
        "tests/split/test_runner.py",
        "tests/split/test_guesses.py",  # delayed parameters
    ),
    "split/proof.py": (
        "tests/split/test_proof.py",
        "tests/split/test_releases.py",
        "tests/split/test_alike.py",
    ),
    "split/sections.py": (
        "tests/split/test_backward_sections.py",
        "tests/split/test_forward_sections.py",
    ),
}


def own_tests(fault: Fault) -> list[str]:
    """The files that should find a fault."""
    found = list(fault.tests)
    if fault.has_all_tests:
        return found
    room, _, name = fault.module.rpartition("/")
    mirror = _TESTS / room / f"test_{name.removeprefix('_')}"
    found += _TESTS_OF.get(fault.module, _TESTS_OF.get(room, ()))
    if not found and mirror.exists():
        found = [str(mirror.relative_to(_TESTS.parent))]
    return found or room_tests(fault)


def room_tests(fault: Fault) -> list[str]:
    """The quick tests of a fault's room, and of the whole."""
    room = fault.module.rpartition("/")[0]
    whole = ["tests/test_backend.py", "tests/test_malformed_calls.py", "tests/test_reducer.py"]
    place = _TESTS / room
    return ["--set", "quick", *([f"tests/{room}"] if room and place.exists() else []), *whole]


def try_fault(
    copy: Path, fault: Fault, *, is_thorough: bool, limit_s: float = OWN_LIMIT_S
) -> Outcome:
    """Run a fault's own tests for so many seconds, and then those of its room."""
    outcome = run(copy, fault, own_tests(fault), limit_s)
    if not outcome.is_found and is_thorough:
        rest = run(copy, fault, room_tests(fault), _ROOM_LIMIT_S)
        outcome = Outcome(rest.found_by, outcome.seconds + rest.seconds)
    return outcome


def _work(faults: Sequence[Fault], is_thorough: bool, limit_s: float, pipe: Any) -> None:
    with (
        contextlib.suppress(BrokenPipeError),  # whoever asked has ended
        tempfile.TemporaryDirectory() as folder,
        copied_source(folder) as copy,
    ):
        for fault in faults:
            outcome = try_fault(copy, fault, is_thorough=is_thorough, limit_s=limit_s)
            pipe.send((fault.name, outcome))
        pipe.send(None)


def try_all(
    faults: Sequence[Fault], num_jobs: int, is_thorough: bool, limit_s: float
) -> Iterator[tuple[str, Outcome]]:
    """The outcome of each fault, in several processes."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for job in range(num_jobs):
        pipe, end = context.Pipe()
        arguments = (faults[job::num_jobs], is_thorough, limit_s, end)
        # Tests start processes, which one that is a daemon may not.
        context.Process(target=_work, args=arguments).start()
        end.close()
        pipes.append(pipe)
    while pipes:
        for pipe in multiprocessing.connection.wait(pipes):
            if (tried := pipe.recv()) is None:
                pipes.remove(pipe)
            else:
                yield tried
