"""Layer order is import order: the arrows between modules, read off their source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ddpopt

ROOT = Path(ddpopt.__file__).parent

# Each module may import those above it, and nothing else of ours.
ALLOWED = {
    "errors": set(),
    "buckets": set(),
    "config": {"errors"},
    "_torch": {"errors", "buckets"},
    "logs": {"_torch"},
    "stores": {"_torch"},
    "listening": set(),
    "reading": set(),
    "writing": set(),
    "recorded": {"plans", "writing"},
    "plans": {"errors", "buckets"},
    "options": {"_torch", "config", "errors"},
    "splitting": {"_torch", "buckets", "errors", "plans", "splitting"},
    "planning": {"buckets", "errors", "planning", "plans", "splitting"},
    "bucket_plan": {"errors", "planning", "plans", "reading", "writing"},
    "simulator": {"bucket_plan", "errors", "planning", "plans"},
    "sweep": {"bucket_plan", "errors", "planning", "plans", "simulator"},
    "drawing": {"_torch", "logs", "splitting"},
    "dump": {"config", "drawing", "logs", "plans", "splitting", "writing"},
    "planning_ahead": {"bucket_plan", "errors", "estimation", "planning"},
    "calibration": {"errors", "planning"},
    "estimation": {"_torch", "errors", "planning"},
    "records": {"_torch", "bucket_plan", "buckets", "plans", "recorded"},
    "recomputation": {"_torch", "buckets", "records"},
    "rebucketing": {"_torch", "bucket_plan", "errors", "plans", "records"},
    "algorithms": {"_torch", "algorithms", "buckets", "errors", "faults", "records"},
    "parallel": {"_torch", "errors", "parallel"},
    "meeting": {"errors", "logs", "stores"},
    "tuning": {
        "_torch",
        "bucket_plan",
        "calibration",
        "errors",
        "logs",
        "meeting",
        "planning",
        "rebucketing",
        "records",
    },
    "presence": set(),
    "rollcall": {"_torch", "presence", "stores"},
    "faults": {"config", "errors", "logs", "presence", "rollcall", "stores"},
    "agreement": {"_torch", "config", "errors", "logs", "plans", "records", "stores"},
    "rehearsal": {"_torch", "errors", "records", "tuning"},
    "comparison": {"rehearsal"},
    "warming": {"agreement", "errors", "meeting", "records", "rehearsal"},
    "verification": {
        "_torch",
        "comparison",
        "errors",
        "logs",
        "records",
        "rehearsal",
        "warming",
    },
    "gates": {"_torch", "listening", "splitting"},
    "sections": {"_torch", "errors", "gates", "listening", "logs", "splitting"},
    "gated": {"_torch", "errors", "gates", "plans", "sections", "splitting"},
    "runner": {"_torch", "buckets", "errors", "gates", "logs", "plans", "records"},
    "inspection": {
        "_torch",
        "bucket_plan",
        "buckets",
        "errors",
        "inspection",
        "listening",
        "planning",
        "plans",
        "reading",
        "recorded",
        "records",
        "writing",
    },
    "cli": {
        "_torch",
        "bucket_plan",
        "calibration",
        "cli",
        "config",
        "errors",
        "estimation",
        "inspection",
        "options",
        "planning",
        "planning_ahead",
        "plans",
        "records",
        "simulator",
        "sweep",
        "writing",
    },
    "__main__": {"cli"},
}


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
    """backend.py may import every layer but inspection and cli; __init__ only shows names."""
    allowed = {**ALLOWED, "backend": set(ALLOWED) - {"inspection", "cli"}, "__init__": set(ALLOWED)}
    for layer, path in _files():
        ours = {name.split(".")[1] for name in _imports(path) if name.startswith("ddpopt.")}
        assert ours <= allowed[layer], f"{path} imports {sorted(ours - allowed[layer])}"


def test_private_torch_names_stay_in_one_room() -> None:
    """No other module imports an underscored name of torch's or reads an underscored attribute.

    How the room itself touches them is tested in tests/_torch/test_table.py.
    """
    for layer, path in _files():
        if layer == "_torch":
            continue
        found = [name for name in _imports(path) if re.match(r"torch\b.*\._", name)]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner not in ("self", "cls"):
                    found.append(ast.unparse(node))
        assert not found, f"{path} touches {found}"
