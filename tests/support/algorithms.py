"""An algorithm at work on a small model, for the tests of algorithms."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    Handle,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    attach,
)
from ddpopt.errors import PeerError
from tests.support.models import MLP

FLAT = Decentralized(hierarchical=False)

ALGORITHMS: dict[str, Any] = {
    "Decentralized": FLAT,
    "LowPrecisionDecentralized": LowPrecisionDecentralized(hierarchical=False),
    "ByteGrad": ByteGrad(hierarchical=False),
    "QAdam": QAdam(hierarchical=False),
    "AsyncModelAverage": AsyncModelAverage(sync_interval_ms=1),
}


def attached_mlp(algorithm: Any = FLAT, **ddp_options: Any) -> tuple[Any, Any, Any]:
    """A DDP module of an MLP, equal on all ranks, its optimizer, and the algorithm's handle."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2), **ddp_options)
    optimizer = optimizer_for(algorithm, ddp.parameters())
    return ddp, optimizer, attach(ddp, optimizer, algorithm)


def optimizer_for(algorithm: Any, parameters: Any, *, lr: float = 0.1, **of_qadam: Any) -> Any:
    """The optimizer that an algorithm needs: QAdam's own, with its options, or else SGD."""
    if isinstance(algorithm, QAdam):
        return QAdamOptimizer(parameters, lr=lr, **of_qadam)
    return torch.optim.SGD(parameters, lr=lr)


def flat_weights(module: nn.Module) -> torch.Tensor:
    """All of a module's parameters in one tensor."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def lose_rank_1(rank: int, handle: Handle, step: Callable[[], object]) -> str:
    """Kill rank 1 before its third step, and return what that raises on the others."""
    try:
        for index in range(4):
            if (rank, index) == (1, 2):  # in the second forward DDP itself communicates, once
                os.kill(os.getpid(), signal.SIGKILL)
            step()
    except PeerError as error:
        handle.detach(average=False)
        return str(error)
    return "nothing"
