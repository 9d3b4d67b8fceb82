"""The table of private names is whole: nothing in the room goes past it, and no row is idle."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from ddpopt import _torch
from ddpopt._torch import names
from ddpopt._torch.names import TABLE, TEXTS, Need, PrivateName, PrivateText
from ddpopt.errors import TorchDriftError

ROOM = Path(_torch.__file__).parent
FILES = sorted(path for path in ROOM.glob("*.py") if path.name != "names.py")
OUTSIDE = sorted(path for path in ROOM.parent.rglob("*.py") if path.parent != ROOM)
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def _goes_past(tree: ast.AST) -> list[str]:
    """Return what touches a private name without going through its row."""
    return [ast.unparse(node) for node in ast.walk(tree) if any(map(_is_private, _named(node)))]


def _named(node: ast.AST) -> list[str]:
    """Return what an access or an import names, as `._attribute` or `torch.module.name`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return []
        case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return [f".{name}"]
        case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
            return [f".{name}"] if function in _BY_NAME else []
        case ast.Import(names=imported):
            return [alias.name for alias in imported]
        case ast.ImportFrom(module=str(module), names=imported):
            return [f"{module}.{alias.name}" for alias in imported]
    return []


def _is_private(name: str) -> bool:
    return bool(re.match(r"(torch\b.*)?\._(?!_)", name))


# Underscored, but not torch's: what named tuples have, and the module behind `operator`.
_OF_PYTHON = {"_replace", "_asdict", "_fields", "_operator"}


def _touched_outside(text: str) -> list[str]:
    """Return the private names of torch, and the texts of its graphs, in a module's source.

    Names may also be spelled out, as in a comparison with what a node calls. What the module
    defines, or sets on `self`, belongs to it.
    """
    tree = ast.parse(text)
    touched: list[str] = []
    defined_here = set(_OF_PYTHON)
    texts = {row.text for row in TEXTS} - {names.ITERATION.text}  # a plain word
    for node in ast.walk(tree):
        touched += filter(_is_private, _named(node))
        touched += _keys_of_metadata(node)
        match node:
            case ast.Constant(value=str(string)):
                if string in texts or re.fullmatch(r"_[a-z]\w*(\.\w+)?", string):
                    touched.append(string)
            case ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.FunctionDef(name=name):
                defined_here.add(name)
    return [name for name in touched if name.removeprefix(".") not in defined_here]


def _keys_of_metadata(node: ast.AST) -> list[str]:
    """Return a key of `x.meta` that stands in an expression: all are torch's, but `IS_COPY`."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="meta"), slice=ast.Constant(value=key)):
            return [str(key)]
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="meta")),
            args=[ast.Constant(value=key), *_],
        ):
            return [str(key)]
        case ast.Compare(
            left=ast.Constant(value=key),
            ops=[ast.In() | ast.NotIn()],
            comparators=[ast.Attribute(attr="meta")],
        ):
            return [str(key)]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_private_names_are_touched_by_their_rows_alone(path: Path) -> None:
    """No underscored attribute of another's object is read or imported, also as a string."""
    assert _goes_past(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "ddp._comm_hooks",
        "ddp._has_rebuilt_buckets = False",
        "getattr(ddp, '_bucket_config', None)",
        "vars(twin)['_comm_hooks']",
        "import torch._dynamo",
        "from torch._guards import TracingContext",
        "from torch.distributed import _register_comm_hook",
    ],
)
def test_every_way_past_a_row_is_detected(text: str) -> None:
    assert _goes_past(ast.parse(text))


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOM.parent)))
def test_no_private_name_is_touched_outside_the_room(path: Path) -> None:
    """Neither an attribute, nor an import, nor a string is one, nor any key of metadata."""
    assert _touched_outside(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("reducer._set_static_graph()", "._set_static_graph"),
        ("torch._dynamo.reset()", "._dynamo"),
        ("from torch import _guards", "torch._guards"),
        ("getattr(ddp, '_comm_hooks', None)", "_comm_hooks"),
        ("hasattr(node.target, '_schema')", "_schema"),
        ("node.meta['from_node']", "from_node"),
        ("node.meta['val'] = value", "val"),
        ("node.meta.get('original_aten')", "original_aten"),
        ("'stack_trace' not in node.meta", "stack_trace"),
        ("name_of(node) == '_enter_autocast'", "_enter_autocast"),
        ("_TOKENS = frozenset({'_make_token.default'})", "_make_token.default"),
        ("node.name.startswith(('primals_', other))", "primals_"),
        ("node.name() == 'CompiledFunctionBackward'", "CompiledFunctionBackward"),
    ],
)
def test_every_way_to_touch_a_name_outside_is_detected(text: str, name: str) -> None:
    """Each way is planted into a module that touches no private name."""
    module = (
        "class Cut:\n    _kept = 1\n    def get(self): return self._kept, vars(self)['_kept']\n"
    )
    assert _touched_outside(module) == []
    assert name in _touched_outside(f"{module}{text}\n")


def test_each_row_is_used_and_no_two_are_of_one_name() -> None:
    """A row that nobody uses would still be asked for by doctor."""
    used = {
        node.attr
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "names"
    }
    kinds = (PrivateName, PrivateText)
    rows = {name: row for name, row in vars(names).items() if isinstance(row, kinds)}
    assert set(rows) <= used
    assert set(rows.values()) == {*TABLE, *TEXTS}
    assert len({str(row) for row in (*TABLE, *TEXTS)}) == len(rows) > 160
    assert {row.need for row in TABLE} == set(Need)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_name_that_is_not_there_is_neither_read_nor_made(
    row: PrivateName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row raises TorchDriftError with its name; the object that lacks it stays as it was."""
    owner = types.SimpleNamespace()
    if row.is_global:
        monkeypatch.setitem(sys.modules, row.owner, owner)
        calls = [row.get, lambda: row.set(1)]
    else:
        calls = [lambda: row.get(owner), lambda: row.set(1, owner)]
    for call in calls:
        with pytest.raises(TorchDriftError, match=f"has no {re.escape(str(row))}, which ddpopt"):
            call()
    assert not hasattr(owner, row.name)


def test_the_supported_range_is_that_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of other releases are not missed; what comes after the last release is to have all."""
    first, _ = names.tested_range().split(" to ")
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'"torch>={first}"' in project.read_text()
    gone = PrivateName("Reducer", "gone", Need.SPLIT, until=(2, 13))
    for version, expected in (("2.11.1", (False, True)), ("2.13.0+cpu", (True, True))):
        monkeypatch.setattr(torch, "__version__", version)
        assert (names.BUCKET_CONFIG.is_expected, gone.is_expected) == expected
    monkeypatch.setattr(torch, "__version__", "3.0.0a0+git1")
    assert (names.BUCKET_CONFIG.is_expected, gone.is_expected) == (True, False)


def test_settings_of_which_one_is_missing_change_nothing() -> None:
    """A setting that was made before the missing name was reached is taken back."""
    moved = PrivateName("torch._dynamo.config", "moved", Need.SPLIT)
    with (
        pytest.raises(TorchDriftError, match=r"torch\._dynamo\.config\.moved"),
        names.settings({names.RECOMPILE_LIMIT: 99, moved: 1}),
    ):
        pass
    assert names.RECOMPILE_LIMIT.get() != 99
