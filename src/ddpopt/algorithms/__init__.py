"""Communication algorithms other than DDP's allreduce, attached to a DDP model by `attach`."""

from __future__ import annotations

from ddpopt.algorithms._runtime.handle import Algorithm, Handle
from ddpopt.algorithms.api import attach
from ddpopt.algorithms.async_average import AsyncModelAverage, AsyncModelAverageHandle
from ddpopt.algorithms.byte_grad import ByteGrad
from ddpopt.algorithms.decentralized import Decentralized
from ddpopt.algorithms.gradient_allreduce import GradientAllReduce
from ddpopt.algorithms.low_precision import (
    LowPrecisionDecentralized,
    LowPrecisionDecentralizedHandle,
    Replicas,
)
from ddpopt.algorithms.qadam import QAdam, QAdamOptimizer
from ddpopt.algorithms.sharded_update import ShardedUpdate, ShardedUpdateHandle

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "AsyncModelAverageHandle",
    "ByteGrad",
    "Decentralized",
    "GradientAllReduce",
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
