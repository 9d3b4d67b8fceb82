"""The ways to train one DDP model that are compared, each in processes of its own."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.harness.finalizing import AdamWByBucket, leave_unfinished
from benchmarks.harness.simplefsdp import Replicated, compile_by_layer, compile_scheduled
from ddpopt.algorithms import Algorithm

Compiled = Callable[..., Any]
Compile = Callable[[Any, str, dict[str, Any]], Compiled]
Wrap = Callable[..., nn.Module]
Around = Callable[[str], contextlib.AbstractContextManager[object]]


_adamw = functools.partial(AdamW, fused=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to train a model on several ranks.

    A worker (harness/worker.py) sets `optimize_ddp`, makes the data parallel module with `wrap`,
    compiles that with `compile`, and makes the optimizer.
    """

    name: str
    label: str  # of tables and plots
    compile: Compile  # takes what `wrap` made, the inner compiler's name and options
    wrap: Wrap = DistributedDataParallel  # takes a module and DDP's arguments
    optimize_ddp: bool | str = True  # Dynamo's, which has to be set before the module is made
    around_backward: Around = lambda _inner: contextlib.nullcontext()  # each backward runs in it
    has_reducer: bool = True  # DDP's, in C++: with buckets, and with a comm hook for each
    has_hook: bool = False  # a comm hook of its own: DDP takes no second one
    is_tuned: bool = False  # finds its buckets anew for each rate of the network
    is_ours: bool = False  # ddpopt compiles it
    is_default: bool = True  # measured without being named
    optimizer: Callable[..., torch.optim.Optimizer] = _adamw  # takes parameters and `lr`
    algorithm: Callable[..., Algorithm[Any]] | None = None  # takes the peer's options; attached
    is_asynchronous: bool = False  # exchanges at times of its own, not in each step


def find_peer(text: str, peers: Mapping[str, Peer] | None = None) -> tuple[Peer, dict[str, Any]]:
    """Return a peer, of `PEERS` if not given, and its options, as `backward:option=1:other=text`.

    Raises:
        ValueError: there is no such peer, or an option has no value.
    """
    peers = PEERS if peers is None else peers
    name, *option_texts = text.split(":")
    if name not in peers:
        raise ValueError(f"there is no peer {name!r}; there are {', '.join(peers)}")
    options = {}
    for option_text in option_texts:
        key, sign, value = option_text.partition("=")
        if not sign:
            raise ValueError(f"the option {option_text!r} of the peer {text!r} has no value")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return peers[name], options


def label(text: str, peers: Mapping[str, Any]) -> str:
    """Return what a plot calls a peer, with the options that it was given."""
    name, _, options = text.partition(":")
    return peers[name].label + (f" ({options})" if options else "")


def _compile_plainly(ddp: nn.Module, inner: str, options: dict[str, Any]) -> Compiled:
    compiled: Compiled = torch.compile(ddp, backend=inner, options=options or None)
    return compiled


def compile_split(split: str, **more: Any) -> Compile:
    """Return a way to compile with ddpopt, with this split and further options of its own."""

    def compile_(ddp: DistributedDataParallel, inner: str, options: dict[str, Any]) -> Compiled:
        merged = {"inner": inner, "split": split, **more, **options}
        compiled: Compiled = torch.compile(ddp, backend="ddpopt", options=merged)
        return compiled

    return compile_


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the members of a model's lists of layers that have parameters, inner ones first.

    Raises:
        ValueError: there is none.
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layers: list[nn.Module] = []
    for part in reversed(lists):
        layers += [layer for layer in part if list(layer.parameters())]
    if not layers:
        raise ValueError(
            f"{type(module).__name__} has no layers in an nn.ModuleList, by which FSDP2 could take "
            "it; leave out the peers fsdp2 and replicate"
        )
    return layers


def _by_layer(distribute: Callable[..., Any], **options: Any) -> Wrap:
    """Have FSDP2 take a model layer by layer, as its documentation does."""

    def wrap(module: nn.Module, **_of_ddp: object) -> nn.Module:
        device = next(module.parameters()).device
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*_layers(module), module):
            distribute(part, mesh=mesh, **options)
        return module

    return wrap


def _compile_layers(module: nn.Module, inner: str, options: dict[str, Any]) -> Compiled:
    for layer in _layers(module):
        layer.compile(backend=inner, options=options or None)
    return module


def _compiled_autograd(inner: str) -> contextlib.AbstractContextManager[object]:
    enable = torch._dynamo.compiled_autograd._enable
    context: contextlib.AbstractContextManager[object] = enable(_compiler(inner))
    return context


@functools.cache  # compiled autograd compiles again for a compiler that it does not know
def _compiler(inner: str) -> Any:
    return torch.compile(backend=inner)


_cut, _tuned = compile_split("backward"), compile_split("backward", buckets="auto")
_with_views = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)
_lazily = functools.partial(_with_views, lazy_bucket_allocation=True)  # from torch 2.15 on
_in_batches = functools.partial(_lazily, batched_grad_copy=True)
_adamw_by_bucket = functools.partial(AdamWByBucket, fused=True)
_zero = functools.partial(ZeroRedundancyOptimizer, optimizer_class=AdamW, fused=True)
_fsdp2 = _by_layer(fully_shard, reshard_after_forward=False)
_replicated = _by_layer(replicate)
_ALL = (
    Peer("eager", "DDP, not compiled", lambda ddp, _inner, _options: ddp),
    Peer("nosplit", "torch.compile, one graph", _compile_plainly, optimize_ddp=False),
    Peer("intree", "PyTorch's DDPOptimizer", _compile_plainly),
    Peer(
        "python_reducer",
        "compiled autograd without Reducer",
        _compile_plainly,
        optimize_ddp="python_reducer",
        around_backward=_compiled_autograd,
        has_reducer=False,
    ),
    Peer("forward", "ddpopt, cut in forward", compile_split("forward"), is_ours=True),
    Peer("backward", "ddpopt, cut in backward", _cut, is_ours=True),
    Peer("auto", "ddpopt, tuned buckets", _tuned, is_tuned=True, is_ours=True),
    Peer(
        "views",
        "ddpopt, tuned, bucket views",
        _tuned,
        _with_views,
        is_tuned=True,
        is_ours=True,
        is_default=False,
    ),
    Peer(
        "lazy",
        "ddpopt, tuned, lazy buckets",
        _tuned,
        _lazily,
        is_tuned=True,
        is_ours=True,
        is_default=False,
    ),
    Peer(
        "batched",
        "ddpopt, tuned, lazy buckets, batched copies",
        _tuned,
        _in_batches,
        is_tuned=True,
        is_ours=True,
        is_default=False,
    ),
    Peer(  # from torch 2.15 on
        "bybucket",
        "ddpopt, updated by bucket",
        _cut,
        leave_unfinished,
        has_hook=True,
        is_ours=True,
        is_default=False,
        optimizer=_adamw_by_bucket,
    ),
    Peer(
        "auto_bybucket",
        "ddpopt, tuned, updated by bucket",
        _tuned,
        leave_unfinished,
        has_hook=True,
        is_tuned=True,
        is_ours=True,
        is_default=False,
        optimizer=_adamw_by_bucket,
    ),
    Peer("zero", "torch's ZeroRedundancyOptimizer", _cut, optimizer=_zero),
    Peer("fsdp2", "torch's FSDP2", _compile_plainly, _fsdp2, has_reducer=False),
    Peer("replicate", "FSDP2's replicate", _compile_layers, _replicated, has_reducer=False),
    Peer("simplefsdp", "SimpleFSDP, replicated", compile_scheduled, Replicated, has_reducer=False),
    Peer(  # from torch 2.15 on
        "bylayer",
        "SimpleFSDP, buckets by layer",
        compile_by_layer,
        Replicated,
        has_reducer=False,
        is_default=False,
    ),
)
PEERS = {peer.name: peer for peer in _ALL}
