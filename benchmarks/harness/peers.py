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

from benchmarks.harness.simplefsdp import Replicated, compile_scheduled
from ddpopt.algorithms import Algorithm

Compiled = Callable[..., Any]
Compile = Callable[[Any, str, dict[str, Any]], Compiled]
Wrap = Callable[..., nn.Module]
Around = Callable[[str], contextlib.AbstractContextManager[object]]


_adamw = functools.partial(AdamW, fused=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """One of them.

    Tables and plots say its `label`. `wrap` makes the data parallel module, with DDP's arguments,
    and `compile` takes that, the inner compiler and further options; Dynamo's `optimize_ddp` is set
    before the module is made, and backward runs in `around_backward`. One that `is_tuned` finds
    its buckets anew for each rate. `optimizer` takes parameters and `lr`; with an `algorithm`,
    which takes the peer's options, this is attached to it. One that `is_asynchronous` exchanges at
    times of its own, not in each step.
    """

    name: str
    label: str
    compile: Compile
    wrap: Wrap = DistributedDataParallel
    optimize_ddp: bool | str = True
    around_backward: Around = lambda _inner: contextlib.nullcontext()
    has_buckets: bool = True
    is_tuned: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = _adamw
    algorithm: Callable[..., Algorithm[Any]] | None = None
    is_asynchronous: bool = False


def find_peer(text: str, peers: Mapping[str, Peer] | None = None) -> tuple[Peer, dict[str, Any]]:
    """Return a peer, of `PEERS` if not given, and its options, as `backward:option=1:other=text`.

    Raises:
        ValueError: there is no such peer, or an option has no value.
    """
    peers = PEERS if peers is None else peers
    name, *settings = text.split(":")
    if name not in peers:
        raise ValueError(f"there is no peer {name!r}; there are {', '.join(peers)}")
    options = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign:
            raise ValueError(f"the option {setting!r} of the peer {text!r} has no value")
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
    def compile_(ddp: DistributedDataParallel, inner: str, options: dict[str, Any]) -> Compiled:
        given = {"inner": inner, "split": split, **more, **options}
        compiled: Compiled = torch.compile(ddp, backend="ddpopt", options=given)
        return compiled

    return compile_


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the members of a model's lists of layers, inner ones first."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layers = [layer for part in reversed(lists) for layer in part]
    return [layer for layer in layers if any(True for _ in layer.parameters())]


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
        has_buckets=False,
    ),
    Peer("forward", "ddpopt, cut in forward", compile_split("forward")),
    Peer("backward", "ddpopt, cut in backward", _cut),
    Peer("auto", "ddpopt, tuned buckets", _tuned, is_tuned=True),
    Peer("views", "ddpopt, tuned, bucket views", _tuned, _with_views, is_tuned=True),
    Peer("lazy", "ddpopt, tuned, lazy buckets", _tuned, _lazily, is_tuned=True),
    Peer("zero", "torch's ZeroRedundancyOptimizer", _cut, optimizer=_zero),
    Peer("fsdp2", "torch's FSDP2", _compile_plainly, _fsdp2, has_buckets=False),
    Peer("replicate", "FSDP2's replicate", _compile_layers, _replicated, has_buckets=False),
    Peer("simplefsdp", "SimpleFSDP, replicated", compile_scheduled, Replicated, has_buckets=False),
)
PEERS = {peer.name: peer for peer in _ALL}
