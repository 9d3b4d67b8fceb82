"""The communication algorithms that are compared: ddpopt's own, and torch's hooks beside them.

None is hierarchical: here every rank is a node of its own. Options of a peer are its algorithm's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import peers as harness_peers
from benchmarks.harness.peers import Peer, Wrap, compile_split
from ddpopt import algorithms

_POWER_SGD_RANK = 4
_LOCAL_STEPS = 4


def make_peers(warmup_steps: int) -> dict[str, Peer]:
    """Return all of them; those that begin with plain allreduce do so for this many steps."""

    def power_sgd(ddp: DistributedDataParallel) -> None:
        start_iter = max(2, warmup_steps)  # its error feedback needs two
        state = powerSGD_hook.PowerSGDState(None, _POWER_SGD_RANK, start_iter)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def post_local_sgd(ddp: DistributedDataParallel) -> None:
        state = post_localSGD_hook.PostLocalSGDState(
            None, None, warmup_steps, post_local_gradient_allreduce=False
        )
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    def averaging(parameters: Any, lr: float) -> torch.optim.Optimizer:
        averager = averagers.PeriodicModelAverager(_LOCAL_STEPS, warmup_steps)
        return PostLocalSGDOptimizer(torch.optim.AdamW(parameters, lr=lr), averager)

    flat = partial(algorithms.Decentralized, hierarchical=False)
    one_peer = partial(flat, peer_selection="shift_one")
    low_precision = partial(algorithms.LowPrecisionDecentralized, hierarchical=False)
    byte_grad = partial(algorithms.ByteGrad, hierarchical=False)
    q_adam = partial(algorithms.QAdam, hierarchical=False)
    q_adam_optimizer = partial(algorithms.QAdamOptimizer, warmup_steps=warmup_steps)
    cut = compile_split("forward")
    every = (
        harness_peers.PEERS["eager"],
        Peer("ddpopt", "ddpopt, DDP's allreduce", cut),
        Peer("decentralized", 'Decentralized("all")', cut, algorithm=flat),
        Peer("shift_one", 'Decentralized("shift_one")', cut, algorithm=one_peer),
        Peer("low_precision", "LowPrecisionDecentralized", cut, algorithm=low_precision),
        Peer(
            "async",
            "AsyncModelAverage",
            cut,
            algorithm=algorithms.AsyncModelAverage,
            is_asynchronous=True,
        ),
        Peer("bytegrad", "ByteGrad", cut, algorithm=byte_grad),
        Peer(
            "qadam",
            "QAdam, with QAdamOptimizer",
            cut,
            algorithm=q_adam,
            optimizer=q_adam_optimizer,
        ),
        Peer("fp16", "torch's fp16 hook", cut, _hooked(_compress)),
        Peer("powersgd", f"torch's PowerSGD, rank {_POWER_SGD_RANK}", cut, _hooked(power_sgd)),
        Peer(
            "post_local_sgd",
            f"torch's post-local SGD, every {_LOCAL_STEPS} steps",
            cut,
            _hooked(post_local_sgd),
            optimizer=averaging,
        ),
    )
    return {peer.name: peer for peer in every}


def _hooked(register: Callable[[DistributedDataParallel], None]) -> Wrap:
    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        ddp = DistributedDataParallel(module, **options)
        register(ddp)
        return ddp

    return wrap


def _compress(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


PEERS = make_peers(warmup_steps=2)
find_peer = partial(harness_peers.find_peer, peers=PEERS)
