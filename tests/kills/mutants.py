"""Random changes of one place each: seeded by the changed text, so that others stay the same.

Which are drawn depends on a hash of the module, the line and the change. A line that is edited
gets other mutants; no other line does.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.kills.fault import SOURCE, Fault, read

ROOMS = ("split", "planning", "ranks", "algorithms", "steps", "reducer.py")
NUM_MUTANTS = 200

_COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}
_ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*"}
_NUMERIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


class Edit(NamedTuple):
    """What to put in place of a part of the source, which begins on `line`."""

    start: int
    stop: int
    text: str
    line: int


def modules() -> list[str]:
    """The modules that are changed, relative to the package."""
    found = []
    for room in ROOMS:
        place = SOURCE / room
        files = sorted(place.glob("*.py")) if place.is_dir() else [place]
        found += [str(file.relative_to(SOURCE)) for file in files if file.name != "__init__.py"]
    return found


def mutants_of(module: str) -> list[Fault]:
    """All changes of a module that this file can make."""
    source = read(module)
    lines = source.splitlines()
    seen: Counter[str] = Counter()
    found = []
    for edit in sorted(set(_Finder(source).find())):
        before = source[edit.start : edit.stop]
        shown = " ".join(lines[edit.line - 1].split())
        name = f"{module}: `{shown}`: {before or 'nothing'} becomes {edit.text or 'nothing'}"
        seen[name] += 1
        if seen[name] > 1:  # the same line once more, or the same change in another place of it
            name += f" ({seen[name]})"
        found.append(Fault(name, module, source[: edit.start] + edit.text + source[edit.stop :]))
    return found


def draw(number: int = NUM_MUTANTS) -> list[Fault]:
    """A fixed choice among all changes of all modules."""
    every = [mutant for module in modules() for mutant in mutants_of(module)]
    return sorted(every, key=lambda mutant: _rank(mutant.name))[:number]


def _rank(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class _Finder:
    """Finds the places of a module that can be changed, and what to change them to."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def find(self) -> Iterator[Edit]:
        yield from self._visit(ast.parse(self._source))

    def _visit(self, node: ast.AST) -> Iterator[Edit]:
        # Assertions, messages and types decide nothing; nor does a zip's `strict`, an assertion.
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise) or _is_for_types(node):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        yield from self._edits_of(node)
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "returns", "decorator_list"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._visit(child)

    def _edits_of(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, comparators=[right]):
                yield from self._operator(left, right, _COMPARISONS)
            case ast.BinOp(left=left, right=right, op=op) if type(op) in _NUMERIC:
                yield from self._operator(left, right, _ARITHMETIC)
            case ast.BoolOp(values=[first, second, *_]):
                yield from self._operator(first, second, {"and": "or", "or": "and"})
            case ast.UnaryOp(op=ast.Not()):
                start = self._place(node)
                yield self._edit(start, start + len("not "), "")
            case ast.Call(func=ast.Name(id=name) as function) if name in _CALLS:
                yield self._replacing(function, _CALLS[name])
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield self._replacing(node, str(value + 1))
            case ast.Constant(value=bool(value)):
                yield self._replacing(node, str(not value))
            case ast.If(test=test, body=[ast.Return() | ast.Raise() | ast.Continue(), *_]):
                yield self._replacing(test, "False")  # the guard never holds

    def _operator(self, left: ast.AST, right: ast.AST, others: dict[str, str]) -> Iterator[Edit]:
        """Another operator between two operands; parentheses may stand beside it."""
        start, stop = self._place(left, is_end=True), self._place(right)
        words = "|".join(sorted(map(re.escape, others), key=len, reverse=True))
        between = re.sub(r"#.*", lambda match: " " * len(match[0]), self._source[start:stop])
        if found := re.search(rf"(?<!\w)(?:{words})(?!\w)|(?:{words})", between):
            place = start + found.start()
            yield self._edit(place, place + len(found[0]), others[found[0]])

    def _replacing(self, node: ast.AST, text: str) -> Edit:
        return self._edit(self._place(node), self._place(node, is_end=True), text)

    def _edit(self, start: int, stop: int, text: str) -> Edit:
        return Edit(start, stop, text, self._source.count("\n", 0, start) + 1)

    def _place(self, node: ast.AST, *, is_end: bool = False) -> int:
        """Where a node begins or ends in the source; the source is ASCII."""
        line = node.end_lineno if is_end else node.lineno  # type: ignore[attr-defined]
        column = node.end_col_offset if is_end else node.col_offset  # type: ignore[attr-defined]
        return int(self._starts[line - 1] + column)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
