"""Layer order is import order: the arrows between modules, read off their source.

That torch's private names stay in one room is tested in tests/_torch/test_names.py.
"""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import ddpopt
from tests.support.fresh import run_fresh

ROOT = Path(ddpopt.__file__).parent

# Each room or module may import those before it, and nothing else of ours.
LAYERS = (
    "errors",
    "_indices",
    "reducer",
    "_text",
    "_values",
    "config",
    "_traced",
    "_torch",
    "_copies",
    "_logs",
    "_slots",
    "steps",
    "options",
    "ranks",
    "split",
    "planning",
    "checks",
    "inspection",
    "algorithms",
    "data_parallel",
    "backend",
    "integrations",
    "__init__",
    "cli",
    "__main__",
)


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _files() -> list[tuple[str, Path]]:
    files = ROOT.rglob("*.py")
    return [(path.relative_to(ROOT).parts[0].removesuffix(".py"), path) for path in files]


def test_modules_import_only_the_layers_below_them() -> None:
    """Modules of the same room may be imported, too."""
    for layer, path in _files():
        below = set(LAYERS[: LAYERS.index(layer) + 1])
        imported = {name.split(".")[1] for name in _imports(path) if name.startswith("ddpopt.")}
        imported &= set(LAYERS)  # the others are names that the package shows
        assert imported <= below, f"{path} imports {sorted(imported - below)}"


def test_no_modules_import_each_other() -> None:
    """Arrows go one way within a room, too; those for type checkers alone count as well."""
    modules: dict[str, Path] = {}
    for _, path in _files():
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        # What is no module is a name in one.
        imported = {n if n in modules else n.rpartition(".")[0] for n in _imports(path)}
        arrows[name] = imported & modules.keys()
    graphlib.TopologicalSorter(arrows).prepare()  # CycleError has a circle


def test_packages_of_callbacks_are_imported_by_those_who_use_them() -> None:
    """No room but `integrations` imports the callbacks, or the frameworks that they are for."""
    assert "integrations" in dict(_files())
    for layer, path in _files():
        packages = {name.split(".")[0] for name in _imports(path)}
        if layer != "integrations":
            assert not packages & {"accelerate", "lightning", "pytorch_lightning", "transformers"}
            assert not any(name.startswith("ddpopt.integrations") for name in _imports(path))


def test_importing_ddpopt_and_its_command_line_imports_no_dynamo() -> None:
    """Dynamo costs as much again as torch itself, and most commands have no use for it."""
    run_fresh("import sys, ddpopt, ddpopt.cli.main; sys.exit('torch._dynamo' in sys.modules)")
