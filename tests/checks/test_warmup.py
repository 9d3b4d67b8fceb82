"""`warmup` compiles all of a step, changes nothing, and waits as long as anybody compiles."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.utils import counters
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _logs, _torch
from ddpopt.checks.verify import verify
from ddpopt.checks.warmup import warmup
from ddpopt.planning import tuner
from ddpopt.ranks import meetings, store
from ddpopt.split import state
from tests.support.hanging_store import hanging_store
from tests.support.models import (
    MLP,
    WAYS,
    Blocks,
    assert_equal_states,
    batches,
    state_of,
    train,
    twins,
)
from tests.support.ranks import MakeRanks, Ranks, error_of

SPLITS = ["forward", "backward"]
CAP_MB = 0.03
SHORT_S = 1.0  # a group's timeout, where compiling takes longer
LONG_S = 300.0  # reached only by what hangs


def _options(split: str, inner: Any = "aot_eager") -> dict[str, Any]:
    return {"backend": "ddpopt", "options": {"inner": inner, "split": split}}


# ---- It compiles all, and changes nothing -----------------------------------------------------


def _warm_and_train(
    rank: int, split: str, steps_before: int, ddp_options: dict[str, Any]
) -> dict[str, Any]:
    """Train beside eager DDP, with a warmup in between; return what was compiled when."""
    ddp, expected = twins(MLP(), bucket_cap_mb=CAP_MB, **ddp_options)
    model = torch.compile(ddp, **_options(split))
    inputs = batches(rank, [(8, 64)] * 4)
    if steps_before:
        train(ddp, inputs[:steps_before], model)
        train(expected, inputs[:steps_before])
    before, rng = state_of(ddp), torch.get_rng_state()
    rebuilt, num_steps = ddp._has_rebuilt_buckets, ddp._get_ddp_logging_data().get("iteration")
    warmup(model, inputs[0])
    assert_equal_states(state_of(ddp), before, bitwise=True)
    assert torch.equal(rng, torch.get_rng_state())
    assert ddp._has_rebuilt_buckets == rebuilt
    assert ddp._get_ddp_logging_data().get("iteration") == num_steps
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    assert_equal_states(train(ddp, inputs, model), train(expected, inputs))
    assert counters["stats"]["unique_graphs"] == num_graphs
    (plan,) = state.get(ddp).cuts
    assert plan.split == split
    assert len(plan.sections) > 1
    return {
        "buckets": [[p.name for p in bucket.parameters] for bucket in plan.buckets],
        "actual": state.get(ddp).reported_buckets,
    }


@pytest.mark.quick("0-forward")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_training_after_a_warmup_compiles_nothing_and_equals_eager(
    ranks: Ranks, split: str, steps_before: int
) -> None:
    """A warmup may come before DDP rebuilds its buckets too; these are as planned."""
    first, second = ranks.run(_warm_and_train, split, steps_before, {})
    assert first == second
    sizes = [len(bucket) for bucket in first["buckets"]]
    assert [len(bucket) for bucket in first["actual"]] == sizes


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_a_reducer_that_counts_uses_is_not_disturbed(ranks: Ranks, options: dict[str, Any]) -> None:
    """The Reducer notes a static graph's first iteration; the copy's Reducer is another one."""
    first, second = ranks.run(_warm_and_train, "backward", 0, options)
    assert first == second


@pytest.mark.quick("forward")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("split", SPLITS)
def test_the_search_for_better_buckets_still_begins(split: str) -> None:
    """The search begins when code is compiled, and after a warmup no code is."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    options = {"inner": "aot_eager", "split": split, "buckets": "auto"}
    model = torch.compile(ddp, backend="ddpopt", options=options)
    warmup(model, torch.randn(8, 64))
    assert tuner.find_tuner(ddp) is not None
    num_graphs = counters["stats"]["unique_graphs"]
    model(torch.randn(8, 64)).sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


# ---- However the model is compiled ------------------------------------------------------------


def _warm_verify_and_train(rank: int, split: str, way: str) -> bool:
    """Warm up and verify a new model, then train it beside eager DDP; return whether it passed."""
    _, expected = twins(Blocks(), bucket_cap_mb=CAP_MB)
    model = WAYS[way](
        copy.deepcopy(expected.module), lambda: _options(split), {"bucket_cap_mb": CAP_MB}
    )
    ddp, inputs = state.ddp_of(model), batches(rank, [(8, 64)] * 3)
    before, rng = state_of(ddp), torch.get_rng_state()
    warmup(model, inputs[0])
    num_graphs = counters["stats"]["unique_graphs"]
    verdict = verify(model, inputs[0])
    assert_equal_states(state_of(ddp), before, bitwise=True)
    assert torch.equal(rng, torch.get_rng_state())
    trained = {n.replace("_orig_mod.", ""): v for n, v in train(ddp, inputs, model).items()}
    assert_equal_states(trained, train(expected, inputs))
    assert counters["stats"]["unique_graphs"] == num_graphs > 0
    assert any(plan.sections for plan in state.get(ddp).cuts)
    return verdict.passed


@pytest.mark.quick("torch.compile(DDP(m))-forward")
@pytest.mark.parametrize(("way", "split"), list(zip(WAYS, itertools.cycle(SPLITS), strict=False)))
def test_warmup_and_verify_take_a_model_however_it_is_compiled(
    ranks: Ranks, way: str, split: str
) -> None:
    """Nothing of the model changes, and training compiles nothing."""
    assert ranks.run(_warm_verify_and_train, split, way) == [True, True]


# ---- It waits, and does not wait for the dead -------------------------------------------------


def _warm_slowly(rank: int, split: str, folder: str) -> list[str]:
    """Warm up and train; rank 1 compiles until rank 0 has waited for twice the group's timeout.

    The timeout is short only while rank 0 waits, so that no speed of the machine matters.
    """
    group = dist.new_group(backend="gloo")
    ddp, expected = twins(MLP(), bucket_cap_mb=CAP_MB, process_group=group)
    has_waited = Path(folder, "rank 0 has waited")
    warnings: list[str] = []

    def set_timeout(seconds: float) -> None:
        _set_pg_timeout(datetime.timedelta(seconds=seconds), group)

    def slow_down() -> None:
        if rank == 0:
            set_timeout(SHORT_S)  # would end a collective before rank 1 comes to it
        stop_s = time.monotonic() + LONG_S
        while rank == 1 and not has_waited.exists():
            assert time.monotonic() < stop_s, "rank 0 does not say that it waits"
            time.sleep(0.01)

    def compile_section(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        slow_down()
        return _torch.lookup_backend("aot_eager")(gm, inputs)

    compile_graph = _torch.aot_eager

    def compile_slowly(*args: Any) -> Any:
        slow_down()
        return compile_graph(*args)

    def note_warning(text: str, *args: object) -> None:
        warnings.append(text % args)
        if rank == 0 and "(forward)" in warnings[-1]:
            set_timeout(LONG_S)
            has_waited.touch()

    inputs = batches(rank, [(8, 64)] * 3)
    inner = compile_section if split == "forward" else "aot_eager"
    with (
        mock.patch.object(meetings, "_REPORT_S", 2 * SHORT_S),
        mock.patch.object(_torch, "aot_eager", compile_slowly),
        mock.patch.object(meetings._logs, "warning", note_warning),
    ):
        model = torch.compile(ddp, **_options(split, inner))
        warmup(model, inputs[0])
    assert_equal_states(train(ddp, inputs, model), train(expected, inputs))
    return warnings


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", SPLITS)
def test_compiling_may_take_longer_than_the_groups_timeout(
    ranks: Ranks, split: str, tmp_path: Path
) -> None:
    """Nobody is in a collective; the rank that waits says for whom, and in which phase."""
    waiting, slow = ranks.run(_warm_slowly, split, str(tmp_path))
    assert "warmup: still waiting for rank 1 (forward)" in waiting
    assert not any("rank 1" in warning for warning in slow)


def _raise_on_one(rank: int) -> str:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    model = torch.compile(ddp, **_options("forward"))

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise KeyError("no target")
        return output.sum()

    with pytest.raises((ddpopt.errors.PeerError, KeyError)) as caught:
        warmup(model, *batches(rank, [(8, 64)]), loss_fn)
    warmup(model, *batches(rank, [(8, 64)]))  # the group is as good as before
    return f"{caught.type.__name__}: {caught.value}"


def test_a_rank_that_raises_is_named_to_the_others(ranks: Ranks) -> None:
    """They are told its phase and its error, which it raises itself. Nothing is left behind."""
    other, failed = ranks.run(_raise_on_one)
    assert failed == "KeyError: 'no target'"
    assert other.startswith("PeerError: warmup: rank 1 raised in forward, KeyError: 'no target'")


def _vanish(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)

    def inner(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if rank == 1:
            os._exit(1)
        return _torch.lookup_backend("aot_eager")(gm, inputs)

    model = torch.compile(ddp, **_options("forward", inner))
    if how == "absent" and rank == 1:
        os._exit(0)
    with pytest.raises(ddpopt.errors.PeerError) as caught:
        warmup(model, *batches(rank, [(8, 64)]), silence_s=2.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "last_report"), [("compiling", "forward"), ("absent", "absent")], ids=lambda text: text
)
def test_a_rank_that_ends_is_noticed_by_its_silence(
    how: str, last_report: str, make_ranks: MakeRanks
) -> None:
    """It ends while it compiles or before it came; the others raise once it was silent so long."""
    workers = make_ranks()
    try:
        results = workers.run_survivors([0], _vanish, how)
    finally:
        workers.stop()
    assert "rank 1 has been silent for 2 s" in results[0]
    assert f"its last report: {last_report}" in results[0]


@pytest.mark.usefixtures("one_rank")
def test_a_store_that_does_not_answer_ends_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that there was no answer within the silence that was allowed."""
    monkeypatch.setattr(store, "_CONNECTING_S", 0.0)
    model = torch.compile(DistributedDataParallel(MLP()), **_options("backward"))
    with hanging_store(), pytest.raises(ddpopt.errors.PeerError) as caught:
        warmup(model, torch.randn(8, 64), silence_s=0.1)
    assert "the process group's store has gone (no answer within 0.1 s)" in str(caught.value)


def _count_threads(rank: int) -> int:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    model = torch.compile(ddp, **_options("backward"))
    before = threading.active_count()
    for _ in range(3):
        warmup(model, *batches(rank, [(8, 64)]))
    return threading.active_count() - before


def test_all_warmups_of_a_group_leave_one_thread(ranks: Ranks) -> None:
    """It has the connection to the group's store, and an earlier test may have made it."""
    assert max(ranks.run(_count_threads)) <= 1


@pytest.mark.quick("0")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("silence_s", [0, -1.0, float("nan"), float("inf"), "60"])
def test_a_bad_silence_s_is_refused_by_name(silence_s: Any) -> None:
    model = torch.compile(DistributedDataParallel(MLP()), **_options("forward"))
    with pytest.raises(ddpopt.errors.OptionError, match="silence_s is"):
        warmup(model, torch.randn(8, 64), silence_s=silence_s)


def _check_past_limit(rank: int) -> list[str]:
    """In mid-training, with another batch size, which Dynamo compiles on rank 0 alone."""
    warnings = []
    with (
        torch._dynamo.config.patch(recompile_limit=8 if rank == 0 else 1),
        mock.patch.object(_logs, "warning", lambda text, *args: warnings.append(text % args)),
    ):
        ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
        model = torch.compile(ddp, dynamic=False, **_options("auto"))
        train(ddp, batches(rank, [(4, 64)] * 2), model)
        (x,) = batches(rank, [(6, 64)])
        warmup(model, x)
        verified = verify(model, x)
        assert verified.passed
        assert "rank 1 compiled nothing" in verified.note
        with ddpopt.config.patch(disagreement="error"):
            warnings.append(error_of(lambda: warmup(model, x)))
        train(ddp, [x] * 2, model)
    return warnings


def test_a_rank_that_compiles_nothing_more_is_named_on_all_and_ends_nothing(ranks: Ranks) -> None:
    """Training goes on there as well, eagerly; with `config.disagreement` it is an error."""
    for warnings in ranks.run(_check_past_limit):
        said = [text for text in warnings if "rank 1 compiled nothing of" in text]
        assert len(said) == 3
        assert said[-1].startswith("DisagreementError: rank 1")


def _warm_uncompiled(rank: int) -> str:
    return error_of(lambda: warmup(DistributedDataParallel(MLP()), batches(rank, [(4, 64)])[0]))


def test_where_no_rank_compiles_anything_all_say_what_to_give(ranks: Ranks) -> None:
    for error in ranks.run(_warm_uncompiled):
        assert error.startswith("OptionError: nothing in this model is compiled")
