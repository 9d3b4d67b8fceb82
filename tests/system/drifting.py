"""Torch without one of the private names that ddpopt touches, as ddpopt sees it.

In a release that moved a name, torch itself finds it. So it is not deleted, but hidden from what
ddpopt's modules run: in torch's modules and classes, so that nothing gets past the table; and in
other objects from the two functions of the table by which all look-ups and writes come.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch.nn.parallel import DistributedDataParallel

import ddpopt.backend
from ddpopt import _torch
from ddpopt._torch import names
from ddpopt.split import state as records
from ddpopt.steps import forwards
from tests.support.beside import compiled
from tests.support.models import WIDTH, assert_equal_states, batches, train
from tests.support.registration import uninstall


class Use(NamedTuple):
    """A private name as it is read, or as it is written."""

    row: names.PrivateName
    is_write: bool = False

    def __str__(self) -> str:
        return f"{self.row}, {'written' if self.is_write else 'read'}"


# Without them graphs come from the in-tree optimizer, which takes no caps below 1 MiB.
WHOLE = {row for row in names.TABLE if row.need is names.Need.WHOLE}


@contextlib.contextmanager
def looking_up(missing: Use | None = None) -> Iterator[set[Use]]:
    """Yield a set that gets the names that are used in this block; one is missing.

    What cannot be read cannot be written either; what is missing when it is written is read.
    """
    asked: set[Use] = set()
    read, write = names._read, names._write
    is_read = missing is not None and not missing.is_write
    home = _home_of(missing.row) if is_read else None

    def look_up(row: names.PrivateName, owner: Any) -> Any:
        asked.add(Use(row))
        if Use(row) == missing and home is None:
            raise AttributeError(f"{row} has moved")
        return read(row, owner)

    def set_to(row: names.PrivateName, owner: Any, value: Any) -> None:
        asked.add(Use(row, is_write=True))
        if missing is not None and row == missing.row:
            raise AttributeError(f"{row} has moved")
        write(row, owner, value)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(names, _read=look_up, _write=set_to))
        if missing is not None and home is not None:
            stack.enter_context(_hidden_in(home, missing.row.name))
        yield asked


# ---- Torch itself without a name --------------------------------------------------------------


def _home_of(row: names.PrivateName) -> types.ModuleType | type | None:
    """Return the module or class of torch's that has a name; None if only objects do."""
    if row.owner == names.REDUCER.owner:
        return DistributedDataParallel
    home = row._find_owner(None) if row.is_global else None
    return home if isinstance(home, types.ModuleType | type) else None


@contextlib.contextmanager
def _hidden_in(home: types.ModuleType | type, name: str) -> Iterator[None]:
    if isinstance(home, type):
        original = vars(home).get(name, _NOTHING)
        setattr(home, name, _Hidden(name, original))
        try:
            yield
        finally:
            if original is _NOTHING:
                delattr(home, name)
            else:
                setattr(home, name, original)
        return

    kind: Any = type(home)

    def hiding(find: Any) -> Any:
        def look_up(module: types.ModuleType, wanted: str) -> Any:
            if wanted == name:
                _refuse_ddpopt(name)
            return find(module, wanted)

        skip_code(look_up.__code__)
        return look_up

    ways = ("__getattribute__", "__getattr__")  # the second is what config modules have
    members = {way: hiding(getattr(kind, way)) for way in ways if hasattr(kind, way)}
    change = types.ModuleType.__setattr__  # theirs is for settings
    change(home, "__class__", type(kind.__name__, (kind,), members))
    try:
        yield
    finally:
        change(home, "__class__", kind)


def _refuse_ddpopt(name: str) -> None:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.partition(".")[0] == "ddpopt":
        raise AttributeError(f"{name} has moved")


_NOTHING = object()


class _Hidden:
    """An attribute of a class, or of its objects, that ddpopt does not find, but torch does."""

    def __init__(self, name: str, original: Any) -> None:
        self.name, self.original = name, original

    def __get__(self, owner: Any, kind: type) -> Any:
        _refuse_ddpopt(self.name)
        if owner is not None and self.name in vars(owner):
            return vars(owner)[self.name]
        if self.original is _NOTHING:
            raise AttributeError(self.name)
        return self.original.__get__(owner, kind)

    def __set__(self, owner: Any, value: Any) -> None:
        _refuse_ddpopt(self.name)
        vars(owner)[self.name] = value


for _function in (_refuse_ddpopt, _Hidden.__get__, _Hidden.__set__):
    skip_code(_function.__code__)  # else Dynamo would compile them


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

    asked: frozenset[Use]
    splits: frozenset[str]  # of graphs that are cut: "backward", "forward"
    warnings: tuple[str, ...]
    error: str
    difference: str


def train_without(rank: int, use: Use | None, options: dict[str, Any]) -> Trained:
    """Train a new model, eagerly and without a name, as the only thing that is missing."""
    inputs = batches(rank, [(2, WIDTH), (3, WIDTH), (2, WIDTH)])
    model = Model()
    expected = train(DistributedDataParallel(copy.deepcopy(model)), inputs)
    uninstall()
    error = difference = ""
    with _warnings() as said, looking_up(use) as asked:
        ddpopt.backend.install()
        names.warn_of.cache_clear()
        forwards._warned.clear()
        cap_mb = 1 if use is not None and use.row in WHOLE else 0.03
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        try:
            state = train(ddp, inputs, compiled(ddp, dynamic=True, **options))
            assert_equal_states(state, expected)
        except AssertionError as problem:
            difference = str(problem)
        except Exception:
            error = traceback.format_exc()
    cuts = records.get(ddp).cuts
    uninstall()
    ddpopt.backend.install()
    return Trained(
        asked=frozenset(asked),
        splits=frozenset(cut.split for cut in cuts if cut.sections),
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
