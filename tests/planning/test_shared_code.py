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
from ddpopt.split import state
from ddpopt.steps.forwards import find_subscriber
from tests.support.beside import Beside
from tests.support.buckets import real_buckets
from tests.support.models import MLP, assert_equal_states, batches, state_of
from tests.support.on_ranks import on_ranks
from tests.support.plans import COST, SIZES_OF_MLP, plan_of
from tests.support.ranks import Ranks

SHAPE = (4, 64)
DECIDED = 9  # the step in which a search ends


class _Twin(Beside):
    """A model in training, and the same one in eager DDP beside it."""

    def __init__(self, seed: int, options: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        super().__init__(MLP(), **options)

    @property
    def outcome(self) -> str:
        tuner = tuning.find_tuner(self.ddp)
        return "" if tuner is None else tuner.outcome


def _graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def _deciding(**changes: Any) -> Iterator[None]:
    """Have every search in this block end with the plan of `SIZES_OF_MLP`."""

    def decide(ddp: DistributedDataParallel, *_: Any) -> Decision:
        plan = plan_of(ddp.module, SIZES_OF_MLP).to_json()
        return Decision("buckets change", plan=plan, gain=0.5, is_better=True)

    with (
        mock.patch.object(tuning, "calibrate", return_value=COST),
        mock.patch.object(tuning, "decide", side_effect=decide),
    ):
        torch._dynamo.utils.counters.clear()
        yield


def _one_by_one(models: Sequence[_Twin]) -> Iterator[_Twin]:
    for model in models:
        yield from itertools.repeat(model, DECIDED + 2)


def _in_turns(models: Sequence[_Twin]) -> Iterator[_Twin]:
    for _ in range(DECIDED + 2):
        yield from models


@on_ranks(2)
@pytest.mark.quick("backward-_one_by_one")
@pytest.mark.parametrize("order", [_one_by_one, _in_turns])
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_buckets_are_searched_for_each_module(
    rank: int, order: Callable[..., Iterator[_Twin]], split: str
) -> None:
    """A backward that is cut for any buckets is compiled once for both."""
    models, num_graphs = _train_two(rank, order, {"split": split, "buckets": "auto"})
    assert all(model.outcome.startswith("buckets change") for model in models)
    sizes = [[len(bucket) for bucket in real_buckets(model.ddp)] for model in models]
    assert len(sizes[0]) == len(SIZES_OF_MLP)
    assert sizes[0] == sizes[1]
    if split == "backward":
        assert num_graphs == 1


@on_ranks(2)
@pytest.mark.quick("backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_a_files_buckets_are_given_to_each_module(rank: int, tmp_path: Path, split: str) -> None:
    """The modules run code that was cut for these buckets once."""
    path = tmp_path / f"plan{rank}.json"
    plan_of(MLP(), SIZES_OF_MLP).save(path)
    models, num_graphs = _train_two(rank, _in_turns, {"split": split, "buckets": str(path)})
    for model in models:
        assert model.outcome == f"buckets are those of {path}"
        assert tuple(len(bucket) for bucket in real_buckets(model.ddp)) == SIZES_OF_MLP
    assert num_graphs == 1


def _train_two(
    rank: int, order: Callable[..., Iterator[_Twin]], options: dict[str, Any]
) -> tuple[list[_Twin], int]:
    """Train two models of one class in some order; return them and the number of graphs."""
    with _deciding():
        models = [_Twin(seed, options) for seed in range(2)]
        inputs = iter(batches(rank, [SHAPE] * 100))
        for model in order(models):
            model.step(next(inputs))
    return models, _graphs_compiled()


def _train_after_one_that_stays(rank: int, options: dict[str, Any]) -> Any:
    """The first module keeps its buckets, so its code is cut for them."""
    options = {"inner": "aot_eager", **options}
    with _deciding():
        first, second = _Twin(0, options), _Twin(1, options)
        first.ddp.register_comm_hook([], _reduce)
        inputs = iter(batches(rank, [SHAPE] * 100))
        for _ in range(2):
            first.step(next(inputs))
        coarse = len(state.get(first.ddp).cuts[0].sections)
        fine = []
        for _ in range(DECIDED + 2):
            second.step(next(inputs))
            fine.append(len(state.get(second.ddp).cuts[-1].sections))
        first.step(next(inputs))
    return first.outcome, second.outcome, coarse, fine, [len(b) for b in real_buckets(second.ddp)]


def _reduce(_state, bucket):  # DDP does not understand annotations that are strings
    return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.quick("backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_code_that_is_cut_for_other_buckets_is_compiled_anew(ranks: Ranks, split: str) -> None:
    """The module whose buckets change has cuts for any buckets from its second step on."""
    for first, second, coarse, fine, sizes in ranks.run(
        _train_after_one_that_stays, {"split": split, "buckets": "auto"}
    ):
        assert "its comm hook keeps a state" in first
        assert second.startswith("buckets change")
        assert coarse == fine[0] == 0
        assert fine[1] > len(SIZES_OF_MLP)
        assert fine[-1] == len(SIZES_OF_MLP)
        assert len(sizes) == len(SIZES_OF_MLP)


def _train_jointly(rank: int, is_refused: bool) -> Any:
    """Both modules have one loss and one optimizer; rank 1 may not follow for the second."""
    options = {"inner": "aot_eager", "buckets": "auto"}
    find_obstacle = rebucket.find_obstacle
    with _deciding():
        models = [_Twin(seed, options) for seed in range(2)]

        def find(ddp: DistributedDataParallel) -> str:
            is_second = rank == 1 and is_refused and ddp is models[1].ddp
            return "the test says so" if is_second else find_obstacle(ddp)

        optimizers = [
            torch.optim.SGD([p for ddp in ddps for p in ddp.parameters()], lr=0.1)
            for ddps in ([m.ddp for m in models], [m.eager for m in models])
        ]
        with mock.patch.object(rebucket, "find_obstacle", find):
            for x in batches(rank, [SHAPE] * (DECIDED + 2)):
                for calls, optimizer in zip(
                    ([m.run for m in models], [m.eager for m in models]), optimizers, strict=True
                ):
                    optimizer.zero_grad()
                    sum(call(x).square().mean() for call in calls).backward()
                    optimizer.step()
                for model in models:
                    assert_equal_states(state_of(model.ddp), state_of(model.eager))
    return [model.outcome for model in models]


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_refused", [False, True])
def test_modules_with_one_backward_decide_separately(ranks: Ranks, is_refused: bool) -> None:
    """They are of one class, and began to count steps in the same backward."""
    for first, second in ranks.run(_train_jointly, is_refused):
        assert first.startswith("buckets change")
        if is_refused:
            assert second == "buckets stay as they are: on rank 1: the test says so"
        else:
            assert second.startswith("buckets change")


def _train_adversaries(rank: int) -> Any:
    """A GAN's loop: one module is frozen while the other is trained through it."""
    options = {"inner": "aot_eager", "buckets": "auto"}
    with _deciding():
        models = [_Twin(seed, options) for seed in range(2)]
        sides = [
            ([m.ddp for m in models], [m.run for m in models]),
            ([m.eager for m in models], [m.eager for m in models]),
        ]
        for x in batches(rank, [SHAPE] * (DECIDED + 2)):
            for (generator, critic), (generate, criticize) in sides:
                for module in (generator, critic):
                    module.zero_grad()
                (criticize(x) - criticize(generate(x).detach())).mean().backward()
                _descend(critic)
                critic.requires_grad_(False)
                criticize(generate(x)).mean().backward()
                critic.requires_grad_(True)
                _descend(generator)
            for model in models:
                assert_equal_states(state_of(model.ddp), state_of(model.eager))
    return [model.outcome for model in models]


def _descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def test_modules_that_train_each_other_equal_eager_ddp(ranks: Ranks) -> None:
    """The searches for both end, alike on all ranks, and each step is eager's."""
    first, second = ranks.run(_train_adversaries)
    assert first == second
    assert all(outcome.startswith("buckets ") for outcome in first)


def _train_a_copy(rank: int, kind: str) -> Any:
    """A second module comes later: a deep copy of the first, or one made after a reset."""
    options = {"inner": "aot_eager", "buckets": "auto"}
    with _deciding():
        first = _Twin(0, options)
        inputs = iter(batches(rank, [SHAPE] * 100))
        for _ in range(3):
            first.step(next(inputs))
        if kind == "reset":
            torch._dynamo.reset()
            second = _Twin(1, options)
        else:
            second = copy.deepcopy(first)
        for _ in range(DECIDED + 2):
            for model in (second, first):
                model.step(next(inputs))
    return [model.outcome for model in (first, second)]


@pytest.mark.quick("deepcopy")
@pytest.mark.parametrize("kind", ["deepcopy", "reset"])
def test_buckets_are_searched_for_copies_and_for_modules_after_a_reset(
    ranks: Ranks, kind: str
) -> None:
    for outcomes in ranks.run(_train_a_copy, kind):
        assert all(outcome.startswith("buckets change") for outcome in outcomes)


def _check_meanwhile(rank: int) -> Any:
    """Have checks run the code on copies of the second module, before it is trained."""
    options = {"inner": "aot_eager", "buckets": "auto"}
    with _deciding():
        first, second = _Twin(0, options), _Twin(1, options)
        (x, *rest) = batches(rank, [SHAPE] * (DECIDED + 3))
        first.step(x)
        with mock.patch.object(tuning, "_Tuner", side_effect=AssertionError("a copy is tuned")):
            ddpopt.warmup(second.run, x)
            ddpopt.verify(second.run, x)
        for x in rest:
            second.step(x)
    return second.outcome


def test_no_buckets_are_searched_for_a_copy_that_a_check_made(ranks: Ranks) -> None:
    for outcome in ranks.run(_check_meanwhile):
        assert outcome.startswith("buckets change")


def _compile(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(MLP(2), bucket_cap_mb=0.01)
    return ddp, torch.compile(ddp, backend="ddpopt", options={"inner": "eager", **options})


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
