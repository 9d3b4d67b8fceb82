"""An algorithm at work on a small model, for the tests of algorithms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    attach,
)
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
    optimizer_type = QAdamOptimizer if isinstance(algorithm, QAdam) else torch.optim.SGD
    optimizer = optimizer_type(ddp.parameters(), lr=0.1)
    return ddp, optimizer, attach(ddp, optimizer, algorithm)


def flat_weights(module: nn.Module) -> torch.Tensor:
    """All of a module's parameters in one tensor."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])
