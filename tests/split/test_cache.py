"""`split/compiler.py` with AOTAutograd's cache: hits are right, the key has all that matters."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import codecache
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _logs
from ddpopt._torch import cached
from ddpopt.inspection import Explanation
from ddpopt.split import compiler
from ddpopt.split.compiler import BackwardCutter
from tests.support.beside import compiled
from tests.support.models import MLP, WIDTH
from tests.support.releases import CACHES_OUR_CODE, needs_our_code_in_caches

CAP_MB = 0.005


class Step(NamedTuple):
    """The result of a first step; `shown` is what `explain` knows of its graph."""

    is_hit: bool
    num_sections: int
    shown: Explanation
    gradients: list[torch.Tensor]
    expected: list[torch.Tensor]


def _step(
    *,
    cap_mb: float = CAP_MB,
    batch: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    context: Callable[[], Any] = contextlib.nullcontext,
    dynamic: bool | None = None,
    retain_graph: bool = False,
    **options: Any,
) -> Step:
    """Take the first step of a new model, as a new process would; `expected` is eager's."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    eager = MLP(3).to(dtype)
    ddp = DistributedDataParallel(copy.deepcopy(eager), bucket_cap_mb=cap_mb)
    model = compiled(ddp, "inductor", dynamic=dynamic, **options)
    inputs = (torch.randn(8, WIDTH) if batch is None else batch).to(dtype)
    with context():
        for forward in (eager, model):
            loss = forward(inputs).square().sum()
            if retain_graph:
                loss.backward(retain_graph=True)
            loss.backward()
    explanation = ddpopt.explain(ddp)
    (cut,) = explanation.cuts
    return Step(
        is_hit=counters["aot_autograd"]["autograd_cache_hit"] > 0,
        num_sections=len(cut.sections),
        shown=explanation,
        gradients=[p.grad for p in ddp.parameters() if p.grad is not None],
        expected=[p.grad for p in eager.parameters() if p.grad is not None],
    )


@pytest.fixture(scope="module")
def cache_folder() -> Iterator[Path]:
    """The caches of this module's tests, with one entry: of a step as `_step` takes it."""
    with fresh_cache():
        yield Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


@pytest.fixture
def cached_step(one_rank: None, cache_folder: Path) -> Step:
    """A step that the cache of this module has afterwards; the first test's is compiled."""
    return _step()


@needs_our_code_in_caches
def test_a_warm_start_neither_traces_nor_cuts(cached_step: Step) -> None:
    """A warm start has the cold one's cut, and gradients equal to the bit.

    It is the first test, so the cold one was compiled; which others need not do again.
    """
    with mock.patch.object(
        compiler, "make_section_graphs", side_effect=AssertionError("cut again")
    ):
        warm = _step()
    assert (cached_step.is_hit, warm.is_hit) == (False, True)
    assert warm.num_sections == cached_step.num_sections > 2
    assert warm.shown.cuts == cached_step.shown.cuts
    _assert_is_shown_without_calls(warm.shown, cached_step.shown)
    torch.testing.assert_close(warm.gradients, cached_step.gradients, rtol=0, atol=0)
    torch.testing.assert_close(warm.gradients, warm.expected)


def _assert_is_shown_without_calls(warm: Explanation, cold: Explanation) -> None:
    """Sizes are stored and texts are not: `explain` says so, and the graph has the same edges."""
    (warm_graph,), (cold_graph,) = (each.to_dict()["graphs"] for each in (warm, cold))
    for section in cold_graph["sections"]:
        assert section.pop("nodes")
    for section in warm_graph["sections"]:
        assert not section.pop("nodes")
    assert warm_graph == cold_graph
    assert any("cache" in hint for hint in warm.hints)
    assert not any("cache" in hint for hint in cold.hints)
    of_warm, of_cold = (each.to_networkx().edges(data="bytes") for each in (warm, cold))
    assert list(of_warm) == list(of_cold)


def test_what_was_compiled_without_retain_graph_serves_with_it(cached_step: Step) -> None:
    """No entry's backward overwrites what the next one needs."""
    again = _step(retain_graph=True)
    assert again.is_hit
    torch.testing.assert_close(again.gradients, again.expected)


def test_an_unsplit_compile_takes_nothing_from_a_split_one(cached_step: Step) -> None:
    """An unsplit backward is compiled otherwise: with donated buffers, for one."""
    unsplit = _step(enabled=False)
    assert not unsplit.is_hit
    torch.testing.assert_close(unsplit.gradients, cached_step.gradients, rtol=0, atol=0)


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "caps": lambda: {"cap_mb": 2 * CAP_MB},
    "shape": lambda: {"batch": torch.randn(16, WIDTH)},
    "strides": lambda: {"batch": torch.randn(WIDTH, 8).t()},
    "dtype": lambda: {"dtype": torch.float64},
    "options": lambda: {"epilogue_fusion": False},
    "autocast": lambda: {"context": lambda: torch.autocast("cpu", torch.bfloat16)},
    "guards": lambda: {"dynamic": True},
    "torch": lambda: {
        "context": lambda: mock.patch.object(codecache, "torch_key", return_value=b"2")
    },
    "ddpopt": lambda: {
        "context": lambda: mock.patch.object(compiler, "source_digest", return_value="another")
    },
    "search": lambda: {"buckets": "auto"},
}


@pytest.mark.quick("caps")
@pytest.mark.parametrize("change", CHANGES)
def test_what_matters_is_part_of_the_key(cached_step: Step, change: str) -> None:
    """Another plan, model, setting or release is compiled anew, and its gradients are right."""
    changed = _step(**CHANGES[change]())
    # A search, which one rank gives up at once, changes nothing.
    assert changed.is_hit == (CACHES_OUR_CODE and change == "search")
    tolerance = {"rtol": 0.02, "atol": 0.02} if change == "autocast" else {}
    torch.testing.assert_close(changed.gradients, changed.expected, **tolerance)
    assert changed.num_sections > 1


@pytest.mark.quick("")
@needs_our_code_in_caches
@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"of": "somebody else"})])
def test_a_damaged_or_foreign_entry_is_a_miss(
    cached_step: Step, cache_folder: Path, content: bytes
) -> None:
    """A whole one is stored beside it."""
    entries = [path for path in (cache_folder / "aotautograd").rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(content)
    again = _step()
    assert not again.is_hit
    torch.testing.assert_close(again.gradients, cached_step.gradients, rtol=0, atol=0)
    # If torch reads a foreign entry first, it may look no further.
    for path in entries:
        path.unlink(missing_ok=True)
    assert _step().is_hit


@pytest.mark.quick("dump_dir")
@pytest.mark.parametrize(
    "shown_by",
    [
        "dump_dir",
        *(pytest.param(w, marks=needs_our_code_in_caches) for w in ("ddp_graphs", "TORCH_TRACE")),
    ],
)
def test_a_graph_that_is_shown_is_cut_anew(
    cached_step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_by: str
) -> None:
    """Code from a cache has no graphs to show."""
    if shown_by == "dump_dir":
        monkeypatch.setattr(ddpopt.config, "dump_dir", str(tmp_path))
    elif shown_by == "ddp_graphs":
        monkeypatch.setattr(_logs, "is_showing_graphs", lambda: True)
    else:
        monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    shown = _step()
    assert not shown.is_hit
    assert bool(list(tmp_path.rglob("backward_section_0.py"))) == (shown_by == "dump_dir")


@pytest.mark.quick("False-False")
@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("bundles", [False, True])
def test_settings_are_the_users_again_after_a_compile_that_stores_nothing(
    cached_step: Step, monkeypatch: pytest.MonkeyPatch, bundles: bool, has_error: bool
) -> None:
    """Bundling is switched off in the middle of it; and it is on again also where that fails.

    Another release of ours compiles it, which takes only the kernels from this module's cache.
    """
    settings, run = torch._functorch.config, BackwardCutter.make_backward
    bundled_in_backward: list[bool] = []

    def run_or_raise(self: Any, *args: Any) -> Any:
        bundled_in_backward.append(settings.bundled_autograd_cache)
        if has_error:
            raise KeyError("lost")
        return run(self, *args)

    monkeypatch.setattr(cached, "are_storable", lambda _graphs: False)
    monkeypatch.setattr(BackwardCutter, "make_backward", run_or_raise)
    monkeypatch.setattr(compiler, "source_digest", lambda: "another release")
    with settings.patch(bundled_autograd_cache=bundles):
        before = settings.get_config_copy(), torch.compiler.config.get_config_copy()
        step = _step()
        assert (settings.get_config_copy(), torch.compiler.config.get_config_copy()) == before
    assert not step.is_hit
    assert bundled_in_backward == [False]
    torch.testing.assert_close(step.gradients, step.expected)
