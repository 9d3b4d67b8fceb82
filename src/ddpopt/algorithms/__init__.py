"""Communication algorithms other than DDP's allreduce, attached to a DDP model by `attach`."""

from __future__ import annotations

from ddpopt.algorithms.attachment import attach
from ddpopt.algorithms.decentralized import Decentralized, DecentralizedHandle
from ddpopt.algorithms.gradient_allreduce import GradientAllReduce, GradientAllReduceHandle
from ddpopt.algorithms.handle import Algorithm, Handle

__all__ = [
    "Algorithm",
    "Decentralized",
    "DecentralizedHandle",
    "GradientAllReduce",
    "GradientAllReduceHandle",
    "Handle",
    "attach",
]
