"""`split="backward"` beside training right: fusion, memory, caches and fallbacks."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch._inductor import compile_fx, metrics
from torch._inductor.async_compile import AsyncCompile
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ddpopt import _torch
from ddpopt._torch.names import installed_release
from ddpopt.errors import Reason, TorchDriftError
from ddpopt.split import compiler
from ddpopt.split.cut import Cut
from tests.support.beside import Beside, compiled
from tests.support.cuts import only_cut
from tests.support.models import MLP, WIDTH, batches
from tests.support.releases import needs_our_code_in_caches


class Block(nn.Module):
    """A layer that Inductor fuses a lot of: norm, GELU, dropout, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.widen(self.norm(x)))
        return x + nn.functional.dropout(self.narrow(hidden), 0.1, self.training)


def _stack(depth: int = 4, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return _Stack([Block(width) for _ in range(depth)])


class _Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _compile(
    model: nn.Module, cap_mb: float, inner: Any = "inductor", **options: Any
) -> tuple[DistributedDataParallel, Any]:
    torch._dynamo.reset()
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    return ddp, compiled(ddp, inner, **options)


def _train(model: nn.Module, **options: Any) -> tuple[list[torch.Tensor], Cut]:
    """Return outputs, losses, gradients and parameters of three steps."""
    ddp, run = _compile(model, 0.02, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for step, x in enumerate(batches(0, [(8, 32)] * 3)):
        torch.manual_seed(step)
        optimizer.zero_grad()
        output = run(x)
        output.pow(2).mean().backward()
        seen += [output.detach(), *(p.grad.clone() for p in ddp.parameters())]
        optimizer.step()
    return [*seen, *(p.detach().clone() for p in ddp.parameters())], only_cut(ddp)


def _convnet() -> nn.Module:
    """Inductor computes it with channels last, where pooling's backward cannot be traced so."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    pooled = [nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *layers]
    return _Stack([nn.Unflatten(1, (2, 4, 4)), *pooled, nn.Flatten(), nn.Linear(64, 64)])


@pytest.mark.quick("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_results_are_those_of_the_unsplit_compile_to_the_bit(one_rank: None, inner: str) -> None:
    """Outputs, gradients and parameters are equal, with dropout, over three steps."""
    unsplit, cut = _train(_stack(), inner=inner, enabled=False)
    assert cut.fallback is Reason.DISABLED
    split, cut = _train(_stack(), inner=inner, split="backward")
    assert cut.split == "backward"
    assert len(cut.sections) > 4
    assert all(torch.equal(a, b) for a, b in zip(split, unsplit, strict=True))


@pytest.mark.slow
def test_where_inductor_prefers_channels_last_backward_is_cut_too(one_rank: None) -> None:
    unsplit, _ = _train(_convnet(), enabled=False)
    split, cut = _train(_convnet(), split="backward")
    assert (cut.split, len(cut.sections)) == ("backward", 2)
    assert all(torch.equal(a, b) for a, b in zip(split, unsplit, strict=True))


@pytest.mark.slow
def test_kernels_that_fail_cost_overlap_not_training(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the section and the error."""
    wait, num_waits = AsyncCompile.wait, itertools.count(1)

    def wait_for(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
        if next(num_waits) == 3:  # after the forward and the first section
            raise ZeroDivisionError("no such register")
        wait(compiler, scope)

    ddp_options = {"bucket_cap_mb": 0.01}
    with (
        mock.patch.object(AsyncCompile, "wait", wait_for),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        beside = Beside(MLP(3), ddp_options=ddp_options, inner="inductor", split="backward")
        beside.train(batches(0, [(2, WIDTH)] * 2))
    assert beside.cut.fallback is Reason.SECTION_FAILED
    (text,) = [r.message for r in caplog.records if Reason.SECTION_FAILED.value in r.message]
    for word in ("ZeroDivisionError", "section 1 of 3", "no such register"):
        assert word in text


def _count_forward_kernels(cap: float, **options: Any) -> tuple[int, int]:
    """Return the kernels that Inductor made of the forward, and the number of sections."""
    inner_compile = compile_fx.compile_fx_inner
    counts: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_backward") and not counts:
            counts.append(metrics.generated_kernel_count)
        return inner_compile(*args, **kwargs)

    metrics.reset()
    ddp, model = _compile(_stack(2), cap, **options)
    with mock.patch.object(compile_fx, "compile_fx_inner", counting):
        model(torch.ones(8, 32))
    # The unsplit backward is compiled later, when it first runs.
    return (counts or [metrics.generated_kernel_count])[0], len(only_cut(ddp).sections)


@pytest.mark.slow
def test_the_forward_has_as_many_kernels_as_unsplit_whatever_the_caps(one_rank: None) -> None:
    """So no fusion is lost in it, while the forward split loses some."""
    with torch._inductor.config.patch(force_disable_caches=True):
        unsplit, _ = _count_forward_kernels(25, enabled=False)
        split = [_count_forward_kernels(cap, split="backward") for cap in (0.05, 0.001)]
    assert {kernels for kernels, _ in split} == {unsplit}
    assert split[0][1] < split[1][1], "smaller caps, more sections"


def _peak(run: Callable[[], None]) -> int:
    """Return the most bytes that were allocated during a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    totals = []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
    totals.sort()
    return max(total for _, total, _ in totals) - (totals[0][1] - totals[0][2])


def _peak_of_step(batch: int, **options: Any) -> int:
    ddp, model = _compile(_stack(depth=3, width=64), 0.1, **options)
    x = torch.ones(batch, 64)
    for _ in range(3):
        model(x).sum().backward()
        ddp.zero_grad()
    return _peak(lambda: model(x).sum().backward())


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, pytest.param(512, marks=pytest.mark.nightly)])
def test_the_peak_of_memory_is_the_unsplit_compiles_and_one_bucket(
    one_rank: None, batch: int
) -> None:
    """It is that at most, with few and with many activations beside the gradients, on Inductor."""
    unsplit = _peak_of_step(batch, enabled=False)
    split = _peak_of_step(batch, split="backward")
    one_bucket = 0.1 * 2**20 + 4 * 64 * 64 * 4  # the cap, and the weight that reaches it
    assert split <= unsplit + one_bucket


def test_equal_sections_are_compiled_once(one_rank: None) -> None:
    """More blocks in a deep stack make more sections, and no more compiles."""
    compiles = []
    for depth in (6, 8):
        with mock.patch.object(_torch, "aot_eager", _CountingAotEager()) as aot:
            ddp, model = _compile(_stack(depth), 0.02, inner="aot_eager", split="backward")
            model(torch.ones(8, 32)).sum().backward()
        assert len(only_cut(ddp).sections) >= depth
        compiles.append(aot.count)
    assert compiles[0] == compiles[1] < 6


class _CountingAotEager:
    """`_torch.aot_eager` that counts the sections it compiles."""

    def __init__(self) -> None:
        self.count = 0
        self._aot_eager = _torch.aot_eager

    def __call__(self, gm: Any, inputs: Any, cutting: Any) -> Any:
        compile_all = cutting.compile_backward

        def compile_counted(graph: Any, values: Any, compile_section: Any) -> Any:
            def counting(*args: Any) -> Any:
                self.count += 1
                return compile_section(*args)

            return compile_all(graph, values, counting)

        cutting.compile_backward = compile_counted
        return self._aot_eager(gm, inputs, cutting)


_CACHED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch._dynamo.utils import counters
from tests.split.test_backward import _stack, _train
{before}
counters.clear()
values, cut = _train(_stack(2), split="backward")
assert cut.split == "backward" and len(cut.sections) > 2, cut
digest = hash(tuple(v.double().sum().item() for v in values))
hits, misses = counters["aot_autograd"], counters["inductor"]
print(digest, hits["autograd_cache_hit"], misses["fxgraph_cache_miss"])
print(hash(str(cut)))
"""
_UNSPLIT_FIRST = "_train(_stack(2), enabled=False)"


def _in_new_process(cache: Path, before: str = "") -> tuple[str, str, int, int]:
    """Return digests of results and cut, hits of AOTAutograd's cache, misses of Inductor's."""
    code = _CACHED.format(tests=str(Path(__file__).parents[2]), before=before)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONHASHSEED": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    digest, hits, misses, cut = result.stdout.split()[-4:]
    return digest, cut, int(hits), int(misses)


@pytest.mark.slow
@needs_our_code_in_caches
def test_caches_change_neither_plan_nor_results(tmp_path: Path) -> None:
    """A cache that the same model filled without this split is cold, and then it is warm."""
    digest, cut, hits, misses = _in_new_process(tmp_path, before=_UNSPLIT_FIRST)
    assert hits == 0
    assert misses > 0
    warm = _in_new_process(tmp_path)
    assert warm == (digest, cut, 1, 0), "all comes from one entry"


def test_fullgraph_inside_of_ddp_is_split(one_rank: None) -> None:
    """`DDP(torch.compile(model, fullgraph=True))` is split as `torch.compile(DDP(model))` is."""
    options = {"split": "backward", "inner": "aot_eager"}
    inner = torch.compile(_stack(), backend="ddpopt", options=options, fullgraph=True)
    ddp = DistributedDataParallel(inner, bucket_cap_mb=0.02)
    ddp(torch.ones(8, 32)).sum().backward()
    assert only_cut(ddp).split == "backward"
    assert len(only_cut(ddp).sections) > 1


def _explicit_inner(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm.forward


@pytest.mark.quick("Reason.INNER-options0")
@pytest.mark.parametrize(
    ("reason", "options"),
    [
        (Reason.INNER, {"inner": "eager"}),
        (Reason.INNER, {"inner": _explicit_inner}),
        (Reason.CUDA_GRAPHS, {"triton.cudagraphs": True}),
    ],
)
def test_what_cannot_be_cut_in_backward_is_cut_in_forward(
    one_rank: None, reason: Reason, options: dict[str, Any], caplog: Any
) -> None:
    """One warning says why, and what to do."""
    with caplog.at_level(logging.WARNING, _torch.LOG_NAME):
        ddp, model = _compile(MLP(), 0.03, split="backward", **options)
        model(batches(0, [(2, WIDTH)])[0]).sum().backward()
    cut = only_cut(ddp)
    assert (cut.backward_fallback, cut.split, cut.fallback) == (reason, "forward", None)
    assert len(cut.sections) > 1
    (record,) = [r for r in caplog.records if reason.value in r.getMessage()]
    assert record.levelno == logging.WARNING


class AsksForCudaGraphs(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._dynamo.override_cudagraphs(fwd=True):
            return super().forward(x)


@pytest.mark.skipif(installed_release() < (2, 13), reason="override_cudagraphs is of torch 2.13")
def test_a_backward_for_which_cuda_graphs_are_asked_is_not_cut(one_rank: None) -> None:
    """A program does so by name; what the recorded sections return would be overwritten."""
    ddp, model = _compile(AsksForCudaGraphs(), 0.03, split="backward", inner="aot_eager")
    model(batches(0, [(2, WIDTH)])[0]).sum().backward()
    cut = only_cut(ddp)
    assert (cut.backward_fallback, cut.split) == (Reason.CUDA_GRAPHS, "forward")


@pytest.mark.skipif(installed_release() >= (2, 13), reason="parameters are always inputs there")
def test_a_backward_whose_parameters_are_attributes_of_the_graph_is_not_cut(one_rank: None) -> None:
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
        ddp, model = _compile(MLP(), 0.03, split="backward", inner="aot_eager")
        model(batches(0, [(2, WIDTH)])[0]).sum().backward()
    assert only_cut(ddp).backward_fallback is Reason.ATTRIBUTES


class BesideAnotherDevice(MLP):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x).sum(), other.square().sum()  # type: ignore[return-value]


def test_a_backward_with_gradients_on_several_devices_is_not_cut(one_rank: None) -> None:
    """The engine runs each device's part in a thread of its own, in no order with the others."""
    ddp, model = _compile(BesideAnotherDevice(), 0.03, split="backward", inner="aot_eager")
    other = torch.ones(2, device="meta", requires_grad=True)
    torch.autograd.backward(model(batches(0, [(2, WIDTH)])[0], other))
    assert only_cut(ddp).backward_fallback is Reason.DEVICES
    assert ddp.module.layers[0].weight.grad is not None


def test_a_backward_whose_graph_uses_streams_is_not_cut(one_rank: None) -> None:
    """How such calls are known, `test_guesses.py` shows, and that no forward is cut there."""
    with mock.patch.object(compiler, "uses_streams", return_value=True):
        ddp, model = _compile(MLP(), 0.03, split="auto", inner="aot_eager")
        model(batches(0, [(2, WIDTH)])[0]).sum().backward()
    assert only_cut(ddp).backward_fallback is Reason.STREAMS


@pytest.mark.quick("error0-Reason.BACKWARD_FAILED")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("broken"), Reason.BACKWARD_FAILED),
        (TorchDriftError("moved"), Reason.BACKWARD_DRIFT),
    ],
)
def test_an_error_of_ours_while_cutting_falls_back_to_the_forward_split(
    one_rank: None, error: Exception, reason: Reason
) -> None:
    """The reason and the error are in the cut, and training is right."""
    with mock.patch("ddpopt.split.compiler.make_section_graphs", side_effect=error):
        split, cut = _train(_stack(), inner="aot_eager", split="backward")
    assert cut.backward_fallback is reason
    assert str(error) in cut.detail
    assert cut.split == "forward"
    assert len(cut.sections) > 1
    unsplit, _ = _train(_stack(), inner="aot_eager", enabled=False)
    assert all(torch.equal(a, b) for a, b in zip(split, unsplit, strict=True))


def test_one_bucket_is_compiled_as_without_splitting(one_rank: None) -> None:
    """There is nothing to release early, so there is no token either."""
    ddp, model = _compile(_stack(), 25, inner="aot_eager", split="backward")
    with mock.patch.object(_torch, "aot_eager", side_effect=AssertionError):
        model(torch.ones(8, 32)).sum().backward()
    assert only_cut(ddp).fallback is Reason.ONE_BUCKET
