"""Which private names of torch ddpopt needs, and whether the installed torch has them.

The list is read off the source of `_torch.py`, which alone touches such names, so that it is never
out of date.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import TorchDriftError

_KINDS = _OF_A_MODULE, _OF_AN_OBJECT = "_private", "_private_of"  # what looks up in _torch.py


class PrivateName(NamedTuple):
    """A name as people know it, such as `torch._guards.TracingContext`."""

    name: str
    is_found: bool


class _Owner(NamedTuple):
    """What has a name, and what it is called; `value` is None if it is missing itself."""

    called: str
    value: Any


class _Scope(NamedTuple):
    """What variables of a function of `_torch.py` stand for.

    `objects` are examples of what they are called for, `assigned` are results of other look-ups.
    """

    objects: Mapping[str, _Owner]
    assigned: Mapping[str, ast.expr]


def private_names(ddp: DistributedDataParallel | None = None) -> list[PrivateName]:
    """Return the names, sorted; those of a DDP module only where one is given.

    Left out are names of objects that exist while a graph is compiled, and only then.
    """
    tree = ast.parse(inspect.getsource(_torch))
    objects = _examples(ddp)
    found = {
        f"{owner.called}.{name}": owner.value is not None and hasattr(owner.value, name)
        for function in tree.body
        for owner, name in _look_ups(function, objects)
    }
    return [PrivateName(name, found[name]) for name in sorted(found)]


def _examples(ddp: DistributedDataParallel | None) -> dict[str, _Owner]:
    """Return an object for each variable of `_torch.py` that always stands for the same kind."""
    ddp_class = DistributedDataParallel
    module, operator = nn.Module(), torch.ops.aten.add.Tensor
    compiled: Any = torch.compile(nn.Identity(), backend="eager")
    context = getattr(compiled, "dynamo_ctx", None)
    examples = {ddp_class.__name__: _Owner(ddp_class.__name__, ddp_class)}
    examples |= {name: _Owner("Module", module) for name in ("m", "module", "original", "copied")}
    examples |= {name: _Owner("OptimizedModule", compiled) for name in ("part", "model")}
    examples |= {"context": _Owner("OptimizedModule.dynamo_ctx", context)}
    examples |= {"function": _Owner("OptimizedModule.forward", getattr(compiled, "forward", None))}
    examples |= {"overload": _Owner("OpOverload", operator)}
    with contextlib.suppress(TorchDriftError):
        examples |= {"inductor": _Owner("Inductor", _torch.inductor(None, {}))}
    if ddp is not None:
        examples |= {name: _Owner(ddp_class.__name__, ddp) for name in ("ddp", "twin")}
        examples |= {"group": _Owner("ProcessGroup", ddp.process_group)}
    return examples


def _look_ups(function: ast.AST, objects: Mapping[str, _Owner]) -> Iterator[tuple[_Owner, str]]:
    """Return each name that a function looks up, with its owner."""
    loops, scope = _loops_over_strings(function), _Scope(objects, _assigned_look_ups(function))
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=kind), args=[owner, name]) if kind in _KINDS:
                found = _module(owner) if kind == _OF_A_MODULE else _object(owner, scope)
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


def _assigned_look_ups(function: ast.AST) -> dict[str, ast.expr]:
    """Return the look-ups whose results are given to variables."""
    return {
        name: value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple)
        for name, value in _pairs(node.targets[0], node.value)
        if isinstance(value, ast.Call)
    }


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, of_one in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, of_one)


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


def _object(node: ast.expr, scope: _Scope) -> _Owner | None:
    match node:
        case ast.Name(id=name) if name in scope.assigned:
            return _object(scope.assigned[name], scope) or scope.objects.get(name)
        case ast.Name(id=name):
            return scope.objects.get(name)
        case ast.Attribute(value=value, attr=attribute):
            owner, texts = _object(value, scope), [attribute]
        case ast.Call(func=ast.Name(id=kind), args=[of, name]) if kind in _KINDS:
            owner = _module(of) if kind == _OF_A_MODULE else _object(of, scope)
            texts = _strings(name, {})
        case _:
            return None
    if owner is None or len(texts) != 1:
        return None
    return _Owner(f"{owner.called}.{texts[0]}", getattr(owner.value, texts[0], None))
