"""Communication algorithms other than DDP's allreduce, attached to a DDP model by `attach`."""

from __future__ import annotations

from ddpopt.algorithms.async_average import AsyncModelAverage, AsyncModelAverageHandle
from ddpopt.algorithms.attachment import attach
from ddpopt.algorithms.byte_grad import ByteGrad, ByteGradHandle
from ddpopt.algorithms.decentralized import Decentralized, DecentralizedHandle
from ddpopt.algorithms.gradient_allreduce import GradientAllReduce, GradientAllReduceHandle
from ddpopt.algorithms.handle import Algorithm, Handle
from ddpopt.algorithms.low_precision import (
    LowPrecisionDecentralized,
    LowPrecisionDecentralizedHandle,
    Replicas,
)
from ddpopt.algorithms.qadam import QAdam, QAdamHandle, QAdamOptimizer

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "AsyncModelAverageHandle",
    "ByteGrad",
    "ByteGradHandle",
    "Decentralized",
    "DecentralizedHandle",
    "GradientAllReduce",
    "GradientAllReduceHandle",
    "Handle",
    "LowPrecisionDecentralized",
    "LowPrecisionDecentralizedHandle",
    "QAdam",
    "QAdamHandle",
    "QAdamOptimizer",
    "Replicas",
    "attach",
]
