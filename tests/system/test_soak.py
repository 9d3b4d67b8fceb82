"""Long runs and many models leave nothing behind, and a leak that is planted is found.

Counts are compared, of objects, descriptors and threads, never bytes of memory: those are for
`python -m benchmarks.soak`, whose parts are used here. Also eight and sixteen ranks on one machine.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import pytest
import torch

import ddpopt
from benchmarks.soak.census import (
    MEASURES,
    Census,
    find_growth,
    grown,
    growth_of,
    take_census,
)
from benchmarks.soak.worker import LongTraining
from ddpopt import config
from ddpopt.errors import DisagreementError
from ddpopt.planning import AllreduceCost, tuner
from ddpopt.split import state
from tests.support.beside import Beside
from tests.support.models import MLP, batches
from tests.support.on_ranks import gather, on_ranks
from tests.system.lives import LIVES, Life, Refs, Trial

CAP_MB = 0.03
SLOW_START = AllreduceCost(startup_s=0.1, s_per_byte=0.0)
NUM_STEPS = 12  # buckets change in the ninth

# ---- the verdict ------------------------------------------------------------------------------


def _series(**slopes: float) -> list[dict[str, float]]:
    """Return 16 counts that grow by so much each, and all else not at all."""
    return [
        {"step": 100.0 * k, **{name: 50 + slopes.get(name, 0.0) * k for name in MEASURES}}
        for k in range(16)
    ]


@pytest.mark.quick
def test_a_series_that_stays_does_not_grow() -> None:
    assert find_growth(_series(), _series()) == []


@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("num_fds", 1),
        ("num_threads", 1),
        ("num_tensors", 1),
        ("num_objects", 10),
        ("rss_mib", 1),
    ],
)
def test_what_grows_is_named_unless_torch_alone_grows_as_much(name: str, slope: float) -> None:
    (text,) = find_growth(_series(**{name: slope}), _series())
    assert name in text
    assert find_growth(_series(**{name: slope}), None)
    assert find_growth(_series(**{name: slope}), _series(**{name: slope})) == []


def test_what_torch_keeps_of_a_graphs_source_is_no_growth_of_ours() -> None:
    counts = _series(num_sources=10, num_objects=30)
    assert find_growth(counts, _series()) == []


def test_a_jump_in_the_first_quarter_is_warm_up_and_one_count_decides_nothing() -> None:
    series = _series()
    for counts in series[:3]:
        counts["num_fds"] = 10
    series[-1]["num_fds"] = 1000
    assert growth_of(series)["num_fds"] == 0
    with pytest.raises(ValueError, match="7 counts are no series"):
        growth_of(series[:7])


# ---- a long run, shortened --------------------------------------------------------------------

_PERIOD, _LEG = 60, 100


class _Leak:
    """A hook that leaks a tensor and a descriptor at each forward."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.descriptors: list[int] = []

    @torch.compiler.disable
    def __call__(self, _module: Any, _inputs: Any) -> None:
        self.tensors.append(torch.ones(1))
        self.descriptors.append(os.dup(0))


def _grown(before: Census, after: Census) -> dict[str, Any]:
    """Return of what there is more: descriptors, threads, tensors, entries of registries."""
    more = grown(before.counts, after.counts)
    counts = {k: more[k] for k in ("num_fds", "num_threads", "num_tensors") if k in more}
    return {**counts, **grown(before.registries, after.registries)}


def _run_long(rank: int, peer: str, is_leaking: bool) -> dict[str, Any]:
    """Compile all twice, and count; go on without compiling, and count."""
    training = LongTraining(peer, "aot_eager", rank)
    leak = _Leak()
    if is_leaking:
        training.ddp.register_forward_pre_hook(leak)
    first = training.run(_PERIOD, _PERIOD)
    second = training.run(_PERIOD, _PERIOD)
    settled = training.run(_LEG, sys.maxsize)
    later = training.run(_LEG, sys.maxsize)
    for descriptor in leak.descriptors:
        os.close(descriptor)
    with_compiling = _grown(first, second)
    with_compiling.pop("num_tensors", None)  # torch keeps some of each dynamic graph it compiled
    return {
        "with compiling": with_compiling,
        "without": _grown(settled, later),
        "objects": later.counts["num_objects"] - settled.counts["num_objects"],
        "which": dict(list(grown(settled.types, later.types).items())[:10]),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("split", ["backward", "forward"])
@on_ranks(2)
def test_steps_shapes_evaluations_and_recompiles_leave_nothing(rank: int, split: str) -> None:
    growth = _run_long(rank, split, False)
    assert growth["with compiling"] == {}
    assert growth["without"] == {}
    assert growth["objects"] < _LEG / 4, growth["which"]


@on_ranks(2)
def test_a_leak_in_steps_is_found(rank: int) -> None:
    growth = _run_long(rank, "eager", True)
    assert growth["with compiling"]["num_fds"] >= _PERIOD
    assert growth["without"]["num_tensors"] >= _LEG
    assert growth["without"]["num_fds"] >= _LEG
    assert growth["objects"] >= _LEG


# ---- models that are dropped ------------------------------------------------------------------

_TWICE = 2


@pytest.mark.parametrize("name", [name for name in LIVES if name not in ("eager", "aot_eager")])
@on_ranks(2)
def test_a_model_that_is_dropped_leaves_nothing(name: str) -> None:
    """No module, parameter or Reducer is alive, and there is no new entry, thread or descriptor.

    Two models live and die; what there is then is what there is after two more.
    """
    life = LIVES[name]
    refs: list[Refs] = [life.live() for _ in range(_TWICE)]
    before = take_census()
    refs += [life.live() for _ in range(_TWICE)]
    after = take_census()
    alive = sorted({kind for of_life in refs for kind, ref in of_life.items() if ref() is not None})
    grown = _grown(before, after)
    if name == "tuned":  # its tensors were seen to grow, of which none is the model's: open
        grown.pop("num_tensors", None)
    if name.startswith("left"):  # process groups end in detach, with their sockets and threads
        assert grown.pop("num_fds") > 0
        assert grown.pop("num_threads") > 0
    assert (alive, grown) == ([], {})


@on_ranks(2)
def test_a_registry_that_keeps_models_is_found() -> None:
    kept: list[Trial] = []
    state.kept = kept  # type: ignore[attr-defined]  # a registry that forgets nothing

    def use_and_keep(trial: Trial) -> None:
        trial.train()
        kept.append(trial)

    leaking = Life(use_and_keep, {"split": "backward"})
    before = take_census()
    refs = leaking.live()
    growth = _grown(before, take_census())
    alive = [name for name, ref in refs.items() if ref() is not None]
    del state.kept  # type: ignore[attr-defined]
    assert "Reducer" in alive
    assert growth["ddpopt.split.state.kept"] == 1
    assert growth["ddpopt.split.state._states"] == 1
    assert growth["num_tensors"] > 0


# ---- many ranks -------------------------------------------------------------------------------


def _beside(cap_mb: float = CAP_MB, **options: Any) -> Beside:
    return Beside(MLP(), ddp_options={"bucket_cap_mb": cap_mb}, **options)


@on_ranks(8)
def test_eight_ranks_train_as_eager_and_compare_what_they_compile(rank: int) -> None:
    beside = _beside()
    inputs = batches(rank, [(8, 64), (8, 64), (5, 64), (8, 64), (5, 64)])
    with config.patch(disagreement="error"):
        ddpopt.warmup(beside.run, inputs[0])
    beside.train(inputs)
    (num_sections,) = set(gather(len(beside.cuts[0].sections)))
    assert num_sections > 1


@on_ranks(8)
def test_one_of_eight_ranks_with_other_buckets_is_named_on_all(rank: int) -> None:
    run = _beside(2 * CAP_MB if rank == 5 else CAP_MB).run
    with (
        config.patch(disagreement="error"),
        pytest.raises(DisagreementError, match="rank 5 differs from rank 0: bucket limits"),
    ):
        ddpopt.warmup(run, *batches(rank, [(8, 64)]))


@pytest.mark.nightly
@pytest.mark.parametrize("buckets", ["ddp", "auto"])
@on_ranks(16)
def test_sixteen_ranks_train_as_eager_after_warmup_and_verify(rank: int, buckets: str) -> None:
    """All change to one bucket, which is better than three on the network that is planted."""
    beside = _beside(buckets=buckets)
    inputs = batches(rank, [(8, 64)] * NUM_STEPS)
    ddpopt.warmup(beside.run, inputs[0])
    assert ddpopt.verify(beside.run, inputs[0]).passed
    with mock.patch.object(tuner, "calibrate", return_value=SLOW_START):
        beside.train(inputs)
    search = tuner.find_tuner(beside.ddp)
    result = len(beside.cuts[0].sections), search.outcome if search else ""
    ((num_sections, outcome),) = set(gather(result))
    assert num_sections > 1
    assert outcome.startswith("buckets change") == (buckets == "auto")
