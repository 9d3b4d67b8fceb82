"""Run a row on two ranks, with one optimizer of DDP's compiled graphs, beside eager DDP.

Everything here runs in the worker processes of `ranks.py`, except that `Trained` comes back.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

import ddpopt.backend
from ddpopt import _torch
from ddpopt.split.cut import Cut
from tests.support.registration import uninstall
from tests.system.fuzzing.training import train
from tests.system.fuzzing.wrapping import Compile
from tests.system.scenarios.rows import ROWS
from tests.system.training.comparing import as_torch_tests
from tests.system.training.outcomes import BOTH_RAISE, REFUSED, SILENT, Finding
from tests.system.training.running import Attempt, Buckets, attempt, judge, quietly

CUT_BACKWARD = ("auto", "backward")


class Trained(NamedTuple):
    """What came of one row under one optimizer, on one rank.

    The detail of what fails, or is refused, is one line. `pieces` are the graphs that the inner
    compiler got, counted for each of Dynamo's graphs, or the sections of the backward split.
    `buckets` are the Reducer's, for each DDP module, by parameter index where it tells; `cuts` are
    ddpopt's.
    """

    finding: Finding
    pieces: tuple[int, ...]
    buckets: tuple[Buckets | None, ...]
    cuts: tuple[Cut, ...]


def run_row(rank: int, name: str, optimizer: str, inner: str) -> Trained:
    """Train a row eagerly and compiled, and compare."""
    pieces = _CountPieces(inner)
    with quietly(), _torch.drawing_as_eager():
        eager = _attempt(name, lambda module, **_: module, rank)
        ours = _train_compiled(name, optimizer, pieces, rank)
        finding = judge(
            ours,
            eager,
            lambda: _train_compiled(name, "none", _CountPieces(inner), rank),
            measure=as_torch_tests,
            tells_rounding=optimizer in CUT_BACKWARD,  # which rounds as the unsplit compile does
        )
    if finding.outcome == REFUSED:
        is_alike = ours.raised == eager.raised
        finding = dataclasses.replace(finding, outcome=BOTH_RAISE if is_alike else SILENT)
    if eager.raised or ours.raised:
        finding = dataclasses.replace(finding, detail=eager.raised or ours.raised)
    return Trained(finding, pieces.by_graph() or ours.sections, ours.buckets, ours.cuts)


def count_graphs(rank: int, name: str) -> int:
    """Return how many graphs Dynamo makes of a row that is not split."""
    pieces = _CountPieces("aot_eager")
    _train_compiled(name, "none", pieces, rank)
    return len(pieces.by_graph())


def _attempt(name: str, compile_: Compile, rank: int) -> Attempt:
    return attempt(lambda group: train(ROWS[name].case, rank, compile_, group))


def _train_compiled(name: str, optimizer: str, inner: _CountPieces, rank: int) -> Attempt:
    if optimizer == "in-tree":
        uninstall()
        try:
            return _attempt(name, functools.partial(torch.compile, backend=inner), rank)
        finally:
            ddpopt.backend.install()
    if optimizer in CUT_BACKWARD:  # takes the compiler's name: it needs AOTAutograd's graphs
        options = {"inner": inner.__name__, "split": optimizer}
    else:
        options = {"inner": inner, "enabled": optimizer == "forward"}
    compile_ = functools.partial(torch.compile, backend="ddpopt", options=options)
    return _attempt(name, compile_, rank)


class _CountPieces:
    """A backend that counts its calls for each of Dynamo's graphs and passes them on.

    Dynamo may start a graph anew; what counts is the last attempt.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._calls: dict[Any, dict[int, int]] = {}

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        context = torch._guards.CompileContext.get()
        attempts = self._calls.setdefault(context, {})
        attempts[context.attempt] = attempts.get(context.attempt, 0) + 1
        return torch._dynamo.lookup_backend(self.__name__)(gm, example_inputs)

    def by_graph(self) -> tuple[int, ...]:
        return tuple(attempts[max(attempts)] for attempts in self._calls.values())
