"""`warmup` compiles all of a step, changes nothing, and waits as long as anybody compiles."""

from __future__ import annotations

import datetime
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _torch
from ddpopt.checks.verify import verify
from ddpopt.checks.warmup import warmup
from ddpopt.errors import OptionError, PeerError
from ddpopt.planning import tuner
from ddpopt.ranks import meetings
from tests.support.beside import Beside, compiled
from tests.support.cuts import assert_as_planned, compiling_nothing
from tests.support.logs import logged
from tests.support.models import MLP, WAYS, Blocks, assert_equal_states, batches, state_of, train
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import MakeRanks, error_of
from tests.support.simulated_ranks import World

SPLITS = ["forward", "backward"]
CAPS = {"bucket_cap_mb": 0.03}
SHORT_S = 0.5  # a group's timeout, where compiling takes longer
LONG_S = 300.0  # reached only by what hangs


# ---- It compiles all, and changes nothing -----------------------------------------------------


@on_ranks(2)
@pytest.mark.quick("forward-0")
@pytest.mark.parametrize(
    ("split", "steps_before"),
    [("forward", 0), ("backward", 0), ("backward", 1), ("forward", 2)],
)
def test_training_after_a_warmup_compiles_nothing_and_equals_eager(
    rank: int, split: str, steps_before: int
) -> None:
    """The warmup may come before DDP rebuilds its buckets, which then are as planned."""
    beside, inputs = Beside(MLP(), ddp_options=CAPS, split=split), batches(rank, [(8, 64)] * 4)
    beside.train(inputs[:steps_before])
    warmup(beside.run, inputs[0])
    with compiling_nothing():
        beside.train(inputs)
    assert beside.cut.split == split
    assert beside.num_sections > 1
    assert_as_planned(beside.ddp)
    assert len(set(gather(str(beside.cut.buckets)))) == 1


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", SPLITS)
def test_after_a_warmup_the_search_for_better_buckets_still_begins(
    one_rank: None, split: str
) -> None:
    """The search begins when code is compiled, and after a warmup no code is."""
    ddp, x = DistributedDataParallel(MLP(), **CAPS), torch.randn(8, 64)
    model = compiled(ddp, split=split, buckets="auto")
    warmup(model, x)
    assert tuner.find_tuner(ddp) is not None
    with compiling_nothing():
        model(x).sum().backward()


@on_ranks(2)
@pytest.mark.quick("torch.compile(DDP(m))-forward")
@pytest.mark.parametrize(("way", "split"), list(zip(WAYS, itertools.cycle(SPLITS), strict=False)))
def test_warmup_and_verify_take_a_model_however_it_is_compiled(
    rank: int, way: str, split: str
) -> None:
    """Nothing of the model changes, and training compiles nothing."""
    beside = Beside(Blocks(), ddp_options=CAPS, way=way, split=split)
    inputs = batches(rank, [(8, 64)] * 3)
    before, rng = state_of(beside.ddp), torch.get_rng_state()
    warmup(beside.run, inputs[0])
    with compiling_nothing():
        assert verify(beside.run, inputs[0]).passed
        assert_equal_states(state_of(beside.ddp), before, bitwise=True)
        assert torch.equal(rng, torch.get_rng_state())
        beside.train(inputs)
    assert any(cut.sections for cut in beside.cuts)


@pytest.mark.parametrize(
    "gradients_off", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_warmup_and_verify_may_be_called_where_gradients_are_off(
    one_rank: None, gradients_off: Callable[[], Any]
) -> None:
    """Also with a batch that was made there."""
    beside, inputs = Beside(MLP(), ddp_options=CAPS), batches(0, [(8, 64)] * 2)
    with gradients_off():
        batch = inputs[0].clone()
        warmup(beside.run, batch)
        assert verify(beside.run, batch).passed
    with compiling_nothing():
        beside.train(inputs)
    assert beside.num_sections > 1


# ---- It waits, and does not wait for the dead -------------------------------------------------


@on_ranks(2)
@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", SPLITS)
def test_compiling_may_take_longer_than_the_groups_timeout(rank: int, split: str) -> None:
    """Nobody is in a collective; the rank that waits says for whom, and in which phase.

    Rank 1 compiles until rank 0 has waited for twice the group's timeout. This is short only while
    rank 0 waits, so that no speed of the machine matters.
    """
    group, store = dist.new_group(backend="gloo"), dist.distributed_c10d._get_default_store()
    has_waited = f"rank 0 has waited, {split}"
    lines: list[str] = []

    def set_timeout(seconds: float) -> None:
        _set_pg_timeout(datetime.timedelta(seconds=seconds), group)

    def slowly(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
        def compile_slowly(*args: Any) -> Any:
            if rank == 0:
                set_timeout(SHORT_S)  # would end a collective before rank 1 comes to it
            else:
                store.wait([has_waited], datetime.timedelta(seconds=LONG_S))
            return compile_graph(*args)

        return compile_slowly

    def note_warning(text: str, *args: object) -> None:
        lines.append(text % args)
        if rank == 0 and "(forward)" in lines[-1]:
            set_timeout(LONG_S)
            store.set(has_waited, "")

    inner = slowly(_torch.lookup_backend("aot_eager")) if split == "forward" else "aot_eager"
    beside = Beside(MLP(), ddp_options={**CAPS, "process_group": group}, inner=inner, split=split)
    inputs = batches(rank, [(8, 64)] * 3)
    with (
        mock.patch.object(meetings, "_REPORT_S", 2 * SHORT_S),
        mock.patch.object(_torch, "aot_eager", slowly(_torch.aot_eager)),
        mock.patch.object(meetings._logs, "warning", note_warning),
    ):
        warmup(beside.run, inputs[0])
    beside.train(inputs)
    told = [line for line in lines if "rank 1" in line]
    assert bool(told) == (rank == 0)
    assert not told or "(forward)" in told[0]


@on_ranks(2)
def test_a_rank_that_raises_is_named_to_the_others(rank: int) -> None:
    """Other ranks are told the phase and the error, which the rank itself raises."""
    model, (x,) = compiled(DistributedDataParallel(MLP(), **CAPS)), batches(rank, [(8, 64)])

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise KeyError("no target")
        return output.sum()

    error = error_of(lambda: warmup(model, x, loss_fn))
    assert error.startswith("KeyError" if rank == 1 else "PeerError: warmup: rank 1 ")
    assert "'no target'" in error
    assert rank == 1 or "forward" in error
    warmup(model, x)  # the group is as good as before


def _vanish(rank: int, how: str) -> str:
    store = dist.distributed_c10d._get_default_store()

    def inner(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if rank == 1:
            store.set("rank 1 compiles", "")
            os._exit(1)
        if how == "compiling":
            store.wait(["rank 1 compiles"])
        return _torch.lookup_backend("aot_eager")(gm, inputs)

    model = compiled(DistributedDataParallel(MLP(), **CAPS), inner, split="forward")
    if how == "absent" and rank == 1:
        os._exit(0)
    return error_of(lambda: warmup(model, *batches(rank, [(8, 64)]), silence_s=2.0))


@pytest.mark.parametrize(("how", "report"), [("compiling", "forward"), ("absent", "absent")])
def test_a_rank_that_ends_is_noticed_by_its_silence(
    how: str, report: str, make_ranks: MakeRanks
) -> None:
    """The rank ends while it compiles, or before it came; the other one then raises."""
    error = make_ranks().run_survivors([0], _vanish, how)[0]
    assert error.startswith("PeerError")
    for value in ("rank 1", "2 s", f" {report})"):
        assert value in error


def test_a_store_that_does_not_answer_ends_the_warmup(one_rank: None) -> None:
    """The error says that there was no answer within the silence that was allowed."""
    model, world = compiled(DistributedDataParallel(MLP())), World(1)
    world.store.hangs = True
    with world.simulated():
        (error,) = world.run(lambda _: warmup(model, torch.randn(8, 64), silence_s=75.0))
    assert isinstance(error, PeerError)
    assert "75 s" in str(error)


@on_ranks(2)
def test_all_warmups_of_a_group_leave_one_thread(rank: int) -> None:
    """The thread has the connection to the group's store; an earlier test may have made it."""
    model = compiled(DistributedDataParallel(MLP(), **CAPS), split="backward")
    before = threading.active_count()
    for _ in range(3):
        warmup(model, *batches(rank, [(8, 64)]))
    assert threading.active_count() - before <= 1


@pytest.mark.parametrize("silence_s", [0, -1.0, float("nan"), float("inf"), "60"])
def test_a_bad_silence_s_is_refused_by_name(one_rank: None, silence_s: Any) -> None:
    model = compiled(DistributedDataParallel(MLP()))
    with pytest.raises(OptionError, match="silence_s is"):
        warmup(model, torch.randn(8, 64), silence_s=silence_s)


@on_ranks(2)
def test_a_rank_that_compiles_nothing_more_is_named_on_all_and_ends_nothing(rank: int) -> None:
    """Training goes on there, eagerly; it is an error where `config.disagreement` says so.

    In mid-training comes another batch size, which Dynamo compiles on rank 0 alone.
    """
    ddp = DistributedDataParallel(MLP(), **CAPS)
    model = compiled(ddp, dynamic=False)
    (x,) = batches(rank, [(6, 64)])
    with (
        torch._dynamo.config.patch(recompile_limit=8 if rank == 0 else 1),
        logged("warning") as lines,
    ):
        train(ddp, batches(rank, [(4, 64)] * 2), model)
        warmup(model, x)
        verified = verify(model, x)
        with ddpopt.config.patch(disagreement="error"):
            error = error_of(lambda: warmup(model, x))
        train(ddp, [x] * 2, model)
    assert verified.passed
    assert error.startswith("DisagreementError: rank 1")
    named = [text for text in lines if "rank 1 compiled nothing of" in text]
    assert len(named) == 2
    assert "rank 1" in verified.note


@on_ranks(2)
def test_where_no_rank_compiles_anything_all_say_what_to_give(rank: int) -> None:
    ddp = DistributedDataParallel(MLP())
    assert error_of(lambda: warmup(ddp, *batches(rank, [(4, 64)]))).startswith("OptionError")
