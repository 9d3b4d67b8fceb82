"""Cases as the Python expressions that make them, to be kept and replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def source_of(value: Any) -> str:
    """Return the Python expression that makes `value`, without what is by default."""
    if isinstance(value, tuple):
        items = [source_of(item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = [
        f"{field.name}={source_of(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def value_of(source: str, kind: type, names: Mapping[str, Any]) -> Any:
    """Return what `source_of` made a line of; `names` are the classes that it may name.

    Raises:
        TypeError: it is of another kind.
    """
    value = eval(source.strip().rstrip(","), dict(names))
    if not isinstance(value, kind):
        raise TypeError(f"{source!r} makes no {kind.__name__}; copy a line as it was printed")
    return value
