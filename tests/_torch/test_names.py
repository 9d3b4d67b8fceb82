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
from ddpopt._torch.names import TABLE, Need, PrivateName
from ddpopt.errors import TorchDriftError

ROOM = Path(_torch.__file__).parent
FILES = sorted(path for path in ROOM.glob("*.py") if path.name != "names.py")
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_private_names_are_touched_by_their_rows_alone(path: Path) -> None:
    """No underscored attribute of another's object, by name or as a string, and no such import."""
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
def test_the_test_above_sees_what_goes_past(text: str) -> None:
    """Each way by which a name could be touched."""
    assert _goes_past(ast.parse(text))


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
    rows = {name: row for name, row in vars(names).items() if isinstance(row, PrivateName)}
    assert set(rows) <= used
    assert set(rows.values()) == set(TABLE)
    assert len({str(row) for row in TABLE}) == len(TABLE) > 100
    assert {row.need for row in TABLE} == set(Need)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_name_that_is_not_there_is_neither_read_nor_made(
    row: PrivateName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every row: TorchDriftError with its name, and the owner stays as it was."""
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


def test_an_unknown_setting_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any other is changed."""
    moved = PrivateName("torch._dynamo.config", "moved", Need.SPLIT)
    with (
        pytest.raises(TorchDriftError, match=r"torch\._dynamo\.config\.moved"),
        names.settings({names.RECOMPILE_LIMIT: 99, moved: 1}),
    ):
        pass
    assert names.RECOMPILE_LIMIT.get() != 99
