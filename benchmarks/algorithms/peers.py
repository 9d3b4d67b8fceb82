"""The communication algorithms that are compared: ddpopt's own, and torch's hooks beside them.

None is hierarchical: here every rank is a node of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.peers import find
from ddpopt import algorithms

_POWER_SGD_RANK = 4
_LOCAL_STEPS = 4


class Settings(NamedTuple):
    """What a training gives to an algorithm, whose own are `options`.

    `warmup_steps` is for those that begin with plain allreduce.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    warmup_steps: int
    options: dict[str, Any]

    def make_optimizer(self, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
        return self.optimizer(ddp.parameters(), lr=self.lr)


class Training(NamedTuple):
    """An optimizer, and the handle where an algorithm of ddpopt is attached."""

    optimizer: torch.optim.Optimizer
    handle: Any = None


Start = Callable[[DistributedDataParallel, Settings], Training]


@dataclass(frozen=True, slots=True)
class Peer:
    """One of them; `start` takes the DDP module and the settings.

    Tables and plots say its `label`. One that `is_asynchronous` exchanges at times of its own, not
    in each step.
    """

    name: str
    label: str
    start: Start
    is_compiled: bool = True
    is_asynchronous: bool = False


def find_peer(text: str) -> tuple[Peer, dict[str, Any]]:
    """Return a peer and its options, as in `async:sync_interval_ms=50`; see `peers.find`."""
    return find(text, PEERS)


def _plain(ddp: DistributedDataParallel, settings: Settings) -> Training:
    return Training(settings.make_optimizer(ddp))


def _attached(name: str, **defaults: Any) -> Start:
    """Attach the algorithm of this name, looked up late so that a missing one fails alone."""

    def start(ddp: DistributedDataParallel, settings: Settings) -> Training:
        optimizer = settings.make_optimizer(ddp)
        algorithm = getattr(algorithms, name)(**{**defaults, **settings.options})
        return Training(optimizer, algorithms.attach(ddp, optimizer, algorithm))

    return start


def _qadam(ddp: DistributedDataParallel, settings: Settings) -> Training:
    optimizer = algorithms.QAdamOptimizer(
        ddp.parameters(), lr=settings.lr, warmup_steps=settings.warmup_steps
    )
    algorithm = algorithms.QAdam(hierarchical=False, **settings.options)
    return Training(optimizer, algorithms.attach(ddp, optimizer, algorithm))


def _fp16(ddp: DistributedDataParallel, settings: Settings) -> Training:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _plain(ddp, settings)


def _power_sgd(ddp: DistributedDataParallel, settings: Settings) -> Training:
    given = {"matrix_approximation_rank": _POWER_SGD_RANK, **settings.options}
    start_iter = max(2, settings.warmup_steps)  # its error feedback needs two
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=start_iter, **given)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _plain(ddp, settings)


def _post_local_sgd(ddp: DistributedDataParallel, settings: Settings) -> Training:
    state = post_localSGD_hook.PostLocalSGDState(
        None,
        None,
        start_localSGD_iter=settings.warmup_steps,
        post_local_gradient_allreduce=False,
    )
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(
        period=settings.options.get("period", _LOCAL_STEPS), warmup_steps=settings.warmup_steps
    )
    return Training(PostLocalSGDOptimizer(settings.make_optimizer(ddp), averager))


_flat = functools.partial(_attached, hierarchical=False)
_ALL = (
    Peer("eager", "DDP, not compiled", _plain, is_compiled=False),
    Peer("ddpopt", "ddpopt, DDP's allreduce", _plain),
    Peer("decentralized", 'Decentralized("all")', _flat("Decentralized")),
    Peer(
        "shift_one",
        'Decentralized("shift_one")',
        _flat("Decentralized", peer_selection="shift_one"),
    ),
    Peer("low_precision", "LowPrecisionDecentralized", _flat("LowPrecisionDecentralized")),
    Peer("async", "AsyncModelAverage", _attached("AsyncModelAverage"), is_asynchronous=True),
    Peer("bytegrad", "ByteGrad", _flat("ByteGrad")),
    Peer("qadam", "QAdam, with QAdamOptimizer", _qadam),
    Peer("fp16", "torch's fp16 hook", _fp16),
    Peer("powersgd", f"torch's PowerSGD, rank {_POWER_SGD_RANK}", _power_sgd),
    Peer(
        "post_local_sgd",
        f"torch's post-local SGD, an average every {_LOCAL_STEPS} steps",
        _post_local_sgd,
    ),
)
PEERS = {peer.name: peer for peer in _ALL}
