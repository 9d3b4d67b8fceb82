"""Run a row on two ranks, with one optimizer of DDP's compiled graphs, beside eager DDP.

Everything here runs in the worker processes of `ranks.py`, except that `Outcome` comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

import ddpopt
import ddpopt.backend
from ddpopt import _torch
from ddpopt.split.cut import Cut
from tests.support.device import DEVICE
from tests.support.registration import uninstall
from tests.system.scenarios.rows import SCENARIOS
from tests.system.scenarios.scenario import Compile, Scenario, Trainer

_CUT_BACKWARD = ("auto", "backward")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one row under one optimizer, on one rank.

    `eager_error` and `error` start with the exception's type. `difference` is the first value that
    is not eager DDP's. `pieces` are the graphs that the inner compiler got, counted for each of
    Dynamo's graphs, or the sections of the backward split. `buckets` are the Reducer's, for each
    DDP module, by parameter index where it tells; `cuts` are ddpopt's.
    """

    eager_error: str | None = None
    error: str | None = None
    difference: str | None = None
    is_synced: bool = True
    pieces: tuple[int, ...] = ()
    num_buckets: int = 0
    buckets: tuple[tuple[tuple[int, ...], ...] | None, ...] = ()
    cuts: tuple[Cut, ...] = ()


def run_row(rank: int, name: str, optimizer: str, inner: str) -> Outcome:
    """Train a row eagerly and compiled, and compare."""
    reference = functools.partial(_train, name, lambda module, **_: module, rank)
    # A graph that is fused differently rounds differently; split in backward it is not.
    is_exact = SCENARIOS[name]().is_exact_on_inductor and optimizer not in _CUT_BACKWARD
    if inner == "inductor" and not is_exact:
        reference = functools.partial(_train_compiled, name, "none", _CountPieces(inner), rank)
    expected, eager_error = _attempt(reference)
    pieces = _CountPieces(inner)
    compiled, error = _attempt(lambda: _train_compiled(name, optimizer, pieces, rank))
    if expected is None or compiled is None:
        return Outcome(eager_error=eager_error, error=error, pieces=pieces.by_graph())
    ddps = _find_ddps(compiled.module)
    cuts = tuple(cut for ddp in ddps for cut in ddpopt.explain(ddp).cuts)
    return Outcome(
        difference=_difference(compiled.state(), expected.state()),
        is_synced=_is_synced(compiled.module),
        pieces=pieces.by_graph() or tuple(max(1, len(cut.sections)) for cut in cuts),
        num_buckets=sum(_num_buckets(ddp) for ddp in ddps),
        buckets=tuple(_torch.final_buckets(ddp) for ddp in ddps),
        cuts=cuts,
    )


def count_graphs(rank: int, name: str) -> int:
    """Return how many graphs Dynamo makes of a row that is not split."""
    pieces = _CountPieces("aot_eager")
    _train_compiled(name, "none", pieces, rank)
    return len(pieces.by_graph())


def _attempt(work: Callable[[], Trainer]) -> tuple[Trainer | None, str | None]:
    try:
        return work(), None
    except Exception as error:
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text}"


def _train(name: str, compile_: Compile, rank: int) -> Trainer:
    torch._dynamo.reset()
    torch.manual_seed(0)
    scenario = SCENARIOS[name]()
    with torch._dynamo.config.patch(**scenario.dynamo_config), _small_first_bucket(scenario):
        wrapped = scenario.wrap(scenario.model.to(DEVICE), compile_, scenario.ddp_options)
        scenario.prepare(wrapped.module)
        trainer = Trainer(scenario, wrapped, rank)
        scenario.train(trainer)
    return trainer


def _small_first_bucket(scenario: Scenario) -> AbstractContextManager[None]:
    """The in-tree optimizer refuses caps under its first bucket's, 1 MiB; ours are small.

    It is at work in eager DDP too, where torch.cond and flex_attention compile themselves.
    """
    cap_mib = scenario.ddp_options.get("bucket_cap_mb", 0.01)
    return mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(cap_mib * 1024 * 1024))


def _train_compiled(name: str, optimizer: str, inner: _CountPieces, rank: int) -> Trainer:
    if optimizer == "in-tree":
        return _train_in_tree(name, inner, rank)
    if optimizer in _CUT_BACKWARD:  # takes the compiler's name: it needs AOTAutograd's graphs
        options = {"inner": inner.__name__, "split": optimizer}
    else:
        options = {"inner": inner, "enabled": optimizer == "forward"}
    return _train(name, functools.partial(torch.compile, backend="ddpopt", options=options), rank)


def _train_in_tree(name: str, inner: _CountPieces, rank: int) -> Trainer:
    uninstall()
    try:
        return _train(name, functools.partial(torch.compile, backend=inner), rank)
    finally:
        ddpopt.backend.install()


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


def _find_ddps(module: nn.Module) -> list[DistributedDataParallel]:
    found = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    return found or [replicate.state(module)._ddp]


def _difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str | None:
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _is_synced(module: nn.Module) -> bool:
    num_different = torch.zeros(())
    for parameter in module.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        num_different += not torch.equal(first, parameter)
    dist.all_reduce(num_different)
    return not num_different


def _num_buckets(ddp: DistributedDataParallel) -> int:
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return len(sizes.split(","))
