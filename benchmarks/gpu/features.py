"""Lines about what people do with a GPU: each trains compiled beside eager, and compares.

`run_features` runs them on two ranks by gloo, or on one rank by the device's own backend.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.gpu.findings import Findings, UnavailableError
from benchmarks.harness.device import backend_of
from benchmarks.harness.network import Rate, connect, open_network
from ddpopt import algorithms
from tests.support.device import compute_exactly
from tests.support.models import WIDTH
from tests.support.ranks import Ranks
from tests.system.scenarios.architectures import Block, ConvNet, FlexTransformer, Transformer
from tests.system.scenarios.scenario import momentum_sgd

_CAP_MB = 0.03  # of a model of 64 columns: some buckets
_NUM_STEPS = 4
_UNAVAILABLE = "unavailable: "  # how a rank says so


def run_features(
    findings: Findings,
    device: str,
    *,
    kind: str,
    num_ranks: int,
    inner: str,
    splits: Sequence[str] = ("backward", "forward"),
) -> None:
    """Run the features of a kind, a name of `KINDS`, with each split; each of them is a check."""
    with in_ranks(device, num_ranks, run_feature) as run:
        for name in KINDS[kind]:
            for split in splits:
                findings.check(f"{name}, {split}", functools.partial(run, name, inner, split))


@contextlib.contextmanager
def in_ranks(device: str, num_ranks: int, function: Callable[..., str]) -> Iterator[Any]:
    """Give what calls `function(rank, device, ...)` on all ranks, and returns what the first says.

    Several ranks have gloo, since NCCL refuses two on one device. One is this process.
    """
    if num_ranks > 1:
        ranks = Ranks(num_ranks)
        try:
            yield lambda *what: _first(ranks.run(function, device, *what))
        finally:
            ranks.stop()
        return
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        compute_exactly()
        dist.init_process_group(backend_of(device), store=store, rank=0, world_size=1)
        yield lambda *what: _first([function(0, device, *what)])


def _first(answers: Sequence[str]) -> str:
    for answer in answers:
        if answer.startswith(_UNAVAILABLE):
            raise UnavailableError(answer.removeprefix(_UNAVAILABLE))
    return answers[0]


def run_feature(rank: int, device: str, name: str, inner: str, split: str) -> str:
    """Run one feature on this rank; return what it says."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        return FEATURES[name](Trial(rank=rank, device=device, inner=inner, split=split))
    except UnavailableError as error:
        return f"{_UNAVAILABLE}{error}"


# ---- training twice ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Where and how a feature is tried."""

    rank: int
    device: str
    inner: str
    split: str

    @property
    def is_cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.device == "cuda"

    def compile(self, ddp: DistributedDataParallel) -> Any:
        """Return what trains the module with this trial's split."""
        options = {"inner": self.inner, "split": self.split}
        return torch.compile(ddp, backend="ddpopt", options=options)

    def batches(self, rows: int = 4) -> list[torch.Tensor]:
        """Return an input for each step, another on each rank."""
        generator = torch.Generator().manual_seed(100 + self.rank)
        shape = (_NUM_STEPS, rows, WIDTH)
        return list(torch.randn(shape, generator=generator).to(self.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A way to train; all but the model can be left as it is."""

    model: Callable[[], nn.Module]
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    around_step: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer: Callable[[Any], torch.optim.Optimizer | None] = momentum_sgd
    scaler: torch.amp.GradScaler | None = None
    prepare: Callable[[DistributedDataParallel], None] = lambda _: None
    mode: str | None = None
    cap_mb: float = _CAP_MB


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
        if training.mode is None:
            return trial.compile(ddp)
        return torch.compile(ddp, backend="ddpopt", mode=training.mode)

    compiled = _train(trial, training, copy.deepcopy(model), compile_)
    worst = 0.0
    for name, expected in eager.items():
        difference = (compiled[name].float() - expected.float()).abs().max()
        relative = float(difference / expected.float().abs().max().clamp(min=1e-6))
        if not relative <= tolerance:
            raise AssertionError(f"{name} differs by {relative:.1e} of its largest element")
        worst = max(worst, relative)
    plans = ddpopt.explain(ddps[0]).plans
    seen = "; ".join(
        f"{plan.split}, {len(plan.sections)} sections"
        + (f", instead: {plan.instead.name}" if plan.instead else "")
        + (f", fallback: {plan.fallback.name}" if plan.fallback else "")
        for plan in plans
    )
    splits = {plan.split for plan in plans if len(plan.sections) > 1}
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
    ddp = DistributedDataParallel(model, bucket_cap_mb=training.cap_mb)
    training.prepare(ddp)
    forward = compile_(ddp)
    scaler = copy.deepcopy(training.scaler)
    found = {}
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
        found[f"loss {step}"] = loss.detach()
    return {**found, **{name: p.detach().clone() for name, p in model.named_parameters()}}


# ---- features ---------------------------------------------------------------------------------


def _autocast(trial: Trial, dtype: torch.dtype) -> Callable[[], torch.autocast]:
    return functools.partial(torch.autocast, trial.device, dtype)


def _bfloat16(trial: Trial) -> str:
    training = Training(model=Transformer, around_forward=_autocast(trial, torch.bfloat16))
    return compare(trial, training, tolerance=0.03)


def _float16(trial: Trial) -> str:
    scaler = torch.amp.GradScaler(trial.device, init_scale=1024.0)
    around = _autocast(trial, torch.float16)
    training = Training(model=Transformer, around_forward=around, scaler=scaler)
    return compare(trial, training, tolerance=0.03)


def _channels_last(trial: Trial) -> str:
    training = Training(model=lambda: ConvNet(torch.channels_last), cap_mb=0.001)
    return compare(trial, training, tolerance=1e-3)


def _optimizers(trial: Trial) -> str:
    # A smaller eps would make updates of what rounding leaves of gradients that are zero.
    adam = functools.partial(torch.optim.AdamW, eps=1e-3)
    said = ""
    for make in (adam, torch.optim.SGD):
        for kind in ("fused", "foreach"):
            optimizer = functools.partial(make, lr=0.01, **{kind: True})
            said = compare(trial, Training(model=Transformer, optimizer=optimizer), tolerance=1e-3)
    return f"AdamW and SGD, fused and foreach; of the last: {said}"


def _optimizer_in_backward(trial: Trial) -> str:
    if not trial.is_cuda:
        raise UnavailableError("DDP takes a stream for it, so it needs CUDA; see the line of gates")

    def no_optimizer(parameters: Any) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})

    return compare(trial, Training(model=Transformer, optimizer=no_optimizer))


class _FlexBlock(Block):
    """With gradients through the attention, which only GPUs have."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended = flex_attention(q, k, v, score_mod=lambda s, _b, _h, i, j: s - (i - j).abs())
        assert isinstance(attended, torch.Tensor)
        return attended


class _FlexTransformer(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_FlexBlock() for _ in range(3))


def _flex_attention(trial: Trial) -> str:
    model = _FlexTransformer if trial.is_cuda else FlexTransformer
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
    if not trial.is_cuda and kernel not in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        raise UnavailableError(f"{kernel.name} needs CUDA")
    try:
        return compare(trial, training, tolerance=0.03)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise UnavailableError(f"{kernel.name} does not take these sizes here") from None
        raise


def _mode(mode: str, trial: Trial) -> str:
    """Inductor's modes; where they have CUDA graphs, forward is cut instead."""
    said = compare(trial, Training(model=Transformer, mode=mode), tolerance=1e-3)
    if ("CUDA_GRAPHS" in said) == mode.endswith("no-cudagraphs"):
        raise AssertionError(f"not what docs/limits.md says: {said}")
    return said


def _offload(trial: Trial) -> str:
    """Tensors wait for backward in the processor's memory, as `save_on_cpu` would have them.

    That one loses the strides of views, at which Inductor's code stops, split or not.
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


def _algorithm(make: Callable[[], Any], trial: Trial) -> str:
    """Train attached, compiled, and detach: the ranks' weights are then equal and finite."""
    ddp = DistributedDataParallel(Transformer().to(trial.device), bucket_cap_mb=_CAP_MB)
    algorithm = make()
    optimizer: torch.optim.Optimizer
    if isinstance(algorithm, algorithms.QAdam):
        optimizer = algorithms.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=2)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = algorithms.attach(ddp, optimizer, algorithm)
    compiled = trial.compile(ddp)
    losses = []
    for x in [*trial.batches(), *trial.batches()]:
        loss = compiled(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    num = handle.num_communications
    handle.detach()
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    if not (flat.isfinite().all() and torch.equal(flat, first)):
        raise AssertionError("weights are not finite, or differ between ranks after detach")
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    return f"{num} exchanges, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def _data_parallel(trial: Trial) -> str:
    """Two replicas on one device; gradients are those of the module on the whole batch."""
    devices = [f"{trial.device}:0"] * 2 if trial.is_cuda else ["cpu"] * 2
    model = Transformer().to(trial.device)
    twin = copy.deepcopy(model)
    backend = trial.inner if trial.inner != "inductor" else None
    given = {} if backend is None else {"backend": backend}
    parallel = ddpopt.DataParallel(model, devices, **given)
    for x in trial.batches(8):
        for forward in (parallel, twin):
            forward(x).pow(2).mean().backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)
    return f"on {devices}"


_KERNELS = {
    f"attention by {kernel.name}": functools.partial(_attention_kernel, kernel)
    for kernel in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
}
_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "Decentralized": functools.partial(algorithms.Decentralized, hierarchical=False),
    "LowPrecisionDecentralized": functools.partial(
        algorithms.LowPrecisionDecentralized, hierarchical=False
    ),
    "ByteGrad": functools.partial(algorithms.ByteGrad, hierarchical=False),
    "QAdam": functools.partial(algorithms.QAdam, hierarchical=False),
    "ShardedUpdate": algorithms.ShardedUpdate,
    "AsyncModelAverage": functools.partial(algorithms.AsyncModelAverage, sync_interval_ms=5),
}
_Features = dict[str, Callable[[Trial], str]]
KINDS: dict[str, _Features] = {
    "TRAINING": {
        "buckets that pass late": _late_buckets,
        "autocast bfloat16": _bfloat16,
        "autocast float16, GradScaler": _float16,
        "channels_last": _channels_last,
        "fused and foreach optimizers": _optimizers,
        "optimizer in backward": _optimizer_in_backward,
        "saved tensors offloaded": _offload,
    },
    "ATTENTION": {"flex attention": _flex_attention, **_KERNELS},
    "MODES": {
        f"mode={mode}": functools.partial(_mode, mode)
        for mode in ("reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
    },
    "ALGORITHMS": {name: functools.partial(_algorithm, make) for name, make in _ALGORITHMS.items()},
    "REPLICAS": {"DataParallel": _data_parallel},
}
FEATURES = {name: feature for kind in KINDS.values() for name, feature in kind.items()}
KINDS["FEW"] = {name: FEATURES[name] for name in ("buckets that pass late", "autocast bfloat16")}
KINDS["FEW_ALGORITHMS"] = {"Decentralized": FEATURES["Decentralized"]}
