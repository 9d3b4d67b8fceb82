"""Torch without one of the private names that ddpopt looks up, as ddpopt sees it.

In a release that moved a name, torch itself finds it. So it is not deleted, but hidden from the
look-ups in `_torch.py`, which alone touches such names: that module gets a `getattr` of its own.
The names are read off its source.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import dataclasses
import inspect
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt.backend
from ddpopt import _torch
from ddpopt.cli import private_names
from ddpopt.split import state as records
from tests.support.models import WIDTH, assert_equal_states, batches, train

_KINDS = ("_private", "_private_of")


class Name(NamedTuple):
    """A private name. `module` is "" for attributes of objects and classes."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def is_of(self, owner: object) -> bool:
        """Whether `owner` is what is asked for this name."""
        return sys.modules.get(self.module) is owner if self.module else True


def find_names() -> list[Name]:
    """Return all names that `_torch.py` looks up; fail if one cannot be read off its source."""
    found = set()
    for function in ast.parse(inspect.getsource(_torch)).body:
        loops = private_names._loops_over_strings(function)
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[owner, name]) if kind in _KINDS:
                    modules = private_names._strings(owner, loops) if kind == "_private" else [""]
                    names = private_names._strings(name, loops)
                    assert modules, f"which module is {ast.unparse(node)}?"
                    assert names, f"which name is {ast.unparse(node)}?"
                    found |= {Name(module, text) for module in modules for text in names}
    return sorted(found)


NAMES = find_names()
# Without it graphs come from the in-tree optimizer, which takes no caps below 1 MiB.
IN_TREE = Name("torch._dynamo.backends.distributed", "DDPOptimizer")
_NAMED: dict[str, list[Name]] = {}
for _each in NAMES:
    _NAMED.setdefault(_each.name, []).insert(0, _each)  # attributes of objects come last


def _asked_for(owner: object, attribute: str) -> Name | None:
    return next((name for name in _NAMED.get(attribute, ()) if name.is_of(owner)), None)


@contextlib.contextmanager
def looking_up(missing: Name | None = None) -> Iterator[set[Name]]:
    """Yield a set that gets the names that are looked up in this block; one is missing."""
    asked: set[Name] = set()

    def look_up(owner: Any, attribute: str, *default: Any) -> Any:
        name = None if default else _asked_for(owner, attribute)
        if name is not None:
            asked.add(name)
            if name == missing:
                raise AttributeError(f"{name} has moved")
        return builtins.getattr(owner, attribute, *default)

    def has(owner: Any, attribute: str) -> bool:
        is_missing = missing is not None and _asked_for(owner, attribute) == missing
        return not is_missing and builtins.hasattr(owner, attribute)

    vars(_torch)["getattr"] = look_up
    vars(private_names)["hasattr"] = has  # it looks whether names are there, for `doctor`
    try:
        yield asked
    finally:
        del vars(_torch)["getattr"], vars(private_names)["hasattr"]


# ---- Training without a name ------------------------------------------------------------------


class Model(nn.Module):
    """Layers, an operator in place and a number; compiled for any batch size it has symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        for layer in self.layers:
            x = torch.ops.aten.mul.Tensor(layer(x), scale).relu()
        return x * x.shape[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One rank's training without a name: what was said, and how it went.

    `error` and `difference` are of the compiled training and of what it should have been.
    """

    missing: Name | None
    asked: frozenset[Name]
    is_split: bool
    warnings: tuple[str, ...]
    error: str = ""
    difference: str = ""


def train_without(
    rank: int, names: Sequence[Name | None], options: dict[str, Any]
) -> list[Trained]:
    """Train a new model without each of the names, as the only thing that is missing."""
    inputs = batches(rank, [(2, WIDTH), (3, WIDTH), (2, WIDTH)])
    torch.manual_seed(0)
    model = Model()
    expected = train(DistributedDataParallel(copy.deepcopy(model)), inputs)
    return [_train_without(name, options, model, inputs, expected) for name in names]


def _train_without(
    name: Name | None,
    options: dict[str, Any],
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    expected: dict[str, torch.Tensor],
) -> Trained:
    torch._dynamo.reset()
    ddpopt.backend.uninstall()
    error = difference = ""
    with _warnings() as said, looking_up(name) as asked:
        ddpopt.backend.install()
        _torch._do_without.cache_clear()
        cap_mb = 1 if name == IN_TREE else 0.03
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap_mb)
        compiled = torch.compile(ddp, backend="ddpopt", dynamic=True, options=options)
        try:
            state = train(ddp, inputs, compiled)
            assert_equal_states(state, expected)
        except AssertionError as problem:
            difference = str(problem)
        except Exception:
            error = traceback.format_exc()
    plans = records.of(ddp).plans
    ddpopt.backend.uninstall()
    ddpopt.backend.install()
    return Trained(
        missing=name,
        asked=frozenset(asked),
        is_split=any(plan.sections for plan in plans),
        warnings=tuple(said),
        error=error,
        difference=difference,
    )


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list that gets what ddpopt warns of in this block."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(_torch.LOG_NAME)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
