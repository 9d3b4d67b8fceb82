"""The communication algorithms that are compared: ddpopt's own, and torch's hooks beside them.

None is hierarchical: here every rank is a node of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class Settings(NamedTuple):
    """What a training gives to an algorithm, whose own are `options`.

    `lr` is for those with an optimizer of their own, and `warmup_steps` for those that begin with
    plain allreduce.
    """

    make_optimizer: MakeOptimizer
    lr: float
    warmup_steps: int
    options: dict[str, Any]


class Training(NamedTuple):
    """An optimizer, and the handle where an algorithm of ddpopt is attached."""

    optimizer: torch.optim.Optimizer
    handle: Any = None


Start = Callable[[DistributedDataParallel, Settings], Training]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    return Training(settings.make_optimizer(ddp.parameters()))


def _attached(name: str, **defaults: Any) -> Start:
    """Attach the algorithm of this name, looked up late so that a missing one fails alone."""

    def start(ddp: DistributedDataParallel, settings: Settings) -> Training:
        optimizer = settings.make_optimizer(ddp.parameters())
        algorithm = getattr(algorithms, name)(**{**defaults, **settings.options})
        return Training(optimizer, algorithms.attach(ddp, optimizer, algorithm))

    return start


def _qadam(ddp: DistributedDataParallel, settings: Settings) -> Training:
    optimizer = algorithms.QAdamOptimizer(
        ddp.parameters(), lr=settings.lr, warmup_steps=settings.warmup_steps
    )
    algorithm = algorithms.QAdam(hierarchical=False, **settings.options)
    return Training(optimizer, algorithms.attach(ddp, optimizer, algorithm))


def _adam(ddp: DistributedDataParallel, settings: Settings) -> Training:
    return Training(torch.optim.Adam(ddp.parameters(), lr=settings.lr))


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
    return Training(PostLocalSGDOptimizer(settings.make_optimizer(ddp.parameters()), averager))


_flat = functools.partial(_attached, hierarchical=False)
_ALL = (
    Peer(name="eager", label="DDP, not compiled", start=_plain, is_compiled=False),
    Peer(name="ddpopt", label="ddpopt, DDP's allreduce", start=_plain),
    Peer(name="decentralized", label='Decentralized("all")', start=_flat("Decentralized")),
    Peer(
        name="shift_one",
        label='Decentralized("shift_one")',
        start=_flat("Decentralized", peer_selection="shift_one"),
    ),
    Peer(
        name="low_precision",
        label="LowPrecisionDecentralized",
        start=_flat("LowPrecisionDecentralized"),
    ),
    Peer(
        name="async",
        label="AsyncModelAverage",
        start=_attached("AsyncModelAverage"),
        is_asynchronous=True,
    ),
    Peer(name="bytegrad", label="ByteGrad", start=_flat("ByteGrad")),
    Peer(name="qadam", label="QAdam, with QAdamOptimizer", start=_qadam),
    Peer(name="ddpopt_adam", label="ddpopt, DDP's allreduce, with Adam", start=_adam),
    Peer(name="fp16", label="torch's fp16 hook", start=_fp16),
    Peer(name="powersgd", label=f"torch's PowerSGD, rank {_POWER_SGD_RANK}", start=_power_sgd),
    Peer(
        name="post_local_sgd",
        label=f"torch's post-local SGD, an average every {_LOCAL_STEPS} steps",
        start=_post_local_sgd,
    ),
)
PEERS = {peer.name: peer for peer in _ALL}
