"""Which private names of torch ddpopt needs, and whether the installed torch has them.

The list is read off the source of `_torch.py`, which alone touches such names, so that it is never
out of date.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch

_OF_A_MODULE, _OF_AN_OBJECT = "_private", "_private_of"  # the functions of _torch.py that look up


class PrivateName(NamedTuple):
    """A name as people know it, such as `torch._guards.TracingContext`."""

    name: str
    is_found: bool


class _Owner(NamedTuple):
    """What has a name, and what it is called; `value` is None if it is missing itself."""

    called: str
    value: Any


def private_names(ddp: DistributedDataParallel | None = None) -> list[PrivateName]:
    """Return the names, sorted; those of a DDP module only where one is given.

    Left out are names of objects that exist while a graph is compiled, and only then.
    """
    tree = ast.parse(inspect.getsource(_torch))
    objects: dict[str, Any] = {DistributedDataParallel.__name__: DistributedDataParallel}
    if ddp is not None:
        objects["ddp"] = ddp
    found = {
        f"{owner.called}.{name}": owner.value is not None and hasattr(owner.value, name)
        for function in tree.body
        for owner, name in _look_ups(function, objects)
    }
    return [PrivateName(name, found[name]) for name in sorted(found)]


def _look_ups(function: ast.AST, objects: Mapping[str, Any]) -> Iterator[tuple[_Owner, str]]:
    """Return each name that a function looks up, with its owner."""
    loops = _loops_over_strings(function)
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=kind), args=[owner, name]) if kind in (
                _OF_A_MODULE,
                _OF_AN_OBJECT,
            ):
                found = _module(owner) if kind == _OF_A_MODULE else _object(owner, objects)
                if found is not None:
                    for text in _strings(name, loops):
                        yield found, text


def _loops_over_strings(function: ast.AST) -> dict[str, list[str]]:
    """Return the values of variables that run over tuples of strings."""
    tuples: dict[str, ast.expr] = {}
    loops: dict[str, list[str]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple() as value):
                tuples[name] = value
    for node in ast.walk(function):
        match node:
            case (
                ast.For(target=ast.Name(id=name), iter=values)
                | ast.comprehension(target=ast.Name(id=name), iter=values)
            ):
                if isinstance(values, ast.Name):
                    values = tuples.get(values.id, values)
                if isinstance(values, ast.Tuple):
                    loops[name] = [text for item in values.elts for text in _strings(item, {})]
    return loops


def _strings(node: ast.expr, loops: Mapping[str, list[str]]) -> list[str]:
    """Return the strings that an expression may be."""
    match node:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.Name(id=name) if name in loops:
            return loops[name]
        case ast.Name(id=name) if isinstance(vars(_torch).get(name), str):
            return [vars(_torch)[name]]
    return []


def _module(node: ast.expr) -> _Owner | None:
    names = _strings(node, {})
    if not names:
        return None
    try:
        return _Owner(names[0], importlib.import_module(names[0]))
    except Exception:  # whatever an import raises, the module cannot be used
        return _Owner(names[0], None)


def _object(node: ast.expr, objects: Mapping[str, Any]) -> _Owner | None:
    match node:
        case ast.Name(id=name) if name in objects:
            return _Owner(DistributedDataParallel.__name__, objects[name])
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in objects:
            return _Owner(
                f"{DistributedDataParallel.__name__}.{attribute}",
                getattr(objects[name], attribute, None),
            )
        case ast.Call(func=ast.Name(id=kind), args=[module, name]) if kind == _OF_A_MODULE:
            found = _module(module)
            for text in _strings(name, {}):
                if found is not None:
                    return _Owner(f"{found.called}.{text}", getattr(found.value, text, None))
    return None
