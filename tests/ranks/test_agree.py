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

from ddpopt import _torch, config
from ddpopt.checks import warmup as warming
from ddpopt.checks.warmup import warmup
from ddpopt.errors import AttachError, DDPOptError, PeerError, PlanError
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
from tests.support.beside import Beside, compiled
from tests.support.cuts import only_cut
from tests.support.logs import logged
from tests.support.models import MLP, batches, train
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import MakeRanks, error_of
from tests.support.releases import needs_our_code_in_caches

CAP_MB = 0.03
SPLITS = ["forward", "backward"]


# ---- Ranks that compile different things train on ---------------------------------------------


@on_ranks(2)
@pytest.mark.quick("forward-recompiles", "forward-does not split")
@pytest.mark.parametrize("how", ["recompiles", "does not split", "splits otherwise"])
@pytest.mark.parametrize("split", SPLITS)
def test_gradients_stay_equal_where_one_rank_compiles_other_code(
    rank: int, split: str, how: str
) -> None:
    """Buckets are the Reducer's, which are equal on ranks that compiled different code."""
    sizes, is_split = [8] * 6, [True]
    options: dict[str, Any] = {"split": split}
    if rank == 1 and how == "recompiles":
        sizes, is_split = [8, 8, 5, 8, 3, 8], [True] * 3
    elif rank == 1 and how == "does not split":
        options, is_split = {"enabled": False}, [False]
    elif rank == 1:
        options = {"split": "backward" if split == "forward" else "forward"}
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": CAP_MB}, dynamic=False, **options)
    beside.train(batches(rank, [(size, 64) for size in sizes]))
    assert [bool(cut.sections) for cut in beside.cuts] == is_split


@on_ranks(2)
@pytest.mark.slow
@needs_our_code_in_caches
def test_gradients_stay_equal_when_one_rank_takes_its_code_from_a_cache(
    rank: int, tmp_path: Path
) -> None:
    """Rank 0, whose cache is cold, compiles the same graph with Inductor."""
    options = {"inner": "inductor", "split": "backward"}
    alone = dist.new_group([1], backend="gloo")
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/{rank}"}):
        if rank == 1:  # warms its cache up, alone and so by a group of its own
            ddp = DistributedDataParallel(MLP(2), bucket_cap_mb=0.01, process_group=alone)
            compiled(ddp, **options)(torch.randn(8, 64)).sum().backward()
            torch._dynamo.reset()
        counters.clear()
        beside = Beside(MLP(2), ddp_options={"bucket_cap_mb": 0.01}, **options)
        beside.train(batches(rank, [(8, 64)] * 3))
        assert (counters["aot_autograd"]["autograd_cache_hit"] > 0) == (rank == 1)


# ---- Compiling longer than collectives may take -----------------------------------------------


def _compile_slowly(rank: int) -> str:
    """Train without a warmup; rank 1 compiles until rank 0 has got an error."""
    group = dist.new_group(backend="gloo")
    ddp = DistributedDataParallel(MLP(2), bucket_cap_mb=0.01, process_group=group)
    store = dist.distributed_c10d._get_default_store()

    def compile_until_told(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        store.wait(["rank 0 has an error"])
        return _torch.lookup_backend("aot_eager")(gm, inputs)

    model = compiled(ddp, compile_until_told if rank == 1 else "aot_eager", split="forward")
    # Only now: nothing but the wait for the other rank may take that long.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
    error = error_of(lambda: train(ddp, batches(rank, [(8, 64)] * 2), model))
    store.set("rank 0 has an error", "")
    return error


def test_without_a_warmup_a_slow_compile_trips_the_groups_timeout(make_ranks: MakeRanks) -> None:
    """The rank that waits times out, and so loses the other; checks/test_warmup.py warms up."""
    waiting, compiling = make_ranks().run(_compile_slowly)
    timed_out = r"RuntimeError: .*(Timed out|[Tt]imeout)"
    assert re.match(timed_out, waiting), waiting
    assert re.match(rf"{timed_out}|RuntimeError: .*Connection (closed|reset)", compiling), compiling


# ---- What must not differ ---------------------------------------------------------------------


class Named(nn.Module):
    """Two layers of one shape, whose names are given in the order in which they are registered."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.b(x).tanh()


@on_ranks(2)
@pytest.mark.quick("error-order")
@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("order", ["b.weight float32[64, 64]", "a.weight float32[64, 64]"]),
        ("caps", ["[10485]", "[31457]"]),
        ("version", ["ddpopt is 0.0", "9.9"]),
    ],
    ids=["order", "caps", "version"],
)
@pytest.mark.parametrize("disagreement", ["error", "warning"])
def test_a_warmup_tells_all_ranks_of_a_difference(
    rank: int, what: str, values: list[str], disagreement: str
) -> None:
    """An error stops all of them before any step, a warning none."""
    other = what if rank == 1 else ""
    module = Named("ba" if other == "order" else "ab")
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01 if other == "caps" else CAP_MB)
    model, inputs = compiled(ddp, split="backward"), batches(rank, [(8, 64)] * 3)
    version = "0.0" if other == "version" else "9.9"
    with (
        mock.patch.object(warming, "installed_version", return_value=version),
        config.patch(disagreement=disagreement),
        logged("warning") as lines,
    ):
        texts = [error_of(lambda: warmup(model, inputs[0]))]
        if disagreement == "warning":
            assert texts == ["nothing"]
            train(ddp, inputs, model)
            texts = lines
    (text,) = [text for text in texts if "rank 1" in text]
    assert len(set(gather(text))) == 1
    assert text.startswith("DisagreementError") == (disagreement == "error")
    for value in [*values, "DistributedDataParallel(Named)"]:
        assert value in text


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


@on_ranks(2)
@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", SPLITS)
def test_a_graph_with_collectives_of_its_own_is_cut_alike_on_all_ranks(
    rank: int, split: str
) -> None:
    """A warmup refuses other cuts, by which DDP's allreduces would meet the graph's."""
    ddp = DistributedDataParallel(_Communicating(), bucket_cap_mb=CAP_MB)
    model = compiled(ddp, split=split, enabled=rank == 0)
    with config.patch(disagreement="error"):
        error = error_of(lambda: warmup(model, *batches(rank, [(8, 64)])))
    assert len(set(gather(error))) == 1
    for value in ("rank 1", "'whole, with 1 calls", f"'that of {split}, "):
        assert value in error


@on_ranks(2)
def test_compiling_takes_no_thread_and_no_store(rank: int) -> None:
    """Without a warmup nothing is compared, also where a disagreement would be an error."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    with (
        config.patch(disagreement="error"),
        mock.patch.object(_torch, "store_of", wraps=_torch.store_of) as store_of,
        mock.patch.object(threading, "Thread", wraps=threading.Thread) as thread,
    ):
        train(ddp, batches(rank, [(8, 64)] * 3), compiled(ddp, split="backward"))
    assert len(only_cut(ddp).sections) > 1
    assert thread.call_count == store_of.call_count == 0


# ---- Comparing --------------------------------------------------------------------------------


def _difference(*values_by_rank: dict[str, str]) -> str | None:
    facts_by_rank = [[Fact(*item) for item in values.items()] for values in values_by_rank]
    shared = [Shared(facts, [rank]) for rank, facts in enumerate(facts_by_rank)]
    return find_difference(shared, "do it")


BASE = {"a": "x", "torch": "1"}
WITH_B = {"a": "x", "b": "y", "torch": "2"}


@pytest.mark.parametrize(
    ("values_by_rank", "difference"),
    [
        ([BASE, BASE], None),
        ([BASE, {"a": "x", "torch": "2"}], "rank 1 differs from rank 0: torch is 2 instead of 1"),
        ([WITH_B, BASE, BASE], "ranks 1, 2 differ from rank 0: b is missing"),
        ([BASE, {**BASE, "b": "y"}], "rank 1 differs from rank 0: b is missing on rank 0"),
        ([BASE, WITH_B], "rank 1 differs from rank 0: torch is 2 instead of 1"),
    ],
)
def test_the_first_difference_is_named_with_its_ranks(
    values_by_rank: list[dict[str, str]], difference: str | None
) -> None:
    """The first is so by the order of rank 0's facts, also if other ranks have more."""
    expected = difference and f"{difference}; do it"
    assert _difference(*values_by_rank) == expected


def test_a_facts_remedy_takes_the_place_of_the_callers() -> None:
    shared = [Shared([Fact("a", value, "mend a")], [rank]) for rank, value in enumerate("xy")]
    assert str(find_difference(shared, "do it")).endswith("; mend a")


@on_ranks(4)
@pytest.mark.parametrize(
    ("texts", "distinct"),
    [
        ("xxxx", [("x", [0, 1, 2, 3])]),
        ("xxyx", [("x", [0, 1, 3]), ("y", [2])]),
        ("0123", [("0", [0]), ("1", [1])]),
    ],
)
def test_what_is_compared_is_a_digest_and_texts_are_sent_once_each_where_ranks_differ(
    rank: int, texts: str, distinct: list[tuple[str, list[int]]]
) -> None:
    """No more texts are sent than name a difference; what rank 0 reads goes to rank 0 alone."""
    ddp, long = DistributedDataParallel(MLP(1)), [text * 1000 for text in texts]
    with (
        mock.patch.object(agree, "_MOST_DISTINCT", 2),
        mock.patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as sent,
    ):
        found = gather_distinct(ddp, long[rank], "testing")
    assert [(shared.value[0], shared.ranks) for shared in found] == distinct
    assert sent.call_count == (0 if len(distinct) == 1 else len(distinct))
    assert gather_on_rank_0(ddp, long[rank], "testing") == (None if rank else long)


@on_ranks(2)
@pytest.mark.quick("None")
@pytest.mark.parametrize(
    ("problem", "error"),
    [
        (None, "AttachError: title: rank 1 differs from rank 0: lr is 0.2 instead of 0.1; mend it"),
        (PlanError("no such plan"), "PlanError: title: on rank 1: no such plan"),
        (KeyError("no disk"), "AttachError: title: on rank 1: KeyError: 'no disk'"),
    ],
    ids=["None", "ours", "foreign"],
)
def test_all_ranks_raise_one_error(rank: int, problem: Exception | None, error: str) -> None:
    """A problem counts before a difference. Errors of ours keep their class, others are causes."""
    ddp = DistributedDataParallel(MLP(1))

    def find_facts() -> list[Fact]:
        if problem is not None and rank == 1:
            raise problem
        return [Fact("lr", "0.2" if rank == 1 else "0.1")]

    with pytest.raises(DDPOptError) as caught:
        require_equal(ddp, find_facts, AttachError, "mend it", title="title: ")
    assert f"{caught.type.__name__}: {caught.value}" == error
    assert caught.value.__cause__ is (problem if rank and "KeyError" in error else None)


# ---- What a collective's error says -----------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("Connection closed"), dist.DistBackendError("Connection closed")]
)
def test_an_error_of_a_collective_gets_what_failed_and_what_to_do(error: RuntimeError) -> None:
    """Torch's error is at the new one's end, and its cause."""
    with pytest.raises(PeerError, match=r"^averaging .*Connection closed\)$") as caught:  # noqa: SIM117
        with communicating("averaging"):
            raise error
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
    """A rank's own lack of memory says enough, though torch derives the error from RuntimeError."""
    with pytest.raises(type(error)) as caught, communicating("averaging"):
        raise error
    assert caught.value is error
