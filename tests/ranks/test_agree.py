"""Ranks that compile different things: gradients stay equal, or all stop with one error in time."""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _torch, config
from ddpopt.checks import warmup as warming
from ddpopt.checks.warmup import warmup
from ddpopt.errors import DisagreementError, PeerError
from ddpopt.ranks import agree
from ddpopt.ranks.agree import (
    Fact,
    Shared,
    communicating,
    find_difference,
    gather_distinct,
    gather_on_rank_0,
    require_equal,
)
from ddpopt.split import state
from tests.support.cuts import only_cut
from tests.support.logs import logged
from tests.support.models import MLP, assert_equal_states, batches, train, twins
from tests.support.ranks import MakeRanks, Ranks, error_of
from tests.support.releases import needs_our_code_in_caches

CAP_MB = 0.03
SPLITS = ["forward", "backward"]


def _options(split: str = "backward", **options: Any) -> dict[str, Any]:
    return {"backend": "ddpopt", "options": {"inner": "aot_eager", "split": split, **options}}


class Named(nn.Module):
    """Two layers of one shape, whose names are given in the order in which they are registered."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.b(x).tanh()


# ---- Ranks that compile different things train on ---------------------------------------------


def _train_beside_eager(
    rank: int, split: str, what: str, shapes: list[tuple[int, int]]
) -> tuple[int, bool]:
    """Train while rank 1 does something else; return what was compiled, and whether it is split."""
    before = counters["stats"]["unique_graphs"]
    ddp, expected = twins(MLP(), bucket_cap_mb=CAP_MB)
    is_other = rank == 1
    options = _options(split, **({"enabled": False} if what == "falls back" and is_other else {}))
    if what == "another split" and is_other:
        options = _options("forward" if split == "backward" else "backward")
    model = torch.compile(ddp, **options, dynamic=False)
    inputs = batches(
        rank, shapes if is_other or what != "recompiles" else [shapes[0]] * len(shapes)
    )
    assert_equal_states(train(ddp, inputs, model), train(expected, inputs))
    cuts = state.get(ddp).cuts
    return counters["stats"]["unique_graphs"] - before, any(cut.sections for cut in cuts)


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", SPLITS)
def test_gradients_stay_equal_while_one_rank_recompiles(ranks: Ranks, split: str) -> None:
    """It meets a new shape in the third step, and another in the fifth."""
    shapes = [(8, 64), (8, 64), (5, 64), (8, 64), (3, 64), (8, 64)]
    (first, _), (second, _) = ranks.run(_train_beside_eager, split, "recompiles", shapes)
    assert first == 1
    assert second == 3


@pytest.mark.quick("falls back-forward")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("what", ["falls back", "another split"])
def test_gradients_stay_equal_when_one_rank_does_not_split_or_splits_otherwise(
    ranks: Ranks, split: str, what: str
) -> None:
    """Buckets are the Reducer's, which are equal on ranks that compiled different code."""
    first, second = ranks.run(_train_beside_eager, split, what, [(8, 64)] * 4)
    assert first[1]
    assert second[1] == (what == "another split")


def _train_with_caches(rank: int, folder: str) -> int:
    """Train on Inductor, rank 1 with its caches warm and rank 0 with cold ones; return its hits."""
    counters.clear()
    alone = dist.new_group([1], backend="gloo")
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{rank}"}):
        options = {"backend": "ddpopt", "options": {"split": "backward"}}
        if rank == 1:  # alone, so by a group of its own
            ddp = DistributedDataParallel(MLP(2), bucket_cap_mb=0.01, process_group=alone)
            torch.compile(ddp, **options)(torch.randn(8, 64)).sum().backward()
            torch._dynamo.reset()
            counters.clear()
        ddp, expected = twins(MLP(2), bucket_cap_mb=0.01)
        model = torch.compile(ddp, **options)
        inputs = batches(rank, [(8, 64)] * 3)
        assert_equal_states(train(ddp, inputs, model), train(expected, inputs))
        return counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.slow
@needs_our_code_in_caches
def test_gradients_stay_equal_when_one_rank_takes_its_code_from_a_cache(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The other rank compiles the same graph with Inductor."""
    cold, warm = ranks.run(_train_with_caches, str(tmp_path))
    assert cold == 0
    assert warm > 0


# ---- Compiling longer than collectives may take -----------------------------------------------


def _compile_slowly(rank: int) -> str:
    """Train without a warmup; rank 1 compiles until rank 0 has got an error."""
    group = dist.new_group(backend="gloo")
    ddp = DistributedDataParallel(MLP(2), bucket_cap_mb=0.01, process_group=group)
    store = dist.distributed_c10d._get_default_store()

    def compile_until_told(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        store.wait(["rank 0 has an error"])
        return _torch.lookup_backend("aot_eager")(gm, inputs)

    inner = compile_until_told if rank == 1 else "aot_eager"
    model = torch.compile(ddp, **_options("forward", inner=inner))
    # Only now: nothing but the wait for the other rank may take that long.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
    error = error_of(lambda: train(ddp, batches(rank, [(8, 64)] * 2), model))
    store.set("rank 0 has an error", "")
    return error


def test_without_a_warmup_a_slow_compile_trips_the_groups_timeout(make_ranks: MakeRanks) -> None:
    """The rank that waits times out, and so loses the other; checks/test_warmup.py warms up."""
    workers = make_ranks()
    try:
        waiting, compiling = workers.run(_compile_slowly)
    finally:
        workers.stop()
    timed_out = r"RuntimeError: .*(Timed out|[Tt]imeout)"
    assert re.match(timed_out, waiting), waiting
    assert re.match(rf"{timed_out}|RuntimeError: .*Connection (closed|reset)", compiling), compiling


# ---- What must not differ ---------------------------------------------------------------------


def _disagree(rank: int, what: str, disagreement: str) -> tuple[str, list[str]]:
    """Warm up where rank 1 differs, and train if it raises nothing; return error and warnings."""
    is_other = rank == 1
    names = "ba" if what == "order" and is_other else "ab"
    cap_mb = 0.01 if what == "caps" and is_other else CAP_MB
    ddp = DistributedDataParallel(Named(names), bucket_cap_mb=cap_mb)
    model = torch.compile(ddp, **_options())
    version = "0.0" if what == "version" and is_other else "9.9"
    error = ""
    with (
        mock.patch.object(warming, "installed_version", return_value=version),
        config.patch(disagreement=disagreement),
        logged("warning") as lines,
    ):
        inputs = batches(rank, [(8, 64)] * 3)
        try:
            warmup(model, inputs[0])
            for x in inputs:
                model(x).sum().backward()
        except DisagreementError as caught:
            error = str(caught)
    dist.barrier()  # the group is in order
    return error, [line for line in lines if line.startswith("ranks compiled for")]


@pytest.mark.quick("error-order")
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("order", "parameter 0 is b.weight float32[64, 64] instead of a.weight float32[64, 64]"),
        ("caps", "bucket limits in bytes is [10485] instead of [31457]"),
        ("version", "ddpopt is 0.0 instead of 9.9"),
    ],
    ids=["order", "caps", "version"],
)
@pytest.mark.parametrize("disagreement", ["error", "warning"])
def test_a_warmup_tells_all_ranks_of_a_difference(
    ranks: Ranks, what: str, difference: str, disagreement: str
) -> None:
    """An error stops all of them before any step, a warning none."""
    first, second = ranks.run(_disagree, what, disagreement)
    assert first == second
    error, warnings = first
    assert (bool(error), len(warnings)) == ((True, 0) if disagreement == "error" else (False, 1))
    text = error or warnings[0]
    assert f"rank 1 differs from rank 0: {difference}" in text
    assert "DistributedDataParallel(Named)" in text


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(gradient, "sum", dist.group.WORLD)


class _Communicating(MLP):
    """Adds activations over ranks in its middle, and gradients in the middle of backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).relu()
            if index == 2:
                x = _Sum.apply(x)
        return x


def _fall_back_alone(rank: int, split: str) -> str:
    ddp = DistributedDataParallel(_Communicating(), bucket_cap_mb=CAP_MB)
    model = torch.compile(ddp, **_options(split, enabled=rank == 0))
    with config.patch(disagreement="error"):
        try:
            warmup(model, *batches(rank, [(8, 64)]))
        except DisagreementError as error:
            return str(error)
    return ""


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", SPLITS)
def test_a_graph_with_collectives_of_its_own_is_cut_alike_on_all_ranks(
    ranks: Ranks, split: str
) -> None:
    """A warmup refuses other cuts, by which DDP's allreduces would meet the graph's."""
    first, second = ranks.run(_fall_back_alone, split)
    assert first == second
    assert re.search(
        r"rank 1 differs from rank 0: the order of collectives in graphs that have some of their "
        r"own is \['whole, with 1 calls that may be collectives'\] instead of "
        rf"\['that of {split}, [0-9a-f]{{12}}'\]; ",
        first,
    ), first


# ---- Without a warmup it costs nothing --------------------------------------------------------


def _compile_unasked(rank: int) -> tuple[int, int, int]:
    """Train as most do; return the sections, the threads begun, and the calls of the store."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    model = torch.compile(ddp, **_options())
    with (
        config.patch(disagreement="error"),
        mock.patch.object(_torch, "store_of", wraps=_torch.store_of) as store_of,
        mock.patch.object(threading, "Thread", wraps=threading.Thread) as thread,
    ):
        train(ddp, batches(rank, [(8, 64)] * 3), model)
    return len(only_cut(ddp).sections), thread.call_count, store_of.call_count


def test_compiling_takes_no_thread_and_no_store(ranks: Ranks) -> None:
    """Without a warmup nothing is compared, also where a disagreement would be an error."""
    for num_sections, num_threads, num_store_calls in ranks.run(_compile_unasked):
        assert num_sections > 1
        assert num_threads == num_store_calls == 0


def _facts(**values: str) -> list[Fact]:
    return [Fact(name, value) for name, value in values.items()]


def _difference(facts_by_rank: list[list[Fact]]) -> str | None:
    shared = [Shared(facts, [rank]) for rank, facts in enumerate(facts_by_rank)]
    return find_difference(shared, "do it")


def test_the_first_difference_is_named_with_its_ranks() -> None:
    """It is the first by the order of facts, also if ranks have more; many ranks are cut short."""
    base, other = _facts(a="x", torch="1"), _facts(a="x", b="y", torch="2")
    assert _difference([base, base]) is None
    assert _difference([base, _facts(a="x", torch="2")]) == (
        "rank 1 differs from rank 0: torch is 2 instead of 1; do it"
    )
    assert _difference([other, base, base]) == (
        "ranks 1, 2 differ from rank 0: b is missing; do it"
    )
    assert _difference([base, _facts(a="x", torch="1", b="y")]) == (
        "rank 1 differs from rank 0: b is missing on rank 0; do it"
    )
    difference = _difference([base, *[other] * 12])
    assert difference.startswith(
        "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more differ from rank 0: torch is 2"
    )


def test_a_facts_remedy_takes_the_place_of_the_callers() -> None:
    facts_by_rank = [[Fact("a", value, "mend a")] for value in "xy"]
    assert _difference(facts_by_rank).endswith("; mend a")


def _gather(rank: int, case: str) -> tuple[list[Any], list[str] | None, dict[str, int]]:
    """The distinct texts of four ranks, all of them on rank 0, and how often texts were sent."""
    ddp = DistributedDataParallel(MLP(1))
    text = {"equal": "x", "two": "xxyx"[rank], "each": str(rank)}[case] * 1000
    sent = mock.Mock(side_effect=dist.broadcast_object_list)
    with mock.patch.object(dist, "broadcast_object_list", sent):
        found = gather_distinct(ddp, text, "testing")
    short = [(each.value[0], each.ranks) for each in found]
    all_texts = gather_on_rank_0(ddp, text, "testing")
    return short, all_texts and [each[0] for each in all_texts], {"sent": sent.call_count}


@pytest.mark.parametrize(
    ("case", "distinct"),
    [
        ("equal", [("x", [0, 1, 2, 3])]),
        ("two", [("x", [0, 1, 3]), ("y", [2])]),
        ("each", [("0", [0]), ("1", [1])]),
    ],
)
def test_what_is_compared_is_a_digest_and_texts_are_sent_once_each_where_ranks_differ(
    four_ranks: Ranks, case: str, distinct: Any
) -> None:
    """As many as are needed to name a difference; what rank 0 alone reads goes to it alone."""
    for rank, (found, all_texts, num) in enumerate(four_ranks.run(_gather_few, case)):
        assert found == distinct
        assert (all_texts is None) == (rank > 0)
        assert num["sent"] == (0 if case == "equal" else len(distinct))


def _gather_few(rank: int, case: str) -> Any:
    with mock.patch.object(agree, "_MOST_DISTINCT", 2):
        return _gather(rank, case)


def _agree(rank: int, what: str) -> tuple[str, str]:
    """The error of a rank, and its cause; the second rank differs or has a problem."""
    ddp = DistributedDataParallel(MLP(1))

    def find_facts() -> list[Fact]:
        if what == "a problem" and rank == 1:
            raise ddpopt.errors.PlanError("no such plan")
        if what == "a foreign problem" and rank == 1:
            raise KeyError("no disk")
        return [Fact("lr", "0.2" if rank == 1 else "0.1")]

    with pytest.raises(ddpopt.errors.DDPOptError) as caught:
        require_equal(
            ddp, find_facts, ddpopt.errors.AttachError, "set it alike", title="nothing changes: "
        )
    return f"{caught.type.__name__}: {caught.value}", repr(caught.value.__cause__)


@pytest.mark.quick("a fact")
@pytest.mark.parametrize(
    ("what", "error", "cause"),
    [
        (
            "a fact",
            "AttachError: nothing changes: rank 1 differs from rank 0: lr is 0.2 instead of 0.1; "
            "set it alike",
            "None",
        ),
        ("a problem", "PlanError: nothing changes: on rank 1: no such plan", "None"),
        (
            "a foreign problem",
            "AttachError: nothing changes: on rank 1: KeyError: 'no disk'",
            "KeyError('no disk')",
        ),
    ],
    ids=["a fact", "a problem", "a foreign problem"],
)
def test_all_ranks_raise_one_error(ranks: Ranks, what: str, error: str, cause: str) -> None:
    """A problem counts before a difference. Errors of ours keep their class, others are causes."""
    assert ranks.run(_agree, what) == [(error, "None"), (error, cause)]


# ---- What a collective's error says -----------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("Connection closed"), dist.DistBackendError("Connection closed")]
)
def test_an_error_of_a_collective_gets_what_failed_and_what_to_do(error: RuntimeError) -> None:
    """Torch's error is at its end, and its cause."""
    with pytest.raises(PeerError) as caught, communicating("averaging"):
        raise error
    assert str(caught.value) == (
        "averaging failed: another rank has ended, hangs, or did not come within the process "
        "group's timeout; look at the other ranks' logs and start all of them again, as torchrun "
        "does with --max-restarts (Connection closed)"
    )
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        PeerError("rank 1 raised"),
        KeyError("no such batch"),
    ],
)
def test_an_error_that_says_enough_is_passed_on(error: Exception) -> None:
    """This rank's lack of memory is one, though torch derives it from RuntimeError."""
    with pytest.raises(type(error)) as caught, communicating("averaging"):
        raise error
    assert caught.value is error
