"""Tests whose body runs on every rank of a process group.

    @on_ranks(2)
    def test_losses_are_alike(rank: int, split: str) -> None:
        loss = ...
        assert len(set(gather(loss.item()))) == 1

[Note: on_ranks]
pytest runs a function that stands in for the test: it has the test's arguments (rows of
`parametrize`, fixtures whose values can be pickled, such as `tmp_path`), and sends them to worker
processes. These import the test's module and run the body there, with `rank` beside. The default
group has as many ranks as the test asked for, so nobody makes a group of some of them.

An assertion that fails on any rank fails the test. The others are stopped, whatever they wait for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

NUM_RANKS = "num_ranks"
Body = Callable[..., None]


def on_ranks(num_ranks: int | None = None) -> Callable[[Body], Body]:
    """Run a test's body on so many ranks; without a number, as its argument `num_ranks` says.

    The body may take `rank` and `num_ranks` as arguments. What it returns is ignored.
    """
    fixture = "ranks" if num_ranks == 2 else "ranks_of"  # two have other hash seeds, and stay

    def decorate(body: Body) -> Body:
        def test(**arguments: Any) -> None:
            found = arguments.pop(fixture)
            ranks = found if num_ranks == 2 else found(num_ranks or arguments[NUM_RANKS])
            ranks.run(_run_body, body.__module__, body.__qualname__, arguments)

        wanted = inspect.signature(body).parameters
        of_worker = {"rank"} if num_ranks is None else {"rank", NUM_RANKS}
        of_pytest = [wanted[name] for name in wanted if name not in of_worker]
        group = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        functools.update_wrapper(test, body)
        test.__signature__ = inspect.Signature([*of_pytest, group])  # type: ignore[attr-defined]
        return test

    return decorate


def gather(value: Any) -> list[Any]:
    """Return what each rank gave, by rank. A collective call of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _run_body(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Run on a worker what the test of this name contains."""
    test: Any = importlib.import_module(module)
    for part in name.split("."):
        test = getattr(test, part)
    body = inspect.unwrap(test)
    told = {"rank": rank, NUM_RANKS: dist.get_world_size(), **arguments}
    body(**{name: told[name] for name in inspect.signature(body).parameters})
