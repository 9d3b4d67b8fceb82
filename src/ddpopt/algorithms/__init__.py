"""Communication algorithms other than DDP's allreduce, attached to a DDP model by `attach`."""

from __future__ import annotations

from ddpopt.algorithms.async_ import AsyncModelAverage, AsyncModelAverageHandle
from ddpopt.algorithms.attaching import attach
from ddpopt.algorithms.bytegrad import ByteGrad
from ddpopt.algorithms.decentralized import (
    Decentralized,
    LowPrecisionDecentralized,
    LowPrecisionDecentralizedHandle,
    Replicas,
)
from ddpopt.algorithms.handle import Algorithm, Handle
from ddpopt.algorithms.qadam import QAdam, QAdamOptimizer
from ddpopt.algorithms.sharded import ShardedUpdate, ShardedUpdateHandle

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "AsyncModelAverageHandle",
    "ByteGrad",
    "Decentralized",
    "Handle",
    "LowPrecisionDecentralized",
    "LowPrecisionDecentralizedHandle",
    "QAdam",
    "QAdamOptimizer",
    "Replicas",
    "ShardedUpdate",
    "ShardedUpdateHandle",
    "attach",
]
