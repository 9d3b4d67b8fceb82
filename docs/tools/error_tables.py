"""Tables of every exception, message, warning and fallback, read from the code of ddpopt.

The sentences are those that users see: the values of the enumerations, and the strings in calls
that make an exception or log a warning, found in the source. What a string has after its first
semicolon is the remedy. `python docs/tools/error_tables.py` writes them into docs/errors.md, where
tests/system/test_docs.py compares them.
"""

from __future__ import annotations

import ast
import enum
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ddpopt import _values, errors

SOURCE = Path(errors.__file__).parent
PAGE = Path(__file__).parents[1] / "errors.md"
_PART = re.compile(r"(<!-- from the source: (\w+) -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
_BUILTIN = ("RuntimeError", "TypeError", "ValueError")
_EXPECTED = "None needed where this is as you meant it: such a graph is rightly compiled whole."
_IN_MESSAGE = "Its message says what was expected and what to do."


class Message(NamedTuple):
    """A sentence in the source: HTML, with a `<var>` where a value is put in."""

    kind: str
    text: str
    module: str

    @property
    def cause(self) -> str:
        """What happened."""
        return self.text.split("; ", 1)[0]

    @property
    def remedy(self) -> str:
        """What to do, empty where the message has one part."""
        return self.text.partition("; ")[2]


class Row(NamedTuple):
    """A name with what it means and what to do."""

    name: str
    cause: str
    remedy: str


def exceptions() -> dict[str, str]:
    """Return the classes that ddpopt raises with their docstrings, the base first."""
    found: dict[str, str] = {}
    classes = [n for _, tree in _modules() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    names = {errors.DDPOptError.__name__}
    while new := [c for c in classes if c.name in names and c.name not in found]:
        found.update((c.name, " ".join((ast.get_docstring(c) or "").split())) for c in new)
        names = {c.name for c in classes if found.keys() & {ast.unparse(b) for b in c.bases}}
    return found


def exception_rows() -> list[Row]:
    """Return what each exception means: the first sentence of its docstring, and the others."""
    rows = []
    for name, text in exceptions().items():
        cause, _, remedy = text.partition(". ")
        rows.append(Row(name, cause.rstrip("."), remedy or _IN_MESSAGE))
    return rows


def reason_rows(reasons: Iterable[enum.Enum]) -> list[Row]:
    """Return cause and remedy of each of these members of `errors.Reason`."""
    rows = []
    for reason in reasons:
        cause, _, remedy = reason.value.partition("; ")
        rows.append(Row(reason.name, cause, remedy or _EXPECTED))
    return rows


def messages() -> list[Message]:
    """Return the message of each exception that is made anywhere in the source."""
    ours = exceptions()
    found = []
    for module, tree in _modules():
        raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = _called(node)
            if name == "check_number":
                what, value, limits, kind = node.args
                text = f"{_text(what)} is {_variable(value)}; it must be {_limits(limits)}"
                found.append(Message(ast.unparse(kind), text, module))
            if name == "check_kind":
                what, value, _, remedy, kind = node.args
                text = f"{_text(what)} is {_variable(value)}; {_text(remedy)}"
                found.append(Message(ast.unparse(kind), text, module))
            if name in ours or (name in _BUILTIN and id(node) in raised):
                found.append(Message(name, _text(node.args[0]), module))
    return sorted(found)


def warnings() -> list[Message]:
    """Return what is logged as a warning with a text of its own, with its arguments' names."""
    found = []
    for module, tree in _modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "_logs.warning":
                continue
            text = _text(node.args[0])
            for argument in node.args[1:]:
                text = _put_in(text, argument)
            if not text.startswith("<var>"):  # a plan or an outcome, which says it all by itself
                found.append(Message("warning", text, module))
    return sorted(found)


def render_exceptions() -> str:
    """Return the exceptions as a table."""
    return _table(("exception", "cause", "remedy"), map(_escape, exception_rows()))


def render_fallbacks() -> str:
    """Return the reasons for which a graph is compiled whole."""
    return _render_reasons(reason for reason in errors.Reason if not reason.is_of_backward)


def render_backward_fallbacks() -> str:
    """Return the reasons for which a graph's backward is not cut."""
    return _render_reasons(reason for reason in errors.Reason if reason.is_of_backward)


def _render_reasons(reasons: Iterable[errors.Reason]) -> str:
    return _table(("Reason", "cause", "remedy"), map(_escape, reason_rows(reasons)))


def render_messages() -> str:
    """Return each message with its class and its module."""
    rows = [(_code(m.kind) + _small(m.module), m.cause, m.remedy) for m in messages()]
    return _table(("exception", "cause", "remedy"), rows)


def render_warnings() -> str:
    """Return the warnings with their modules."""
    return _table(("from", "cause", "remedy"), [(m.module, m.cause, m.remedy) for m in warnings()])


def render_page(page: str) -> str:
    """Return the text of docs/errors.md with its tables as the source has them now."""
    tables = {
        "exceptions": render_exceptions,
        "fallbacks": render_fallbacks,
        "backward_fallbacks": render_backward_fallbacks,
        "messages": render_messages,
        "warnings": render_warnings,
    }
    return _PART.sub(lambda part: f"{part[1]}{tables[part[2]]()}\n{part[3]}", page)


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """Return a string as HTML, with the names of what is put into it."""
    if isinstance(node, ast.Constant):
        return html.escape(str(node.value), quote=False)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return _variable(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return _variable(node)


def _variable(node: ast.expr) -> str:
    """Return a short name for a value: the last word of what computes it."""
    if isinstance(node, ast.Call) and _called(node) == "quote":
        (node,) = node.args
    names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    names = [name for name in names if not name.startswith("__")]
    names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    is_plain = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and names
    return f"<var>{html.escape(names[0]) if is_plain else '…'}</var>"


def _limits(node: ast.expr) -> str:
    """What a value must be, from the limits that `check_number` is called with."""
    if isinstance(node, ast.Name):
        limits = getattr(_values, node.id, None)
        return _variable(node) if limits is None else html.escape(str(limits), quote=False)
    assert isinstance(node, ast.Call), "limits are a name or are made in the call"
    values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return html.escape(str(_values.Limits(**values)), quote=False)


def _put_in(text: str, argument: ast.expr) -> str:
    """Replace the first `%s` and the like."""
    for place in ("%s", "%d", "%r"):
        before, found, after = text.partition(place)
        if found and not any(other in before for other in ("%s", "%d", "%r")):
            return f"{before}{_variable(argument)}{after}"
    return text


def _escape(row: Row) -> Row:
    cause, remedy = (_markup(text) for text in row[1:])
    return Row(_code(row.name), cause, remedy)


def _markup(text: str) -> str:
    return re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text, quote=False))


def _code(name: str) -> str:
    return f'<code style="white-space: nowrap">{name}</code>'


def _small(text: str) -> str:
    return f"<br><small>{text}</small>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML, so that nothing in a message is taken for Markdown."""
    lines = ["<table>", "<thead><tr>", *(f"<th>{cell}</th>" for cell in header), "</tr></thead>"]
    lines.append("<tbody>")
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</tbody>", "</table>"])


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
