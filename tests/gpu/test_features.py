"""What people do with a GPU: each trains compiled beside eager, and both are equal.

Layers, autocast and loops are rows of `tests/system/scenarios`, which run on the device too. Their
models are 8 wide, which some of a GPU's kernels do not take: those here are wider.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.harness.network import Rate, connect, open_network
from ddpopt.algorithms import attach
from tests.gpu.conftest import Run
from tests.gpu.models import Transformer, attend_flexibly
from tests.support.algorithms import ALGORITHMS, flat_weights, optimizer_for
from tests.support.models import WIDTH
from tests.system.training.comparing import differences, lines_of, relative_error, within

_CAP_MB = 0.03  # of a model of 64 columns: some buckets
_NUM_STEPS = 4
_SPLITS = ("backward", "forward")

# ---- training twice ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Where and how a feature is tried on a rank; with a `mode`, that of torch.compile."""

    rank: int
    device: str
    inner: str
    split: str
    mode: str | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.device == "cuda"

    def compile(self, ddp: DistributedDataParallel) -> Any:
        """Return what trains the module with this trial's split."""
        if self.mode is not None:
            return torch.compile(ddp, backend="ddpopt", mode=self.mode)
        options = {"inner": self.inner, "split": self.split}
        return torch.compile(ddp, backend="ddpopt", options=options)

    def batches(self, rows: int = 4) -> list[torch.Tensor]:
        """Return an input for each step, another on each rank."""
        generator = torch.Generator().manual_seed(100 + self.rank)
        shape = (_NUM_STEPS, rows, WIDTH)
        return list(torch.randn(shape, generator=generator).to(self.device))


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A way to train; all but the model can be left as it is."""

    model: Callable[[], nn.Module]
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    around_step: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer: Callable[[Any], torch.optim.Optimizer | None] = momentum_sgd
    scaler: torch.amp.GradScaler | None = None
    prepare: Callable[[DistributedDataParallel], None] = lambda _: None


def compare(trial: Trial, training: Training, *, tolerance: float = 1e-4) -> str:
    """Train eagerly and compiled, and compare losses and parameters.

    The tolerance is relative to a tensor's largest element; what is rounded to 16 bits needs one of
    some percent, since compilers round less often than eager does.
    """
    torch.manual_seed(0)
    model = training.model().to(trial.device)
    eager = _train(trial, training, copy.deepcopy(model), lambda ddp: ddp)
    ddps: list[DistributedDataParallel] = []

    def compile_(ddp: DistributedDataParallel) -> Any:
        ddps.append(ddp)
        return trial.compile(ddp)

    compiled = _train(trial, training, copy.deepcopy(model), compile_)
    found = differences(compiled, eager, within(tolerance))
    assert not found, lines_of(found)
    worst = max(relative_error(compiled[name], expected) for name, expected in eager.items())
    cuts = ddpopt.explain(ddps[0]).cuts
    seen = "; ".join(
        f"{cut.split}, {len(cut.sections)} sections"
        + (f", instead: {cut.backward_fallback.name}" if cut.backward_fallback else "")
        + (f", fallback: {cut.fallback.name}" if cut.fallback else "")
        for cut in cuts
    )
    splits = {cut.split for cut in cuts if len(cut.sections) > 1}
    if not splits or (trial.split != "auto" and splits != {trial.split}):
        raise AssertionError(f"not split as asked for: {seen}")
    return f"{seen}; largest relative difference {worst:.0e}"


def _train(
    trial: Trial, training: Training, model: nn.Module, compile_: Callable[[Any], Any]
) -> dict[str, torch.Tensor]:
    """Return losses and parameters."""
    torch._dynamo.reset()
    torch.manual_seed(trial.rank)
    optimizer = training.optimizer(model.parameters())
    ddp = DistributedDataParallel(model, bucket_cap_mb=_CAP_MB)
    training.prepare(ddp)
    forward = compile_(ddp)
    scaler = copy.deepcopy(training.scaler)
    results = {}
    for step, x in enumerate(trial.batches()):
        with training.around_step():
            with training.around_forward():
                loss = forward(x).float().pow(2).mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if optimizer is not None:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        results[f"loss {step}"] = loss.detach()
    return results | {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- features ---------------------------------------------------------------------------------


def _autocast(trial: Trial, dtype: torch.dtype) -> Callable[[], torch.autocast]:
    return functools.partial(torch.autocast, trial.device, dtype)


def _float16(trial: Trial) -> str:
    scaler = torch.amp.GradScaler(trial.device, init_scale=1024.0)
    around = _autocast(trial, torch.float16)
    training = Training(model=Transformer, around_forward=around, scaler=scaler)
    return compare(trial, training, tolerance=0.03)


def _optimizers(trial: Trial) -> str:
    # A smaller eps would make updates of what rounding leaves of gradients that are zero.
    adam = functools.partial(torch.optim.AdamW, eps=1e-3)
    outcome = ""
    for make in (adam, torch.optim.SGD):
        for kind in ("fused", "foreach"):
            optimizer = functools.partial(make, lr=0.01, **{kind: True})
            training = Training(model=Transformer, optimizer=optimizer)
            outcome = compare(trial, training, tolerance=1e-3)
    return f"AdamW and SGD, fused and foreach; of the last: {outcome}"


def _optimizer_in_backward(trial: Trial) -> str:
    def no_optimizer(parameters: Any) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})

    return compare(trial, Training(model=Transformer, optimizer=no_optimizer))


def _flex_attention(trial: Trial) -> str:
    model = functools.partial(Transformer, attend_flexibly)
    note = "" if trial.is_cuda else "; projections frozen, as there is no backward on the CPU"
    # In eager DDP it compiles itself; the in-tree optimizer refuses caps under its first bucket.
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(_CAP_MB * 2**20)):
        return compare(trial, Training(model=model), tolerance=1e-3) + note


def _attention_kernel(kernel: SDPBackend, trial: Trial) -> str:
    training = Training(
        model=Transformer,
        around_forward=_autocast(trial, torch.bfloat16),
        around_step=lambda: sdpa_kernel(kernel),
    )
    return compare(trial, training, tolerance=0.03)


def _offload(trial: Trial) -> str:
    """Tensors wait for backward in the processor's memory, as `save_on_cpu` would have them.

    `save_on_cpu` loses the strides of views, at which Inductor's code stops, split or not.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        layout = {"dtype": tensor.dtype, "pin_memory": trial.is_cuda}
        return torch.empty_strided(tensor.size(), tensor.stride(), **layout).copy_(tensor)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed.to(trial.device, copy=True)

    around = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, unpack)
    return compare(trial, Training(model=Transformer, around_step=around))


def _late_buckets(trial: Trial) -> str:
    """Buckets pass when later sections have run: nothing may have taken their memory meanwhile."""

    def prepare(ddp: DistributedDataParallel) -> None:
        network = open_network(trial.device)
        network.rate = Rate(gbit=0.05, num_ranks=2)  # a bucket takes some milliseconds
        connect(ddp, network)

    return compare(trial, Training(model=Transformer, prepare=prepare))


def _algorithm(trial: Trial, name: str) -> str:
    """Train attached, compiled, and detach: the ranks' weights are then equal and finite."""
    ddp = DistributedDataParallel(Transformer().to(trial.device), bucket_cap_mb=_CAP_MB)
    algorithm, lr = ALGORITHMS[name], 1e-3 if name == "QAdam" else 0.1
    optimizer = optimizer_for(algorithm, ddp.parameters(), lr=lr, warmup_steps=2)
    handle = attach(ddp, optimizer, algorithm)
    compiled = trial.compile(ddp)
    losses = []
    for x in [*trial.batches(), *trial.batches()]:
        loss = compiled(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    num = handle.num_communications
    handle.detach()
    flat = flat_weights(ddp)
    first = flat.clone()
    dist.broadcast(first, 0)
    if not (flat.isfinite().all() and torch.equal(flat, first)):
        raise AssertionError("weights are not finite, or differ between ranks after detach")
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    return f"{num} exchanges, loss {losses[0]:.3f} to {losses[-1]:.3f}"


_TRAINING: dict[str, Callable[[Trial], str]] = {
    "buckets that pass late": _late_buckets,
    "autocast float16, GradScaler": _float16,
    "fused and foreach optimizers": _optimizers,
    "optimizer in backward": _optimizer_in_backward,
    "saved tensors offloaded": _offload,
}
_KERNELS = {
    kernel.name: functools.partial(_attention_kernel, kernel)
    for kernel in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
}
_ATTENTION: dict[str, Callable[[Trial], str]] = {"flex attention": _flex_attention, **_KERNELS}
_FEATURES = {**_TRAINING, **_ATTENTION}
# DDP takes a stream for an optimizer in backward.
_NEED_CUDA = ("optimizer in backward", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
# In bfloat16; of any GPU after it each kernel takes the model's sizes, as does the CPU of its two.
_NEED_AMPERE = ("FLASH_ATTENTION", "CUDNN_ATTENTION")
_AMPERE = (8, 0)

# ---- tests ------------------------------------------------------------------------------------


def _run_feature(rank: int, name: str, **trial_options: str) -> str:
    return _FEATURES[name](Trial(rank=rank, **trial_options))


def _run_algorithm(rank: int, name: str, **trial_options: str) -> str:
    return _algorithm(Trial(rank=rank, **trial_options), name)


@pytest.fixture
def trial_options(device: str, inner_backend: str) -> dict[str, str]:
    """The options that all trials of a test have in common."""
    return {"device": device, "inner": inner_backend}


def _try(name: str, run_on_ranks: Run, trial_options: dict[str, str], split: str) -> str:
    """Run a feature on all ranks and return what it says; skip it where the device has it not."""
    if trial_options["device"] == "cpu":
        if name in _NEED_CUDA:
            pytest.skip(f"{name} needs CUDA")
    elif name in _NEED_AMPERE and torch.cuda.get_device_capability() < _AMPERE:
        pytest.skip(f"{name} needs a GPU of compute capability 8.0")
    run = functools.partial(_run_feature, name=name, split=split, **trial_options)
    return str(run_on_ranks(run)[0])


@pytest.mark.parametrize("split", _SPLITS)
@pytest.mark.parametrize("name", _TRAINING)
def test_training_features_equal_eager_ddp(
    run_on_ranks: Run, trial_options: dict[str, str], name: str, split: str, record_property: Any
) -> None:
    """Losses and weights are those of eager DDP, with what people add to a step."""
    record_property("said", _try(name, run_on_ranks, trial_options, split))


@pytest.mark.parametrize("split", _SPLITS)
@pytest.mark.parametrize("name", _ATTENTION)
def test_attention_kernels_equal_eager_ddp(
    run_on_ranks: Run, trial_options: dict[str, str], name: str, split: str, record_property: Any
) -> None:
    """Losses and weights are those of eager DDP, by each kernel that the device has."""
    record_property("said", _try(name, run_on_ranks, trial_options, split))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_are_equal_after_each_algorithm(
    run_on_ranks: Run, trial_options: dict[str, str], name: str, record_property: Any
) -> None:
    """A compiled model's loss falls, and once it is detached, weights are finite and equal."""
    run = functools.partial(_run_algorithm, name=name, split="backward", **trial_options)
    record_property("said", run_on_ranks(run)[0])


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_modes_with_cuda_graphs_cut_forward(
    one_rank: None, trial_options: dict[str, str], mode: str, record_property: Any
) -> None:
    """Training equals eager DDP's in each mode of Inductor; without them backward is cut."""
    trial = Trial(rank=0, split="auto", mode=mode, **trial_options)
    outcome = compare(trial, Training(model=Transformer), tolerance=1e-3)
    record_property("said", outcome)
    assert ("CUDA_GRAPHS" in outcome) != mode.endswith("no-cudagraphs"), "see docs/limits.md"


def test_two_replicas_have_the_gradients_of_the_whole_batch(
    device: str, inner_backend: str
) -> None:
    """The replicas are both on one device."""
    model = Transformer().to(device)
    twin = copy.deepcopy(model)
    options = {} if inner_backend == "inductor" else {"backend": inner_backend}
    devices = [f"{device}:0" if device == "cuda" else device] * 2
    parallel = ddpopt.DataParallel(model, devices, **options)
    for x in Trial(rank=0, device=device, inner=inner_backend, split="auto").batches(8):
        for forward in (parallel, twin):
            forward(x).pow(2).mean().backward()
    for (name, p), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=name)
