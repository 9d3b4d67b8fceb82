"""Communication algorithms other than DDP's allreduce, attached to a DDP model by `attach`.

docs/your-algorithm.md shows how to write another one.
"""

from __future__ import annotations

from ddpopt.algorithms.algorithm import Algorithm, HierarchicalAlgorithm
from ddpopt.algorithms.async_ import AsyncModelAverage, AsyncModelAverageHandle
from ddpopt.algorithms.attach import attach
from ddpopt.algorithms.bytegrad import ByteGrad
from ddpopt.algorithms.comm import Communicator, FlatWeights, Groups
from ddpopt.algorithms.decentralized import (
    Decentralized,
    LowPrecisionDecentralized,
    LowPrecisionDecentralizedHandle,
    Replicas,
)
from ddpopt.algorithms.handle import BackgroundHandle, Handle
from ddpopt.algorithms.qadam import QAdam, QAdamOptimizer
from ddpopt.algorithms.training import Training
from ddpopt.ranks.agree import communicating

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "AsyncModelAverageHandle",
    "BackgroundHandle",
    "ByteGrad",
    "Communicator",
    "Decentralized",
    "FlatWeights",
    "Groups",
    "Handle",
    "HierarchicalAlgorithm",
    "LowPrecisionDecentralized",
    "LowPrecisionDecentralizedHandle",
    "QAdam",
    "QAdamOptimizer",
    "Replicas",
    "Training",
    "attach",
    "communicating",
]
