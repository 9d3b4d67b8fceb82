"""Faults that are planted by name: rows of docs/splits.md, guards, refusals, promises.

Three families. The proof's requirements and all refusals are found in the source, so that a new one
is planted as soon as it is there; the others are written down here, with the text that they change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from tests.kills.fault import SOURCE, Fault, read

_PROOF = "split/proof.py"


class Planted(NamedTuple):
    """A change of one text in a module, which has that text once.

    `name` says what goes wrong. `tests` are those to run first, if not the module's own.
    """

    name: str
    module: str
    before: str
    after: str
    tests: tuple[str, ...] = ()


BY_NAME = (
    # ---- Rows of the table of faults in docs/splits.md, by their numbers -----------------------
    Planted(
        "fault 1: calls with effects may move between sections",
        "split/facts.py",
        "has_effects=has_effects,",
        "has_effects=[False] * len(has_effects),",
    ),
    Planted(
        "fault 5: reads of memory that hooks may write to may move behind releases",
        "split/facts.py",
        "observable_calls=observable_calls,",
        "observable_calls={},",
    ),
    Planted(
        "fault 7: reads of what the forward has left may move behind releases",
        "split/facts.py",
        "snapshot_reads=snapshot_reads,",
        "snapshot_reads={},",
    ),
    Planted(
        "fault 8: sections do not compare how often what they read was written to",
        "split/gates.py",
        "            if version != run.versions[slot]:",
        "            if False:",
        ("tests/split/test_order.py",),
    ),
    Planted(
        "fault 12: a sparse gradient shares its rows with what later sections read",
        "split/gates.py",
        "return gradient.clone()",
        "return gradient",
        ("tests/split/test_gradients.py", "tests/split/test_gates.py"),
    ),
    Planted(
        "fault 13: graphs with complex values are compiled with writes in place",
        "_torch/aot.py",
        "    if has_complex_values(graph):",
        "    if False:",
        ("tests/split/test_complex.py",),
    ),
    Planted(
        "fault 15: a gradient is released where it is made, not where its autograd node ends",
        "split/facts.py",
        "release_places=_release_places(calls, gradients, num_released_before),",
        "release_places=_release_places(calls, gradients, {}),",
        ("tests/split/test_releases.py",),
    ),
    Planted(
        "fault 16: nothing is known to communicate in a backward",
        "split/facts.py",
        "    communicates = [may_communicate(node) for node in calls]\n    in_arguments",
        "    communicates = [False] * len(calls)\n    in_arguments",
        ("tests/split/test_alike.py",),
    ),
    Planted(
        "fault 17: what draws random numbers is not known by its tag",
        "split/nodes.py",
        '    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())',
        "    return False",
        ("tests/split/test_random.py",),
    ),
    Planted(
        "fault 18: tokens and parts shift the outputs of a section's first run",
        "split/forward.py",
        "has_parts = any(is_composite(_torch.dynamo_value(n)) for n in returned)",
        "has_parts = False",
        ("tests/split/test_forward.py", "tests/split/test_guesses.py"),
    ),
    Planted(
        "fault 19: a write by an operator's method is taken for a read",
        "split/nodes.py",
        '        return name.strip("_") in _IN_PLACE_OPERATORS',
        "        return False",
        ("tests/split/test_facts.py",),
    ),
    Planted(
        "fault 20: a copy that a section makes has other strides than the original",
        "split/nodes.py",
        "    return str(torch.empty_like(value).stride()) == str(value.stride())",
        "    return True",
        ("tests/split/test_strides.py",),
    ),
    Planted(
        "fault 21: a section writes to a copy of a view of an attribute",
        "split/nodes.py",
        ', *graph.find_nodes(op="get_attr")]',
        "]",
        ("tests/split/test_forward.py",),
    ),
    # ---- Promises ------------------------------------------------------------------------------
    Planted(
        "sections run in autocast where backward() does",
        "split/gates.py",
        "            with _torch.no_autocast():\n                returned = self.call(values)",
        "            returned = self.call(values)",
        ("tests/split/test_autograd_doors.py",),
    ),
    Planted(
        "a section keeps the values that no later one reads",
        "split/gates.py",
        "for slot in self.flow.drops:",
        "for slot in ():",
        ("tests/split/test_gates.py",),
    ),
    Planted(
        "the token's copy stays in the forward",
        "split/backward.py",
        "user.args == (token,):",
        "not user.args:",
        ("tests/split/test_backward.py",),
    ),
    Planted(
        "ranks plan for the fastest of them",
        "planning/decision.py",
        "latest.append((max(",
        "latest.append((min(",
    ),
)


def planted_by_name() -> list[Fault]:
    """The faults that are written down here; raises where a text is not there, or not once."""
    found = []
    for name, module, before, after, tests in BY_NAME:
        source = read(module)
        if source.count(before) != 1:
            raise ValueError(f"{name}: {module} has {source.count(before)} times {before!r}")
        found.append(Fault(name, module, source.replace(before, after), tests))
    return found


def unproven() -> list[Fault]:
    """The proof without one of its requirements, each in turn."""
    source = read(_PROOF)
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    found = []
    for function in functions:
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Name(id="_require"), args=[holds, message]):
                    name = f"not proven: {function.name}: {ast.unparse(message)}"
                    found.append(Fault(name, _PROOF, _replacing(source, holds, "True")))
    return found


def unrefused() -> list[Fault]:
    """The package without one of its refusals, `if ...: raise ...`, each in turn."""
    found: dict[str, Fault] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = str(path.relative_to(SOURCE))
        source = read(module)
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.If(test=test, body=[*_, ast.Raise(exc=ast.expr() as error)]):
                    shown = " ".join(ast.unparse(error).split())[:120]
                    name = f"not refused: {module}: if {ast.unparse(test)}: {shown}"
                    found[name] = Fault(name, module, _replacing(source, test, "False"))
    return list(found.values())


def every() -> Iterator[Fault]:
    """All faults of this file."""
    yield from planted_by_name()
    yield from unproven()
    yield from unrefused()


def _replacing(source: str, node: ast.expr, text: str) -> str:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    stop = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
    return source[:start] + text + source[stop:]
