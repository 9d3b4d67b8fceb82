"""Names that a package imports on first use: its modules import each other's packages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def import_from(package: str, where: Mapping[str, str], name: str) -> Any:
    """Return what a package shows by this name; `where` has the names in each of its modules.

    Raises:
        AttributeError: it shows nothing by this name.
    """
    for module, names in where.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{package}.{module}"), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
