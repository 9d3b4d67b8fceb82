"""The tuner, files' plans and hints are for each DDP module, also in code compiled for another.

Dynamo gives a module the code of another one of its class.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import PlanError
from ddpopt.planning import hint, rebucket
from ddpopt.planning import tuner as tuning
from ddpopt.planning.decision import Decision
from ddpopt.steps.forwards import find_subscriber
from tests.support.beside import Beside, compiled
from tests.support.buckets import real_buckets
from tests.support.models import MLP, assert_equal_states, batches, state_of
from tests.support.on_ranks import gather, on_ranks
from tests.support.plans import COST, plan_of

SHAPE = (4, 64)
DEPTH = 3  # of the model, which has two parameters a layer
SIZES = (2, 4)  # of the buckets that searches find, and that files have
DECIDED = 9  # the step in which a search ends


class _Twin(Beside):
    """A model in training, and the same one in eager DDP beside it."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        super().__init__(MLP(DEPTH), **options)

    @property
    def outcome(self) -> str:
        tuner = tuning.find_tuner(self.ddp)
        return "" if tuner is None else tuner.outcome

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many parameters each bucket has."""
        return tuple(len(bucket) for bucket in real_buckets(self.ddp))


def _graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def _deciding() -> Iterator[None]:
    """Have every search in this block end with the plan of `SIZES`."""

    def decide(ddp: DistributedDataParallel, *_: Any) -> Decision:
        plan = plan_of(ddp.module, SIZES).to_json()
        return Decision("buckets change", plan=plan, gain=0.5, is_better=True)

    with (
        mock.patch.object(tuning, "calibrate", return_value=COST),
        mock.patch.object(tuning, "decide", side_effect=decide),
    ):
        torch._dynamo.utils.counters.clear()
        yield


def _inputs(rank: int) -> Iterator[torch.Tensor]:
    return iter(batches(rank, [SHAPE] * 4 * DECIDED))


# ---- One after another --------------------------------------------------------------------------


def _one_by_one(models: Sequence[_Twin]) -> Iterator[_Twin]:
    for model in models:
        yield from itertools.repeat(model, DECIDED + 2)


def _in_turns(models: Sequence[_Twin]) -> Iterator[_Twin]:
    for _ in range(DECIDED + 2):
        yield from models


def _train_two(
    rank: int, order: Callable[..., Iterator[_Twin]], **options: Any
) -> tuple[list[_Twin], int]:
    """Train two models of one class in some order; return them and the number of graphs."""
    inputs = _inputs(rank)
    with _deciding():
        models = [_Twin(seed, **options) for seed in range(2)]
        for model in order(models):
            model.step(next(inputs))
    return models, _graphs_compiled()


@on_ranks(2)
@pytest.mark.quick("backward-_one_by_one")
@pytest.mark.parametrize("order", [_one_by_one, _in_turns])
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_buckets_are_searched_for_each_module(
    rank: int, order: Callable[..., Iterator[_Twin]], split: str
) -> None:
    """A backward that is cut for any buckets is compiled once for both."""
    models, num_graphs = _train_two(rank, order, split=split, buckets="auto")
    assert all(model.outcome.startswith("buckets change") for model in models)
    assert models[0].sizes == models[1].sizes == SIZES
    if split == "backward":
        assert num_graphs == 1


@on_ranks(2)
@pytest.mark.quick("backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_a_files_buckets_are_given_to_each_module(rank: int, tmp_path: Path, split: str) -> None:
    """The modules run code that was cut for these buckets once."""
    path = tmp_path / f"plan{rank}.json"
    plan_of(MLP(DEPTH), SIZES).save(path)
    models, num_graphs = _train_two(rank, _in_turns, split=split, buckets=str(path))
    for model in models:
        assert model.outcome == f"buckets are those of {path}"
        assert model.sizes == SIZES
    assert num_graphs == 1


@on_ranks(2)
@pytest.mark.quick("backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_code_that_is_cut_for_other_buckets_is_compiled_anew(rank: int, split: str) -> None:
    """The first module keeps its buckets, of which there is one: its code is whole.

    The second one's buckets change: from its second step on its code has cuts for any buckets.
    """
    inputs = _inputs(rank)
    with _deciding():
        first, second = (_Twin(seed, split=split, buckets="auto") for seed in range(2))
        first.ddp.register_comm_hook([], _reduce)
        for _ in range(2):
            first.step(next(inputs))
        num_sections = [first.num_sections]
        for _ in range(DECIDED + 2):
            second.step(next(inputs))
            num_sections.append(second.num_sections)
        first.step(next(inputs))
    assert "its comm hook keeps a state" in first.outcome
    assert second.outcome.startswith("buckets change")
    assert num_sections[:2] == [0, 0]
    assert num_sections[2] > len(SIZES)
    assert num_sections[-1] == len(second.sizes) == len(SIZES)


def _reduce(_state, bucket):  # DDP does not understand annotations that are strings
    return default_hooks.allreduce_hook(None, bucket)


@on_ranks(2)
@pytest.mark.quick("deepcopy")
@pytest.mark.parametrize("kind", ["deepcopy", "reset"])
def test_buckets_are_searched_for_copies_and_for_modules_after_a_reset(
    rank: int, kind: str
) -> None:
    """The second module comes later: a deep copy of the first, or one made after a reset."""
    inputs = _inputs(rank)
    with _deciding():
        first = _Twin(0, buckets="auto")
        for _ in range(3):
            first.step(next(inputs))
        if kind == "reset":
            torch._dynamo.reset()
        second = copy.deepcopy(first) if kind == "deepcopy" else _Twin(1, buckets="auto")
        for model in _in_turns([second, first]):
            model.step(next(inputs))
    assert all(model.outcome.startswith("buckets change") for model in (first, second))


@on_ranks(2)
def test_no_buckets_are_searched_for_a_copy_that_a_check_made(rank: int) -> None:
    """Checks run the code on copies of the second module, before it is trained."""
    inputs = _inputs(rank)
    with _deciding():
        first, second = (_Twin(seed, buckets="auto") for seed in range(2))
        x = next(inputs)
        first.step(x)
        with mock.patch.object(tuning, "_Tuner", side_effect=AssertionError("a copy is tuned")):
            ddpopt.warmup(second.run, x)
            ddpopt.verify(second.run, x)
        for _ in range(DECIDED + 2):
            second.step(next(inputs))
    assert second.outcome.startswith("buckets change")


# ---- In one step --------------------------------------------------------------------------------

Side = tuple[list[Any], list[Any]]  # DDP modules, and what is called of each


def _train_jointly(rank: int, take_step: Callable[[torch.Tensor, Side], None]) -> list[str]:
    """Train two models in each step, beside eager DDP; return how the search for each ended."""
    with _deciding():
        models = [_Twin(seed, buckets="auto") for seed in range(2)]
        eager = [model.eager for model in models]
        sides = ([model.ddp for model in models], [model.run for model in models]), (eager, eager)
        for x in itertools.islice(_inputs(rank), DECIDED + 2):
            for side in sides:
                take_step(x, side)
            for model in models:
                assert_equal_states(state_of(model.ddp), state_of(model.eager))
    return [model.outcome for model in models]


def _descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


@on_ranks(2)
@pytest.mark.quick("False")
@pytest.mark.parametrize("is_refused", [False, True])
def test_modules_with_one_backward_decide_separately(rank: int, is_refused: bool) -> None:
    """They are of one class, and began to count steps in the same backward.

    Rank 1 may not follow for the second one.
    """
    find_obstacle, asked = rebucket.find_obstacle, []

    def find(ddp: DistributedDataParallel) -> str:
        if ddp not in asked:
            asked.append(ddp)
        is_second = ddp is not asked[0]
        return "the test says so" if rank and is_refused and is_second else find_obstacle(ddp)

    def take_step(x: torch.Tensor, side: Side) -> None:
        ddps, calls = side
        for ddp in ddps:
            ddp.zero_grad()
        sum(call(x).square().mean() for call in calls).backward()
        for ddp in ddps:
            _descend(ddp)

    with mock.patch.object(rebucket, "find_obstacle", find):
        first, second = _train_jointly(rank, take_step)
    assert first.startswith("buckets change")
    if is_refused:
        assert second == "buckets stay as they are: on rank 1: the test says so"
    else:
        assert second.startswith("buckets change")


@on_ranks(2)
def test_modules_that_train_each_other_equal_eager_ddp(rank: int) -> None:
    """A GAN's loop: one module is frozen while the other is trained through it.

    The searches for both end, alike on all ranks.
    """

    def take_step(x: torch.Tensor, side: Side) -> None:
        (generator, critic), (generate, criticize) = side
        for ddp in (generator, critic):
            ddp.zero_grad()
        (criticize(x) - criticize(generate(x).detach())).mean().backward()
        _descend(critic)
        critic.requires_grad_(False)
        criticize(generate(x)).mean().backward()
        critic.requires_grad_(True)
        _descend(generator)

    outcomes = _train_jointly(rank, take_step)
    assert all(outcome.startswith("buckets ") for outcome in outcomes)
    first, second = gather(outcomes)
    assert first == second


# ---- What each module is told -------------------------------------------------------------------


def _compile(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(MLP(2), bucket_cap_mb=0.01)
    return ddp, compiled(ddp, "eager", **options)


def test_a_graphs_log_lines_come_for_each_module(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning comes once a module, and no line says that nothing was compiled."""
    with caplog.at_level(logging.INFO):
        for seed in range(3):
            _, run = _compile(seed, split="backward")
            for _ in range(3):
                run(torch.ones(2, 64)).sum().backward()
    lines = [record for record in caplog.records if "hands out no backward graph" in record.message]
    assert [line.levelname for line in lines] == ["WARNING"] * 3
    assert not any("compiled nothing" in record.message for record in caplog.records)


def test_the_hint_is_prepared_for_each_module(one_rank: None) -> None:
    """Its subscriber is there from the first forward, and waits for DDP to have timed steps."""
    for seed in range(2):
        ddp, run = _compile(seed)
        assert hint._hints.get(ddp) is None
        run(torch.ones(2, 64)).sum().backward()
        assert hint._hints.get(ddp) == ""
        assert find_subscriber(ddp, rebucket._Accumulation) is not None


def test_a_plan_that_does_not_fit_is_an_error_for_each_module(
    one_rank: None, tmp_path: Path
) -> None:
    """Each forward of the second, which runs code of the first, raises it."""
    path = tmp_path / "plan.json"
    plan_of(MLP(2), (2, 2)).save(path)
    _, run = _compile(0, buckets=str(path))
    run(torch.ones(2, 64)).sum().backward()
    plan_of(MLP(3), (2, 4)).save(path)
    _, run = _compile(1, buckets=str(path))
    for _ in range(2):
        with pytest.raises(PlanError, match="2 parameters are not reduced"):
            run(torch.ones(2, 64))
